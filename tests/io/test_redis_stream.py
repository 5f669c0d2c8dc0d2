"""Files in Redis, read as streams: layouts, URIs, logins, TLS, holes, and servers that break off."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import os
import random
import socket
import threading
import time
import traceback

import pytest
from conftest import open_descriptors, thread_count, threads_end
from servers import needs
from servers.redis_server import RedisServer, free_port, redis_is_installed

from tensorizer._io.http_options import CAInfo
from tensorizer._io.redis import RedisStreamFile, _parse_redis_uri, parse_redis_address
from tensorizer.errors import FormatError, StreamError, StreamNotFoundError, TruncatedError
from tensorizer.stream_io import open_stream

pytestmark = [pytest.mark.skipif(not redis_is_installed(), reason=needs("Redis")), pytest.mark.timeout(60)]

SECRET = "pass/w:rd@%é"
QUOTED = "pass%2Fw%3Ard%40%25%C3%A9"


@pytest.fixture(scope="module")
def server():
    with RedisServer() as running:
        yield running


@pytest.fixture(scope="module")
def locked_server():
    with RedisServer(password=SECRET) as running:
        yield running


@pytest.fixture(scope="module")
def tls_server():
    with RedisServer(tls=True) as running:
        yield running


def store(client, prefix, cuts, data, names=None):
    """Puts ``data`` under keys that begin at the cuts."""
    for i, (begin, end) in enumerate(zip(cuts, [*cuts[1:], len(data)])):
        name = names[i] if names else ("header" if i == 0 else f"t{i}")
        client.set(f"{prefix}:{name}:{begin}", data[begin:end])


def random_bytes(nbytes, seed=1):
    return random.Random(seed).randbytes(nbytes)


class TestUri:
    @pytest.mark.parametrize(
        ("uri", "expected"),
        [
            ("redis://host/p", ("host", 6379, "p")),
            ("redis://host:1234/p/q", ("host", 1234, "p/q")),
            ("REDIS://host//p", ("host", 6379, "/p")),
            ("redis://host/7", ("host", 6379, "7")),
            ("redis://host/7/p", ("host", 6379, "7/p")),
            ("redis://user:word@host/p?x=1#y", ("host", 6379, "p?x=1#y")),
            ("redis://host/run#1?db=3", ("host", 6379, "run#1")),
            ("redis://host/p?db=1/q", ("host", 6379, "p?db=1/q")),
            ("redis://[::1]:99/p", ("::1", 99, "p")),
            ("redis://host/a%20b", ("host", 6379, "a%20b")),
            ("redis://host/a b", ("host", 6379, "a b")),
        ],
    )
    def test_everything_behind_the_first_slash_is_the_prefix(self, uri, expected):
        assert _parse_redis_uri(uri) == expected

    def test_login_is_percent_decoded_and_the_database_comes_from_the_query(self):
        address = parse_redis_address(f"rediss://me:{QUOTED}@h/p?db=12")
        assert (address.user, address.password, address.database, address.tls) == ("me", SECRET, 12, True)

    def test_the_password_shows_in_no_repr(self):
        assert "word" not in repr(parse_redis_address("redis://user:word@host/p"))

    @pytest.mark.parametrize(
        "uri",
        [
            "http://h/p",
            "h/p",
            "redis://h/p?db=x",
            "redis://h/p?db=-1",
            "redis://h/p?db=",
            "redis://h/p?db=1&x=2",
            "redis://h:99999/p",
            "redis://h",
            "redis://h/",
            "redis://h?db=1",
            "redis://h/?db=1",
        ],
    )
    def test_a_malformed_uri_is_a_value_error_without_the_password(self, uri):
        with pytest.raises(ValueError, match=r"redis|Redis"):
            parse_redis_address(uri)
        with pytest.raises(ValueError) as caught:
            parse_redis_address(uri.replace("://", "://u:topsecret@"))
        assert "topsecret" not in str(caught.value)

    @pytest.mark.parametrize("query", ["?password=topsecret", "?db=1&password=topsecret", "?username=topsecret&db=1"])
    def test_a_login_in_the_query_is_no_part_of_a_key(self, query):
        with pytest.raises(ValueError, match="in front of the host") as caught:
            RedisStreamFile(f"redis://127.0.0.1:1/p{query}")
        assert "topsecret" not in str(caught.value)


class TestReading:
    def test_the_file_is_the_union_of_its_keys(self, server):
        data = random_bytes(3 << 20)
        store(server.client(), "union", [0, 1000, 1001, 500_000, 2_500_000], data)
        with RedisStreamFile(server.uri("union")) as stream:
            assert stream.read() == data
            assert stream.tell() == len(data)
            assert stream.read(5) == b""

    def test_random_reads_agree_with_the_file_at_every_edge(self, server):
        data = random_bytes(300_000)
        cuts = [0, 7, 65_536, 65_537, 200_000]
        store(server.client(), "edges", cuts, data)
        places = [p + d for p in [*cuts, len(data)] for d in (-1, 0, 1)]
        with RedisStreamFile(server.uri("edges")) as stream:
            for begin in places:
                for end in places:
                    if 0 <= begin <= end:
                        stream.seek(begin)
                        assert stream.read(end - begin) == data[begin:end]

    @pytest.mark.parametrize(
        "name", ["a b", 'a"b', "a'b", '1E[s:3:"x y"]', "a\nb", "ä:ö", "a:b:c", "*", "", "x" * 5000]
    )
    def test_names_may_hold_any_character(self, server, name):
        data = random_bytes(1000)
        client = server.client()
        client.flushdb()
        store(client, "names", [0, 100], data, names=["header", name])
        assert RedisStreamFile(server.uri("names")).read() == data

    @pytest.mark.parametrize(
        "prefix", ["a*b", "[ab]", "a\\b", "a^-b", "a b", "org/name", "ü", "7", "a\nb\t\r", "run#1", "lr?seed=1", "/p"]
    )
    def test_prefixes_may_hold_any_character(self, server, prefix):
        data = random_bytes(1000)
        client = server.client()
        client.flushdb()
        store(client, prefix, [0, 100], data)
        for other in ("axb", "a", "b", "-", "ab"):  # what the characters would match were they alive
            store(client, other, [0, 50], random_bytes(99, seed=2))
        assert RedisStreamFile(server.uri(prefix)).read() == data

    def test_empty_values_do_not_hide_their_neighbours(self, server):
        data = random_bytes(1000)
        client = server.client()
        client.flushdb()
        store(client, "empty", [0, 100, 500], data)
        for position in (0, 100, 500, 1000):
            client.set(f"empty:nothing:{position}", b"")
        assert RedisStreamFile(server.uri("empty")).read() == data

    def test_a_model_under_a_longer_prefix_does_not_mix_in(self, server):
        data, other = random_bytes(1000), random_bytes(5000, seed=2)
        client = server.client()
        client.flushdb()
        store(client, "a", [0, 100], data, names=["header", "weight"])
        store(client, "a:b", [0, 100, 4000], other)
        assert RedisStreamFile(server.uri("a")).read() == data
        assert RedisStreamFile(server.uri("a:b")).read() == other

    def test_the_database_of_the_query_is_read(self, server):
        data = random_bytes(100)
        store(server.client(db=3), "dbtest", [0], data)
        assert RedisStreamFile(server.uri("dbtest", "?db=3")).read() == data
        with pytest.raises(StreamNotFoundError):
            RedisStreamFile(server.uri("dbtest"))

    def test_many_keys_come_back_in_order(self, server):
        data = random_bytes(20_000)
        client = server.client()
        client.flushdb()
        with client.pipeline(transaction=False) as pipeline:
            for i in range(0, len(data), 4):
                pipeline.set(f"many:n{i % 17}:{i}", data[i : i + 4])
            pipeline.execute()
        assert RedisStreamFile(server.uri("many")).read() == data

    def test_threads_may_share_the_source(self, server):
        data = random_bytes(8 << 20)
        store(server.client(), "shared", [0, 1_000_000, 5_000_000], data)
        source = RedisStreamFile(server.uri("shared"))._tensorizer_source()
        assert source.concurrency == 4
        wrong = []

        def work(seed):
            chance = random.Random(seed)
            for _ in range(30):
                begin = chance.randrange(len(data))
                end = chance.randrange(begin, min(len(data), begin + 2_000_000))
                if source.read(begin, end - begin) != data[begin:end]:
                    wrong.append((begin, end))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert source.bytes_read > 0


class TestStreamSurface:
    @pytest.fixture
    def stream(self, server):
        self.data = random_bytes(2_500_000)
        store(server.client(), "surface", [0, 1000, 2_000_000], self.data)
        with RedisStreamFile(server.uri("surface")) as stream:
            yield stream

    def test_counters_tell_what_happened(self, stream):
        assert isinstance(stream.read(100), bytes)
        assert stream.readinto(bytearray(50)) == 50
        assert stream.seek(1000) == 1000
        assert stream.seek(10, io.SEEK_CUR) == 1010
        assert (stream.bytes_read, stream.read_operations, stream.bytes_skipped) == (150, 2, 860)
        assert stream.setup_latency > 0
        assert 1 <= len(stream.response_latencies) <= 2

    def test_small_reads_are_served_from_one_request(self, stream):
        assert b"".join(stream.read(8) for _ in range(1000)) == self.data[:8000]
        assert len(stream.response_latencies) == 1

    def test_arguments_may_be_given_by_name(self, stream):
        assert stream.seek(position=5, whence=io.SEEK_SET) == 5
        assert stream.read(size=3) == self.data[5:8]

    def test_readinto_leaves_bytes_past_the_end_alone(self, stream):
        stream.seek(len(self.data) - 3)
        buffer = bytearray(b"-" * 10)
        assert stream.readinto(buffer) == 3
        assert bytes(buffer) == self.data[-3:] + b"-" * 7

    def test_reading_follows_io_conventions(self, stream):
        assert stream.seek(-5, io.SEEK_END) == len(self.data) - 5
        assert stream.peek(2)[:2] == self.data[-5:-3]
        assert stream.read1(2) == self.data[-5:-3]
        assert stream.read(-1) == self.data[-3:]
        assert stream.read() == stream.read(1) == stream.readline() == b""
        stream.seek(0)
        assert stream.readline() == self.data[: self.data.index(b"\n") + 1]

    def test_odd_arguments_are_refused(self, stream, server):
        with pytest.raises(ValueError):
            stream.seek(0, 9)
        with pytest.raises(ValueError):
            stream.seek(-1)
        with pytest.raises(io.UnsupportedOperation):
            stream.write(b"x")
        with pytest.raises(ValueError):
            RedisStreamFile(server.uri("surface"), begin=-1)
        with pytest.raises(ValueError):
            RedisStreamFile(server.uri("surface"), connections=0)

    def test_flags_and_begin(self, stream, server):
        assert (stream.readable(), stream.seekable(), stream.writable(), stream.fileno()) == (True, True, False, -1)
        shifted = RedisStreamFile(server.uri("surface"), begin=1500, end=1600)
        assert shifted.tell() == 1500
        assert shifted.read(200) == self.data[1500:1700]

    def test_a_closed_stream_says_so(self, stream):
        stream.close()
        stream.close()
        assert stream.closed
        for call in (stream.read, lambda: stream.seek(0), lambda: stream.readinto(bytearray(1))):
            with pytest.raises(OSError):
                call()


class TestDamage:
    def test_a_hole_is_an_error_of_the_read_that_meets_it(self, server):
        data = random_bytes(3000)
        client = server.client()
        client.flushdb()
        store(client, "hole", [0, 1000, 2000], data)
        client.delete("hole:t1:1000")
        with RedisStreamFile(server.uri("hole")) as stream:
            assert stream.read(1000) == data[:1000]
            with pytest.raises(TruncatedError, match="no key holds byte 1000"):
                stream.read(10)
            stream.seek(2000)
            assert stream.read() == data[2000:]
            stream.seek(500)
            with pytest.raises(TruncatedError):
                stream.read(1000)

    def test_no_key_at_all_is_not_found(self, server):
        with pytest.raises(FileNotFoundError, match="no key begins with"):
            RedisStreamFile(server.uri("nobody/stored/this"))

    def test_a_key_without_a_position_is_a_value_error(self, server):
        server.client().set("odd:lock", b"x")
        with pytest.raises(ValueError, match="odd:lock"):
            RedisStreamFile(server.uri("odd"))
        server.client().set("odd2:x:99999999999999999999999", b"x")
        with pytest.raises(FormatError):
            RedisStreamFile(server.uri("odd2"))

    def test_two_keys_that_claim_the_same_bytes_are_an_error_where_they_do(self, server):
        data = random_bytes(3000)
        client = server.client()
        client.flushdb()
        store(client, "twice", [0, 1000, 2000], data)
        client.set("twice:stale:1500", b"-" * 100)
        with RedisStreamFile(server.uri("twice")) as stream:
            assert stream.read(1000) == data[:1000]
            with pytest.raises(FormatError, match="overlaps"):
                stream.read(100)
            stream.seek(2000)
            assert stream.read() == data[2000:]

    def test_a_value_that_changes_its_length_is_an_error(self, server):
        client = server.client()
        client.set("change:header:0", b"x" * 1000)
        stream = RedisStreamFile(server.uri("change"))
        client.set("change:header:0", b"y" * 900)
        with pytest.raises(TruncatedError, match=r"change:header:0.*expected 1000 bytes, got 900"):
            stream.read()
        client.delete("change:header:0")
        with pytest.raises(TruncatedError, match="got no value"):
            stream.read()

    def test_a_key_of_another_type_is_named(self, server):
        client = server.client()
        client.rpush("list:header:0", "x")
        with pytest.raises(StreamError, match=r"list:header:0.*WRONGTYPE"):
            RedisStreamFile(server.uri("list"))


class TestLogin:
    def test_password_and_user_come_from_the_uri(self, locked_server):
        data = random_bytes(1000)
        client = locked_server.client()
        store(client, "p", [0], data)
        client.acl_setuser("reader", enabled=True, passwords=["+" + SECRET], keys=["*"], commands=["+@all"])
        host = f"127.0.0.1:{locked_server.port}"
        for login in (f":{QUOTED}", f"default:{QUOTED}", f"reader:{QUOTED}"):
            assert RedisStreamFile(f"redis://{login}@{host}/p").read() == data

    @pytest.mark.parametrize("login", ["", ":wrongword@", "nobody:wrongword@"])
    def test_a_refused_login_is_an_error_that_shows_no_password(self, locked_server, login, caplog):
        caplog.set_level(logging.DEBUG)
        with pytest.raises(StreamError) as caught:
            RedisStreamFile(f"redis://{login}127.0.0.1:{locked_server.port}/p")
        text = f"{caught.value!r} {caught.getrepr(style='long')} {caplog.text}"
        assert "NOAUTH" in text or "WRONGPASS" in text
        assert "wrongword" not in str(caught.value) + caplog.text

    def test_no_answer_of_a_server_shows_the_password(self, tmp_path):
        password = "hunter2SECRET" + "x" * 200
        unknown = f"ERR unknown command 'AUTH', with args beginning with: '{password[:100]}'"
        (tmp_path / "conf").write_text(f"requirepass {password}\nrename-command AUTH NOTAUTH\n")
        with RedisServer(options={"include": str(tmp_path / "conf")}) as server:
            with pytest.raises(StreamError, match="ERR unknown command") as caught:
                RedisStreamFile(f"redis://bob:{password}@127.0.0.1:{server.port}/p")
            assert "hunter2SECRET" not in str(caught.value)
        for login in (unknown, f"{password[:50]} is wrong", f"LOADING {password}", "OK"):
            for scan in ("NOAUTH Authentication required.", f"ERR {password} \x1b[31m " + "y" * 50_000):
                answers = [b"+OK\r\n" if login == "OK" else f"-{login}\r\n".encode(), f"-{scan}\r\n".encode()]
                with AnsweringServer(answers) as port, pytest.raises(StreamError) as caught:
                    RedisStreamFile(f"redis://bob:{password}@127.0.0.1:{port}/p", retries=0)
                text = str(caught.value)
                assert "hunter2SECRET" not in text
                assert text.isprintable()
                assert len(text) < 1000

    def test_a_password_that_nobody_asked_for_does_no_harm(self, server):
        server.client().set("open:header:0", b"data")
        for login in (":word", "user:word", "default:word"):
            assert RedisStreamFile(f"redis://{login}@127.0.0.1:{server.port}/open").read() == b"data"

    def test_a_stream_that_could_not_be_opened_has_a_repr(self):
        with pytest.raises(StreamError) as caught:
            RedisStreamFile("redis://127.0.0.1:1/p", retries=0)
        stack = traceback.TracebackException.from_exception(caught.value, capture_locals=True).stack
        assert "(not open)" in stack[-1].locals["self"]

    def test_repr_and_name_hold_no_password(self, locked_server):
        locked_server.client().set("p:header:0", b"data")
        stream = RedisStreamFile(f"redis://:{QUOTED}@127.0.0.1:{locked_server.port}/p")
        assert QUOTED not in repr(stream) + stream._source.name
        assert SECRET not in repr(stream) + stream._source.name


class TestTls:
    def test_a_trusted_certificate_is_accepted(self, tls_server):
        data = random_bytes(3 << 20)
        store(tls_server.client(), "tls", [0, 1000], data)
        trust = CAInfo(cacert=str(tls_server.certificate))
        with RedisStreamFile(tls_server.uri("tls"), certificate_handling=trust) as stream:
            assert stream.read() == data
        with open_stream(tls_server.uri("tls"), certificate_handling=trust) as stream:
            assert stream.read() == data

    def test_an_untrusted_certificate_is_refused_with_the_ways_to_trust_it(self, tls_server):
        with pytest.raises(StreamError, match=r"certificate.*; .* pass CAInfo\(cacert=\.\.\.\) or set CURL_CA_BUNDLE"):
            RedisStreamFile(tls_server.uri("tls"))

    def test_a_name_that_the_certificate_does_not_hold_is_refused(self, tls_server):
        trust = CAInfo(cacert=str(tls_server.certificate))
        uri = tls_server.uri("tls").replace("127.0.0.1", "127.0.0.2")
        with pytest.raises(StreamError, match="certificate"):
            RedisStreamFile(uri, certificate_handling=trust)

    def test_allow_untrusted_turns_the_check_off(self, tls_server):
        store(tls_server.client(), "tls2", [0], b"data")
        stream = RedisStreamFile(tls_server.uri("tls2"), certificate_handling=CAInfo(allow_untrusted=True))
        assert stream.read() == b"data"

    def test_tls_to_a_plain_server_fails_within_the_connect_timeout(self, server):
        started = time.monotonic()
        with pytest.raises(StreamError):
            RedisStreamFile(f"rediss://127.0.0.1:{server.port}/p", connect_timeout=2, retries=0)
        assert time.monotonic() - started < 30


class Proxy:
    """Between client and server: counts connections and cuts each after so many bytes of answers."""

    def __init__(self, port, limits):
        self._target, self._limits = port, list(limits)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        self._sockets = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            limit = self._limits.pop(0) if self._limits else None
            self.connections += 1
            self._sockets.append(client)
            if limit == "hang":
                self._threads.append(threading.Thread(target=self._hang, args=(client,)))
            else:
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets.append(server)
                self._threads.append(threading.Thread(target=self._pump, args=(client, server, None)))
                self._threads.append(threading.Thread(target=self._pump, args=(server, client, limit)))
                self._threads[-2].start()
            self._threads[-1].start()

    @staticmethod
    def _hang(client):
        with contextlib.suppress(OSError):
            while client.recv(65536):
                pass

    @staticmethod
    def _pump(source, target, limit):
        try:
            while True:
                data = source.recv(65536 if limit is None else min(65536, limit))
                if limit is not None:
                    limit -= len(data)
                target.sendall(data)
                if not data or limit == 0:
                    break
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()


class TestNetwork:
    @pytest.fixture
    def proxied(self, server):
        proxies = []

        def make(*limits):
            proxies.append(Proxy(server.port, limits))
            return proxies[-1]

        yield make
        for proxy in proxies:
            proxy.close()

    def test_a_broken_connection_is_resumed_at_the_byte(self, server, proxied):
        data = random_bytes(6 << 20)
        store(server.client(), "resume", [0, 1000, 3_000_000], data)
        proxy = proxied(1_000_000, 2_000_001, 300_000)
        with RedisStreamFile(f"redis://127.0.0.1:{proxy.port}/resume") as stream:
            assert stream.read() == data
            assert stream._source.bytes_read == len(data)  # nothing came twice
        assert proxy.connections == 4

    def test_retries_end(self, server, proxied):
        store(server.client(), "ends", [0], random_bytes(100_000))
        proxy = proxied(*[2000] * 50)
        started = time.monotonic()
        with pytest.raises(StreamError, match=r"closed the connection|reset"):
            RedisStreamFile(f"redis://127.0.0.1:{proxy.port}/ends", retries=2).read()
        assert time.monotonic() - started < 60
        assert proxy.connections == 3

    def test_a_silent_server_is_given_up_after_the_stall_timeout(self, proxied):
        proxy = proxied(*["hang"] * 9)
        started = time.monotonic()
        with pytest.raises(StreamError, match="timed out"):
            RedisStreamFile(f"redis://127.0.0.1:{proxy.port}/p", stall_timeout=0.5, retries=0)
        assert 0.4 < time.monotonic() - started < 3

    def test_nobody_listening_is_a_refused_connection(self):
        with pytest.raises(StreamError, match="refused") as caught:
            RedisStreamFile(f"redis://127.0.0.1:{free_port()}/p", retries=1)
        assert caught.value.errno == errno.ECONNREFUSED

    def test_a_host_that_nobody_knows_is_an_error_that_names_it(self):
        with pytest.raises(StreamError, match=r"resolve.*nowhere\.invalid|nowhere\.invalid.*resolve"):
            RedisStreamFile("redis://nowhere.invalid/p", retries=0)

    def test_close_ends_the_connections(self, server):
        store(server.client(), "closing", [0, 1000], random_bytes(100_000))
        before = open_descriptors()
        stream = RedisStreamFile(server.uri("closing"))
        stream.read()
        source = stream._tensorizer_source()
        assert any("socket" in d[1] for d in open_descriptors() - before)
        stream.close()
        assert not any("socket" in d[1] for d in open_descriptors() - before)
        assert len(source.read(0, 1000)) == 1000  # a load that reads from it opens its own
        del stream, source

    def test_something_that_is_not_redis_is_recognised(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve():
                client, _ = listener.accept()
                with client:
                    client.recv(1000)
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(StreamError, match="not an answer that Redis gives"):
                RedisStreamFile(f"redis://127.0.0.1:{listener.getsockname()[1]}/p")
            thread.join()

    def test_ctrl_c_ends_a_waiting_read(self, proxied):
        import _thread

        proxy = proxied("hang")
        timer = threading.Timer(0.3, _thread.interrupt_main)
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            RedisStreamFile(f"redis://127.0.0.1:{proxy.port}/p")
        timer.join()
        assert time.monotonic() - started < 30

    def test_nothing_is_left_behind(self, server):
        store(server.client(), "left", [0, 10], random_bytes(100_000))
        RedisStreamFile(server.uri("left")).read()
        before, threads = open_descriptors(), thread_count()
        for _ in range(3):
            stream = RedisStreamFile(server.uri("left"))
            stream.read()
            stream.close()
            del stream
            with pytest.raises(StreamNotFoundError):
                RedisStreamFile(server.uri("not there"))
        assert threads_end(threads)
        assert {d for d in open_descriptors() - before if "socket" in d[1]} == set()

    def test_a_forked_child_uses_connections_of_its_own(self, server):
        data = random_bytes(500_000)
        store(server.client(), "fork", [0, 1000], data)
        stream = RedisStreamFile(server.uri("fork"))
        assert stream._source.read(0, 10) == data[:10]
        child = os.fork()
        if child == 0:
            ok = stream._source.read(5, 400_000) == data[5:400_005]
            os._exit(0 if ok else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert stream._source.read(0, len(data)) == data


class LyingServer:
    """Answers the first request of a connection with these bytes, and ends it."""

    def __init__(self, answer):
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self):
        self._thread.start()
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/p"

    def _serve(self):
        client, _ = self._listener.accept()
        with client, contextlib.suppress(OSError):
            client.recv(1000)
            client.sendall(self._answer)

    def __exit__(self, *_):
        self._thread.join()
        self._listener.close()


class AnsweringServer:
    """Answers the n-th request of its only connection with the n-th answer, and all further ones with the last."""

    def __init__(self, answers):
        self._answers = iter(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self):
        self._thread.start()
        return self._listener.getsockname()[1]

    def _serve(self):
        client, _ = self._listener.accept()
        answer = b""
        with client, contextlib.suppress(OSError):
            while client.recv(10_000):
                answer = next(self._answers, answer)
                client.sendall(answer)

    def __exit__(self, *_):
        self._thread.join()
        self._listener.close()


class TestLyingServers:
    def test_a_listing_without_end_is_an_error(self):
        def page(cursor, *keys):
            parts = (b"$%d\r\n%b\r\n" % (len(part), part) for part in (cursor, *keys))
            return b"*2\r\n" + next(parts) + b"*%d\r\n" % len(keys) + b"".join(parts)

        numbers = [str(number).encode() for number in range(1, 300)]
        for pages, text in (
            ([page(b"7", b"p:a:0")], "SCAN goes in circles"),
            (itertools.cycle([page(number) for number in numbers]), "SCAN goes in circles"),
            (
                (page(b"%d" % n, b"p:" + b"a" * (64 << 20)) for n in itertools.count(1)),
                "more keys than can be believed",
            ),
        ):
            with AnsweringServer(pages) as port, pytest.raises(StreamError, match=text):
                RedisStreamFile(f"redis://127.0.0.1:{port}/p", retries=0)

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"*2147483647\r\n",
            b"*99999999999999999999\r\n",
            b"*4000000\r\n" + b"*4000000\r\n" * 6,
            b"$2147483647\r\nabc",
            b"$-5\r\n",
            b"+OK\r\n",
            b":5\r\n",
            b"*2\r\n:0\r\n*0\r\n",
            b"*2\r\n$1\r\n0\r\n$1\r\n0\r\n",
            b"*2\r\n$1\r\n0\r\n*1\r\n$500000000\r\n",
            b"%1\r\n+a\r\n+b\r\n",
            b"#t\r\n",
            b",1.5\r\n",
            b"*1\r\n" * 100,
            b"-ERR no\r\n",
            b"-MOVED 1 127.0.0.1:7000\r\n",
            b"\0" * 10_000,
            b"+" + b"x" * 1_000_000,
        ],
    )
    def test_a_reply_that_makes_no_sense_is_an_error_in_bounded_memory(self, answer):
        with LyingServer(answer) as uri, pytest.raises(StreamError):
            RedisStreamFile(uri, connect_timeout=5, stall_timeout=5, retries=0)

    def test_any_bytes_are_an_error_or_a_listing(self):
        from hypothesis import HealthCheck, given, settings
        from hypothesis import strategies as st

        words = st.sampled_from([b"*2\r\n", b"$1\r\n", b"0\r\n", b"*1\r\n", b"$5\r\np:a:0\r\n", b"\r\n", b":7\r\n"])
        piece = st.one_of(words, st.binary(max_size=8))

        @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
        @given(st.lists(piece, max_size=12).map(b"".join))
        def check(answer):
            with LyingServer(answer) as uri, pytest.raises(OSError):  # the server ends after its answer
                RedisStreamFile(uri, connect_timeout=5, stall_timeout=5, retries=0)

        check()
