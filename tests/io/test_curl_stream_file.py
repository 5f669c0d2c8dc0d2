"""CURLStreamFile: a binary file over HTTP, with the surface that callers know and the conventions of io."""

from __future__ import annotations

import gc
import http.client
import io
import json
import os
import pickle
import shutil
import threading
import zipfile

import numpy
import pytest
import torch
from http_tools import nothing_left, quick, random_bytes
from servers.http_faults import GOOD, FaultyServer, Reply

from tensorizer.errors import StreamError, StreamNotFoundError, TensorizerError
from tensorizer.stream_io import CAInfo, CURLStreamFile, HTTPOptions, open_stream

CONTENT = random_bytes(300_000)


@pytest.fixture
def server():
    with FaultyServer(CONTENT) as running:
        yield running


@pytest.fixture
def stream(server):
    with CURLStreamFile(server.url, http_options=quick()) as opened:
        yield opened


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", [(), (None,), (-1,), (-7,)])
def test_read_without_a_size_gives_everything(stream, argument):
    assert stream.read(*argument) == CONTENT
    assert stream.tell() == len(CONTENT)
    assert stream.read() == b""


@pytest.mark.parametrize("size", [1, 1000, 4095, 4096, 4097, 65536, 299_999, 300_000, 300_001, 1 << 30])
def test_sized_reads_are_exact_and_short_only_at_the_end(server, size):
    with CURLStreamFile(server.url, http_options=quick()) as stream:
        position, pieces = 0, []
        while position < min(len(CONTENT), 40 * size):
            pieces.append(stream.read(size))
            assert pieces[-1] == CONTENT[position : position + size]
            position += len(pieces[-1])
            assert stream.tell() == position
        if position == len(CONTENT):
            assert stream.read(size) == b""


def test_reads_of_nothing_give_nothing_and_stay(stream):
    assert stream.read(0) == b""
    assert stream.readinto(bytearray()) == 0
    assert stream.tell() == 0


def test_readinto_fills_the_buffer_and_leaves_the_rest_untouched(stream):
    stream.seek(len(CONTENT) - 10)
    buffer = bytearray(b"\xee" * 30)
    assert stream.readinto(buffer) == 10
    assert buffer == CONTENT[-10:] + b"\xee" * 20
    assert stream.readinto(buffer) == 0
    assert buffer == CONTENT[-10:] + b"\xee" * 20


def test_readinto_accepts_any_writable_contiguous_buffer(stream):
    tensor = torch.zeros(100, dtype=torch.int32)
    assert stream.readinto(tensor.numpy()) == 400
    assert tensor.numpy().tobytes() == CONTENT[:400]
    with pytest.raises(TypeError):
        stream.readinto(b"read-only")
    with pytest.raises((TypeError, BufferError)):
        stream.readinto(memoryview(bytearray(100))[::2])
    assert stream.tell() == 400


def test_large_reads_of_every_kind_give_the_same_bytes():
    content = random_bytes(5 << 20)
    with FaultyServer(content) as server, CURLStreamFile(server.url, http_options=quick()) as stream:
        assert stream.read(10) == content[:10]
        assert stream.read(3 << 20) == content[10 : 10 + (3 << 20)]
        buffer = bytearray(1 << 20)
        assert stream.readinto(buffer) == 1 << 20
        assert buffer == content[10 + (3 << 20) : 10 + (4 << 20)]
        assert stream.read() == content[10 + (4 << 20) :]
        stream.seek(0)
        assert stream.read() == content


def test_arguments_may_be_given_by_name(stream):
    assert stream.seek(position=5, whence=os.SEEK_SET) == 5
    assert stream.read(size=3) == CONTENT[5:8]


def test_small_reads_do_not_cost_a_request_each(server, stream):
    for i in range(2000):
        assert stream.read(100) == CONTENT[i * 100 : (i + 1) * 100]
    assert len(server.requests) <= 5


def test_a_buffer_size_bounds_what_is_read_ahead(server):
    with CURLStreamFile(server.url, buffer_size=1000, http_options=quick(head_nbytes=10)) as stream:
        for i in range(30):
            assert stream.read(100) == CONTENT[i * 100 : (i + 1) * 100]
    ahead = [request.range[1] - request.range[0] + 1 for request in server.requests]
    assert max(ahead) <= 1000


def test_read1_peek_and_lines_follow_the_conventions():
    text = b"one\ntwo\n\nlast without end"
    with FaultyServer(text) as server, CURLStreamFile(server.url, http_options=quick()) as stream:
        assert stream.peek(3)[:3] == b"one"
        assert stream.tell() == 0
        assert stream.readline() == b"one\n"
        assert list(stream) == [b"two\n", b"\n", b"last without end"]
        stream.seek(0)
        assert stream.readlines() == text.splitlines(keepends=True)
        stream.seek(0)
        assert stream.read1(2) == b"on"
        assert stream.read1() == text[2:]
        assert stream.read1() == b"" == stream.peek()


# -- positions --------------------------------------------------------------------------------------------------------


def test_seek_returns_the_position_and_moves_both_ways(stream):
    assert stream.seek(1000) == 1000
    assert stream.read(5) == CONTENT[1000:1005]
    assert stream.seek(-5, os.SEEK_CUR) == 1000
    assert stream.read(5) == CONTENT[1000:1005]
    assert stream.seek(-7, os.SEEK_END) == len(CONTENT) - 7
    assert stream.read() == CONTENT[-7:]
    assert stream.seek(3) == 3
    assert stream.read(3) == CONTENT[3:6]
    assert stream.seek(0, io.SEEK_CUR) == 6


def test_reading_beyond_the_end_gives_nothing(stream):
    assert stream.seek(len(CONTENT) + 100) == len(CONTENT) + 100
    assert stream.read() == b""
    assert stream.read(5) == b""


@pytest.mark.parametrize("target", [(-1, os.SEEK_SET), (-1, os.SEEK_CUR), (-400_000, os.SEEK_END), (0, 9)])
def test_impossible_seeks_are_refused_and_change_nothing(stream, target):
    with pytest.raises(ValueError, match="seek"):
        stream.seek(*target)
    assert stream.read(3) == CONTENT[:3]


@pytest.mark.parametrize("target", [1.5, "1", None])
def test_a_position_that_is_no_integer_is_refused_and_changes_nothing(stream, target):
    with pytest.raises(TypeError):
        stream.seek(target)
    assert stream.tell() == 0
    assert stream.read(3) == CONTENT[:3]


def test_the_end_of_an_object_without_a_size_cannot_be_sought():
    with FaultyServer(CONTENT, default=Reply(ignore_range=True, chunked=True)) as server:
        stream = CURLStreamFile(server.url, http_options=quick())
        with pytest.raises(io.UnsupportedOperation, match="size"):
            stream.seek(0, os.SEEK_END)
        with pytest.raises(ValueError):  # what callers of the reference catch
            stream.seek(0, os.SEEK_END)
        assert stream.read(10) == CONTENT[:10]


# -- ranges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (10, None), (10, 5000), (299_999, None), (0, 400_000), (None, 7)])
def test_a_range_is_all_that_is_read(server, begin, end):
    with CURLStreamFile(server.url, begin, end, http_options=quick()) as stream:
        assert stream.tell() == (begin or 0)
        assert stream.read() == CONTENT[begin:end]
        assert stream.read(1) == b""
        assert stream.seek(0, os.SEEK_END) == min(end or len(CONTENT), len(CONTENT))
    for request in server.requests:
        first, last = request.range
        assert first >= (begin or 0)
        assert last < (end or len(CONTENT) + 4096)


@pytest.mark.parametrize(("begin", "end"), [(-1, None), (None, 0), (5, 5), (5, 4), (0, 0), (-3, -1)])
def test_impossible_ranges_are_refused_before_any_request(server, begin, end):
    with pytest.raises(ValueError):
        CURLStreamFile(server.url, begin, end)
    assert server.connections_seen == 0


def test_seeking_before_the_begin_is_allowed(server):
    with CURLStreamFile(server.url, 1000, 2000, http_options=quick()) as stream:
        stream.seek(990)
        assert stream.read() == CONTENT[990:2000]


def test_a_range_behind_the_end_is_an_error(server):
    with pytest.raises(StreamError, match="416"):
        CURLStreamFile(server.url, 300_000, http_options=quick())


def test_an_empty_object_is_an_empty_file():
    with FaultyServer(b"") as server, CURLStreamFile(server.url, http_options=quick()) as stream:
        assert stream.read() == stream.read(10) == b""
        assert stream.seek(0, os.SEEK_END) == 0


@pytest.mark.parametrize("end", [10**30, 2**64 - 1, numpy.uint64(2**64 - 1), numpy.int64(2**63 - 1)])
def test_an_end_beyond_every_object_is_the_end_of_the_object(server, end):
    with CURLStreamFile(server.url, begin=len(CONTENT) - 5, end=end, http_options=quick()) as stream:
        assert stream.read() == CONTENT[-5:]


# -- what the request says --------------------------------------------------------------------------------------------


def test_requests_carry_the_documented_headers(server):
    headers = {"X-Number": 5, "x-empty": "", "Authorization": "Bearer abc"}
    CURLStreamFile(server.url, headers=headers, http_options=quick(headers={"X-Number": 4, "X-More": "1"})).close()
    sent = server.requests[0].headers
    assert sent["accept-encoding"] == "identity"
    assert sent["user-agent"].startswith("Tensorizer/")
    assert sent["user-agent"].endswith(" (curl)")
    assert (sent["x-number"], sent["x-empty"], sent["x-more"], sent["authorization"]) == ("5", "", "1", "Bearer abc")


def test_headers_of_the_caller_replace_ours(server):
    CURLStreamFile(server.url, headers={"user-agent": "mine", "ACCEPT-ENCODING": "x"}, http_options=quick()).close()
    assert server.requests[0].headers["user-agent"] == "mine"
    assert server.requests[0].headers["accept-encoding"] == "x"


@pytest.mark.parametrize("headers", [{"a": "b\r\nInjected: 1"}, {"a\nb": "c"}, {"": "x"}, {"Range": "bytes=0-1"}])
def test_headers_that_would_change_the_request_are_refused(server, headers):
    with pytest.raises(ValueError, match="headers"):
        CURLStreamFile(server.url, headers=headers)
    assert server.connections_seen == 0


@pytest.mark.parametrize("value", [None, b"s3cret", bytearray(b"s3cret"), memoryview(b"s3cret")])
def test_header_values_whose_str_nobody_means_are_refused_and_not_shown(server, value):
    wanted = f"headers: the value of Authorization: expected text or a number, got {type(value).__name__}"
    headers = {"Authorization": value}
    for use in (
        lambda: CURLStreamFile(server.url, headers=headers),
        lambda: CURLStreamFile(server.url, headers=lambda: headers, http_options=quick()),
        lambda: HTTPOptions(headers=headers),
    ):
        with pytest.raises(TypeError, match=f"^{wanted}$"):
            use()
    assert server.requests == []


def test_credentials_of_the_url_are_sent_and_never_shown(server):
    url = server.url.replace("http://", "http://user:p%40ssword@") + "?X-Amz-Signature=s3cret"
    with CURLStreamFile(url, http_options=quick()) as stream:
        assert "p@ssword" not in repr(stream)
        assert "s3cret" not in repr(stream)
        assert repr(stream) == f"<CURLStreamFile {server.url}>"
    assert server.requests[0].headers["authorization"] == "Basic dXNlcjpwQHNzd29yZA=="
    assert server.requests[0].target.endswith("?X-Amz-Signature=s3cret")


def test_blanks_and_letters_in_a_url_are_encoded_and_percents_left_alone(server):
    CURLStreamFile(server.url + "/a b/ü%20?q=ö#part", http_options=quick()).close()
    assert server.requests[0].target == "/some/object.tensors/a%20b/%C3%BC%20?q=%C3%B6"
    CURLStreamFile(f"http://127.0.0.1:{server.port}?q=ö /#part", http_options=quick()).close()
    assert server.requests[-1].target == "/?q=%C3%B6%20/"


@pytest.mark.parametrize("uri", ["", "no url", "http://", "ftp://127.0.0.1/x", "file:///etc/passwd"])
def test_what_is_no_http_url_cannot_be_opened(uri):
    with pytest.raises(OSError, match="Failed to open stream"):
        CURLStreamFile(uri, http_options=quick())


def test_arguments_of_the_wrong_type_are_refused(server):
    with pytest.raises(TypeError, match="uri"):
        CURLStreamFile(b"http://127.0.0.1/")
    with pytest.raises(TypeError, match="certificate_handling"):
        CURLStreamFile(server.url, certificate_handling="ca.pem")
    assert server.connections_seen == 0


# -- what the object tells --------------------------------------------------------------------------------------------


def test_response_headers_are_found_in_any_case(server):
    server.default = Reply(headers={"X-Cache-Status": "HIT"})
    with CURLStreamFile(server.url, http_options=quick()) as stream:
        assert isinstance(stream.response_headers, http.client.HTTPMessage)
        assert stream.response_headers.get("x-cache-status") == "HIT"
        assert stream.response_headers["ETAG"].startswith('"')
        assert ("accept-ranges", "bytes") in [(name.lower(), value) for name, value in stream.response_headers.items()]


def test_counters_count_what_was_read_and_passed_over(stream):
    stream.read(100)
    stream.seek(1100)
    stream.readinto(bytearray(50))
    stream.seek(0)
    assert (stream.bytes_read, stream.bytes_skipped, stream.read_operations) == (1150, 1000, 3)
    stream.read()
    assert (stream.bytes_read, stream.read_operations) == (1150, 3)
    stream.readinto(bytearray())
    stream.read(0)
    assert (stream.bytes_read, stream.read_operations) == (1150, 5)


def test_latencies_have_an_entry_per_opening(server, stream):
    assert len(stream.http_response_latencies) == len(stream.popen_latencies) == 1
    assert 0 < stream.http_response_latencies[0] < 10
    stream.seek(200_000)
    stream.read(10)
    stream.seek(100_000)
    stream.read(10)
    assert len(stream.http_response_latencies) == len(stream.popen_latencies) == 2
    stream.close()
    stream.seek(5)
    assert len(stream.http_response_latencies) == 3


def test_the_conventions_of_a_read_only_file_hold(stream):
    assert stream.readable()
    assert stream.seekable()
    assert not stream.writable()
    assert stream.fileno() == -1
    assert isinstance(stream, io.BufferedIOBase)
    assert not stream.closed
    for refused in (lambda: stream.write(b"x"), stream.detach, lambda: stream.truncate(0)):
        with pytest.raises(io.UnsupportedOperation):
            refused()


# -- life -------------------------------------------------------------------------------------------------------------


def test_closing_ends_reading_and_may_be_repeated(stream):
    stream.read(5)
    stream.close()
    stream.close()
    assert stream.closed
    for use in (stream.read, lambda: stream.read(5), lambda: stream.readinto(bytearray(1)), stream.peek, stream.read1,
                lambda: stream.seek(10), stream._fork, stream._tensorizer_source):  # fmt: skip
        with pytest.raises(OSError, match="closed"):
            use()
    assert stream.bytes_read == 5


def test_seeking_backward_opens_a_closed_stream_again(stream):
    stream.read(100)
    stream.close()
    assert stream.seek(50) == 50
    assert not stream.closed
    assert stream.read(10) == CONTENT[50:60]
    assert stream.bytes_read == 110


def test_leaving_a_with_block_and_losing_the_last_reference_end_connections(server):
    with nothing_left():
        with CURLStreamFile(server.url, http_options=quick()) as stream:
            stream.seek(100_000)
            stream.read(10)
        lost = CURLStreamFile(server.url, http_options=quick())
        lost.read(200_000)
        del lost
        gc.collect()


def test_a_failed_constructor_leaves_nothing(server):
    server.default = Reply(status=404)
    with nothing_left():
        with pytest.raises(StreamNotFoundError):
            CURLStreamFile(server.url, http_options=quick())
        gc.collect()


def test_forks_share_connections_and_have_their_own_range(server, stream):
    stream.read(10)
    requests = len(server.requests)
    connections = server.connections_seen
    assert connections == 1
    with stream._fork(0, 100) as fork, stream._fork(4000, 4096) as other:
        assert fork.read() == CONTENT[:100]
        assert other.read(50) == CONTENT[4000:4050]
        assert len(server.requests) == requests  # both lie within what is in memory
    assert stream.read(10) == CONTENT[10:20]
    with pytest.raises(ValueError):
        stream._fork(5, 5)
    last = stream._fork(200_000)
    stream.close()
    assert last.read() == CONTENT[200_000:]
    assert server.connections_seen == connections
    last.close()


def test_a_shared_source_outlives_the_stream(stream):
    source = stream._tensorizer_source()
    stream.close()
    assert source.read(299_000, 1000) == CONTENT[299_000:]
    assert source.size() == len(CONTENT)


def test_the_counter_of_a_shared_stream_counts_what_others_read(stream):
    source = stream._tensorizer_source()
    source.read(0, 300_000)
    assert stream.bytes_read >= 300_000
    stream.close()
    assert stream.bytes_read >= 300_000


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "text"), [(404, "no such object"), (403, "denied"), (401, "credentials"), (416, "416")]
)
def test_an_error_status_is_named_with_host_path_and_hint(server, status, text):
    server.default = Reply(status=status)
    with pytest.raises(OSError, match=text) as caught:
        CURLStreamFile(server.url + "?Signature=s3cret", http_options=quick())
    message = str(caught.value)
    assert message.startswith(f"Failed to open stream: {server.url}: HTTP/1.1 {status} ")
    assert "s3cret" not in message
    assert isinstance(caught.value, TensorizerError)
    assert caught.value.source == server.url
    assert isinstance(caught.value, FileNotFoundError) == (status == 404)
    # A 416 may refuse the range and not the object: that is asked for whole, once.
    assert [request.range is None for request in server.requests] == ([False, True] if status == 416 else [False])


def test_the_registered_context_is_part_of_a_later_error(server, stream):
    stream.register_error_context("while loading model 7")
    server.default = Reply(status=404)
    with stream._fork() as fork:
        for failing in (stream, fork):
            failing.seek(100_000)
            with pytest.raises(StreamNotFoundError, match=r"404.*; while loading model 7") as caught:
                failing.read(10)
            assert caught.value.source == server.url
            assert caught.value.__cause__ is not None
            assert failing.closed


def test_a_body_that_is_cut_short_for_good_is_an_error_and_closes_the_stream():
    with FaultyServer(CONTENT, [GOOD], default=Reply(cut_after=100)) as server:
        stream = CURLStreamFile(server.url, http_options=quick())
        with pytest.raises(StreamError, match="ended after"):
            stream.read()
        assert stream.closed


# -- users ------------------------------------------------------------------------------------------------------------


def test_json_reads_a_stream():
    with FaultyServer(json.dumps({"a": [1, 2]}).encode()) as server:
        assert json.load(open_stream(server.url, http_options=quick())) == {"a": [1, 2]}


def test_zipfile_reads_a_stream():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a", random_bytes(100_000))
        archive.writestr("b", b"text")
    with FaultyServer(buffer.getvalue()) as server:
        archive = zipfile.ZipFile(open_stream(server.url, http_options=quick()))
        assert archive.read("b") == b"text"
        assert archive.read("a") == random_bytes(100_000)


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_load_reads_a_stream(zipped):
    buffer = io.BytesIO()
    tensors = {"a": torch.arange(10_000), "b": torch.ones(3)}
    torch.save(tensors, buffer, _use_new_zipfile_serialization=zipped)
    with FaultyServer(buffer.getvalue()) as server, open_stream(server.url, http_options=quick()) as stream:
        loaded = torch.load(stream, weights_only=True)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_pickle_text_wrappers_and_copies_read_a_stream():
    value = {"text": "a\nb" * 5000}
    with FaultyServer(pickle.dumps(value)) as server, open_stream(server.url, http_options=quick()) as stream:
        assert pickle.load(stream) == value
    with FaultyServer(b"a\nb\n") as server:
        assert io.TextIOWrapper(open_stream(server.url, http_options=quick())).read() == "a\nb\n"
    with FaultyServer(CONTENT) as server, open_stream(server.url, http_options=quick()) as stream:
        copy = io.BytesIO()
        shutil.copyfileobj(stream, copy)
        assert copy.getvalue() == CONTENT


def test_other_threads_run_while_a_request_waits():
    """The server is a thread of this process: with the interpreter lock held, it could not answer."""
    counted = 0
    stop = threading.Event()

    def count():
        nonlocal counted
        while not stop.wait(0.005):
            counted += 1

    with FaultyServer(CONTENT, default=Reply(delay=0.2)) as server:
        thread = threading.Thread(target=count)
        thread.start()
        with CURLStreamFile(server.url, http_options=quick()) as stream:
            stream.seek(100_000)
            stream.read(10)
        stop.set()
        thread.join()
    assert counted > 10


def test_a_certificate_choice_has_no_effect_without_tls(server):
    with CURLStreamFile(server.url, certificate_handling=CAInfo(allow_untrusted=True), http_options=quick()) as stream:
        assert stream.read(3) == CONTENT[:3]
