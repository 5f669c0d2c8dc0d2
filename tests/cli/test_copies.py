"""Copies of bytes as they are, from every kind of source to every kind of target, with and without a known length."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import subprocess
import sys
import threading

import pytest
import torch
from samples import assert_same, tensor
from servers import needs
from servers.http_faults import FaultyServer, Reply
from servers.redis_server import RedisServer, redis_is_installed
from servers.s3_recorder import S3Recorder
from servers.s3_server import S3Server, s3_is_installed

from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer._files.copy import copy_file, sha256_of_file

CONTENT = bytes(range(256)) * 70_000  # more than two units of a copy
WITHOUT_LENGTH = {
    "ends with the connection": Reply(ignore_range=True, no_length=True),
    "in chunks": Reply(ignore_range=True, chunked=True),
}


@contextlib.contextmanager
def sources(tmp_path):
    """Of every kind, the location of CONTENT and the options that open it."""
    with contextlib.ExitStack() as stack:
        (tmp_path / "source").write_bytes(CONTENT)
        places = {"file": (tmp_path / "source", None), "pipe": ("-", None)}
        for name, reply in {"http": Reply(), **WITHOUT_LENGTH}.items():
            server = stack.enter_context(FaultyServer(CONTENT, default=reply))
            places[f"http, {name}"] = (server.url, None)
        memory = pytest.importorskip("fsspec").filesystem("memory")
        memory.pipe_file("/copies/source", CONTENT)
        stack.callback(memory.store.clear)
        places["fsspec"] = ("memory://copies/source", None)
        if redis_is_installed():
            redis = stack.enter_context(RedisServer())
            with contextlib.closing(redis.client()) as client:
                client.set("copies:all:0", CONTENT)
            places["redis"] = (redis.uri("copies"), None)
        yield places


def copy(place, target, options=None):
    source, _ = place
    if source != "-":
        return copy_file(source, target, stream_options=options)
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe, os.fdopen(writing, "wb") as feed, pytest.MonkeyPatch.context() as patch:
        writer = threading.Thread(target=lambda: (feed.write(CONTENT), feed.close()))
        writer.start()
        patch.setattr("sys.stdin", pipe)
        try:
            return copy_file(source, target, stream_options=options)
        finally:
            writer.join()


def test_files_of_proc_are_copied_although_their_size_is_told_as_none(tmp_path):
    assert copy_file("/proc/self/maps", tmp_path / "maps") > 0
    assert b"python" in (tmp_path / "maps").read_bytes()


def test_a_length_that_nobody_knows_is_no_length_of_zero(tmp_path, monkeypatch):
    with sources(tmp_path) as places:
        for name, place in places.items():
            target = tmp_path / "copy"
            assert copy(place, target) == len(CONTENT), name
            assert target.read_bytes() == CONTENT, name
            output = io.BytesIO()
            with monkeypatch.context() as patch:
                patch.setattr("sys.stdout", io.TextIOWrapper(output))
                assert copy(place, "-") == len(CONTENT), name
                assert output.getvalue() == CONTENT, name
            memory = pytest.importorskip("fsspec").filesystem("memory")
            assert copy(place, "memory://copies/copy") == len(CONTENT), name
            assert memory.cat_file("/copies/copy") == CONTENT, name


@pytest.mark.xdist_group("s3 copies")
def test_copies_to_and_from_a_store_need_no_length(tmp_path):
    pytest.importorskip("boto3")
    if not s3_is_installed():
        pytest.skip(needs("OpenStack Swift"))
    with S3Server() as store, sources(tmp_path) as places:
        store.client().create_bucket(Bucket="copies")
        options = dict(store.arguments)
        for name, place in places.items():
            if name in ("file", "pipe", *(f"http, {kind}" for kind in WITHOUT_LENGTH)):
                assert copy(place, "s3://copies/copy", options) == len(CONTENT), name
                assert store.client().get_object(Bucket="copies", Key="copy")["Body"].read() == CONTENT, name
        assert copy_file("s3://copies/copy", tmp_path / "back", stream_options=options) == len(CONTENT)
        assert (tmp_path / "back").read_bytes() == CONTENT
        keys = {
            "AWS_ACCESS_KEY_ID": options["s3_access_key_id"],
            "AWS_SECRET_ACCESS_KEY": options["s3_secret_access_key"],
        }
        command = [sys.executable, "-m", "tensorizer", "cp", "s3://copies/copy", str(tmp_path / "typed")]
        endpoint = store.endpoint if "://" in store.endpoint else f"http://{store.endpoint}"
        typed = subprocess.run([*command, "--s3-endpoint", endpoint], env={**os.environ, **keys}, capture_output=True)
        assert typed.returncode == 0, typed.stderr
        assert (tmp_path / "typed").read_bytes() == CONTENT
        found = {**os.environ, **keys, "AWS_ENDPOINT_URL_S3": endpoint, "AWS_ENDPOINT_URL": endpoint}
        told = subprocess.run([*command[:-1], str(tmp_path / "no")], env=found, capture_output=True, text=True)
        assert "force_http" not in told.stderr
        assert told.returncode == 0 or "--s3-endpoint http://HOST" in told.stderr, told.stderr


def test_an_empty_file_is_copied_wherever_it_goes(tmp_path):
    pytest.importorskip("boto3")
    memory = pytest.importorskip("fsspec").filesystem("memory")
    empty = tmp_path / "empty"
    empty.touch()
    with S3Recorder() as store:
        for target in ("s3://bucket/empty", "memory://copies/empty", str(tmp_path / "copy")):
            assert copy_file(empty, target, stream_options=store.arguments) == 0
        assert store.objects == {"/bucket/empty": b""}
    assert memory.cat_file("/copies/empty") == b""
    assert (tmp_path / "copy").read_bytes() == b""


def test_a_source_without_ranges_is_copied_and_hashed_with_one_request(tmp_path):
    for name, reply in {"whole": Reply(ignore_range=True), **WITHOUT_LENGTH}.items():
        with FaultyServer(CONTENT, default=reply, etag=None) as server:
            assert copy_file(server.url, tmp_path / "copy") == len(CONTENT), name
            assert len(server.requests) == 1, name
            assert sha256_of_file(server.url) == hashlib.sha256(CONTENT).digest(), name
            assert len(server.requests) == 2, name


# --- file objects -----------------------------------------------------------------------------------------------------


class Counting(io.RawIOBase):
    """A file object that writes down where it is read."""

    def __init__(self, file):
        self.file, self.reads = file, []

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=0):
        return self.file.seek(offset, whence)

    def tell(self):
        return self.file.tell()

    def readinto(self, buffer):
        offset = self.file.tell()
        got = self.file.readinto(buffer)
        self.reads.append((offset, got))
        return got


STATE = {f"large.{i}": tensor((1 << 20, 3), torch.float32, seed=i) for i in range(5)} | {
    f"small.{i}": tensor((i, 5), torch.float16, seed=i) for i in range(50)
}


def test_a_file_object_is_read_once_and_in_order(tmp_path):
    path = tmp_path / "file"
    serializer = TensorSerializer(path)
    serializer.write_state_dict(STATE)
    serializer.close()
    for options in ({}, {"verify_hash": True}, {"verify_hash": True, "dtype": torch.float32}, {"lazy_load": True}):
        with path.open("rb") as file:
            counting = Counting(file)
            with TensorDeserializer(counting, device="cpu", **options) as loaded:
                for name, expected in STATE.items():
                    if options.get("dtype") is None:
                        assert_same(loaded[name], expected)
        ends = [0, *(offset + got for offset, got in counting.reads)]
        assert all(offset >= end for (offset, _), end in zip(counting.reads, ends)), (options, counting.reads)


def test_a_packed_file_object_is_unpacked_once(tmp_path):
    path = tmp_path / "file"
    serializer = TensorSerializer(path)
    serializer.write_state_dict(STATE)
    serializer.close()
    packed = tmp_path / "file.gz"
    packed.write_bytes(gzip.compress(path.read_bytes(), 1))
    with gzip.open(packed) as stream:
        rewinds = []
        stream._buffer.raw._rewind = (lambda rewind: lambda: (rewinds.append(1), rewind()))(stream._buffer.raw._rewind)
        with TensorDeserializer(stream, device="cpu", verify_hash=True) as loaded:
            assert_same(loaded["large.4"], STATE["large.4"])
        assert len(rewinds) <= 1, "one pass to learn the size"
