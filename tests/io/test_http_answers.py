"""Servers whose answers contradict the request, know no ranges or tell no size."""

from __future__ import annotations

import gzip
import hashlib
import os
import signal
import threading
import time

import memory
import pytest
import samples
import torch
from http_tools import (
    CONTENT,
    DATE,
    HEAD,
    nothing_left,
    open_faulty,
    quick,
    random_bytes,
    read_faulty,
    within,
)
from servers.http_faults import GOOD, FaultyServer, Reply

import tensorizer
from tensorizer.errors import StreamError, TruncatedError
from tensorizer.stream_io import CURLStreamFile, open_stream

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
        source = open_faulty(server, retries=1)
        with pytest.raises(StreamError, match=text) as caught:
            source.read(100_000, 50_000)
        assert str(caught.value).startswith(f"Failed to read {server.url}: bytes 100000-149999: ")
        assert caught.value.source == server.url
        del source


def test_more_bytes_than_announced_never_reach_the_caller():
    with FaultyServer(CONTENT, [GOOD, Reply(surplus=b"z" * 100)]) as server:
        source = open_faulty(server)
        assert source.read(100_000, 50_000) == CONTENT[100_000:150_000]
        assert source.read(150_000, 50_000) == CONTENT[150_000:]
    with FaultyServer(CONTENT, [GOOD], default=lambda r: Reply(chunked=True, body=b"z" * 60_000)) as server:
        source = open_faulty(server)
        buffer = bytearray(50_000)
        with pytest.raises(StreamError, match="longer"):
            source.readinto(100_000, buffer)


TRAILED = (
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 100000-100009/200000\r\n"
    b"Transfer-Encoding: chunked\r\n\r\na\r\n" + CONTENT[100_000:100_010] + b"\r\n0\r\n"
)  # what follows are trailers


def test_trailers_without_end_are_an_error():
    lines = b"".join(b"X-%d: %b\r\n" % (i, b"y" * 100) for i in range(4000))
    with nothing_left(), FaultyServer(CONTENT, [GOOD], Reply(raw=TRAILED + lines), etag=None) as server:
        with within(20), pytest.raises(StreamError, match=r"head and trailers.*larger than 256 KiB"):
            open_faulty(server, retries=1).read(100_000, 10)
        assert len(server.requests) == 2
    with FaultyServer(CONTENT, [GOOD, Reply(raw=TRAILED + b"X-Sum: 1\r\n\r\n")], etag=None) as server:
        assert open_faulty(server).read(100_000, 10) == CONTENT[100_000:100_010]


@pytest.mark.skipif(not memory.can_measure(), reason="the kernel does not tell peaks of memory")
def test_trailers_that_are_no_headers_end_the_response_and_take_no_memory():
    answer = TRAILED + b"HTTP/1.1 206 OK\r\n" * 4_000_000
    told = []
    with nothing_left(), FaultyServer(CONTENT, [GOOD], Reply(raw=answer), etag=None) as server:
        with within(20), memory.peak_growth() as growth:
            try:  # libcurl 8 stops at the first such line, when the body is there; older ones fail
                assert open_faulty(server, retries=1).read(100_000, 10) == CONTENT[100_000:100_010]
            except StreamError as error:
                told.append(str(error))
        assert all(text.startswith(f"Failed to read {server.url}: bytes 100000-100009: ") for text in told)
        assert growth.peak < len(answer) / 2
        assert len(server.requests) == 2


def test_a_body_that_was_packed_for_the_way_is_an_error():
    packed = gzip.compress(CONTENT[100_000:150_000])
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed)
    for coding, body in (("gzip", packed), ("gzip, chunked", chunk), ("deflate", packed)):
        head = f"HTTP/1.1 206 OK\r\nContent-Range: bytes 100000-149999/200000\r\nTransfer-Encoding: {coding}\r\n\r\n"
        with nothing_left(), FaultyServer(CONTENT, [GOOD], Reply(raw=head.encode() + body), etag=None) as server:
            with pytest.raises(StreamError, match="Transfer-Encoding"):
                open_faulty(server, retries=1).read(100_000, 50_000)
            assert len(server.requests) == 2
    head = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 100000-149999/200000\r\nTransfer-Encoding: identity\r\n\r\n"
    with FaultyServer(CONTENT, [GOOD, Reply(raw=head + CONTENT[100_000:150_000])], etag=None) as server:
        assert open_faulty(server).read(100_000, 50_000) == CONTENT[100_000:150_000]


def test_an_object_opens_though_its_first_body_goes_on_behind_the_range():
    longer = Reply(chunked=True, body=CONTENT[:60_000] + b"z" * 600_000)
    with within(20), FaultyServer(CONTENT, [longer]) as server:
        source = open_faulty(server, head_nbytes=60_000)
        assert source.read(0, len(CONTENT)) == CONTENT


def test_a_chunked_body_that_ends_early_is_resumed():
    with FaultyServer(CONTENT, [GOOD, lambda r: Reply(chunked=True, body=CONTENT[100_000:120_000])]) as server:
        assert open_faulty(server).read(100_000, 50_000) == CONTENT[100_000:150_000]


@pytest.mark.parametrize("etag", ["auto", None])
def test_an_object_that_changes_between_requests_is_never_mixed(etag):
    """Without an ETag, the size tells."""
    with FaultyServer(CONTENT, etag=etag) as server:
        source = open_faulty(server)
        server.content = random_bytes(200_001, seed=1)
        with pytest.raises(StreamError, match=r"changed|412"):
            source.read(100_000, 50_000)


def test_a_validator_that_later_answers_lack_is_a_changed_object():
    """A server that dropped If-Match, too, may have put another object of the same size in its place."""
    for name, validators in (("ETag", {"etag": "auto"}), ("Last-Modified", {"etag": None, "last_modified": DATE})):
        with FaultyServer(CONTENT, **validators) as server:
            source = open_faulty(server)
            server.default = Reply(headers={name: None})
            with pytest.raises(StreamError, match=f"changed while it was read: it had an? {name}, and now has none"):
                source.read(100_000, 50_000)


def test_an_object_that_changes_while_a_body_is_resumed_is_never_mixed():
    with FaultyServer(CONTENT) as server:
        source = open_faulty(server)

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
        source = open_faulty(server)
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
        source = open_faulty(server)
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
        assert read_faulty(server) == content
        with pytest.raises(StreamError, match="416"):
            open_stream(server.url, begin=1, http_options=quick())


def test_a_small_object_without_ranges_is_held_in_memory():
    with FaultyServer(CONTENT[:1000], default=Reply(ignore_range=True), etag=None) as server:
        source = open_faulty(server)
        assert not source.sequential
        for offset in (900, 0, 500):
            assert source.read(offset, 100) == CONTENT[offset : offset + 100]
        assert len(server.requests) == 1


@pytest.mark.parametrize("etag", ["auto", None])
def test_going_back_without_ranges_begins_anew_if_the_object_is_provably_the_same(etag):
    with FaultyServer(CONTENT, default=Reply(ignore_range=True), etag=etag, last_modified=DATE) as server:
        source = open_faulty(server)
        assert source.read(150_000, 10) == CONTENT[150_000:150_010]
        assert source.read(50_000, 10) == CONTENT[50_000:50_010]
        assert len(server.requests) == 2


def test_going_back_without_ranges_and_without_proof_is_an_error():
    with FaultyServer(CONTENT, default=Reply(ignore_range=True), etag=None) as server:
        source = open_faulty(server)
        assert source.read(150_000, 10) == CONTENT[150_000:150_010]
        with pytest.raises(StreamError, match="no ranges"):
            source.read(50_000, 10)
        assert source.read(0, HEAD) == CONTENT[:HEAD]  # this much is in memory


def test_a_pass_that_breaks_begins_anew_and_goes_on_at_its_byte():
    content = random_bytes(1_000_000)
    script = [Reply(ignore_range=True, cut_after=300_000), Reply(ignore_range=True, cut_after=700_000)]
    with nothing_left(), FaultyServer(content, script, default=Reply(ignore_range=True)) as server:
        assert read_faulty(server) == content
        assert len(server.requests) == 3


def test_a_pass_over_a_changed_object_is_an_error():
    with FaultyServer(
        CONTENT, [Reply(ignore_range=True, cut_after=100_000)], default=Reply(ignore_range=True)
    ) as server:
        source = open_faulty(server)
        server.content = random_bytes(200_000, seed=1)
        with pytest.raises(StreamError, match=r"changed|412"):
            source.read(150_000, 1000)


def test_several_threads_take_turns_on_a_server_without_ranges():
    with FaultyServer(CONTENT, default=Reply(ignore_range=True)) as server:
        source = open_faulty(server)
        results = {}

        def read(offset):
            results[offset] = source.read(offset, 1000)

        threads = [threading.Thread(target=read, args=(offset,)) for offset in range(10_000, 100_000, 15_000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {offset: CONTENT[offset : offset + 1000] for offset in range(10_000, 100_000, 15_000)}


@pytest.mark.parametrize("etag", ["auto", None])
def test_a_forked_child_starts_a_pass_of_its_own_and_the_parents_goes_on(etag):
    """Both would read one socket, and each would miss what the other took."""
    content = random_bytes(20_000_000)
    with FaultyServer(content, default=Reply(ignore_range=True), etag=etag) as server:
        source = open_faulty(server)
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


def test_a_child_that_is_forked_in_the_middle_of_a_pass_starts_one_of_its_own():
    content = random_bytes(2_000_000)
    stalls = Reply(ignore_range=True, stall_after=500_000)
    with FaultyServer(content, [stalls], default=Reply(ignore_range=True)) as server, within(60):
        source = open_faulty(server, stall_timeout=2.0)
        results = []
        thread = threading.Thread(target=lambda: results.append(source.read(100_000, 1_500_000)))
        thread.start()
        while source.bytes_read < 400_000:
            time.sleep(0.01)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(40)
            os._exit(source.read(100_000, 1_500_000) != content[100_000:1_600_000])
        assert os.waitpid(child, 0)[1] == 0
        thread.join()
        assert results == [content[100_000:1_600_000]]


BARE = Reply(ignore_range=True, headers={"etag": None, "last-modified": None})


@pytest.fixture(scope="module")
def values():
    return {f"t{i:02}": samples.tensor((200_000,), torch.float32, seed=i) for i in range(12)}


def asked_for(server) -> list:
    return [request for request in server.requests if not request.target.endswith(".sig")]


@pytest.mark.parametrize("format", ["tensors", "safetensors"])
def test_convert_asks_a_server_without_ranges_and_validators_once(tmp_path, values, format):
    content = tensorizer.save(values, format=format)
    other = "safetensors" if format == "tensors" else "tensors"
    options = {"http_options": quick()}
    with FaultyServer(
        content, default=lambda request: Reply(status=404) if request.target.endswith(".sig") else BARE
    ) as server:
        for target in (tmp_path / f"m.{other}", tmp_path / f"again.{format}"):
            tensorizer.convert(server.url, target, stream_options=options)
            samples.assert_same(tensorizer.load_file(target), values)
        assert len(asked_for(server)) == 2


@pytest.mark.parametrize("reply", [Reply(), BARE, Reply(ignore_range=True)], ids=["ranges", "bare", "validators"])
@pytest.mark.parametrize("format", ["tensors", "safetensors"])
def test_verify_with_a_sha256_reads_a_remote_file_once(values, format, reply):
    content = tensorizer.save(values, format=format)
    right = hashlib.sha256(content).hexdigest()
    options = {"stream_options": {"http_options": quick()}}
    damaged = bytearray(content)
    damaged[-70] ^= 1
    with FaultyServer(content, default=lambda _request: reply) as server:
        report = tensorizer.verify(server.url, sha256=right, **options)
        assert report.ok
        assert report.sha256_matches
        if reply.ignore_range:
            assert len(asked_for(server)) == 1
        else:
            assert sum(r.range[1] - r.range[0] + 1 for r in asked_for(server)) <= len(content) + (1 << 20)
        assert tensorizer.verify(server.url, sha256="0" * 64, **options).sha256_matches is False
    with FaultyServer(bytes(damaged), default=lambda _request: reply) as server:
        report = tensorizer.verify(server.url, sha256=right, **options)
        assert report.sha256_matches is False
        assert bool(report.mismatched) == (format == "tensors")
