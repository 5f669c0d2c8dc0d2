"""The cache of the node: what is asked of servers, and what is kept of their answers."""

from __future__ import annotations

import json
import logging
import os
import socket
import time

import cache_tools
import pytest
import torch
from cache_tools import MIB, entries, files_below, load, load_one, same, sent, tensors, write
from servers.counting_relay import CountingRelay
from servers.http_faults import FaultyServer, Reply

import tensorizer
from tensorizer import TensorDeserializer, cache
from tensorizer._io.node_cache import finish
from tensorizer.errors import StreamError, StreamNotFoundError
from tensorizer.stream_io import CacheOptions, HTTPOptions, open_stream

environment, folder, site = cache_tools.environment, cache_tools.folder, cache_tools.site


def test_the_second_load_sends_one_request_and_gets_no_payload(site, folder):
    wanted = write(site.root / "m.tensors", tensors())
    size = (site.root / "m.tensors").stat().st_size
    first, file = load(f"{site.url}/m.tensors", folder)
    assert same(first, wanted)
    assert file.cached_bytes_read == 0
    assert sent(site.requests()) == size
    second, file = load(f"{site.url}/m.tensors", folder)
    assert same(second, wanted)
    assert site.requests() == [(304, 0)]
    assert file.total_bytes_read >= file.cached_bytes_read >= 12 * MIB


def test_the_first_load_sends_the_same_requests_with_and_without_a_cache(site, folder):
    write(site.root / "m.tensors", tensors(40 * MIB))
    TensorDeserializer(f"{site.url}/m.tensors", device="cpu").close()
    without = site.requests()
    TensorDeserializer(f"{site.url}/m.tensors", device="cpu", stream_options={"cache": folder}).close()
    with_cache = site.requests()
    assert len(with_cache) <= len(without)
    assert sent(with_cache) - sent(without) <= 4096, "what lies behind the last record"


def test_the_variable_alone_caches_every_way_of_reading(site, folder, monkeypatch):
    from safetensors.torch import save_file

    wanted = write(site.root / "m.tensors", tensors())
    save_file({"w": torch.arange(100_000)}, site.root / "s.safetensors")
    (site.root / "model").mkdir()
    content = tensors(2 * MIB, seed=3)
    names = {"model-00001-of-00002.tensors": ["t0", "t1"], "model-00002-of-00002.tensors": ["t2", "t3", "t4", "t5"]}
    for name, keys in names.items():
        write(site.root / "model" / name, {key: content[key] for key in keys})
    weight_map = {key: name for name, keys in names.items() for key in keys}
    index = {"metadata": {}, "weight_map": weight_map}
    (site.root / "model" / "model.tensors.index.json").write_text(json.dumps(index))
    for path in site.root.rglob("*.*"):
        os.utime(path, (time.time() - 3600,) * 2)
    monkeypatch.setenv("TENSORIZER_CACHE", str(folder))
    statuses = []
    for offline in ("0", "0", "1"):
        site.requests()
        monkeypatch.setenv("TENSORIZER_CACHE_OFFLINE", offline)
        assert same(load(f"{site.url}/m.tensors")[0], wanted)
        assert torch.equal(load(f"{site.url}/s.safetensors")[0]["w"], torch.arange(100_000))
        assert same(load(f"{site.url}/model/model.tensors.index.json")[0], content)
        with open_stream(f"{site.url}/m.tensors") as stream:
            assert stream.read() == (site.root / "m.tensors").read_bytes()
        statuses.append({status for status, _ in site.requests()})
    assert statuses[1:] == [{304}, set()]


IN_SEVERAL_LOADS = {
    "load_stream": lambda uri, out, options: dict(tensorizer.load_stream(uri, stream_options=options)),
    "verify": lambda uri, out, options: tensorizer.verify(uri, stream_options=options),
    "convert": lambda uri, out, options: tensorizer.convert(uri, out, stream_options=options, force=True),
    "another dtype": lambda uri, out, options: tensorizer.load_file(uri, dtype=torch.float16, stream_options=options),
}


@pytest.mark.parametrize("way", IN_SEVERAL_LOADS)
def test_an_object_that_several_loads_read_together_is_stored(site, folder, tmp_path, monkeypatch, way):
    limits = ("_load.open_file.BATCH", "_load.open_file._MOVED", "_load.stream._GROUP", "_files.write.BATCH")
    for name in limits:
        monkeypatch.setattr(f"tensorizer.{name}_NBYTES", 3 * MIB)
    write(site.root / "m.tensors", tensors())
    size = (site.root / "m.tensors").stat().st_size
    IN_SEVERAL_LOADS[way](f"{site.url}/m.tensors", tmp_path / "out.safetensors", {"cache": folder})
    finish()
    assert size <= sent(site.requests()) < size + MIB  # convert reads record headers twice
    IN_SEVERAL_LOADS[way](f"{site.url}/m.tensors", tmp_path / "out.safetensors", {"cache": folder})
    assert site.requests() == [(304, 0)]


def test_false_turns_the_variable_off(site, folder, monkeypatch):
    write(site.root / "m.tensors", tensors())
    monkeypatch.setenv("TENSORIZER_CACHE", str(folder))
    for _ in range(2):
        load(f"{site.url}/m.tensors", False)
        assert sent(site.requests()) >= 12 * MIB
    assert not folder.exists()


def test_a_replaced_object_is_loaded_anew(site, folder):
    from tensorizer import cache

    write(site.root / "m.tensors", tensors())
    load(f"{site.url}/m.tensors", folder)
    wanted = write(site.root / "m.tensors", tensors(13 * MIB, seed=9))
    assert same(load(f"{site.url}/m.tensors", folder)[0], wanted)
    assert [entry.state for entry in cache.entries(folder)] == ["old", "complete"]
    site.requests()
    assert same(load(f"{site.url}/m.tensors", folder)[0], wanted)
    assert site.requests() == [(304, 0)]


@pytest.mark.parametrize(("status", "error"), [(403, StreamError), (404, StreamNotFoundError), (401, StreamError)])
def test_the_cache_never_answers_where_the_server_refuses(status, error, tmp_path, folder):
    write(tmp_path / "m.tensors", tensors())
    with FaultyServer((tmp_path / "m.tensors").read_bytes()) as server:
        load(f"{server.url}/m.tensors", folder)
        server.default = Reply(status=status)
        with pytest.raises(error):
            load(f"{server.url}/m.tensors", folder)


def test_a_server_that_is_gone_is_an_error_unless_offline_is_set(site, folder, tmp_path):
    wanted = write(site.root / "m.tensors", tensors())
    load(f"{site.url}/m.tensors", folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{probe.getsockname()[1]}"
    options = {"cache": folder, "http_options": HTTPOptions(retries=1)}
    with pytest.raises(StreamError):
        TensorDeserializer(f"{gone}/m.tensors", device="cpu", stream_options=options)
    site.requests()
    offline = CacheOptions(folder, offline=True)
    assert same(load(f"{site.url}/m.tensors", offline)[0], wanted)
    assert site.requests() == []
    with pytest.raises(StreamNotFoundError, match="not in the cache"):
        load(f"{gone}/m.tensors", offline)
    with pytest.raises(StreamNotFoundError, match="not in the cache"):
        load(f"{gone}/m.tensors", CacheOptions(tmp_path / "empty", offline=True))
    assert not (tmp_path / "empty").exists()


def test_offline_no_connection_is_tried(site, folder, monkeypatch):
    wanted = write(site.root / "m.tensors", tensors())
    load(f"{site.url}/m.tensors", folder)
    monkeypatch.setattr(socket.socket, "connect", None)
    monkeypatch.setenv("TENSORIZER_CACHE_OFFLINE", "1")
    site.requests()
    with TensorDeserializer(
        f"{site.url}/m.tensors", device="cpu", lazy_load=True, stream_options={"cache": folder}
    ) as file:
        assert torch.equal(file["t5"], wanted["t5"])
    assert site.requests() == []


def test_a_load_of_parts_reads_a_copy_and_makes_none(site, folder):
    wanted = write(site.root / "m.tensors", tensors(48 * MIB))
    uri = f"{site.url}/m.tensors"
    for _ in range(2):
        site.requests()
        assert torch.equal(load_one(uri, "t3", folder), wanted["t3"])
        assert 8 * MIB < sent(site.requests()) < 11 * MIB
        assert files_below(folder) == []
    assert same(load(uri, folder)[0], wanted)
    site.requests()
    assert torch.equal(load_one(uri, "t3", folder), wanted["t3"])
    assert sent(site.requests()) == 0


def test_a_filter_that_leaves_out_little_makes_a_copy_of_all(site, folder):
    content = {**tensors(24 * MIB), "small": torch.arange(1000)}
    write(site.root / "m.tensors", content)
    size = (site.root / "m.tensors").stat().st_size
    uri = f"{site.url}/m.tensors"
    load(uri, folder, filter_func=lambda name: name != "small")
    assert sent(site.requests()) <= size
    found, file = load(uri, CacheOptions(folder, offline=True))
    assert same(found, content)
    assert file.cached_bytes_read > 24 * MIB


def test_a_server_that_ignores_the_condition_or_refuses_it_is_as_good(tmp_path, folder):
    wanted = write(tmp_path / "m.tensors", tensors())
    content = (tmp_path / "m.tensors").read_bytes()
    with FaultyServer(content) as server:  # knows no If-None-Match
        load(f"{server.url}/m.tensors", folder)
        before = len(server.requests)
        assert same(load(f"{server.url}/m.tensors", folder)[0], wanted)
        assert len(server.requests) == before + 1
        assert server.requests[-1].headers["if-none-match"].startswith('"')
        server.default = lambda request: Reply(status=412) if "if-none-match" in request.headers else Reply()
        assert same(load(f"{server.url}/m.tensors", folder)[0], wanted)
        assert len(server.requests) == before + 3


def test_an_object_that_is_replaced_after_the_opening_is_never_mixed(tmp_path, folder):
    wanted = write(tmp_path / "m.tensors", tensors(24 * MIB))
    write(tmp_path / "new.tensors", tensors(24 * MIB, seed=8))
    with FaultyServer((tmp_path / "m.tensors").read_bytes()) as server:
        uri = f"{server.url}/m.tensors"
        options = {"cache": folder}
        with open_stream(uri, **options) as stream:
            first = stream.read(12 * MIB)
            assert first == server.content[: 12 * MIB]
            server.content = (tmp_path / "new.tensors").read_bytes()
            with pytest.raises(StreamError, match="changed"):
                stream.read(6 * MIB), stream.read(6 * MIB)
        with TensorDeserializer(uri, device="cpu", lazy_load=True, stream_options=options) as file:
            assert same(dict(file), tensors(24 * MIB, seed=8))
            server.content = (tmp_path / "m.tensors").read_bytes()
        finish()
        assert same(load(uri, folder)[0], wanted)
        server.content = (tmp_path / "new.tensors").read_bytes()
        assert same(load(uri, folder)[0], tensors(24 * MIB, seed=8))


def test_versions_of_headers_and_of_uris():
    from tensorizer._io.node_cache import _version_of_headers

    assert _version_of_headers({"etag": '"a"'}, "v1") == '"a"'
    assert _version_of_headers({"etag": 'W/"a"'}, "v1") == "versionId=v1"
    old = {"last-modified": "Mon, 01 Jan 2024 00:00:00 GMT", "date": "Mon, 01 Jan 2024 00:01:00 GMT"}
    assert _version_of_headers(old, None) == "Last-Modified=Mon, 01 Jan 2024 00:00:00 GMT"
    for odd in ({"last-modified": "yesterday"}, {"last-modified": "Mon, 01 Jan 2024 00:00:00"}, {"date": None}):
        assert _version_of_headers({**old, **odd}, None) is None


def test_a_server_without_ranges_is_read_in_one_pass_and_then_not_at_all(tmp_path, folder):
    wanted = write(tmp_path / "m.tensors", tensors())
    with FaultyServer((tmp_path / "m.tensors").read_bytes(), default=Reply(ignore_range=True)) as server:
        uri = f"{server.url}/m.tensors"
        assert torch.equal(load_one(uri, "t0", folder), wanted["t0"])
        assert same(load(uri, folder)[0], wanted)
        before = len(server.requests)
        assert same(load(uri, folder)[0], wanted)
        assert len(server.requests) == before + 1
        found, file = load(uri, folder)
        assert same(found, wanted)
        assert file.cached_bytes_read >= 12 * MIB


def test_a_copy_that_was_damaged_is_read_again_from_a_server_without_ranges(tmp_path, folder):
    def reply(request):
        return Reply(status=304) if request.headers.get("if-none-match") else Reply(ignore_range=True)

    wanted = write(tmp_path / "m.tensors", tensors())
    with FaultyServer((tmp_path / "m.tensors").read_bytes(), default=reply) as server:
        for damage in (None, lambda data: os.truncate(data, 1000), os.unlink):
            if damage is not None:
                damage(entries(folder)[0] / "data")
            assert same(load(f"{server.url}/m.tensors", folder)[0], wanted)


def test_a_copy_is_not_removed_between_the_answer_of_a_server_without_ranges_and_its_use(tmp_path, folder):
    def reply(request):
        if not request.headers.get("if-none-match"):
            return Reply(ignore_range=True)
        removed.append(cache.prune(folder, all=True).removed)
        return Reply(status=304)

    removed = []
    wanted = write(tmp_path / "m.tensors", tensors())
    with FaultyServer((tmp_path / "m.tensors").read_bytes(), default=reply) as server:
        load(f"{server.url}/m.tensors", folder)
        assert same(load(f"{server.url}/m.tensors", folder)[0], wanted)
        assert removed == [[]]


def test_a_304_about_another_etag_is_not_believed(tmp_path, folder):
    uri_of = "{}/m.tensors".format
    old = write(tmp_path / "m.tensors", tensors())
    with FaultyServer((tmp_path / "m.tensors").read_bytes()) as server:
        assert same(load(uri_of(server.url), folder)[0], old)
        server.script.append(Reply(status=304, headers={"ETag": None}))
        assert same(load(uri_of(server.url), folder)[0], old)
        new = write(tmp_path / "m.tensors", tensors(seed=5))
        server.content = (tmp_path / "m.tensors").read_bytes()
        server.script.append(Reply(status=304))
        assert same(load(uri_of(server.url), folder)[0], new)


@pytest.mark.parametrize(
    "server",
    [
        {"etag": None},
        {"etag": 'W/"weak"'},
        {"default": Reply(headers={"Cache-Control": "private, no-store"})},
        {"etag": None, "default": Reply(headers={"Last-Modified": "Mon, 01 Jan 2024 00:00:30 GMT",
                                                 "Date": "Mon, 01 Jan 2024 00:00:40 GMT"})},
    ],
)  # fmt: skip
def test_what_has_no_version_or_must_not_be_kept_is_not_cached(server, tmp_path, folder, caplog):
    wanted = write(tmp_path / "m.tensors", tensors())
    with FaultyServer((tmp_path / "m.tensors").read_bytes(), **server) as served, caplog.at_level(logging.INFO):
        for _ in range(2):
            assert same(load(f"{served.url}/m.tensors", folder)[0], wanted)
    assert files_below(folder) == []
    assert "is not cached" in caplog.text


def test_a_date_and_a_size_are_a_version_where_the_date_is_old(tmp_path, folder):
    wanted = write(tmp_path / "m.tensors", tensors())
    old = {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT", "Date": "Mon, 01 Jan 2024 00:02:00 GMT"}
    with FaultyServer((tmp_path / "m.tensors").read_bytes(), etag=None, default=Reply(headers=old)) as server:
        load(f"{server.url}/m.tensors", folder)
        before = len(server.requests)
        assert same(load(f"{server.url}/m.tensors", folder)[0], wanted)
        assert len(server.requests) == before + 1
        assert "if-none-match" not in server.requests[-1].headers


def test_s3_objects_are_asked_for_once_with_a_condition(tmp_path, folder, s3_server):
    wanted = write(tmp_path / "m.tensors", tensors())
    client = s3_server.client()
    client.create_bucket(Bucket="cached")
    client.upload_file(str(tmp_path / "m.tensors"), "cached", "m.tensors")
    uri = "s3://cached/m.tensors"
    with CountingRelay(s3_server.port) as relay:
        through = {**s3_server.arguments, "s3_endpoint": f"http://127.0.0.1:{relay.port}"}

        def load_s3(**options):
            with TensorDeserializer(uri, device="cpu", stream_options={**through, **options}) as file:
                assert same({name: t.detach() for name, t in file.items()}, wanted)
                return file

        load_s3(cache=folder)
        finish()
        with open_stream(uri, cache=folder, **through) as stream:
            assert stream._shared.http.is_known
            assert stream.read() == (tmp_path / "m.tensors").read_bytes()
            assert stream._shared.http.requests == 1
        about = json.loads((entries(folder)[0] / "about.json").read_text())
        assert about["location"] == f"s3://127.0.0.1:{relay.port}/cached/m.tensors"
        assert "Signature" not in "".join(map(str, about.values()))
    file = load_s3(cache=CacheOptions(folder, offline=True))  # nobody listens at that port any more
    assert file.cached_bytes_read >= 12 * MIB


def test_what_a_store_encrypts_with_a_key_of_the_caller_is_not_cached(tmp_path, folder, caplog):
    wanted = write(tmp_path / "m.tensors", tensors())
    # No store of the tests takes such keys: this one answers any request, and keeps what it was sent.
    with FaultyServer((tmp_path / "m.tensors").read_bytes()) as server:
        options = {
            "s3_access_key_id": "id",
            "s3_secret_access_key": "secret",
            "s3_endpoint": server.url.rpartition("/")[0] if server.url.count("/") > 2 else server.url,
            "force_http": True,
            "cache": folder,
        }
        key = {"SSECustomerKey": "k" * 32, "SSECustomerAlgorithm": "AES256"}
        for extra in ({"s3_extra_args": {"get": key}}, {"s3_extra_args": {"get": key}}, {}):
            before = len(server.requests)
            assert files_below(folder) == []
            with (
                caplog.at_level(logging.INFO),
                TensorDeserializer("s3://models/m.tensors", device="cpu", stream_options={**options, **extra}) as file,
            ):
                assert same({name: t.detach() for name, t in file.items()}, wanted)
                assert file.cached_bytes_read == 0
            finish()
            sent_key = "x-amz-server-side-encryption-customer-key" in server.requests[before].headers
            assert sent_key is bool(extra)
            assert "if-none-match" not in server.requests[before].headers
    assert caplog.text.count("key of the caller") == 2
    assert len(entries(folder)) == 1, "without such a key it is kept"


def test_a_file_system_of_fsspec_is_cached_by_the_version_that_it_tells(tmp_path, folder):
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    class Versioned(MemoryFileSystem):
        protocol = "versioned"
        store = {}  # noqa: RUF012
        reads = 0
        tag = "one"

        @classmethod
        def _strip_protocol(cls, path):
            return "/" + path.removeprefix("versioned://").lstrip("/")

        def info(self, path, **kwargs):
            return {**super().info(path, **kwargs), "etag": self.tag}

        def cat_file(self, path, start=None, end=None, **kwargs):
            type(self).reads += end - start
            return super().cat_file(path, start, end, **kwargs)

    fsspec.register_implementation("versioned", Versioned, clobber=True)
    wanted = write(tmp_path / "m.tensors", tensors())
    Versioned().pipe("/m.tensors", (tmp_path / "m.tensors").read_bytes())
    assert same(load("versioned://m.tensors", folder)[0], wanted)
    assert Versioned.reads >= 12 * MIB
    before = Versioned.reads
    found, file = load("versioned://m.tensors", folder)
    assert same(found, wanted)
    assert Versioned.reads == before
    assert file.cached_bytes_read >= 12 * MIB
    with open_stream("versioned://m.tensors", cache=folder) as stream:
        assert stream.read() == (tmp_path / "m.tensors").read_bytes()
    Versioned.clear_instance_cache()
    with pytest.MonkeyPatch.context() as patched:  # drivers look for credentials there
        patched.setattr(Versioned, "__init__", None)
        assert same(load("versioned://m.tensors", CacheOptions(folder, offline=True))[0], wanted)
    Versioned.tag = "two"
    assert same(load("versioned://m.tensors", folder)[0], wanted)
    assert Versioned.reads > before
    fsspec.filesystem("memory").pipe("/plain.tensors", (tmp_path / "m.tensors").read_bytes())
    load("memory://plain.tensors", folder)
    assert len(entries(folder)) == 2, "a time is no version"


def test_parts_of_objects_are_not_cached(site, folder, caplog):
    (site.root / "a").write_bytes(b"x" * 1000)
    with caplog.at_level(logging.INFO), open_stream(f"{site.url}/a", begin=10, cache=folder) as stream:
        assert stream.read() == b"x" * 990
    assert not folder.exists() or files_below(folder) == []
    assert "only a part" in caplog.text
