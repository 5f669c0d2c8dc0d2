"""The cache of remote objects on the disk of the node: what is asked of servers, what is kept, and what is served."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from http_tools import random_bytes
from places import EXAMPLES
from servers.http_faults import FaultyServer, Reply
from servers.nginx import PROGRAM as NGINX
from servers.nginx import nginx
from servers.s3_server import S3Server, s3_is_installed

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer, stream_io
from tensorizer.errors import HashMismatchError, StreamError, StreamNotFoundError
from tensorizer.stream_io import CacheOptions, HTTPOptions, open_stream

MIB = 1 << 20
BLOCK = 256 << 10
WHOLE_HEAD = 1 << 20

needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("TENSORIZER_CACHE", "TENSORIZER_CACHE_SIZE", "TENSORIZER_CACHE_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TENSORIZER_CACHE_MIN_FREE", "0")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def tensors(nbytes=12 * MIB, seed=0):
    """Six equal ones."""
    generator = torch.Generator().manual_seed(seed)
    return {f"t{i}": torch.randn(nbytes // 24, generator=generator) for i in range(6)}


def write(path, content, **arguments):
    serializer = TensorSerializer(str(path), **arguments)
    serializer.write_state_dict(content)
    serializer.close()
    old = time.time() - 3600
    os.utime(path, (old, old))
    return content


def load(uri, cache=None, **arguments):
    options = {} if cache is None else {"cache": cache}
    with TensorDeserializer(uri, device="cpu", stream_options=options, **arguments) as file:
        return {name: tensor.detach().clone() for name, tensor in file.items()}, file


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def files_below(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.name != "lock")


def entries(folder):
    return sorted(path.parent for path in Path(folder).glob("tensorizer-1/*/*/*/map"))


class Site:
    """A folder that nginx serves, and what was asked of it."""

    def __init__(self, url, root, log):
        self.url, self.root, self._log, self._seen = url, root, log, 0

    def requests(self):
        """(status, bytes of the body) of the requests since the last call."""
        time.sleep(0.05)
        found = [
            (int(status), int(nbytes))
            for status, nbytes in re.findall(r'HTTP/1\.1" (\d+) (\d+)', self._log.read_text())
        ]
        new, self._seen = found[self._seen :], len(found)
        return new


@contextlib.contextmanager
def serving(tmp_path, server_lines=""):
    (tmp_path / "root").mkdir(exist_ok=True)
    work = tmp_path / f"nginx{len(list(tmp_path.glob('nginx*')))}"
    work.mkdir()
    with nginx(work, tmp_path / "root", server_lines=server_lines) as url:
        yield Site(url, tmp_path / "root", work / "access.log")


@pytest.fixture
def site(tmp_path):
    if NGINX is None:
        pytest.skip("nginx is not installed")
    with serving(tmp_path) as found:
        yield found


def sent(requests):
    return sum(nbytes for status, nbytes in requests if status in (200, 206))


# -- what is asked of servers ------------------------------------------------------------------------------------------


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
    options = {"http_options": HTTPOptions(hedge_after=0)}
    TensorDeserializer(f"{site.url}/m.tensors", device="cpu", stream_options=options).close()
    without = site.requests()
    TensorDeserializer(f"{site.url}/m.tensors", device="cpu", stream_options={**options, "cache": folder}).close()
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
    for _ in range(2):
        site.requests()
        assert same(load(f"{site.url}/m.tensors")[0], wanted)
        assert torch.equal(load(f"{site.url}/s.safetensors")[0]["w"], torch.arange(100_000))
        assert same(load(f"{site.url}/model/model.tensors.index.json")[0], content)
        with open_stream(f"{site.url}/m.tensors") as stream:
            assert stream.read() == (site.root / "m.tensors").read_bytes()
    assert {status for status, _ in site.requests()} == {304}


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
    options = {"cache": folder, "http_options": HTTPOptions(first_answer_seconds=0.2, retries=1)}
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


def test_offline_no_connection_is_tried_and_a_missing_byte_is_named(site, folder, monkeypatch):
    wanted = write(site.root / "m.tensors", tensors())
    with TensorDeserializer(
        f"{site.url}/m.tensors", device="cpu", lazy_load=True, stream_options={"cache": folder}
    ) as file:
        assert torch.equal(file["t0"], wanted["t0"])
    monkeypatch.setattr(socket.socket, "connect", None)
    monkeypatch.setenv("TENSORIZER_CACHE_OFFLINE", "1")
    site.requests()
    with TensorDeserializer(
        f"{site.url}/m.tensors", device="cpu", lazy_load=True, stream_options={"cache": folder}
    ) as file:
        assert torch.equal(file["t0"], wanted["t0"])
        with pytest.raises(StreamError, match=r"bytes \d+ to \d+ are not in the cache \(\d+ of \d+ bytes are\)"):
            file["t5"]
    assert site.requests() == []


def test_a_lazy_load_keeps_its_blocks_and_a_whole_one_fetches_the_others_once(site, folder):
    wanted = write(site.root / "m.tensors", tensors(48 * MIB))
    size = (site.root / "m.tensors").stat().st_size
    uri = f"{site.url}/m.tensors"
    with TensorDeserializer(uri, device="cpu", lazy_load=True, stream_options={"cache": folder}) as file:
        assert torch.equal(file["t3"], wanted["t3"])
    (entry,) = entries(folder)
    allocated = (entry / "data").stat().st_blocks * 512
    assert 8 * MIB < allocated < 8 * MIB + WHOLE_HEAD + 4 * BLOCK
    first = sent(site.requests())
    assert same(load(uri, folder)[0], wanted)
    assert first + sent(site.requests()) <= size + BLOCK


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


def test_a_server_without_ranges_is_read_in_one_pass_and_then_not_at_all(tmp_path, folder):
    wanted = write(tmp_path / "m.tensors", tensors())
    with FaultyServer((tmp_path / "m.tensors").read_bytes(), default=Reply(ignore_range=True)) as server:
        uri = f"{server.url}/m.tensors"
        with TensorDeserializer(uri, device="cpu", lazy_load=True, stream_options={"cache": folder}) as file:
            assert torch.equal(file["t0"], wanted["t0"])
        assert same(load(uri, folder)[0], wanted)
        before = len(server.requests)
        assert same(load(uri, folder)[0], wanted)
        assert len(server.requests) == before + 1
        found, file = load(uri, folder)
        assert same(found, wanted)
        assert file.cached_bytes_read >= 12 * MIB


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


@pytest.mark.skipif(not s3_is_installed(), reason="the S3 server of the tests is not installed")
def test_s3_objects_are_asked_for_once_with_a_condition(tmp_path, folder, caplog):
    wanted = write(tmp_path / "m.tensors", tensors())
    with S3Server() as server:
        client = server.client()
        client.create_bucket(Bucket="models")
        client.upload_file(str(tmp_path / "m.tensors"), "models", "m.tensors")
        uri = "s3://models/m.tensors"

        def load_s3(**options):
            arguments = {**server.arguments, **options}
            with TensorDeserializer(uri, device="cpu", stream_options=arguments) as file:
                assert same({name: t.detach() for name, t in file.items()}, wanted)
                return file

        key = {"SSECustomerKey": "k" * 32, "SSECustomerAlgorithm": "AES256"}
        with caplog.at_level(logging.INFO), contextlib.suppress(StreamError, AssertionError):
            load_s3(cache=folder, s3_extra_args={"get": key})
        assert files_below(folder) == []
        assert "key of the caller" in caplog.text
        load_s3(cache=folder)
        with open_stream(uri, cache=folder, **server.arguments) as stream:
            assert stream._shared.http.is_known
            assert stream.read() == (tmp_path / "m.tensors").read_bytes()
            assert stream._shared.http.requests == 1
        about = json.loads((entries(folder)[0] / "about.json").read_text())
        assert about["location"] == f"s3://127.0.0.1:{server.port}/models/m.tensors"
        assert "Signature" not in "".join(map(str, about.values()))
    file = load_s3(cache=CacheOptions(folder, offline=True))
    assert file.cached_bytes_read >= 12 * MIB


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


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, b"folder", 3, ["x"]])
def test_another_type_is_a_mistake(value):
    with pytest.raises(TypeError, match="cache"):
        open_stream("http://127.0.0.1:9/x", cache=value)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [("max_size", -1, ValueError), ("max_size", "much", ValueError), ("max_size", "10%", ValueError),
     ("min_free", "101%", ValueError), ("min_free", -5, ValueError), ("max_size", 1.5, TypeError),
     ("offline", 1, TypeError)],
)  # fmt: skip
def test_a_setting_that_is_none_is_named(field, value, kind):
    with pytest.raises(kind, match=field):
        CacheOptions("x", **{field: value})


def test_a_variable_that_is_none_is_named(monkeypatch, folder):
    for name, value in (("SIZE", "much"), ("MIN_FREE", "-1"), ("OFFLINE", "perhaps")):
        monkeypatch.setenv(f"TENSORIZER_CACHE_{name}", value)
        with pytest.raises(ValueError, match=f"TENSORIZER_CACHE_{name}"):
            open_stream("http://127.0.0.1:9/x", cache=folder)
        monkeypatch.delenv(f"TENSORIZER_CACHE_{name}")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("500GB", 500 * 10**9), ("200GiB", 200 << 30), ("1.5k", 1500), ("7", 7), ("2 MiB", 2 << 20), (12, 12)],
)
def test_sizes_are_numbers_or_text(text, nbytes):
    from tensorizer._io.cache import parse_size

    assert parse_size("max_size", text) == nbytes


def test_without_a_cache_nothing_of_it_is_imported(site, tmp_path):
    (site.root / "a").write_bytes(b"x")
    program = f"""
import sys
from tensorizer.stream_io import open_stream
open_stream("{site.url}/a").read()
assert not [name for name in sys.modules if name.startswith("tensorizer") and name.endswith("cache")]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# -- what is on the disk -----------------------------------------------------------------------------------------------


def test_folders_and_files_are_the_users_alone_whatever_the_umask(site, folder):
    write(site.root / "m.tensors", tensors())
    before = os.umask(0)
    try:
        load(f"{site.url}/m.tensors", folder)
    finally:
        os.umask(before)
    for path in [folder, *folder.rglob("*")]:
        found = path.stat()
        assert found.st_mode & 0o7777 == (0o700 if path.is_dir() else 0o600), path
        assert found.st_uid == os.geteuid()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_folder_that_others_can_write_to_turns_the_cache_off(depth, site, folder, caplog):
    wanted = write(site.root / "m.tensors", tensors())
    load(f"{site.url}/m.tensors", folder)
    place = [entries(folder)[0], *entries(folder)[0].parents][4 - depth]
    place.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        found, file = load(f"{site.url}/m.tensors", folder)
        load(f"{site.url}/m.tensors", folder)
    assert same(found, wanted)
    assert file.cached_bytes_read == 0
    assert len([record for record in caplog.records if "can be written by others" in record.message]) == 1


def test_a_link_in_place_of_a_folder_turns_the_cache_off(site, folder, tmp_path, caplog):
    wanted = write(site.root / "m.tensors", tensors())
    (tmp_path / "elsewhere").mkdir()
    folder.mkdir()
    (folder / "tensorizer-1").symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        assert same(load(f"{site.url}/m.tensors", folder)[0], wanted)
    assert "symbolic link" in caplog.text
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_encrypted_files_are_kept_as_they_came(site, folder):
    wanted = write(site.root / "m.tensors", tensors(), encryption=EncryptionParams(b"k" * 32))
    key = DecryptionParams.from_key(b"k" * 32)
    for _ in range(2):
        found, file = load(f"{site.url}/m.tensors", folder, encryption=key)
        assert same(found, wanted)
    assert file.cached_bytes_read >= 12 * MIB
    data = (entries(folder)[0] / "data").read_bytes()
    assert data == (site.root / "m.tensors").read_bytes()
    for tensor in wanted.values():
        assert tensor.numpy().tobytes()[:64] not in data


def test_no_secret_of_a_url_is_kept_and_signatures_share_an_entry(site, folder):
    write(site.root / "m.tensors", tensors())
    host = site.url.partition("://")[2]
    for signature in ("hushhush1", "hushhush2"):
        uri = f"http://someone:hushpass@{host}/m.tensors?X-Amz-Signature={signature}&token=hushtoken"
        load(uri, folder)
    assert len(entries(folder)) == 1
    for path in folder.rglob("*"):
        assert "hush" not in path.name
        if path.is_file():
            assert b"hush" not in path.read_bytes()


def test_locations_leave_out_what_is_no_part_of_an_object():
    from tensorizer._io.cache import http_location

    assert http_location("HTTPS://u:p@Host.Example:443/A%20b?x=1&X-AMZ-Date=2&SIG=3&y=#f") == (
        "https://host.example/A%20b?x=1&y="
    )
    assert http_location("http://h:8080") == "http://h:8080/"


def test_damaged_bytes_are_an_error_once(site, folder):
    wanted = write(site.root / "m.tensors", tensors())
    load(f"{site.url}/m.tensors", folder)
    data = entries(folder)[0] / "data"
    with data.open("r+b") as file:
        file.seek(9 * MIB)
        byte = file.read(1)
        file.seek(9 * MIB)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(HashMismatchError, match=r"the cached copy was removed; try again$"):
        load(f"{site.url}/m.tensors", folder, verify_hash=True)
    assert entries(folder) == []
    assert same(load(f"{site.url}/m.tensors", folder, verify_hash=True)[0], wanted)


def test_a_damaged_index_is_an_error_once(site, folder):
    wanted = write(site.root / "m.tensors", tensors())
    load(f"{site.url}/m.tensors", folder)
    with (entries(folder)[0] / "data").open("r+b") as file:
        file.write(b"\0" * 4096)
    with pytest.raises(ValueError, match=r"the cached copy was removed; try again$"):
        load(f"{site.url}/m.tensors", folder)
    assert same(load(f"{site.url}/m.tensors", folder)[0], wanted)


@pytest.mark.parametrize("name", ["map", "data", "about.json"])
@pytest.mark.parametrize("how", ["cut", "gone", "zeros"])
def test_damaged_files_of_the_cache_are_a_miss(name, how, site, folder):
    wanted = write(site.root / "m.tensors", tensors())
    load(f"{site.url}/m.tensors", folder)
    path = entries(folder)[0] / name
    if how == "cut":
        os.truncate(path, 30)
    elif how == "gone":
        path.unlink()
    elif name != "data":
        path.write_bytes(b"\0" * path.stat().st_size)
    site.requests()
    found, file = load(f"{site.url}/m.tensors", folder)
    assert same(found, wanted)
    if (name, how) != ("data", "zeros"):
        assert file.cached_bytes_read == 0
    assert same(load(f"{site.url}/m.tensors", folder)[0], wanted)


@pytest.mark.parametrize("durable", [True, False])
def test_after_a_crash_of_the_machine_only_durable_blocks_count(durable, site, folder):
    wanted = write(site.root / "m.tensors", tensors())
    result(start(f"{site.url}/m.tensors", folder))  # a process that has ended notes nothing any more
    entry = entries(folder)[0]
    with (entry / "map").open("r+b") as file:
        half = ((entry / "map").stat().st_size - 64) // 2
        file.seek(24)
        file.write(b"another boot")
        file.seek(64)
        present = file.read(half)
        file.write(present if durable else b"\0" * half)
    found, file = load(f"{site.url}/m.tensors", folder)
    assert same(found, wanted)
    assert (file.cached_bytes_read >= 12 * MIB) is durable
    assert durable or file.cached_bytes_read == 0
    assert load(f"{site.url}/m.tensors", folder)[1].cached_bytes_read >= 12 * MIB


# -- several processes -------------------------------------------------------------------------------------------------

LOADER = """
import hashlib, sys, time
from tensorizer import TensorDeserializer
print("ready", flush=True)
with TensorDeserializer(sys.argv[1], device="cpu", stream_options={"cache": sys.argv[2]}) as file:
    digest = hashlib.sha256()
    for name in sorted(file):
        digest.update(file[name].detach().numpy().tobytes())
    print(digest.hexdigest(), file.cached_bytes_read, time.monotonic())
"""


def start(uri, folder, program=LOADER):
    command = [sys.executable, "-c", textwrap.dedent(program), uri, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return [word for word in out.split() if word != "ready"]


def digest_of(content):
    import hashlib

    digest = hashlib.sha256()
    for name in sorted(content):
        digest.update(content[name].numpy().tobytes())
    return digest.hexdigest()


@needs_nginx
def test_four_processes_that_start_together_share_what_they_read(tmp_path, folder):
    with serving(tmp_path, "limit_rate 8m;") as site:
        wanted = write(site.root / "m.tensors", tensors(36 * MIB))
        size = (site.root / "m.tensors").stat().st_size
        processes = [start(f"{site.url}/m.tensors", folder) for _ in range(4)]
        assert {result(process)[0] for process in processes} == {digest_of(wanted)}
        # Alone it is read about once. A disk that other tests keep busy makes processes leave blocks out.
        assert sent(site.requests()) <= 2 * size


@needs_nginx
def test_who_waits_for_a_process_that_is_killed_goes_on_itself(tmp_path, folder):
    with serving(tmp_path, "limit_rate 1m;") as site:
        wanted = write(site.root / "m.tensors", tensors(144 * MIB))
        first = start(f"{site.url}/m.tensors", folder)
        while not entries(folder) or not any((entries(folder)[0] / "map").read_bytes()[66:]):
            assert first.poll() is None, first.communicate()
            time.sleep(0.02)
        second = start(f"{site.url}/m.tensors", folder)
        assert second.stdout is not None
        second.stdout.readline()
        time.sleep(0.5)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        killed = time.monotonic()
        digest, _, ended = result(second)
        assert digest == digest_of(wanted)
        transfer = 144 / (8 * 1)  # connections, and MiB/s of each
        assert float(ended) - killed < 3 + transfer
        found, file = load(f"{site.url}/m.tensors", folder)
        assert same(found, wanted)
        assert file.cached_bytes_read >= 144 * MIB


@needs_nginx
def test_a_process_that_is_killed_at_any_moment_leaves_nothing_wrong(tmp_path, folder):
    with serving(tmp_path, "limit_rate 20m;") as site:
        wanted = write(site.root / "m.tensors", tensors(24 * MIB))
        for round_number in range(6):
            uri = f"{site.url}/m.tensors?round={round_number}"
            process = start(uri, folder)
            while process.poll() is None and len(entries(folder)) <= round_number:
                time.sleep(0.001)
            time.sleep(0.012 * round_number)
            process.kill()
            process.communicate()
            found, _ = load(uri, folder, verify_hash=True)
            assert same(found, wanted)


@needs_nginx
def test_control_c_ends_the_wait_for_another_process(tmp_path, folder):
    with serving(tmp_path, "limit_rate 100k;") as site:  # a quarter of a minute, or more
        write(site.root / "m.tensors", tensors(24 * MIB))
        first = start(f"{site.url}/m.tensors", folder)
        while not entries(folder):
            time.sleep(0.02)
        program = """
            import sys, time
            from tensorizer import TensorDeserializer
            print("ready", flush=True)
            try:
                TensorDeserializer(sys.argv[1], device="cpu", stream_options={"cache": sys.argv[2]})
            except KeyboardInterrupt:
                print(time.monotonic(), flush=True)
        """
        second = start(f"{site.url}/m.tensors", folder, program)
        assert second.stdout is not None
        second.stdout.readline()
        time.sleep(1.0)
        second.send_signal(signal.SIGINT)
        begin = time.monotonic()
        (ended,) = result(second)
        first.kill()
        first.communicate()
        assert float(ended) - begin < 5, "it waited for the other process"


# -- bounds and trouble ------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(path)], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted: {made.stderr.decode()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_a_warning_and_no_error(small_disk, site, caplog):
    wanted = write(site.root / "m.tensors", tensors())
    folder = small_disk / "cache"
    for _ in range(3):
        with caplog.at_level(logging.WARNING):
            assert same(load(f"{site.url}/m.tensors", folder, verify_hash=True)[0], wanted)
    warnings = [record for record in caplog.records if record.name == "tensorizer.cache"]
    assert len(warnings) == 1
    assert "No space left" in warnings[0].message


def test_a_small_disk_of_which_some_stays_free_gets_nothing(small_disk, site):
    wanted = write(site.root / "m.tensors", tensors())
    cache = CacheOptions(small_disk / "cache", min_free="10%")
    assert same(load(f"{site.url}/m.tensors", cache)[0], wanted)
    assert entries(small_disk / "cache") == []


def test_room_for_one_and_a_half_holds_the_last_one(site, folder):
    cache = CacheOptions(folder, max_size=18 * MIB)
    first = write(site.root / "a.tensors", tensors())
    second = write(site.root / "b.tensors", tensors(seed=1))
    load(f"{site.url}/a.tensors", cache)
    (of_first,) = entries(folder)
    assert same(load(f"{site.url}/b.tensors", cache)[0], second)
    (of_second,) = entries(folder)
    assert of_first != of_second
    with TensorDeserializer(
        f"{site.url}/b.tensors", device="cpu", lazy_load=True, stream_options={"cache": cache}
    ) as file:
        found, other = load(f"{site.url}/a.tensors", cache)
        assert same(found, first)
        assert entries(folder) == [of_second]
        assert torch.equal(file["t1"], second["t1"])
    assert other.cached_bytes_read == 0


def test_the_least_recently_used_goes_first_and_old_versions_before_it(site, folder):
    cache = CacheOptions(folder, max_size=42 * MIB)
    for name in "abc":
        write(site.root / f"{name}.tensors", tensors(seed=ord(name)))
    load(f"{site.url}/a.tensors", cache)
    (of_a,) = entries(folder)
    load(f"{site.url}/b.tensors", cache)
    long_ago = time.time() - 1000
    os.utime(of_a / "about.json", (long_ago, long_ago))
    write(site.root / "b.tensors", tensors(seed=77))
    later = time.time() + 5
    os.utime(site.root / "b.tensors", (later, later))  # nginx makes the ETag of size and second
    load(f"{site.url}/b.tensors", cache)
    assert len(entries(folder)) == 3
    load(f"{site.url}/c.tensors", cache)
    assert of_a in entries(folder), "the old version of b went"
    load(f"{site.url}/b.tensors?again", cache)
    assert of_a not in entries(folder)


def test_a_folder_that_cannot_be_used_is_a_warning_and_offline_an_error(site, tmp_path, caplog):
    wanted = write(site.root / "m.tensors", tensors())
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        assert same(load(f"{site.url}/m.tensors", tmp_path / "file")[0], wanted)
    assert "is not used" in caplog.text
    with pytest.raises(StreamError, match="offline"):
        load(f"{site.url}/m.tensors", CacheOptions(tmp_path / "file", offline=True))


def test_redis_is_not_cached(folder, caplog):
    with caplog.at_level(logging.INFO), pytest.raises(OSError):
        open_stream("redis://127.0.0.1:9/x", cache=folder)
    assert "Redis tells no versions" in caplog.text
    assert not folder.exists() or files_below(folder) == []


def test_mapping_a_cached_object_is_refused(site, folder):
    write(site.root / "m.tensors", tensors())
    load(f"{site.url}/m.tensors", folder)
    with pytest.raises(ValueError, match="mapped"):
        load(f"{site.url}/m.tensors", folder, mmap=True)


def test_one_line_of_a_log_says_what_came_from_where(site, folder, caplog):
    write(site.root / "m.tensors", tensors())
    with caplog.at_level(logging.DEBUG, logger="tensorizer.cache"):
        load(f"{site.url}/m.tensors", folder)
        load(f"{site.url}/m.tensors", folder)
    lines = [record.message for record in caplog.records if record.name == "tensorizer.cache"]
    assert len(lines) == 2
    assert re.search(r": 0 bytes from the cache, \d{8} from the network, \d{8} stored, 0 left out", lines[0])
    assert re.search(r": \d{8} bytes from the cache, 0 from the network, 0 stored, 0 left out", lines[1])


def test_the_random_bytes_of_an_object_come_back_by_any_reads(site, folder):
    content = random_bytes(3 * MIB + 123)
    (site.root / "a").write_bytes(content)
    os.utime(site.root / "a", (time.time() - 3600,) * 2)
    for _ in range(2):
        with open_stream(f"{site.url}/a", cache=folder) as stream:
            for offset, nbytes in ((2 * MIB - 5, 10), (0, 7), (3 * MIB, 200), (MIB, MIB), (17, 3 * MIB)):
                stream.seek(offset)
                assert stream.read(nbytes) == content[offset : offset + nbytes]


assert stream_io.CacheOptions is CacheOptions


# -- the command line and the module -----------------------------------------------------------------------------------


def command(*arguments, status=0, capsys=None):
    from tensorizer.cli.main import main

    assert main(["cache", *map(str, arguments)]) == status
    out = capsys.readouterr().out
    return json.loads(out) if "--json" in arguments else out


def test_the_command_lists_adds_verifies_and_prunes(site, folder, capsys, monkeypatch):
    wanted = write(site.root / "a.tensors", tensors())
    write(site.root / "b.tensors", tensors(4 * MIB, seed=1))
    assert command("ls", "--cache", folder, "--json", capsys=capsys)["count"] == 0
    command("add", f"{site.url}/a.tensors", f"{site.url}/b.tensors", "--cache", folder, capsys=capsys)
    listed = command("ls", "--cache", folder, "--json", capsys=capsys)
    assert [entry["state"] for entry in listed["entries"]] == ["complete", "complete"]
    assert all(entry["location"].startswith(site.url) for entry in listed["entries"])
    assert listed["cached"] == sum((site.root / name).stat().st_size for name in ("a.tensors", "b.tensors"))
    assert "2 entries" in command("ls", "--cache", folder, capsys=capsys)
    assert same(load(f"{site.url}/a.tensors", CacheOptions(folder, offline=True))[0], wanted)
    monkeypatch.setenv("TENSORIZER_CACHE", str(folder))
    checked = command("verify", "--json", capsys=capsys)
    assert [entry["checked"] for entry in checked["entries"]] == [6, 6]
    with TensorDeserializer(f"{site.url}/a.tensors", device="cpu", lazy_load=True):
        assert {e["state"] for e in command("ls", "--json", capsys=capsys)["entries"]} == {"in use", "complete"}
        pruned = command("prune", "--all", "--json", "--dry-run", capsys=capsys)
        assert [len(pruned["removed"]), len(pruned["skipped"])] == [1, 1]
        pruned = command("prune", "--all", "--json", capsys=capsys)
        assert [entry["location"] for entry in pruned["skipped"]] == [f"{site.url}/a.tensors"]
    assert len(entries(folder)) == 1
    command("prune", "--location", "*/nothing", capsys=capsys)
    command("prune", "--older-than", "1", capsys=capsys)
    assert len(entries(folder)) == 1
    command("prune", "--max-size", "1MB", capsys=capsys)
    assert entries(folder) == []


def test_pruning_by_default_removes_old_versions_and_left_overs(site, folder, capsys):
    write(site.root / "a.tensors", tensors())
    load(f"{site.url}/a.tensors", folder)
    write(site.root / "a.tensors", tensors(4 * MIB))
    load(f"{site.url}/a.tensors", folder)
    user = entries(folder)[0].parents[1]
    for name in (".new-0123456789abcdef", ".del-0123456789abcdef", ".new-0000000000000000", "other"):
        (user / name).mkdir()
        (user / name / "data").write_bytes(b"x")
    for name in (".new-0123456789abcdef", ".del-0123456789abcdef", "other"):
        os.utime(user / name, (time.time() - 4000,) * 2)
    command("prune", "--cache", folder, capsys=capsys)
    assert len(entries(folder)) == 1
    kept = {path.name for path in user.iterdir() if len(path.name) != 32}
    assert kept == {".new-0000000000000000", "other", "lock"}


def test_verifying_removes_what_is_damaged_and_takes_parts_for_what_they_are(site, folder, capsys):
    content = tensors(48 * MIB)
    write(site.root / "a.tensors", content)
    write(site.root / "b.tensors", tensors())
    write(site.root / "c.tensors", tensors(), encryption=EncryptionParams(b"k" * 32))
    with TensorDeserializer(
        f"{site.url}/a.tensors", device="cpu", lazy_load=True, stream_options={"cache": folder}
    ) as file:
        assert torch.equal(file["t2"], content["t2"])
    load(f"{site.url}/b.tensors", folder)
    (damaged,) = [p for p in entries(folder) if "b.tensors" in (p / "about.json").read_text()]
    with open_stream(f"{site.url}/c.tensors", cache=folder) as stream:
        stream.read()
    with (damaged / "data").open("r+b") as data:
        data.seek(9 * MIB)
        data.write(b"\0" * 100)
    found = command("verify", "--cache", folder, "--json", status=1, capsys=capsys)
    by_name = {entry["location"][-9:]: entry for entry in found["entries"]}
    assert by_name["a.tensors"]["problem"] is None
    assert by_name["a.tensors"]["checked"] == 1
    assert by_name["b.tensors"]["problem"]
    assert by_name["c.tensors"]["problem"] is None
    assert damaged not in entries(folder)
    assert len(entries(folder)) == 2
    command("verify", "--cache", folder, capsys=capsys)


def test_adding_completes_what_is_partial_and_says_what_cannot_be_stored(site, folder, capsys, tmp_path):
    content = tensors(48 * MIB)
    write(site.root / "a.tensors", content)
    size = (site.root / "a.tensors").stat().st_size
    uri = f"{site.url}/a.tensors"
    with TensorDeserializer(uri, device="cpu", lazy_load=True, stream_options={"cache": folder}) as file:
        assert torch.equal(file["t2"], content["t2"])
    command("add", uri, "--cache", folder, capsys=capsys)
    assert sent(site.requests()) <= size + BLOCK
    nbytes = (entries(folder)[0] / "map").read_bytes()[64:]
    assert nbytes[: len(nbytes) // 2] == nbytes[len(nbytes) // 2 :], "all of it is durable"
    command("add", f"{site.url}/nothing", "--cache", folder, status=3, capsys=capsys)
    with FaultyServer(b"x" * 1000, etag=None) as server:
        command("add", server.url, "--cache", folder, status=3, capsys=capsys)


def test_the_example_fills_a_cache_and_loads_offline(site, folder):
    write(site.root / "a.tensors", tensors())
    example = EXAMPLES / "node_cache.py"
    for step in ("fill", "load"):
        site.requests()
        command = [sys.executable, str(example), step, str(folder), f"{site.url}/a.tensors"]
        out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert re.search(r"6 tensors, 12,\d+,\d+ bytes from the cache", out)
    assert site.requests() == []


def test_without_a_folder_the_command_is_used_wrongly(capsys):
    command("ls", status=2, capsys=capsys)


def test_a_thousand_entries_are_listed_by_one_scan(folder):
    from tensorizer import _C

    folder.mkdir()
    cache = _C.CacheFolder(str(folder), True)
    user = folder / "tensorizer-1" / str(os.geteuid())
    for i in range(1000):
        place = user / f"{i:032x}" / ("0" * 32)
        place.mkdir(parents=True, mode=0o700)
        for name in ("data", "map", "about.json"):
            (place / name).write_bytes(b"")
    assert len(cache.scan()) == 1000
