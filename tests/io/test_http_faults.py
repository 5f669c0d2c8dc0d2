"""Networks and servers in trouble: the bytes are right or the error is clear, soon, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import threading
import time

import pytest
from http_tools import (
    CONTENT,
    DATE,
    HEAD,
    nothing_left,
    open_faulty,
    quick,
    random_bytes,
    read_faulty,
    tuned,
    within,
)
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from servers.certificates import make_certificates
from servers.http_faults import GOOD, FaultyServer, Reply
from servers.nginx import PROGRAM as NGINX
from servers.nginx import nginx

from tensorizer import _C
from tensorizer.errors import StreamError, StreamNotFoundError
from tensorizer.stream_io import CAInfo, CURLStreamFile, HTTPOptions, open_stream


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


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


@pytest.mark.parametrize("name", PASSING)
@pytest.mark.parametrize("at_request", [0, 1])
def test_passing_trouble_is_outlasted(name, at_request):
    script = [GOOD] * at_request + [PASSING[name]] * 2
    with nothing_left(), FaultyServer(CONTENT, script) as server, within(20):
        assert read_faulty(server) == CONTENT
        assert not server.script


@pytest.mark.parametrize("name", PASSING)
def test_trouble_that_does_not_pass_is_an_error_that_names_it(name):
    with nothing_left(), FaultyServer(CONTENT, default=PASSING[name]) as server, within(20):
        with pytest.raises(StreamError, match=re.escape(server.url)) as caught:
            read_faulty(server, retries=2)
        assert "after 3 tries" in str(caught.value)
        # A body that lacks one byte is complete with the second request, and the next range breaks in turn.
        assert len(server.requests) in ((4, 5) if name == "a body cut before its last byte" else (3,))


def test_without_retries_the_first_failure_is_the_last():
    with FaultyServer(CONTENT, [Reply(status=503)]) as server:
        with pytest.raises(StreamError, match="503 Service Unavailable"):
            read_faulty(server, retries=0)
        assert len(server.requests) == 1


def test_a_broken_body_is_resumed_at_its_byte():
    with FaultyServer(CONTENT, [GOOD, Reply(cut_after=50_000), Reply(cut_after=60_000)]) as server:
        source = open_faulty(server)
        assert source.read(10_000, 150_000) == CONTENT[10_000:160_000]
    assert [request.range for request in server.requests[1:]] == [
        (10_000, 159_999),
        (60_000, 159_999),
        (120_000, 159_999),
    ]


def test_a_broken_head_is_resumed_at_its_byte():
    with FaultyServer(CONTENT, [Reply(cut_after=1000)]) as server:
        assert open_faulty(server).read(0, HEAD) == CONTENT[:HEAD]
    assert [request.range for request in server.requests] == [(0, HEAD - 1), (1000, HEAD - 1)]


def test_a_handshake_that_ends_early_is_tried_again(certificates):
    trust = CAInfo(cacert=str(certificates.authority))
    with nothing_left(), FaultyServer(CONTENT, tls=certificates.context()) as server, within(20):
        server.cut_handshakes = 2
        with nothing_left(), CURLStreamFile(server.url, certificate_handling=trust, http_options=quick()) as stream:
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
        source = open_faulty(server, connections=1)
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


@pytest.mark.parametrize("settings", [{}, {"retries": 5}], ids=["default", "tries"])
def test_a_host_that_accepts_and_stays_silent_is_given_up_after_one_stall(settings):
    with nothing_left(), socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        accepted = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(stack.enter_context(listener.accept()[0]))

        accepting = threading.Thread(target=accept)
        accepting.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        uploader = _C.HttpUploader(HTTPOptions(stall_timeout=0.5, proxy="", **settings)._native())
        silent = r"the transfer stalled: .*; the server has not answered once: check host"
        try:
            with within(60), pytest.raises(StreamError, match=silent):
                open_stream(url, http_options=HTTPOptions(stall_timeout=0.5, proxy="", **settings))
            with within(60), pytest.raises(StreamError, match="the server has not answered once: check host"):
                uploader.put(url, b"body")
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
        assert len(accepted) == 2
        del uploader


def test_time_alone_bounds_the_tries_unless_a_number_is_given():
    with FaultyServer(CONTENT, default=Reply(status=503)) as server:
        with pytest.raises(StreamError, match=r"503.*after \d\d"):
            read_faulty(server, retries=None, retry_seconds=1.0)
        assert len(server.requests) >= 10


@pytest.mark.slow
def test_a_server_that_goes_away_for_twenty_seconds_in_the_middle_of_a_load_is_waited_for():
    content = random_bytes(8_000_000)
    with FaultyServer(content) as server:
        options = tuned(head_nbytes=4096, unit_nbytes=1_000_000, proxy="")
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
        source = open_faulty(server, retries=2)
        assert source.read(10_000, 5_900_000) == content[10_000:5_910_000]
    assert len(server.requests) > 15


def test_a_retry_after_is_obeyed():
    with FaultyServer(CONTENT, [Reply(status=503, headers={"Retry-After": "1"})]) as server:
        start = time.monotonic()
        assert read_faulty(server) == CONTENT
        assert 1 <= time.monotonic() - start < 10


def test_a_retry_after_beyond_the_time_for_retries_is_an_error_at_once():
    with FaultyServer(CONTENT, default=Reply(status=429, headers={"Retry-After": "3600"})) as server, within(5):
        with pytest.raises(StreamError, match="429"):
            read_faulty(server)
        assert len(server.requests) == 1


# -- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("seconds", ["100000", "9" * 30])
def test_a_retry_after_that_is_too_late_is_named_however_large_it_is(status, seconds):
    with FaultyServer(CONTENT, default=Reply(status=status, headers={"Retry-After": seconds})) as server:
        with pytest.raises(StreamError, match="the server asks to wait for 86400 s or more"):
            read_faulty(server)
        assert len(server.requests) == 1


@pytest.mark.parametrize("at_request", [0, 1])
def test_a_stall_is_noticed_and_resumed(at_request):
    script = [GOOD] * at_request + [Reply(stall_after=1000)]
    with nothing_left(), FaultyServer(CONTENT, script) as server, within(60):
        assert read_faulty(server, stall_timeout=1) == CONTENT


@pytest.mark.parametrize("stall", [Reply(stall_after=0), Reply(stall_after=1000), Reply(delay=30), Reply(trickle=0.1)])
def test_a_server_that_always_stalls_is_an_error_in_time(stall):
    with nothing_left(), FaultyServer(CONTENT, [GOOD], default=stall) as server, within(60):
        source = open_faulty(server, stall_timeout=1, retries=0)
        with pytest.raises(StreamError, match="stalled"):
            source.read(100_000, 50_000)
        with pytest.raises(StreamError, match="stalled"):
            open_faulty(server, stall_timeout=1, retries=0)
        del source


def test_a_reader_that_pauses_is_not_a_stall():
    with FaultyServer(random_bytes(8_000_000), default=Reply(ignore_range=True)) as server:
        with CURLStreamFile(server.url, http_options=quick(stall_timeout=1.5, retries=0)) as stream:
            stream.read(10_000)
            time.sleep(2)
            assert len(stream.read()) == 8_000_000 - 10_000
        assert len(server.requests) == 1


def test_the_smallest_times_are_limits_and_not_the_zero_that_sets_none():
    for name in ("connect_timeout", "stall_timeout", "retry_seconds"):
        assert getattr(HTTPOptions(**{name: 1e-12})._native(), name) == 0.001
        assert getattr(HTTPOptions(**{name: 0.0014})._native(), name) == 0.001
    assert HTTPOptions(retry_seconds=0)._native().retry_seconds == 0


def test_a_port_that_nobody_listens_on_is_an_error_in_time():
    with FaultyServer() as server:
        url = server.url
    refused = r"connect.*after 3 tries.*check that the server runs"
    with nothing_left(), within(10), pytest.raises(StreamError, match=refused):
        open_stream(url, http_options=quick(retries=2))


def test_a_limit_of_open_files_is_named():
    with FaultyServer(CONTENT) as server:
        source = open_faulty(server, retries=0, stall_timeout=0.3)
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


# -- slow answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stall", [Reply(stall_after=1000), Reply(trickle=0.1)])
def test_a_body_that_stands_still_is_abandoned_once_and_resumed_on_another_connection(stall):
    with nothing_left(), FaultyServer(CONTENT) as server, within(60):
        source = open_faulty(server, retries=0, stall_timeout=1000)
        server.script.append(stall)
        assert source.read(100_000, 50_000) == CONTENT[100_000:150_000]
        first, second = server.requests[1:]
        assert first.connection != second.connection
        assert second.range[1] == first.range[1]
        assert second.range[0] > first.range[0]  # what the slow one brought is not asked for again
        del source


def test_what_comes_in_place_of_an_abandoned_body_is_waited_for():
    with nothing_left(), FaultyServer(CONTENT) as server, within(60):
        source = open_faulty(server, retries=0, stall_timeout=5)
        server.default = Reply(stall_after=1000)
        with pytest.raises(StreamError, match="stalled"):
            source.read(100_000, 50_000)
        assert len(server.requests) == 3
        del source


def test_what_comes_in_place_of_an_abandoned_body_is_tried_again_like_any_other():
    with FaultyServer(CONTENT) as server:
        source = open_faulty(server)
        server.script.extend([Reply(stall_after=1000), Reply(status=503)])
        assert source.read(100_000, 50_000) == CONTENT[100_000:150_000]
        assert not server.script


@pytest.mark.parametrize("at_request", [0, 1, 2])
def test_a_request_that_is_not_answered_yet_is_waited_for_and_sent_once(at_request):
    with FaultyServer(CONTENT, [GOOD] * at_request + [Reply(delay=4.0)]) as server:
        source = open_faulty(server)
        assert source.read(10_000, 50_000) == CONTENT[10_000:60_000]
        assert source.read(100_000, 50_000) == CONTENT[100_000:150_000]
        ranges = [request.range for request in server.requests]
        assert ranges == [(0, HEAD - 1), (10_000, 59_999), (100_000, 149_999)]


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
    # Another body of the right size would be taken for the right one.
    st.sampled_from([b"", b"long" * 100_000]).map(lambda body: Reply(body=body)),
)


@pytest.mark.parametrize("examples", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_after_any_sequence_of_faults_the_bytes_are_right_or_the_error_is_ours(examples):
    @given(
        script=st.lists(faults, max_size=8),
        reads=st.lists(st.tuples(st.integers(0, len(CONTENT)), st.integers(0, 80_000)), min_size=1, max_size=4),
        etag=st.sampled_from(["auto", None]),
    )
    @settings(max_examples=examples, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
    def check(script, reads, etag):
        with nothing_left(), FaultyServer(CONTENT, script, etag=etag, last_modified=DATE) as server, within(30):
            with contextlib.suppress(StreamError, StreamNotFoundError):
                source = open_faulty(server, retries=3, retry_seconds=2)
                for offset, nbytes in reads:
                    nbytes = min(nbytes, len(CONTENT) - offset)
                    with contextlib.suppress(StreamError):
                        data = source.read(offset, nbytes)
                        note(f"read {len(data)} bytes at {offset}")
                        # If the first answer lies, a sequential pass can be right only about the bytes of that answer.
                        assert data == CONTENT[offset : offset + nbytes]
            source = None
            server.script.clear()
            assert read_faulty(server) == CONTENT  # and the server is well again

    check()
