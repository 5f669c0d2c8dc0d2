"""to_redis: what is stored, in which order, resumed, and by which client."""

from __future__ import annotations

import random
import subprocess
import threading

import pytest
from servers import needs
from servers.redis_server import RedisServer, redis_is_installed

from tensorizer._io.redis import RedisStreamFile, export_to_redis

redis = pytest.importorskip("redis")
pytestmark = [pytest.mark.skipif(not redis_is_installed(), reason=needs("Redis")), pytest.mark.timeout(120)]

HEADER_NBYTES = 5000


class File:
    """A file of header, records (name, header bytes, payload bytes) and nothing else, kept in Redis itself."""

    def __init__(self, server, sizes, seed=1):
        chance = random.Random(seed)
        self.records, position = [], HEADER_NBYTES
        for i, nbytes in enumerate(sizes):
            header = chance.randrange(50, 200)
            name = ["plain", "1E[s:1:a]", 'sp ace"quote', "co:lon", "ü"][i % 5] + str(i)
            self.records.append((name.encode(), position, position + header, nbytes))
            position += header + nbytes
        self.data = chance.randbytes(position)
        client = server.client()
        for begin in range(0, position, 100_000_000):
            client.set(f"source{seed}:x:{begin}", self.data[begin : begin + 100_000_000])
        self.source = RedisStreamFile(server.uri(f"source{seed}"))._tensorizer_source()

    @property
    def header(self):
        return self.data[:HEADER_NBYTES]

    def keys(self, prefix):
        expected = {f"{prefix}:header:0".encode(): self.header}
        for name, header, data, nbytes in self.records:
            stem = prefix.encode() + b":" + name + b":"
            expected[stem + str(header).encode()] = self.data[header:data]
            if nbytes:
                expected[stem + str(data).encode()] = self.data[data : data + nbytes]
        return expected


SIZES = [0, 1, 100, 0, 70_000, 1 << 20, (1 << 20) + 1, 9_000_000, 3, 0, 2_000_000, *range(0, 3000, 7)]


@pytest.fixture(scope="module")
def server():
    with RedisServer() as running:
        yield running


@pytest.fixture(scope="module")
def file(server):
    return File(server, SIZES)


def stored(client, prefix):
    return {key: client.get(key) for key in client.scan_iter(prefix + ":*", count=1000)}


def as_decoding(server):
    return server.client(decode_responses=True)


CLIENTS = {
    "tcp": lambda server: server.client(),
    "decoding": as_decoding,
    "unix": lambda server: redis.Redis(unix_socket_path=str(server.unix_path)),
    "url": lambda server: redis.from_url(f"redis://127.0.0.1:{server.port}/0"),
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_every_kind_of_client_stores_the_layout_of_the_format(server, file, kind):
    client = CLIENTS[kind](server)
    export_to_redis(file.source, file.header, file.records, client, kind)
    assert stored(server.client(), kind) == file.keys(kind)
    assert RedisStreamFile(server.uri(kind)).read() == file.data
    client.close()


def test_password_database_and_tls_of_the_client_are_used(file):
    with RedisServer(password="pa ss:w/örd", tls=True) as other:
        client = other.client(db=5)
        export_to_redis(file.source, file.header, file.records, client, "p")
        assert stored(client, "p") == file.keys("p")
        client.close()


def test_the_source_is_read_once(server, file):
    before = file.source.bytes_read
    export_to_redis(file.source, file.header, file.records, server.client(), "once")
    assert file.source.bytes_read - before == len(file.data) - HEADER_NBYTES


def test_what_is_there_is_skipped_unless_forced(server, file):
    client = server.client()
    export_to_redis(file.source, file.header, file.records, client, "skip")
    name, header, data, _ = file.records[4]
    header_key, data_key = (b"skip:%s:%d" % (name, at) for at in (header, data))
    client.set(header_key, b"mine")
    client.set(data_key, b"mine too")
    client.set("skip:header:0", b"old")
    export_to_redis(file.source, file.header, file.records, client, "skip")
    assert (client.get(header_key), client.get(data_key)) == (b"mine", b"mine too")
    assert client.get("skip:header:0") == file.header
    export_to_redis(file.source, file.header, file.records, client, "skip", force=True)
    assert stored(client, "skip") == file.keys("skip")


def test_an_interrupted_export_is_invisible_and_is_resumed(server):
    file = File(server, [*SIZES, 60_000_000], seed=3)  # the last one does not fit
    client = server.client()
    limit = client.info("memory")["used_memory"] + 40_000_000
    client.config_set("maxmemory", limit)
    try:
        with pytest.raises(redis.ResponseError, match=r"OOM|maxmemory"):
            export_to_redis(file.source, file.header, file.records, client, "resume")
    finally:
        client.config_set("maxmemory", 0)
    partial, complete = stored(client, "resume"), file.keys("resume")
    assert b"resume:header:0" not in partial
    for name, header, data, nbytes in file.records:
        header_key, data_key = (b"resume:%s:%d" % (name, at) for at in (header, data))
        if header_key in partial:  # only then is the payload complete
            assert partial[header_key] == complete[header_key]
            assert not nbytes or partial[data_key] == complete[data_key]
    before = file.source.bytes_read
    export_to_redis(file.source, file.header, file.records, client, "resume")
    assert stored(client, "resume") == complete
    assert file.source.bytes_read - before <= len(file.data) - HEADER_NBYTES


def test_records_of_a_filter_are_stored_alone(server, file):
    chosen = file.records[5:8]
    export_to_redis(file.source, file.header, chosen, server.client(), "some")
    assert len(stored(server.client(), "some")) == 1 + 2 * 3
    stream = RedisStreamFile(server.uri("some"))
    _, header, data, nbytes = chosen[1]
    assert stream._source.read(header, data - header + nbytes) == file.data[header : data + nbytes]


def test_payloads_above_the_limit_of_a_value_are_stored_in_pieces(monkeypatch):
    from tensorizer._io import redis as redis_export

    limit = 1 << 20  # the smallest that a server can be told
    monkeypatch.setattr(redis_export, "MAX_VALUE_NBYTES", limit)
    monkeypatch.setattr(redis_export, "SPLIT_NBYTES", limit // 2)
    monkeypatch.setattr(redis_export, "PIECE_NBYTES", 100_000)
    with RedisServer() as plain, RedisServer(options={"proto-max-bulk-len": "1mb"}) as strict:
        file = File(plain, [limit, limit + 1, 3_100_000])
        client = strict.client()
        export_to_redis(file.source, file.header, file.records, client, "pieces")
        assert RedisStreamFile(strict.uri("pieces")).read() == file.data
        name, _, data, _ = file.records[2]
        assert client.strlen(b"pieces:%s:%d" % (name, data + limit // 2)) == limit // 2
        client.close()


def export_many(file, client):
    for i in range(10_000):
        export_to_redis(file.source, file.header, file.records, client, f"p{i}")


def test_a_server_that_goes_away_is_an_error_of_the_client(file):
    with RedisServer() as short_lived:
        client = short_lived.client()
        timer = threading.Timer(0.2, short_lived.stop)
        timer.start()
        with pytest.raises(redis.ConnectionError):
            export_many(file, client)
        timer.join()
        client.close()


PROGRAM = """
import sys, hashlib, tensorizer, torch
d = tensorizer.TensorDeserializer(sys.argv[1], device="cpu", lazy_load=True)
for name in d.keys():
    print(name, hashlib.sha256(d[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest())
"""

WRITE = """
import sys, redis, torch, tensorizer
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200))
s = tensorizer.TensorSerializer(sys.argv[1]); s.write_module(module); s.close()
d = tensorizer.TensorDeserializer(sys.argv[1], device="cpu", lazy_load=True)
d.to_redis(redis.Redis(port=int(sys.argv[2])), "theirs")
for entry in d._metadata.values():
    print(entry.name if isinstance(entry.name, str) else entry.name.serialized_().decode(), entry.offset,
          entry.data_offset, entry.data_length)
"""


def test_the_reference_reads_what_we_store_and_stores_the_same_keys(server, reference_python, tmp_path):
    python = str(reference_python("2.12.1"))
    path = tmp_path / "model.tensors"
    client = server.client()
    run = subprocess.run(
        [python, "-I", "-c", WRITE, str(path), str(server.port)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = [line.rsplit(" ", 3) for line in run.stdout.splitlines()]
    records = [(name.encode(), int(offset), int(data), int(nbytes)) for name, offset, data, nbytes in lines]
    theirs = stored(client, "theirs")
    source = RedisStreamFile(server.uri("theirs"))._tensorizer_source()
    export_to_redis(source, theirs[b"theirs:header:0"], records, client, "ours")
    assert stored(client, "ours") == {key.replace(b"theirs", b"ours", 1): value for key, value in theirs.items()}
    read = subprocess.run(
        [python, "-I", "-c", PROGRAM, f"redis://127.0.0.1:{server.port}/ours"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert read.returncode == 0, read.stderr
    local = subprocess.run([python, "-I", "-c", PROGRAM, str(path)], capture_output=True, text=True, check=True)
    assert read.stdout == local.stdout
    assert read.stdout
