"""The HTTP source below the streams: real servers, TLS, HTTP/2, connections, renewal of URLs, uploads."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time

import pytest
import torch
from http_tools import nothing_left, quick, random_bytes, tuned
from servers import needs
from servers.certificates import make_certificates
from servers.http_faults import FaultyServer, Reply
from servers.nginx import PROGRAM, nginx

from tensorizer import _C, TensorDeserializer, save_file
from tensorizer.errors import StreamError, StreamNotFoundError, TruncatedError
from tensorizer.stream_io import CAInfo, CURLStreamFile, open_stream

CONTENT = random_bytes(3_000_000)

needs_nginx = pytest.mark.skipif(PROGRAM is None, reason=needs("nginx"))


def open_source(url: str, **changes: object) -> _C.HttpSource:
    return _C.HttpSource.open(url, quick(**changes)._native())


def read_in_threads(source: _C.HttpSource, ranges: list, threads: int) -> list:
    """Every (offset, nbytes) of ``ranges``, from so many threads; the first exception is raised."""
    results: list = [None] * len(ranges)
    errors = []
    numbers = iter(range(len(ranges)))
    lock = threading.Lock()

    def work():
        while not errors:
            with lock:
                i = next(numbers, None)
            if i is None:
                return
            try:
                results[i] = source.read(*ranges[i])
            except Exception as error:
                errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return results


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def web_root(tmp_path):
    root = tmp_path / "www"
    root.mkdir()
    (root / "object").write_bytes(CONTENT)
    (root / "empty").write_bytes(b"")
    (tmp_path / "nginx").mkdir()
    return root


# -- nginx ------------------------------------------------------------------------------------------------------------


@needs_nginx
def test_nginx_serves_ranges_to_many_threads(tmp_path, web_root):
    with nginx(tmp_path / "nginx", web_root) as url, nothing_left():
        source = open_source(url + "/object")
        assert source.size() == len(CONTENT)
        assert not source.sequential
        ranges = [(offset, min(70_001, len(CONTENT) - offset)) for offset in range(0, len(CONTENT), 70_001)]
        results = read_in_threads(source, ranges, 6)
        assert b"".join(results) == CONTENT
        assert source.connections <= 7
        del source
        with open_stream(url + "/empty", http_options=quick()) as stream:
            assert stream.read() == b""
        with pytest.raises(StreamNotFoundError):
            open_stream(url + "/missing", http_options=quick())


@needs_nginx
def test_an_object_replaced_during_a_load_is_an_error(tmp_path, web_root):
    with nginx(tmp_path / "nginx", web_root) as url:
        source = open_source(url + "/object")
        assert source.read(0, 100_000) == CONTENT[:100_000]
        time.sleep(1.1)  # nginx takes its ETag from the size and the second
        (web_root / "new").write_bytes(CONTENT[::-1])
        (web_root / "new").replace(web_root / "object")
        with pytest.raises(StreamError, match="changed"):
            source.read(200_000, 100_000)


@needs_nginx
@pytest.mark.parametrize("http2", [False, True])
def test_https_with_a_private_authority(tmp_path, web_root, certificates, http2):
    with nginx(tmp_path / "nginx", web_root, tls=certificates, http2=http2) as url:
        for trust in (CAInfo(cacert=str(certificates.authority)), CAInfo(capath=str(certificates.folder)),
                      CAInfo(allow_untrusted=True)):  # fmt: skip
            with open_stream(url + "/object", certificate_handling=trust, http_options=quick()) as stream:
                assert stream.read() == CONTENT
        source = open_source(url + "/object", certificate_handling=CAInfo(cacert=str(certificates.authority)))
        assert source.response_status_line.startswith("HTTP/2 206" if http2 else "HTTP/1.1 206")
        ranges = [(offset, 100_000) for offset in range(0, 3_000_000, 100_000)]
        assert b"".join(read_in_threads(source, ranges, 4)) == CONTENT


@needs_nginx
def test_http2_can_be_refused(tmp_path, web_root, certificates):
    with nginx(tmp_path / "nginx", web_root, tls=certificates, http2=True) as url:
        source = open_source(url + "/object", http_version="1.1", certificate_handling=CAInfo(allow_untrusted=True))
        assert source.response_status_line.startswith("HTTP/1.1")
        assert source.read(10, 1000) == CONTENT[10:1010]


# -- TLS --------------------------------------------------------------------------------------------------------------


def test_an_untrusted_certificate_fails_when_the_stream_is_opened(certificates, monkeypatch):
    for name in ("CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    with FaultyServer(CONTENT, tls=certificates.context()) as server:
        with pytest.raises(OSError, match=r"Failed to open stream.*cURL exit code 60.*CAInfo"):
            open_stream(server.url, http_options=quick())
        assert server.connections_seen == 1  # distrust is not tried again


def test_a_self_signed_certificate_can_be_its_own_authority(certificates):
    with FaultyServer(CONTENT, tls=certificates.context(self_signed=True)) as server:
        trust = CAInfo(cacert=str(certificates.self_signed))
        with open_stream(server.url, certificate_handling=trust, http_options=quick()) as stream:
            assert stream.read(10) == CONTENT[:10]


@pytest.mark.parametrize("variable", ["CURL_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_certificates_of_the_environment_are_trusted(certificates, monkeypatch, variable):
    for name in ("CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(
        variable, str(certificates.folder if variable == "REQUESTS_CA_BUNDLE" else certificates.authority)
    )
    with FaultyServer(CONTENT, tls=certificates.context()) as server:
        stream = open_stream(server.url, http_options=quick())
        assert stream.read(10) == CONTENT[:10]


def test_an_unreadable_bundle_is_an_error(certificates, tmp_path):
    (tmp_path / "bad.pem").write_bytes(b"no certificate")
    with FaultyServer(CONTENT, tls=certificates.context()) as server, pytest.raises(OSError, match="certificate"):
        open_stream(server.url, certificate_handling=CAInfo(cacert=str(tmp_path / "bad.pem")), http_options=quick())


def test_plain_http_on_a_tls_port_and_tls_on_a_plain_port_are_errors(certificates):
    tls = certificates.context()
    with FaultyServer(CONTENT, tls=tls) as server, pytest.raises(OSError, match="Failed to open stream"):
        open_stream(server.url.replace("https", "http"), http_options=quick())
    with FaultyServer(CONTENT) as server, pytest.raises(OSError, match="Failed to open stream"):
        open_stream(server.url.replace("http", "https"), http_options=quick())


# -- the first request ------------------------------------------------------------------------------------------------


def test_the_first_request_brings_the_head_and_reads_inside_cost_none():
    with FaultyServer(CONTENT) as server:
        source = open_source(server.url, head_nbytes=100_000)
        assert [request.range for request in server.requests] == [(0, 99_999)]
        assert source.read(0, 100_000) == CONTENT[:100_000]
        assert source.read(500, 7) == CONTENT[500:507]
        assert source.requests == 1
        assert source.read(99_990, 20) == CONTENT[99_990:100_010]
        assert server.requests[-1].range == (100_000, 100_009)


def test_the_default_head_holds_the_index_of_a_large_file():
    assert 1 << 20 <= _C.HttpOptions().head_nbytes <= 4 << 20


def test_later_requests_insist_on_the_etag_or_the_date():
    with FaultyServer(CONTENT, etag='"strong"') as server:
        open_source(server.url).read(100_000, 10)
        assert server.requests[-1].headers["if-match"] == '"strong"'
    date = "Wed, 21 Oct 2015 07:28:00 GMT"
    with FaultyServer(CONTENT, etag='W/"weak"', last_modified=date) as server:
        open_source(server.url).read(100_000, 10)
        assert "if-match" not in server.requests[-1].headers
        assert server.requests[-1].headers["if-unmodified-since"] == date


def test_reads_beyond_the_end_are_truncated_errors_without_a_request():
    with FaultyServer(CONTENT) as server:
        source = open_source(server.url)
        for offset, nbytes in ((len(CONTENT) - 5, 6), (len(CONTENT), 1), (1 << 62, 10), ((1 << 64) - 5, 100)):
            with pytest.raises(TruncatedError, match=r"ends at 3000000|offset"):
                source.read(offset, nbytes)
        assert len(server.requests) == 1


def test_one_connection_is_kept_for_reads_in_turn():
    with FaultyServer(CONTENT) as server:
        source = open_source(server.url)
        for offset in range(10_000, 500_000, 50_000):
            source.read(offset, 10_000)
        assert server.connections_seen == 1
        assert source.connections == 1


def test_closing_ends_idle_connections_and_later_reads_open_new_ones():
    with FaultyServer(CONTENT) as server:
        with nothing_left():
            source = open_source(server.url)
            source.read(10_000, 10)
            source.close_connections()
        assert source.read(20_000, 10) == CONTENT[20_000:20_010]
        assert server.connections_seen == 2


# -- how many connections ---------------------------------------------------------------------------------------------


class Crowd:
    """Counts the requests that are answered at the same time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.most = self.now = 0
        self.lock = threading.Lock()

    def __call__(self, request):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        with self.lock:
            self.now -= 1
        return Reply()


def test_a_fixed_number_of_connections_is_kept_and_capped():
    for connections, cap, expected in ((3, 32, 3), (20, 5, 5)):
        with FaultyServer(CONTENT) as server:
            source = open_source(server.url, connections=connections, max_connections=cap)
            server.default = crowd = Crowd(0.05)
            assert source.concurrency == expected
            read_in_threads(source, [(10_000 + i, 10) for i in range(40)], 20)
            assert crowd.most == expected


def test_a_server_that_is_near_gets_sixteen_requests_at_the_same_time():
    with FaultyServer(CONTENT) as server:
        # A busy machine may answer late, which looks like a server that is far away.
        source = next(source for source in (open_source(server.url) for _ in range(50)) if source.concurrency == 16)
        server.default = crowd = Crowd(0.1)
        read_in_threads(source, [(10_000 + i, 10_000) for i in range(200)], 40)
        assert crowd.most == 16


def test_a_server_that_refuses_more_requests_gets_fewer_and_fewer():
    refused = []

    class Few(Crowd):
        def __call__(self, request):
            if self.now >= 6:
                refused.append(request)
                return Reply(status=503)
            return super().__call__(request)

    with FaultyServer(CONTENT) as server:
        source = open_source(server.url, retries=None)
        server.default = Few(0.03)
        read_in_threads(source, [(10_000 + i, 10_000) for i in range(300)], 16)
    assert 0 < len(refused) < 40  # all at once, and a few while the number falls to 4


def test_a_server_that_is_far_away_is_met_with_many_connections_at_once():
    """Growing from few would take a good part of a load whose requests mostly wait."""
    with FaultyServer(CONTENT, [Reply(delay=0.05)]) as server:
        source = open_source(server.url)
        server.default = crowd = Crowd(1.0)
        read_in_threads(source, [(10_000 + i, 10) for i in range(64)], 64)
        assert crowd.most > 48  # all at once but for a thread that starts late; from 8 there would be 16


def test_a_fixed_number_of_connections_is_kept_however_far_the_server_is():
    with FaultyServer(CONTENT, [Reply(delay=0.05)]) as server:
        source = open_source(server.url, connections=3)
        server.default = crowd = Crowd(0.05)
        read_in_threads(source, [(10_000 + i, 10) for i in range(20)], 20)
        assert crowd.most == 3


def test_the_environment_caps_connections(monkeypatch):
    monkeypatch.setenv("TENSORIZER_MAX_CONNECTIONS", "2")
    with FaultyServer(CONTENT) as server:
        source = open_source(server.url)
        assert source.concurrency == 2
        source.fix_connections(10)
        assert source.concurrency == 2
        server.default = crowd = Crowd(0.02)
        read_in_threads(source, [(10_000 + i, 10) for i in range(30)], 10)
        assert crowd.most == 2


def test_a_small_object_wants_no_more_connections_than_it_has_units():
    with FaultyServer(CONTENT) as server:
        assert open_source(server.url, unit_nbytes=1_000_000).concurrency == 3
        assert open_source(server.url, head_nbytes=4_000_000).concurrency == 1


def test_connections_to_a_host_are_bounded_for_all_sources_together():
    with FaultyServer(CONTENT) as server:
        sources = [open_source(server.url, max_connections=3) for _ in range(3)]
        server.default = crowd = Crowd(0.05)
        threads = [
            threading.Thread(target=read_in_threads, args=(source, [(10_000 + i, 10) for i in range(12)], 6))
            for source in sources
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert crowd.most == 3
        assert server.open_connections() <= 3  # those that wait for the next request, too


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_a_process_opens_as_many_connections_as_the_environment_says(monkeypatch, most):
    monkeypatch.setenv("TENSORIZER_MAX_CONNECTIONS", str(most))
    with FaultyServer(CONTENT) as server:
        sources = [open_source(server.url) for _ in range(2)]
        places = [(10_000 + i * 20_000, 10_000 if i % 2 else 10) for i in range(60)]
        threads = [threading.Thread(target=read_in_threads, args=(source, places, 6)) for source in sources]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 1 <= server.connections_seen <= most


def test_a_load_opens_as_many_connections_as_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("TENSORIZER_MAX_CONNECTIONS", "4")
    wanted = {f"t{i}": torch.arange(i * 100_000, (i + 1) * 100_000) for i in range(60)}
    save_file(wanted, tmp_path / "m.tensors")
    with FaultyServer((tmp_path / "m.tensors").read_bytes()) as server:
        options = {"http_options": tuned(unit_nbytes=1 << 20, proxy="")}
        for settings in ({}, {"lazy_load": True}):
            seen = server.connections_seen
            with TensorDeserializer(server.url, device="cpu", stream_options=options, **settings) as file:
                assert all(torch.equal(file[name], value) for name, value in wanted.items())
            assert server.connections_seen - seen <= 4


def test_connections_to_the_target_of_a_redirect_count_too(monkeypatch):
    monkeypatch.setenv("TENSORIZER_MAX_CONNECTIONS", "2")
    with FaultyServer(CONTENT) as target, FaultyServer() as server:
        server.default = Reply(status=302, headers={"Location": target.url})
        sources = [open_source(server.url) for _ in range(4)]
        for source in sources:
            read_in_threads(source, [(10_000 + i, 10_000) for i in range(30)], 6)
        assert server.open_connections() + target.open_connections() <= 2


def test_sources_that_are_open_at_the_same_time_share_connections():
    with FaultyServer(CONTENT) as server:
        first, second = (open_source(server.url) for _ in range(2))
        for source in (first, second, first, second):
            assert source.read(100_000, 10) == CONTENT[100_000:100_010]
        assert server.connections_seen == 1
        first.close_connections()
        assert second.read(200_000, 10) == CONTENT[200_000:200_010]
        assert server.connections_seen == 1


def test_connections_that_were_closed_are_opened_again_and_kept():
    with FaultyServer(CONTENT) as server:
        with nothing_left():
            source = open_source(server.url)
            source.close_connections()
        for i in range(5):
            assert source.read(100_000 + i, 10) == CONTENT[100_000 + i : 100_010 + i]
        assert server.connections_seen == 2


def test_tls_sessions_are_shared_by_all_sources_of_a_process(certificates):
    """One full handshake, however many shards there are."""
    with FaultyServer(CONTENT, tls=certificates.context()) as server:
        native = quick()._native(certificate_handling=CAInfo(cacert=str(certificates.authority)))
        for _ in range(4):
            with nothing_left():
                source = _C.HttpSource.open(server.url, native)
                assert source.read(10_000, 1000) == CONTENT[10_000:11_000]
                source.close_connections()
        assert server.resumed == [False, True, True, True]


def test_tls_sessions_are_shared_by_connections_at_the_same_time(certificates):
    with FaultyServer(CONTENT, tls=certificates.context()) as server:
        native = quick()._native(certificate_handling=CAInfo(cacert=str(certificates.authority)))
        source = _C.HttpSource.open(server.url, native)
        server.default = Reply(delay=0.05)
        read_in_threads(source, [(10_000 + i, 1000) for i in range(40)], 8)
        # OpenSSL gives a session up whose connection did not end in order, so some may be missing; without sharing all.
        assert server.resumed.count(True) >= len(server.resumed) / 4


def test_tls_sessions_are_not_shared_where_trust_differs(certificates):
    """A session that is resumed skips the check of the certificate."""
    with FaultyServer(CONTENT, tls=certificates.context()) as server:
        open_source(server.url, certificate_handling=CAInfo(allow_untrusted=True)).read(10_000, 10)
        with pytest.raises(StreamError, match="not trusted"):
            open_source(server.url)
        trusting = CAInfo(cacert=str(certificates.authority))
        assert open_source(server.url, certificate_handling=trusting).read(10_000, 10) == CONTENT[10_000:10_010]
        with pytest.raises(StreamError, match="not trusted"):
            open_source(server.url)


# -- headers that expire ----------------------------------------------------------------------------------------------


class Tokens:
    """Gives bearer tokens that a server accepts until they are revoked."""

    def __init__(self, server: FaultyServer) -> None:
        self.calls = 0
        self.revoked: set = set()
        server.default = lambda r: Reply(status=401) if self.token(r) in self.revoked else Reply()

    @staticmethod
    def token(request):
        return request.headers.get("authorization", "").removeprefix("Bearer ")

    def __call__(self):
        self.calls += 1
        return {"Authorization": f"Bearer s3cret{self.calls}"}


def test_headers_may_be_a_callable_that_is_asked_again_when_they_are_refused():
    with FaultyServer(CONTENT) as server:
        tokens = Tokens(server)
        source = open_source(server.url, headers=tokens)
        ranges = [(10_000 + 1000 * i, 1000) for i in range(20)]
        read_in_threads(source, ranges, 4)
        assert tokens.calls == 1
        tokens.revoked.add("s3cret1")
        assert read_in_threads(source, ranges, 4) == [CONTENT[a : a + n] for a, n in ranges]
        assert tokens.calls == 2
        tokens.revoked.update(f"s3cret{i}" for i in range(100))
        with pytest.raises(StreamError, match="401") as caught:
            source.read(100_000, 10)
        assert "s3cret" not in str(caught.value)


def test_a_callable_for_headers_that_are_refused_at_the_opening_is_asked_at_most_three_times():
    asked = []
    with FaultyServer(CONTENT, default=Reply(status=403)) as server:
        options = quick(headers=lambda: {"Authorization": f"token {len(asked)}", "X": str(asked.append(1))})
        with pytest.raises(StreamError, match="403"):
            open_stream(server.url, http_options=options)
        assert len(server.requests) == len(asked) <= 3


def test_headers_of_a_stream_go_over_those_of_the_options_also_when_both_are_callables():
    with FaultyServer(CONTENT) as server:
        options = quick(headers=lambda: {"X-A": "1", "X-B": "1"})
        with CURLStreamFile(server.url, headers=lambda: {"x-b": "2"}, http_options=options) as stream:
            assert stream.read(10) == CONTENT[:10]
        headers = server.requests[0].headers
        assert (headers["x-a"], headers["x-b"]) == ("1", "2")


def test_what_a_callable_for_headers_gives_is_checked_and_what_it_raises_reaches_the_caller():
    def no_token():
        raise KeyError("no token")

    with FaultyServer(CONTENT) as server:
        for wrong, error in ((no_token, KeyError), (lambda: {"A\nB": "1"}, ValueError), (lambda: 5, TypeError)):
            with pytest.raises(error):
                open_source(server.url, headers=wrong)
        assert server.requests == []


# -- renewed URLs -----------------------------------------------------------------------------------------------------


class Presigner:
    """Gives URLs that a server accepts until they are revoked."""

    def __init__(self, server: FaultyServer) -> None:
        self.server = server
        self.calls = 0
        self.revoked: set = set()
        server.default = self.answer

    def __call__(self) -> str:
        self.calls += 1
        return f"{self.server.url}?Signature=s3cret{self.calls}"

    def answer(self, request):
        return Reply(status=403) if request.target.rpartition("s3cret")[2] in self.revoked else Reply()


def open_presigned(presigner: Presigner, **arguments: object) -> _C.HttpSource:
    return _C.HttpSource.open("", quick()._native(), url_provider=presigner, **arguments)


def test_an_expired_url_is_renewed_once_for_all_threads():
    with FaultyServer(CONTENT) as server:
        presigner = Presigner(server)
        source = open_presigned(presigner)
        presigner.revoked.add("1")
        ranges = [(10_000 + 1000 * i, 1000) for i in range(20)]
        assert read_in_threads(source, ranges, 5) == [CONTENT[a : a + n] for a, n in ranges]
        assert presigner.calls == 2
        assert source.name == server.url


def test_a_url_is_renewed_when_its_lifetime_is_over():
    with FaultyServer(CONTENT) as server:
        presigner = Presigner(server)
        source = open_presigned(presigner, url_lifetime=1.0)
        source.read(10_000, 10)
        assert presigner.calls == 1
        time.sleep(1.1)
        source.read(20_000, 10)
        assert presigner.calls == 2


def test_a_url_that_lives_for_less_than_a_second_is_renewed_too():
    with FaultyServer(CONTENT) as server:
        presigner = Presigner(server)
        options = {"http_options": quick(), "url_provider": presigner, "url_lifetime": 0.01, "buffer_size": 100}
        with CURLStreamFile(server.url, **options) as stream:
            stream.read(10)
            time.sleep(1.1)
            stream.seek(20_000)
            stream.read(10)
            assert presigner.calls == 1


def test_a_url_that_stays_refused_after_renewal_is_an_error():
    with FaultyServer(CONTENT) as server:
        presigner = Presigner(server)
        presigner.revoked.update(map(str, range(100)))
        with pytest.raises(StreamError, match="403") as caught:
            open_presigned(presigner)
        assert presigner.calls <= 3
        assert "s3cret" not in str(caught.value)


def test_what_the_renewal_raises_reaches_the_caller():
    def no_url():
        raise KeyError("no credentials")

    with pytest.raises(KeyError, match="no credentials"):
        _C.HttpSource.open("", quick()._native(), url_provider=no_url)


def test_a_renewal_that_fails_is_tried_again():
    with FaultyServer(CONTENT) as server:
        presigner = Presigner(server)
        outages = [1, 2]

        def provider():
            if presigner.calls and outages:
                raise ConnectionError("no metadata service", outages.pop())
            return presigner()

        source = _C.HttpSource.open("", quick()._native(), url_provider=provider)
        presigner.revoked.add("1")
        assert source.read(100_000, 10) == CONTENT[100_000:100_010]
        assert not outages
        outages.extend(range(100))
        presigner.revoked.add("2")
        with pytest.raises(ConnectionError, match="no metadata service"):
            source.read(200_000, 10)


def test_a_url_is_renewed_until_the_server_accepts_one_within_the_time_for_retries():
    """Also when the first URL was not of the provider's making, and the provider itself fails in between."""
    with FaultyServer(CONTENT) as server:
        presigner = Presigner(server)
        outages = []

        def provider():
            if outages:
                raise ConnectionError("no metadata service", outages.pop())
            return presigner()

        options = quick(retries=10)
        source = _C.HttpSource.open(presigner(), options._native(), url_provider=provider)
        presigner.revoked.update(str(i) for i in range(1, 8))  # credentials that the store learns of late
        outages.extend([1, 2])
        assert source.read(100_000, 10) == CONTENT[100_000:100_010]
        assert presigner.calls == 8
        presigner.revoked.update(map(str, range(1000)))
        with pytest.raises(StreamError, match=r"403.*after 11 tries"):
            source.read(200_000, 10)


def test_a_stream_uses_renewal_and_a_display_name():
    with FaultyServer(CONTENT) as server:
        presigner = Presigner(server)
        with CURLStreamFile(presigner(), http_options=quick(), url_provider=presigner,
                            display_name="s3://bucket/key at host") as stream:  # fmt: skip
            assert "s3://bucket/key at host" in repr(stream)
            presigner.revoked.add("1")
            stream.seek(100_000)
            assert stream.read(10) == CONTENT[100_000:100_010]
            server.default = Reply(status=404)
            with pytest.raises(StreamNotFoundError, match="s3://bucket/key at host"):
                stream.seek(2_000_000), stream.read(10)


# -- interruption, exit, fork -----------------------------------------------------------------------------------------

_PROLOGUE = """
import os, signal, sys, threading, time
url = sys.argv[1]
from http_tools import tuned
from tensorizer.stream_io import open_stream
options = tuned(head_nbytes=4096, stall_timeout=60, proxy="")
"""


@pytest.fixture
def run_python(fresh_process):
    return lambda program, url: fresh_process(_PROLOGUE + program, url, timeout=60)


def test_ctrl_c_ends_a_read_that_waits(run_python):
    program = """
stream = open_stream(url, http_options=options)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    stream.seek(100_000)
    stream.read(10)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - start < 5)
"""
    with FaultyServer(CONTENT, [Reply()], default=Reply(stall_after=0)) as server:
        result = run_python(program, server.url)
        assert result.stdout == "interrupted True\n", result.stderr


def test_ctrl_c_ends_an_opening_that_waits(run_python):
    program = """
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    open_stream(url, http_options=options)
except KeyboardInterrupt:
    print("interrupted")
"""
    with FaultyServer(CONTENT, default=Reply(delay=30)) as server:
        assert run_python(program, server.url).stdout == "interrupted\n"


def test_a_process_ends_with_streams_open_and_reads_in_flight(run_python):
    program = """
stream = open_stream(url, http_options=options)
def read():
    stream.seek(100_000)
    stream.read(10)
threading.Thread(target=read, daemon=True).start()
time.sleep(0.3)
print("done", flush=True)
"""
    with FaultyServer(CONTENT, [Reply()], default=Reply(stall_after=0)) as server:
        result = run_python(program, server.url)
        assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def test_a_forked_child_reads_on_connections_of_its_own(certificates):
    with FaultyServer(CONTENT, tls=certificates.context()) as server:
        trust = CAInfo(cacert=str(certificates.authority))
        with open_stream(server.url, certificate_handling=trust, http_options=quick()) as stream:
            stream.seek(10_000)
            stream.read(300_000)
            program_reader, program_writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    stream.seek(1_000_000)
                    ok = stream.read(10) == CONTENT[1_000_000:1_000_010]
                    stream.close()
                    os.write(program_writer, b"1" if ok else b"0")
                finally:
                    os._exit(0)
            os.close(program_writer)
            deadline = time.monotonic() + 20
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    break
                time.sleep(0.01)
            assert os.read(program_reader, 1) == b"1"
            os.close(program_reader)
            stream.seek(2_000_000)
            assert stream.read(10) == CONTENT[2_000_000:2_000_010]


def test_a_broken_connection_does_not_kill_a_program_that_dies_of_sigpipe(certificates, run_python):
    program = """
from tensorizer.stream_io import CAInfo
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
options = tuned(head_nbytes=4096, proxy="", first_retry_delay=0.01)
stream = open_stream(url, http_options=options, certificate_handling=CAInfo(allow_untrusted=True))
time.sleep(0.2)
stream.seek(100_000)
print(len(stream.read(10)))
stream.close()
"""
    with FaultyServer(CONTENT, [Reply(close=True)] * 2, tls=certificates.context()) as server:
        result = run_python(program, server.url)
        assert (result.returncode, result.stdout) == (0, "10\n"), result.stderr


# -- proxies ----------------------------------------------------------------------------------------------------------


def test_a_proxy_is_used_as_libcurl_users_expect(monkeypatch):
    with FaultyServer(CONTENT) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", "direct.invalid")
        with open_stream("http://far.invalid/x", http_options=quick(proxy=None)) as stream:
            assert stream.read() == CONTENT
        assert {request.target for request in proxy.requests} == {"http://far.invalid/x"}
        assert len(proxy.requests) > 1
        monkeypatch.delenv("http_proxy")
        with open_stream(
            "http://far.invalid/y", http_options=quick(proxy=f"http://user:s3cret@127.0.0.1:{proxy.port}")
        ):
            assert proxy.requests[-1].headers["proxy-authorization"].startswith("Basic ")
        with pytest.raises(OSError, match="Failed to open stream") as caught:
            open_stream(
                "http://far.invalid/", http_options=quick(proxy="http://user:s3cret@nowhere.invalid", retries=0)
            )
        assert "s3cret" not in str(caught.value)


# -- uploads ----------------------------------------------------------------------------------------------------------


def test_an_upload_arrives_whole_and_its_etag_comes_back():
    with nothing_left(), FaultyServer() as server:
        uploader = _C.HttpUploader(quick()._native())
        headers = uploader.put(server.url + "?partNumber=1", CONTENT, headers=[("Content-Type", "x/y")])
        assert headers["etag"] == f'"{hashlib.md5(CONTENT).hexdigest()}"'
        request = server.requests[0]
        assert (request.method, request.body) == ("PUT", CONTENT)
        assert request.headers["content-type"] == "x/y"
        assert request.headers["content-length"] == str(len(CONTENT))
        assert "expect" not in request.headers
        uploader.put(server.url, b"")
        assert server.connections_seen == 1
        del uploader


@pytest.mark.parametrize(
    ("trouble", "times"),
    [
        (Reply(status=503), 2),
        (Reply(drop=True), 2),
        (Reply(reset=True), 2),
        (Reply(status=429), 2),
        (Reply(stall_after=0, body=b"x"), 1),  # it takes curl seconds to see that nothing comes after so much was sent
    ],
)
def test_an_upload_is_repeated_after_passing_trouble(trouble, times):
    with FaultyServer(script=[trouble] * times) as server:
        urls = iter(range(100))
        uploader = _C.HttpUploader(quick(stall_timeout=0.5)._native())
        uploader.put(lambda: f"{server.url}?try={next(urls)}", CONTENT)
        assert server.uploads[server.requests[-1].target] == CONTENT
        assert server.requests[-1].target.endswith(f"?try={times}")


def test_a_refused_upload_names_the_object_and_the_code_alone():
    body = b"<Error><Code>SignatureDoesNotMatch</Code><StringToSign>s3cret</StringToSign></Error>"
    with FaultyServer(default=Reply(status=403, body=body)) as server:
        uploader = _C.HttpUploader(quick()._native())
        with pytest.raises(
            StreamError, match=r"Failed to write s3://b/k: HTTP/1.1 403.*SignatureDoesNotMatch"
        ) as caught:
            uploader.put(server.url + "?sig=s3cret", CONTENT, display_name="s3://b/k")
        assert "s3cret" not in str(caught.value)
        assert len(server.requests) == 1


def test_a_temporary_redirect_of_an_upload_keeps_method_and_body():
    with FaultyServer() as target:
        with FaultyServer(default=Reply(status=307, headers={"Location": target.url + "?there"})) as server:
            _C.HttpUploader(quick()._native()).put(server.url, CONTENT, headers=[("X-Secret", "1")])
        assert list(target.uploads.values()) == [CONTENT]
        assert "x-secret" not in target.requests[0].headers
        found = Reply(status=302, headers={"Location": target.url})
        with FaultyServer(default=found) as server, pytest.raises(StreamError, match="redirect"):
            _C.HttpUploader(quick()._native()).put(server.url, CONTENT)
