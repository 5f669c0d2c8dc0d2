"""Networks and servers that misbehave: the bytes are right or the error is clear, soon, and nothing is left behind."""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import itertools
import logging
import os
import re
import resource
import socket
import threading
import time
import traceback

import pytest
from http_tools import nothing_left, quick, random_bytes
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from servers.certificates import make_certificates
from servers.http_faults import GOOD, FaultyServer, Reply, Request
from servers.nginx import PROGRAM as NGINX
from servers.nginx import nginx

from tensorizer import _C
from tensorizer.errors import StreamError, StreamNotFoundError, TruncatedError
from tensorizer.stream_io import CAInfo, CURLStreamFile, HTTPOptions, open_stream

CONTENT = random_bytes(200_000)
HEAD = 4096
DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@contextlib.contextmanager
def within(seconds: float):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def open_source(server: FaultyServer, **changes: object) -> _C.HttpSource:
    return _C.HttpSource.open(server.url, quick(**changes)._native())


def read_all(server: FaultyServer, **changes: object) -> bytes:
    with CURLStreamFile(server.url, http_options=quick(**changes)) as stream:
        return stream.read()


# -- trouble that passes ----------------------------------------------------------------------------------------------

PASSING = {
    "a dropped connection": Reply(drop=True),
    "a reset connection": Reply(reset=True),
    "a 500": Reply(status=500),
    "a 503": Reply(status=503),
    "a 429": Reply(status=429),
    "a 408": Reply(status=408),
    "a 400 of S3 about time": Reply(status=400, body=b"<Error><Code>RequestTimeout</Code></Error>"),
    "a 503 that ends the connection": Reply(status=503, close=True),
    "a 503 with a body that breaks": Reply(status=503, body=b"x" * 100, cut_after=10),
    "a 500 with a large body": Reply(status=500, body=b"x" * 1_000_000),
    "a body cut at once": Reply(cut_after=0),
    "a body cut in the middle": Reply(cut_after=1000),
    "a body cut before its last byte": Reply(cut_after=HEAD - 1),
    "a reset in the body": Reply(cut_after=1000, reset=True),
    "a chunked body cut in the middle": Reply(cut_after=1000, chunked=True),
    "an end before the head": Reply(raw=b""),
    "an end within the head": Reply(raw=b"HTTP/1.1 206 Partial Content\r\nContent-Le"),
}


BOTH_WAYS = (1, 1 << 40)  # values of direct_nbytes: straight from the socket, and through libcurl


@pytest.mark.parametrize("name", PASSING)
@pytest.mark.parametrize("at_request", [0, 1])
def test_passing_trouble_is_outlasted(name, at_request):
    for direct_nbytes in BOTH_WAYS:
        script = [GOOD] * at_request + [PASSING[name]] * 2
        with nothing_left(), FaultyServer(CONTENT, script) as server, within(20):
            assert read_all(server, direct_nbytes=direct_nbytes) == CONTENT
            assert not server.script


@pytest.mark.parametrize("name", PASSING)
def test_trouble_that_does_not_pass_is_an_error_that_names_it(name):
    with nothing_left(), FaultyServer(CONTENT, default=PASSING[name]) as server, within(20):
        with pytest.raises(StreamError, match=re.escape(server.url)) as caught:
            read_all(server, retries=2)
        assert "after 3 tries" in str(caught.value)
        # A body that lacks one byte is complete with the second request, and the next range breaks in turn.
        assert len(server.requests) in ((4, 5) if name == "a body cut before its last byte" else (3,))


def test_without_retries_the_first_failure_is_the_last():
    with FaultyServer(CONTENT, [Reply(status=503)]) as server:
        with pytest.raises(StreamError, match="503 Service Unavailable"):
            read_all(server, retries=0)
        assert len(server.requests) == 1


def test_a_broken_body_is_resumed_at_its_byte():
    for direct_nbytes in BOTH_WAYS:
        with FaultyServer(CONTENT, [GOOD, Reply(cut_after=50_000), Reply(cut_after=60_000)]) as server:
            source = open_source(server, direct_nbytes=direct_nbytes)
            assert source.read(10_000, 150_000) == CONTENT[10_000:160_000]
        assert [request.range for request in server.requests[1:]] == [
            (10_000, 159_999),
            (60_000, 159_999),
            (120_000, 159_999),
        ]


def raw(head: str, body: bytes = b"") -> Reply:
    return Reply(raw=head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)


BODY = CONTENT[10_000:20_000]
PARTIAL = f"HTTP/1.1 206 Partial Content\nContent-Range: bytes 10000-19999/{len(CONTENT)}\n"
LENGTH = "Content-Length: 10000"
ENDS = {
    "chunks": Reply(chunked=True),
    "no length": Reply(no_length=True),
    "HTTP/1.0": Reply(http10=True),
    "the whole object": Reply(ignore_range=True),
    "another range": Reply(headers={"Content-Range": f"bytes 0-9999/{len(CONTENT)}"}),
    "another object": Reply(headers={"ETag": '"another"'}),
    "bytes behind the body": Reply(surplus=b"surplus"),
    "the end of the connection behind the body": Reply(close=True),
    "404": Reply(status=404),
    "412": Reply(status=412),
    "416": Reply(status=416),
    "a redirect to nowhere": Reply(status=302),
    "an interim response first": raw("HTTP/1.1 103 Early Hints\nLink: x\n\n" + PARTIAL + LENGTH, BODY),
    "one length twice": raw(PARTIAL + LENGTH + "\n" + LENGTH, BODY),
    "two lengths": raw(PARTIAL + LENGTH + "\nContent-Length: 9999", BODY),
    "a length that is none": raw(PARTIAL + "Content-Length: ten", BODY),
    "a length and chunks": raw(
        PARTIAL + LENGTH + "\nTransfer-Encoding: chunked", b"2710\r\n" + BODY + b"\r\n0\r\n\r\n"
    ),
    "a folded line": raw(PARTIAL + LENGTH + "\nX-Note: a\n  b", BODY),
    "a line that is no field": raw(PARTIAL + LENGTH + "\nnonsense", BODY),
    "no HTTP": raw("SSH-2.0-OpenSSH_9.6"),
}


@pytest.mark.parametrize("reply", ENDS.values(), ids=list(ENDS))
def test_reads_from_the_socket_and_through_libcurl_come_to_the_same_end(reply):
    ends = []
    for direct_nbytes in BOTH_WAYS:
        with nothing_left(), FaultyServer(CONTENT, [GOOD, reply, reply]) as server, within(20):
            source = open_source(server, direct_nbytes=direct_nbytes, retries=0)
            try:
                got = source.read(10_000, 10_000)
                assert got == BODY
                ends.append("read")
            except OSError as error:
                ends.append(f"{type(error).__name__}: {error}".replace(server.url, "URL"))
            del source
    assert ends[0] == ends[1]


def test_a_broken_head_is_resumed_at_its_byte():
    with FaultyServer(CONTENT, [Reply(cut_after=1000)]) as server:
        assert open_source(server).read(0, HEAD) == CONTENT[:HEAD]
    assert [request.range for request in server.requests] == [(0, HEAD - 1), (1000, HEAD - 1)]


def test_a_handshake_that_ends_early_is_tried_again(certificates):
    trust = CAInfo(cacert=str(certificates.authority))
    with nothing_left(), FaultyServer(CONTENT, tls=certificates.context()) as server, within(20):
        server.cut_handshakes = 2
        with CURLStreamFile(server.url, certificate_handling=trust, http_options=quick()) as stream:
            assert stream.read() == CONTENT
        server.cut_handshakes = 1000
        with pytest.raises(StreamError, match="after 3 tries"):
            CURLStreamFile(server.url, certificate_handling=trust, http_options=quick(retries=2))


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_a_server_without_tls_is_an_error_at_once(tmp_path):
    (tmp_path / "root").mkdir()
    with nginx(tmp_path, tmp_path / "root") as url, within(10), pytest.raises(StreamError, match="speaks TLS"):
        open_stream(url.replace("http:", "https:") + "/m", http_options=quick(retries=None))


def test_who_waits_for_a_retry_leaves_its_place_to_others():
    with FaultyServer(CONTENT) as server:
        source = open_source(server, connections=1)
        server.script.append(Reply(status=503, headers={"Retry-After": "3"}))
        slow = threading.Thread(target=source.read, args=(100_000, 10))
        slow.start()
        deadline = time.monotonic() + 10
        while len(server.requests) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert source.read(50_000, 10) == CONTENT[50_000:50_010]
        assert slow.is_alive()
        slow.join()


def test_a_server_that_never_answered_is_given_up_sooner_with_a_hint():
    with socket.socket() as taken:  # nobody listens there, and nobody else can
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/x"
        with within(30), pytest.raises(StreamError, match="the server has not answered once"):
            open_stream(url, http_options=quick(retries=None, first_answer_seconds=0.5))


def test_time_alone_bounds_the_tries_unless_a_number_is_given():
    with FaultyServer(CONTENT, default=Reply(status=503)) as server:
        with pytest.raises(StreamError, match=r"503.*after \d\d"):
            read_all(server, retries=None, retry_seconds=1.0)
        assert len(server.requests) >= 10


@pytest.mark.slow
def test_a_server_that_goes_away_for_twenty_seconds_in_the_middle_of_a_load_is_waited_for():
    content = random_bytes(8_000_000)
    with FaultyServer(content) as server:
        options = HTTPOptions(head_nbytes=4096, unit_nbytes=1_000_000, proxy="")
        source = _C.HttpSource.open(server.url, options._native())
        port = server.port
        assert source.read(10_000, 1_000_000) == content[10_000:1_010_000]
    result = []
    thread = threading.Thread(target=lambda: result.append(source.read_parallel(1_000_000, 7_000_000)))
    thread.start()
    time.sleep(20)
    assert thread.is_alive()
    with FaultyServer(content, port=port), within(60):
        thread.join()
    assert result == [content[1_000_000:]]


@pytest.mark.slow
def test_a_server_that_is_overloaded_for_thirty_seconds_is_waited_for():
    end = time.monotonic() + 30
    with FaultyServer(CONTENT, default=lambda _: Reply(status=503) if time.monotonic() < end else GOOD) as server:
        with CURLStreamFile(server.url, http_options=HTTPOptions(proxy="")) as stream:
            assert stream.read() == CONTENT
        assert time.monotonic() >= end
        assert len(server.requests) < 20  # delays grow


def test_progress_starts_the_count_of_tries_anew():
    """20 breaks with retries=2: each try brings 300 KB, which is more than a try that stands still."""
    content = random_bytes(6_000_000)
    with FaultyServer(content, [GOOD], default=Reply(cut_after=300_000)) as server:
        source = open_source(server, retries=2, hedge_after=0)
        assert source.read(10_000, 5_900_000) == content[10_000:5_910_000]
    assert len(server.requests) > 15


def test_a_retry_after_is_obeyed():
    with FaultyServer(CONTENT, [Reply(status=503, headers={"Retry-After": "1"})]) as server:
        start = time.monotonic()
        assert read_all(server) == CONTENT
        assert 1 <= time.monotonic() - start < 10


def test_a_retry_after_beyond_the_time_for_retries_is_an_error_at_once():
    with FaultyServer(CONTENT, default=Reply(status=429, headers={"Retry-After": "3600"})) as server, within(5):
        with pytest.raises(StreamError, match="429"):
            read_all(server)
        assert len(server.requests) == 1


# -- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("seconds", ["100000", "9" * 30])
def test_a_retry_after_that_is_too_late_is_named_however_large_it_is(status, seconds):
    with FaultyServer(CONTENT, default=Reply(status=status, headers={"Retry-After": seconds})) as server:
        with pytest.raises(StreamError, match="the server asks to wait for 86400 s or more"):
            read_all(server)
        assert len(server.requests) == 1


@pytest.mark.parametrize("at_request", [0, 1])
def test_a_stall_is_noticed_and_resumed(at_request):
    script = [GOOD] * at_request + [Reply(stall_after=1000)]
    with nothing_left(), FaultyServer(CONTENT, script) as server, within(10):
        assert read_all(server, stall_timeout=0.5) == CONTENT


@pytest.mark.parametrize("stall", [Reply(stall_after=0), Reply(stall_after=1000), Reply(delay=30), Reply(trickle=0.1)])
def test_a_server_that_always_stalls_is_an_error_in_time(stall):
    with nothing_left(), FaultyServer(CONTENT, [GOOD], default=stall) as server, within(10):
        source = open_source(server, stall_timeout=0.4, retries=1)
        with pytest.raises(StreamError, match="stalled"):
            source.read(100_000, 50_000)
        with pytest.raises(StreamError, match="stalled"):
            open_source(server, stall_timeout=0.4, retries=1)
        del source


def test_a_slow_but_steady_server_is_not_a_stall():
    content = random_bytes(60)
    with FaultyServer(content, default=Reply(trickle=0.02)) as server:
        assert read_all(server, stall_timeout=1, min_bytes_per_second=0) == content


def test_a_reader_that_pauses_is_not_a_stall():
    with FaultyServer(random_bytes(8_000_000), default=Reply(ignore_range=True)) as server:
        with CURLStreamFile(server.url, http_options=quick(stall_timeout=1.5, retries=0)) as stream:
            stream.read(10_000)
            time.sleep(2)
            assert len(stream.read()) == 8_000_000 - 10_000
        assert len(server.requests) == 1


def test_the_total_timeout_ends_a_read_that_goes_on_and_on():
    with FaultyServer(CONTENT, [GOOD], default=Reply(trickle=0.01)) as server, within(10):
        source = open_source(server, total_timeout=0.5, min_bytes_per_second=0)
        with pytest.raises(StreamError, match="total timeout of 500 ms"):
            source.read(100_000, 1000)


def test_the_smallest_times_are_limits_and_not_the_zero_that_sets_none():
    trickling = FaultyServer(CONTENT, [GOOD], default=Reply(trickle=0.01))
    with trickling as server, within(10), pytest.raises(StreamError, match="total timeout of 1 ms"):
        read_all(server, total_timeout=1e-12, min_bytes_per_second=0)
    for name in ("connect_timeout", "stall_timeout", "total_timeout", "retry_seconds", "hedge_after"):
        assert getattr(HTTPOptions(**{name: 1e-12})._native(), name) == 0.001
        assert getattr(HTTPOptions(**{name: 0.0014})._native(), name) == 0.001
    assert HTTPOptions(hedge_after=0)._native().hedge_after == 0
    assert HTTPOptions()._native().total_timeout == 0


def test_a_port_that_nobody_listens_on_is_an_error_in_time():
    with FaultyServer() as server:
        url = server.url
    refused = r"connect.*after 3 tries.*check that the server runs"
    with nothing_left(), within(10), pytest.raises(StreamError, match=refused):
        open_stream(url, http_options=quick(retries=2))


def test_a_limit_of_open_files_is_named():
    for direct_nbytes in BOTH_WAYS:
        with FaultyServer(CONTENT) as server:
            source = open_source(server, direct_nbytes=direct_nbytes, retries=0, stall_timeout=0.3)
            source.close_connections()
            while server.open_connections():
                time.sleep(0.01)
            time.sleep(0.1)  # its socket is closed a little later
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            free = os.dup(0)
            os.close(free)
            # What a connection needs besides its socket differs among releases of libcurl; the server needs one, too.
            texts = []
            for more in range(5):
                resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, before[1]))
                try:
                    source.read(100_000, 10)
                    break
                except StreamError as error:
                    texts.append(str(error))
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, before)
            assert any(re.search("Too many open files; raise the limit", text) for text in texts), texts
            assert not any("check that the server runs" in text for text in texts), texts


def test_a_host_that_does_not_exist_is_an_error_in_time():
    with within(60), pytest.raises(StreamError, match=r"nowhere\.invalid"):
        open_stream("http://nowhere.invalid/x", http_options=quick(retries=0))


def test_a_listener_that_accepts_nothing_is_a_timeout():
    """A full backlog: the handshake of TCP never ends."""
    import socket

    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with within(15), pytest.raises(StreamError, match=r"(?i)timed? ?out"):
            open_stream(url, http_options=quick(connect_timeout=0.5, retries=1, stall_timeout=0.5))


# -- a slow last unit -------------------------------------------------------------------------------------------------


def test_a_slow_last_request_is_sent_again_on_another_connection():
    with nothing_left(), FaultyServer(CONTENT) as server:
        source = open_source(server, hedge_after=0.3)
        for i in range(5):
            source.read(10_000 + i * 10_000, 10_000)
        before = len(server.requests)
        server.script.append(Reply(trickle=0.01))
        with within(8):
            assert source.read(100_000, 50_000) == CONTENT[100_000:150_000]
        first, second = server.requests[before:]
        assert first.connection != second.connection
        assert second.range[1] == first.range[1]
        assert second.range[0] > first.range[0]  # what the slow one brought is not asked for again
        del source


@pytest.mark.parametrize("at_request", [0, 1])
def test_a_slow_first_byte_is_asked_for_again_on_another_connection(at_request):
    """The main tail of object stores; the request that opens the object is no exception."""
    with nothing_left(), FaultyServer(CONTENT, [GOOD] * at_request + [Reply(delay=60)]) as server, within(10):
        source = open_source(server, hedge_after=0.3)
        assert source.read(100_000, 50_000) == CONTENT[100_000:150_000]
        first, second = server.requests[at_request : at_request + 2]
        assert first.range == second.range
        assert first.connection != second.connection
        del source


def test_what_usual_is_may_be_learnt_while_a_request_lags():
    with nothing_left(), FaultyServer(CONTENT) as server, within(8):
        source = open_source(server, hedge_after=0.3)
        server.script.append(Reply(trickle=0.01))
        slow = threading.Thread(target=source.read, args=(100_000, 50_000))
        slow.start()
        while server.script:
            time.sleep(0.01)
        for i in range(5):
            source.read(10_000 + i * 10_000, 10_000)
        slow.join()
        assert len(server.requests) == 8  # the one that opened, six reads, and the rest of the slow one
        del source


def test_a_server_that_usually_takes_long_is_not_asked_twice():
    with FaultyServer(CONTENT, default=Reply(delay=0.5)) as server:
        source = open_source(server, hedge_after=1.0)
        server.default = Reply(delay=1.2)
        assert source.read(100_000, 50_000) == CONTENT[100_000:150_000]
        assert len(server.requests) == 2


def test_without_a_hedge_a_slow_first_byte_is_waited_for():
    with FaultyServer(CONTENT, [GOOD, Reply(delay=1)]) as server:
        assert open_source(server, hedge_after=0).read(100_000, 50_000) == CONTENT[100_000:150_000]
        assert len(server.requests) == 2


def test_what_comes_in_place_of_a_slow_answer_is_tried_again_like_any_other():
    with FaultyServer(CONTENT) as server:
        source = open_source(server, hedge_after=0.1)
        for i in range(5):
            source.read(10_000 + i * 10_000, 10_000)
        server.script.extend([Reply(delay=1.0), Reply(status=503)])
        assert source.read(100_000, 50_000) == CONTENT[100_000:150_000]
        assert not server.script


def test_a_request_that_is_given_up_for_being_slow_counts_as_no_try():
    for direct_nbytes in BOTH_WAYS:
        with nothing_left(), FaultyServer(CONTENT) as server, within(10):
            source = open_source(server, hedge_after=0.1, retries=0, direct_nbytes=direct_nbytes)
            for i in range(5):
                source.read(10_000 + i * 10_000, 10_000)
            server.script.append(Reply(delay=60))
            assert source.read(100_000, 50_000) == CONTENT[100_000:150_000]
            assert not server.script
            del source


def test_a_server_that_has_become_slow_is_waited_for_after_a_few_requests():
    """Each request in place of a slow one has four times as long."""
    with FaultyServer(CONTENT) as server, within(20):
        source = open_source(server, hedge_after=0.2)
        for i in range(5):
            source.read(10_000 + i * 10_000, 10_000)
        before = len(server.requests)
        server.default = Reply(delay=1.5)
        assert source.read(100_000, 50_000) == CONTENT[100_000:150_000]
        assert len(server.requests) - before in (3, 4)


# -- answers that contradict the request ------------------------------------------------------------------------------

LIES = {
    "a range that begins elsewhere": (Reply(headers={"Content-Range": "bytes 0-9/200000"}), "Content-Range"),
    "a range that ends early": (
        lambda r: Reply(headers={"Content-Range": f"bytes {r.range[0]}-{r.range[0]}/200000"}),
        "Content-Range",
    ),
    "another size": (lambda r: Reply(headers={"Content-Range": f"bytes {r.range[0]}-{r.range[1]}/200001"}), "changed"),
    "no range": (Reply(headers={"Content-Range": None}), "no Content-Range"),
    "a garbled range": (Reply(headers={"Content-Range": "bytes x-y/z"}), "Content-Range"),
    "a short length": (lambda r: Reply(headers={"Content-Length": "5"}), "Content-Length 5"),
    "a long length": (lambda r: Reply(headers={"Content-Length": "50000000"}), "Content-Length 50000000"),
    "a garbled length": (Reply(headers={"Content-Length": "12x"}), "Content-Length|invalid|number"),
    "the whole object": (Reply(ignore_range=True), "206"),
    "another ETag": (Reply(headers={"ETag": '"other"'}), "ETag"),
    "another date": (Reply(headers={"Last-Modified": "Thu, 22 Oct 2015 07:28:00 GMT"}), "Last-Modified"),
    "a precondition that failed": (Reply(status=412), "412.*changed"),
    "no content": (Reply(status=204), "204"),
    "interim heads without end": (Reply(raw=b"HTTP/1.1 102 Processing\r\nX: y\r\n\r\n" * 20_000), "larger|Too many"),
    "garbage": (Reply(raw=b"\x00\x01\x02 no http at all\r\n\r\n"), "HTTP"),
    "a head without end": (Reply(raw=b"HTTP/1.1 206 OK\r\n" + b"x: " + b"y" * 400_000), "head|larger"),
    "a 404": (Reply(status=404), "no such object"),
    "a 403": (Reply(status=403), "denied"),
    "a 401": (Reply(status=401), "credentials"),
    "a 416": (Reply(status=416), "416.*range"),
    "a status nobody knows": (Reply(status=799), "799"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_an_answer_that_contradicts_the_request_is_an_error(name):
    reply, text = LIES[name]
    etag = None if name == "another date" else "auto"
    server = FaultyServer(CONTENT, [GOOD], default=reply, etag=etag, last_modified=DATE)
    with nothing_left(), server, within(20):
        source = open_source(server, retries=1)
        with pytest.raises(StreamError, match=text) as caught:
            source.read(100_000, 50_000)
        assert str(caught.value).startswith(f"Failed to read {server.url}: bytes 100000-149999: ")
        assert caught.value.source == server.url
        del source


def test_more_bytes_than_announced_never_reach_the_caller():
    with FaultyServer(CONTENT, [GOOD, Reply(surplus=b"z" * 100)]) as server:
        source = open_source(server)
        assert source.read(100_000, 50_000) == CONTENT[100_000:150_000]
        assert source.read(150_000, 50_000) == CONTENT[150_000:]
    with FaultyServer(CONTENT, [GOOD], default=lambda r: Reply(chunked=True, body=b"z" * 60_000)) as server:
        source = open_source(server)
        buffer = bytearray(50_000)
        with pytest.raises(StreamError, match="longer"):
            source.readinto(100_000, buffer)


def test_trailers_without_end_are_an_error():
    head = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 100000-100009/200000\r\n"
    body = b"Transfer-Encoding: chunked\r\n\r\na\r\n" + CONTENT[100_000:100_010] + b"\r\n0\r\n"
    lines = b"".join(b"X-%d: %b\r\n" % (i, b"y" * 100) for i in range(4000))
    heads = b"HTTP/1.1 206 OK\r\n" * 20_000
    for trailers, text in ((lines, "head and trailers.*larger than 256 KiB"), (heads, "Failed to read")):
        with nothing_left(), FaultyServer(CONTENT, [GOOD], Reply(raw=head + body + trailers), etag=None) as server:
            with within(20), pytest.raises(StreamError, match=text):
                open_source(server, retries=1, direct_nbytes=1 << 40).read(100_000, 10)
            assert len(server.requests) == 2
    with FaultyServer(CONTENT, [GOOD, Reply(raw=head + body + b"X-Sum: 1\r\n\r\n")], etag=None) as server:
        assert open_source(server).read(100_000, 10) == CONTENT[100_000:100_010]


def test_a_body_that_was_packed_for_the_way_is_an_error():
    packed = gzip.compress(CONTENT[100_000:150_000])
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed)
    for coding, body in (("gzip", packed), ("gzip, chunked", chunk), ("deflate", packed)):
        head = f"HTTP/1.1 206 OK\r\nContent-Range: bytes 100000-149999/200000\r\nTransfer-Encoding: {coding}\r\n\r\n"
        with nothing_left(), FaultyServer(CONTENT, [GOOD], Reply(raw=head.encode() + body), etag=None) as server:
            with pytest.raises(StreamError, match="Transfer-Encoding"):
                open_source(server, retries=1, direct_nbytes=1 << 40).read(100_000, 50_000)
            assert len(server.requests) == 2
    head = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 100000-149999/200000\r\nTransfer-Encoding: identity\r\n\r\n"
    with FaultyServer(CONTENT, [GOOD, Reply(raw=head + CONTENT[100_000:150_000])], etag=None) as server:
        assert open_source(server, direct_nbytes=1 << 40).read(100_000, 50_000) == CONTENT[100_000:150_000]


def test_an_object_opens_though_its_first_body_goes_on_behind_the_range():
    longer = Reply(chunked=True, body=CONTENT[:60_000] + b"z" * 600_000)
    with within(20), FaultyServer(CONTENT, [longer]) as server:
        source = open_source(server, head_nbytes=60_000)
        assert source.read(0, len(CONTENT)) == CONTENT


def test_a_chunked_body_that_ends_early_is_resumed():
    with FaultyServer(CONTENT, [GOOD, lambda r: Reply(chunked=True, body=CONTENT[100_000:120_000])]) as server:
        assert open_source(server).read(100_000, 50_000) == CONTENT[100_000:150_000]


@pytest.mark.parametrize("etag", ["auto", None])
def test_an_object_that_changes_between_requests_is_never_mixed(etag):
    """Without an ETag, the size tells."""
    with FaultyServer(CONTENT, etag=etag) as server:
        source = open_source(server)
        server.content = random_bytes(200_001, seed=1)
        with pytest.raises(StreamError, match=r"changed|412"):
            source.read(100_000, 50_000)


def test_a_validator_that_later_answers_lack_is_a_changed_object():
    """A server that dropped If-Match, too, may have put another object of the same size in its place."""
    for name, validators in (("ETag", {"etag": "auto"}), ("Last-Modified", {"etag": None, "last_modified": DATE})):
        with FaultyServer(CONTENT, **validators) as server:
            source = open_source(server)
            server.default = Reply(headers={name: None})
            with pytest.raises(StreamError, match=f"changed while it was read: it had an? {name}, and now has none"):
                source.read(100_000, 50_000)


def test_an_object_that_changes_while_a_body_is_resumed_is_never_mixed():
    with FaultyServer(CONTENT) as server:
        source = open_source(server)

        def cut_and_change(_request):
            server.script.append(change)
            return Reply(cut_after=10_000)

        def change(_request):
            server.content = random_bytes(200_000, seed=1)
            return GOOD

        server.script.append(cut_and_change)
        with pytest.raises(StreamError, match=r"changed|412"):
            source.read(100_000, 50_000)


def test_a_size_that_nobody_can_have_costs_no_memory():
    huge = {"Content-Range": f"bytes 0-{HEAD - 1}/{1 << 62}"}
    with FaultyServer(CONTENT, default=Reply(headers=huge)) as server:
        source = open_source(server)
        assert source.size() == 1 << 62
        with pytest.raises(StreamError):
            source.read(10_000, 10)


def test_more_than_memory_holds_is_an_error_of_the_read_and_not_of_the_stream():
    huge = {"Content-Range": f"bytes 0-{HEAD - 1}/{(1 << 63) - 1}"}
    with FaultyServer(CONTENT, default=Reply(headers=huge)) as server:
        stream = CURLStreamFile(server.url, http_options=quick())
        with pytest.raises(StreamError, match="more than memory holds"):
            stream.read()
        assert not stream.closed
        stream.close()


def ranges_without_a_size(request):
    first, last = request.range
    if first >= len(CONTENT):
        return Reply(status=416)
    return Reply(headers={"Content-Range": f"bytes {first}-{min(last, len(CONTENT) - 1)}/*"})


def test_ranges_of_an_object_that_tells_no_size_are_read_to_its_end():
    with FaultyServer(CONTENT, default=ranges_without_a_size) as server:
        with CURLStreamFile(server.url, http_options=quick()) as stream:
            assert stream._tensorizer_source().size() is None
            assert stream.read(1 << 40) == CONTENT
            assert stream.read() == b""
            assert stream.seek(-5, 2) == len(CONTENT) - 5  # now the size is known
            assert stream.read() == CONTENT[-5:]
        source = open_source(server)
        assert source.read(100_000, 100_000) == CONTENT[100_000:]
        with pytest.raises(TruncatedError, match="ends at"):
            source.read(100_000, 100_001)


# -- servers without ranges -------------------------------------------------------------------------------------------

RANGELESS = {
    "with a length": Reply(ignore_range=True),
    "in chunks": Reply(ignore_range=True, chunked=True),
    "with an end in place of a length": Reply(ignore_range=True, no_length=True),
    "of HTTP/1.0": Reply(ignore_range=True, http10=True),
}


@pytest.mark.parametrize("name", RANGELESS)
def test_a_server_without_ranges_is_read_in_one_pass(name):
    content = random_bytes(3_000_000)
    with nothing_left(), FaultyServer(content, default=RANGELESS[name]) as server:
        with CURLStreamFile(server.url, http_options=quick()) as stream:
            assert stream._tensorizer_source().sequential
            assert stream._tensorizer_source().concurrency == 1
            assert stream.read(10) == content[:10]
            stream.seek(100_000)
            assert stream.read(100_000) == content[100_000:200_000]
            stream.seek(2_000_000)
            assert stream.read() == content[2_000_000:]
            assert stream.read(5) == b""
        assert len(server.requests) == 1


@pytest.mark.parametrize("name", RANGELESS)
def test_a_range_of_a_server_without_ranges_is_cut_out(name):
    with FaultyServer(CONTENT, default=RANGELESS[name]) as server:
        with CURLStreamFile(server.url, 1000, 150_000, http_options=quick()) as stream:
            assert stream.tell() == 1000
            assert stream.read() == CONTENT[1000:150_000]
        if name in ("with a length", "of HTTP/1.0"):
            with pytest.raises(StreamError, match="begins at"):
                CURLStreamFile(server.url, 200_000, http_options=quick())


def test_an_empty_object_without_ranges_is_empty():
    for reply in RANGELESS.values():
        with FaultyServer(b"", default=reply) as server, CURLStreamFile(server.url, http_options=quick()) as stream:
            assert stream.read() == b""


@pytest.mark.parametrize("content", [b"", CONTENT], ids=["empty", "not empty"])
def test_a_server_that_refuses_every_range_is_asked_for_the_whole(content):
    def answer(request):
        return Reply(status=416) if request.range else GOOD

    with FaultyServer(content, default=answer) as server:
        assert read_all(server) == content
        with pytest.raises(StreamError, match="416"):
            open_stream(server.url, begin=1, http_options=quick())


def test_a_small_object_without_ranges_is_held_in_memory():
    with FaultyServer(CONTENT[:1000], default=Reply(ignore_range=True), etag=None) as server:
        source = open_source(server)
        assert not source.sequential
        for offset in (900, 0, 500):
            assert source.read(offset, 100) == CONTENT[offset : offset + 100]
        assert len(server.requests) == 1


@pytest.mark.parametrize("etag", ["auto", None])
def test_going_back_without_ranges_begins_anew_if_the_object_is_provably_the_same(etag):
    with FaultyServer(CONTENT, default=Reply(ignore_range=True), etag=etag, last_modified=DATE) as server:
        source = open_source(server)
        assert source.read(150_000, 10) == CONTENT[150_000:150_010]
        assert source.read(50_000, 10) == CONTENT[50_000:50_010]
        assert len(server.requests) == 2


def test_going_back_without_ranges_and_without_proof_is_an_error():
    with FaultyServer(CONTENT, default=Reply(ignore_range=True), etag=None) as server:
        source = open_source(server)
        assert source.read(150_000, 10) == CONTENT[150_000:150_010]
        with pytest.raises(StreamError, match="no ranges"):
            source.read(50_000, 10)
        assert source.read(0, HEAD) == CONTENT[:HEAD]  # this much is in memory


def test_a_pass_that_breaks_begins_anew_and_goes_on_at_its_byte():
    content = random_bytes(1_000_000)
    script = [Reply(ignore_range=True, cut_after=300_000), Reply(ignore_range=True, cut_after=700_000)]
    with nothing_left(), FaultyServer(content, script, default=Reply(ignore_range=True)) as server:
        assert read_all(server) == content
        assert len(server.requests) == 3


def test_a_pass_over_a_changed_object_is_an_error():
    with FaultyServer(
        CONTENT, [Reply(ignore_range=True, cut_after=100_000)], default=Reply(ignore_range=True)
    ) as server:
        source = open_source(server)
        server.content = random_bytes(200_000, seed=1)
        with pytest.raises(StreamError, match=r"changed|412"):
            source.read(150_000, 1000)


def test_several_threads_take_turns_on_a_server_without_ranges():
    with FaultyServer(CONTENT, default=Reply(ignore_range=True)) as server:
        source = open_source(server)
        results = {}

        def read(offset):
            results[offset] = source.read(offset, 1000)

        threads = [threading.Thread(target=read, args=(offset,)) for offset in range(10_000, 100_000, 15_000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {offset: CONTENT[offset : offset + 1000] for offset in range(10_000, 100_000, 15_000)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("etag", ["auto", None])
def test_a_forked_child_starts_a_pass_of_its_own_and_the_parents_goes_on(etag):
    """Both would read one socket, and each would miss what the other took."""
    content = random_bytes(20_000_000)
    with FaultyServer(content, default=Reply(ignore_range=True), etag=etag) as server:
        source = open_source(server)
        assert source.read(10_000, 10) == content[10_000:10_010]
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            answer = b"wrong"
            try:
                answer = b"right" if source.read(100_000, 9_000_000) == content[100_000:9_100_000] else b"wrong"
            except StreamError as error:  # nothing proves that it is the same object
                answer = b"refused" if "no ranges" in str(error) else b"failed"
            finally:
                os.write(writer, answer)
                os._exit(0)
        os.close(writer)
        mine = source.read(100_000, 9_000_000)
        os.waitpid(child, 0)
        assert mine == content[100_000:9_100_000]
        assert os.read(reader, 100) == (b"refused" if etag is None else b"right")
        os.close(reader)
        assert source.read(10_000_000, 9_000_000) == content[10_000_000:19_000_000]
        assert len(server.requests) == (1 if etag is None else 2)


# -- redirects --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed_and_remembered(status):
    with FaultyServer(CONTENT) as target:
        leads = Reply(status=status, headers={"Location": target.url + "?Signature=s3cret"})
        with FaultyServer(default=leads) as server:
            assert read_all(server) == CONTENT
            assert len(server.requests) == 1
            assert target.requests[0].range == (0, HEAD - 1)


def test_secrets_do_not_follow_to_another_host():
    with FaultyServer(CONTENT) as target, FaultyServer() as server:
        server.default = Reply(status=302, headers={"Location": target.url})
        headers = {"Authorization": "Bearer s3cret", "X-Api-Key": "s3cret", "Cookie": "s3cret"}
        url = server.url.replace("http://", "http://user:s3cret@")
        with CURLStreamFile(url, headers=headers, http_options=quick()) as stream:
            assert stream.read() == CONTENT
        assert "s3cret" in server.requests[0].headers["x-api-key"]
        for request in target.requests:
            assert "s3cret" not in str(request.headers)
            assert request.headers["user-agent"].startswith("Tensorizer/")


def test_secrets_are_sent_again_where_another_host_leads_back():
    with FaultyServer(CONTENT) as home, FaultyServer() as other:
        home.script.append(Reply(status=302, headers={"Location": other.url}))
        other.default = Reply(status=302, headers={"Location": home.url})
        url = home.url.replace("http://", "http://user:s3cret@")
        with CURLStreamFile(url, headers={"X-Key": "s3cret"}, http_options=quick()) as stream:
            assert stream.read() == CONTENT
        assert len(home.requests) > 2
        for request in home.requests:
            assert request.headers["x-key"] == "s3cret"
            assert request.headers["authorization"].startswith("Basic ")
        assert "authorization" not in other.requests[0].headers


def test_a_redirect_of_s3_without_a_target_names_its_code():
    body = b"<Error><Code>PermanentRedirect</Code><Message>s3cret</Message></Error>"
    with FaultyServer(CONTENT, [GOOD], default=Reply(status=301, body=body)) as server:
        for opening in (False, True):
            with pytest.raises(StreamError, match=r"301.*\[PermanentRedirect\]; .*s3_region_name") as caught:
                read_all(server) if opening else open_source(server).read(100_000, 10)
            assert "s3cret" not in str(caught.value)


def test_headers_follow_within_a_host():
    with FaultyServer(CONTENT, [Reply(status=302, headers={"Location": "/elsewhere?x=1"})]) as server:
        with CURLStreamFile(server.url, headers={"X-Api-Key": "s3cret"}, http_options=quick()) as stream:
            assert stream.read() == CONTENT
        assert server.requests[1].target == "/elsewhere?x=1"
        assert server.requests[1].headers["x-api-key"] == "s3cret"


def test_a_remembered_redirect_that_expires_is_asked_for_again():
    with FaultyServer(CONTENT) as target:
        numbers = iter(range(100))
        with FaultyServer(
            default=lambda r: Reply(status=302, headers={"Location": f"{target.url}?{next(numbers)}"})
        ) as server:
            source = open_source(server)
            target.default = lambda r: Reply(status=403) if r.target.endswith("?0") else GOOD
            assert source.read(100_000, 10) == CONTENT[100_000:100_010]
            assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("/loop", "more than 3 redirects"),
        (None, "without a target"),
        ("file:///etc/passwd", "not followed"),
        ("ftp://127.0.0.1/x", "not followed"),
        ("http://", "not followed"),
    ],
)
def test_bad_redirects_are_errors(location, text):
    with FaultyServer(default=Reply(status=302, headers={"Location": location})) as server, within(10):
        with pytest.raises(StreamError, match=text):
            read_all(server, max_redirects=3)
        assert len(server.requests) <= 4


def test_redirects_can_be_refused():
    with FaultyServer(default=Reply(status=302, headers={"Location": "/x"})) as server:
        url = server.url
        with pytest.raises(StreamError, match="302"):
            open_stream(url, http_options=quick(max_redirects=0))


# -- secrets ----------------------------------------------------------------------------------------------------------

SECRET = "".join(["s3", "cr3t"])  # in two pieces: tracebacks show lines of this file

_FAULTS_WITH_SECRETS = [
    Reply(status=403), Reply(status=404), Reply(status=503), Reply(drop=True), Reply(cut_after=10), Reply(raw=b"junk"),
    Reply(headers={"Content-Range": "junk"}), Reply(status=302, headers={"Location": f"/loop?Signature={SECRET}"}),
    Reply(status=302, headers={"Location": f"ftp://user:{SECRET}@h/?{SECRET}"}), Reply(stall_after=0),
    Reply(status=400, body=f"<Error><Code>{SECRET} is wrong</Code>{SECRET}</Error>".encode()),
    lambda request: quoting(403, request), lambda request: quoting(206, request),
]  # fmt: skip


def quoting(status: int, request: Request) -> Reply:
    """A status line with all that was sent."""
    words = f"{request.target} {request.target.partition('=')[2]} {list(request.headers.values())}"
    return Reply(raw=f"HTTP/1.1 {status} {words}\r\nContent-Length: 0\r\n\r\n".encode())


def test_a_status_line_that_quotes_the_request_is_told_without_its_secrets():
    token = f"{SECRET}5".encode().hex()
    basic = base64.b64encode(f"user:{SECRET}1".encode()).decode()
    logins = (("", {"Authorization": f"Bearer {token}"}), (f"user:{SECRET}1@", {}))
    for (login, headers), direct_nbytes, at_request in itertools.product(logins, BOTH_WAYS, (0, 1)):
        for status in (206, 403):
            default = functools.partial(quoting, status)
            with FaultyServer(CONTENT, [GOOD] * at_request, default=default) as server:
                url = server.url.replace("http://", f"http://{login}") + f"?X-Amz-Signature={SECRET}2"
                options = quick(retries=0, direct_nbytes=direct_nbytes, headers=headers)
                with pytest.raises(StreamError, match=f"HTTP/1.1 {status}") as caught:
                    _C.HttpSource.open(url, options._native()).read(100_000, 10)
            for secret in (SECRET, token, basic):
                assert secret not in str(caught.value)


def read_with_secrets(url: str, options: HTTPOptions) -> None:
    with CURLStreamFile(url, headers={"Authorization": f"{SECRET}4"}, http_options=options) as stream:
        print(repr(stream), repr(stream._tensorizer_source()))
        stream.seek(100_000)
        stream.read(10)


@pytest.mark.parametrize("number", range(len(_FAULTS_WITH_SECRETS)))
@pytest.mark.parametrize("at_request", [0, 1])
def test_no_secret_is_in_errors_tracebacks_reprs_or_logs(number, at_request, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    with FaultyServer(CONTENT, [GOOD] * at_request, default=_FAULTS_WITH_SECRETS[number]) as server:
        url = server.url.replace("http://", f"http://user:{SECRET}1@") + f"?X-Amz-Signature={SECRET}2"
        options = quick(retries=1, stall_timeout=0.3, max_redirects=2, headers={"X-Key": f"{SECRET}3"})
        told = repr(options)
        with pytest.raises(OSError) as caught:
            read_with_secrets(url, options)
        told += "".join(traceback.format_exception(caught.type, caught.value, caught.tb)) + repr(caught.value)
        told += str(vars(caught.value)) + caplog.text + "".join(capfd.readouterr())
        assert server.url in told
        assert SECRET not in told
        assert f"{SECRET}2" in server.requests[0].target  # it was there to be told


@pytest.mark.parametrize("proxy", ["http://user:{}@[:x", "user:{}@[:x", "other://user:{}@127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_an_error_without_its_password(proxy, monkeypatch):
    monkeypatch.setenv("http_proxy", proxy.format(SECRET))
    with FaultyServer(CONTENT) as server:
        with pytest.raises(StreamError, match=r"Unsupported proxy .*; check proxy, http_proxy") as caught:
            open_stream(server.url, http_options=quick(proxy=None, no_proxy=""))
        assert SECRET not in "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
        assert server.requests == []


@pytest.mark.parametrize(
    ("status", "text", "tries"),
    [(407, "the proxy wants credentials", 1), (403, "the proxy does not connect", 1), (502, "after 4 tries", 4)],
)
def test_a_proxy_that_refuses_a_tunnel_is_named(status, text, tries):
    with FaultyServer(CONTENT, default=Reply(status=status)) as proxy:
        with pytest.raises(StreamError, match=text):
            open_stream("https://127.0.0.1:1/x", http_options=quick(proxy=proxy.url, no_proxy=""))
        assert [request.method for request in proxy.requests] == ["CONNECT"] * tries


# -- sequences of faults ----------------------------------------------------------------------------------------------

faults = st.one_of(
    st.just(GOOD),
    st.builds(lambda n: Reply(cut_after=n), st.integers(0, 60_000)),
    st.builds(lambda n: Reply(cut_after=n, reset=True), st.integers(0, 60_000)),
    st.builds(lambda n: Reply(chunked=True, cut_after=n), st.integers(0, 60_000)),
    st.just(Reply(chunked=True)),
    st.just(Reply(drop=True)),
    st.just(Reply(reset=True)),
    st.builds(lambda status: Reply(status=status), st.sampled_from([408, 429, 500, 502, 503, 504])),
    st.just(Reply(status=503, headers={"Retry-After": "0"})),
    st.just(Reply(close=True)),
    st.just(Reply(http10=True)),
    st.just(Reply(surplus=b"surplus")),
    st.builds(lambda status: Reply(status=status), st.sampled_from([204, 304, 401, 403, 404, 410, 412, 416])),
    st.just(Reply(ignore_range=True)),
    st.just(Reply(status=302, headers={"Location": "/moved"})),
    st.just(Reply(headers={"ETag": '"changed"'})),
    st.just(Reply(headers={"Content-Range": "bytes 0-1/2"})),
    st.just(Reply(raw=b"junk\r\n\r\n")),
    st.just(Reply(body=b"short")),
)


@given(
    script=st.lists(faults, max_size=8),
    reads=st.lists(st.tuples(st.integers(0, len(CONTENT)), st.integers(0, 80_000)), min_size=1, max_size=4),
    etag=st.sampled_from(["auto", None]),
)
@settings(max_examples=60, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
def test_after_any_sequence_of_faults_the_bytes_are_right_or_the_error_is_ours(script, reads, etag):
    with nothing_left(), FaultyServer(CONTENT, script, etag=etag, last_modified=DATE) as server, within(30):
        with contextlib.suppress(StreamError, StreamNotFoundError):
            source = open_source(server, retries=3, retry_seconds=2)
            for offset, nbytes in reads:
                nbytes = min(nbytes, len(CONTENT) - offset)
                with contextlib.suppress(StreamError):
                    data = source.read(offset, nbytes)
                    note(f"read {len(data)} bytes at {offset}")
                    # A sequential pass that a lie began is honest about the bytes of that answer alone.
                    assert data == CONTENT[offset : offset + nbytes]
        source = None
        server.script.clear()
        assert read_all(server) == CONTENT  # and the server is well again
