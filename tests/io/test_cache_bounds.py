"""The cache of the node: its bounds, and disks and folders that make trouble."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import time

import cache_tools
import pytest
import torch
from cache_tools import MIB, entries, files_below, load, same, tensors, write
from http_tools import random_bytes
from servers import needs
from servers.fuse import fuse_folder
from servers.http_faults import FaultyServer, Reply
from servers.redis_server import RedisServer, redis_is_installed

from tensorizer import TensorDeserializer
from tensorizer.errors import StreamError, StreamNotFoundError
from tensorizer.stream_io import CacheOptions, open_stream

environment, folder, site = cache_tools.environment, cache_tools.folder, cache_tools.site


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


def test_room_that_cannot_be_made_costs_no_entry(site, folder):
    write(site.root / "a.tensors", tensors())
    load(f"{site.url}/a.tensors", folder)
    wanted = write(site.root / "b.tensors", tensors(seed=1))
    (of_a,) = entries(folder)
    assert same(load(f"{site.url}/b.tensors", CacheOptions(folder, min_free="100%"))[0], wanted)
    assert entries(folder) == [of_a]
    write(site.root / "c.tensors", tensors(4 * MIB))
    with TensorDeserializer(f"{site.url}/a.tensors", device="cpu", lazy_load=True, stream_options={"cache": folder}):
        load(f"{site.url}/c.tensors", folder)
        load(f"{site.url}/b.tensors", CacheOptions(folder, max_size=20 * MIB))
        assert len(entries(folder)) == 2, "with what is open, there is no room, whatever else goes"


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


def test_a_folder_that_cannot_be_written_to_is_a_warning_and_offline_an_error_that_says_so(small_disk, site, caplog):
    wanted = write(site.root / "m.tensors", tensors(4 * MIB))
    load(f"{site.url}/m.tensors", small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with caplog.at_level(logging.WARNING):
        found, file = load(f"{site.url}/m.tensors", small_disk)
    assert same(found, wanted)
    assert file.cached_bytes_read == 0
    assert "Read-only file system" in caplog.text
    with pytest.raises(StreamError, match="Read-only file system"):
        load(f"{site.url}/m.tensors", CacheOptions(small_disk, offline=True))


def test_a_folder_that_is_removed_under_an_open_file_is_begun_anew(site, folder):
    wanted = write(site.root / "m.tensors", tensors(24 * MIB))
    uri = f"{site.url}/m.tensors"
    load(uri, folder)
    with TensorDeserializer(uri, device="cpu", lazy_load=True, stream_options={"cache": folder}) as file:
        assert torch.equal(file["t0"], wanted["t0"])
        shutil.rmtree(folder)
        assert torch.equal(file["t5"], wanted["t5"])
        assert same(load(uri, folder)[0], wanted)
    assert len(entries(folder)) == 1
    assert load(uri, folder)[1].cached_bytes_read >= 24 * MIB


def test_a_folder_of_any_name_serves(site, tmp_path):
    from tensorizer import cache

    wanted = write(site.root / "m.tensors", tensors(MIB))
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xe9")
    for _ in range(2):
        found, file = load(f"{site.url}/m.tensors", folder)
        assert same(found, wanted)
    assert file.cached_bytes_read >= MIB
    (entry,) = cache.entries(folder)
    assert (entry.path / "data").exists()
    assert [len(found) for found in cache.prune(folder, all=True)] == [1, 0]


def test_an_object_of_a_size_that_no_disk_has_is_read_without_a_cache(tmp_path, folder):
    content = random_bytes(2 * MIB)
    absurd = Reply(headers={"Content-Range": f"bytes 0-1048575/{1 << 60}"})
    with (
        FaultyServer(content, default=absurd) as server,
        open_stream(f"{server.url}/m", cache=folder) as stream,
    ):
        assert stream.read(100) == content[:100]
    assert entries(folder) == []


def test_a_folder_that_a_program_serves_is_not_used(site, tmp_path, caplog):
    wanted = write(site.root / "m.tensors", tensors())
    folder = tmp_path / "served"
    folder.mkdir()
    with contextlib.ExitStack() as mounted:
        try:
            mounted.enter_context(fuse_folder(folder))
        except OSError as error:
            pytest.skip(f"no FUSE here: {error}")
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                found, file = load(f"{site.url}/m.tensors", folder)
                assert same(found, wanted)
        assert file.cached_bytes_read == 0
        with pytest.raises(StreamError, match="offline"):
            load(f"{site.url}/m.tensors", CacheOptions(folder, offline=True))
    warnings = [record.message for record in caplog.records if record.name == "tensorizer.cache"]
    assert len(warnings) == 1
    assert "is on a network file system (FUSE)" in warnings[0]


@pytest.mark.skipif(not redis_is_installed(), reason=needs("Redis"))
def test_redis_is_not_cached(folder, caplog):
    with RedisServer() as server, caplog.at_level(logging.INFO), pytest.raises(StreamNotFoundError):
        open_stream(server.uri("nobody"), cache=folder)
    assert "Redis tells no versions" in caplog.text
    assert not folder.exists() or files_below(folder) == []


@pytest.mark.parametrize(
    ("uri", "options"),
    [
        ("http://127.0.0.1:9/x", {"begin": 1}),
        ("redis://127.0.0.1:9/x", {}),
        ("s3://b/k", {"s3_extra_args": {"get": {"SSECustomerKey": "k" * 32}}}),
    ],
)
def test_offline_nobody_is_asked_for_what_is_never_cached(uri, options, folder):
    with pytest.raises(StreamNotFoundError, match="offline is set: "):
        open_stream(uri, cache=CacheOptions(folder, offline=True), **options)


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
    assert re.search(r": 0 bytes from the cache, \d{8} from the network, \d{8} stored$", lines[0])
    assert re.search(r": \d{8} bytes from the cache, 0 from the network, 0 stored$", lines[1])


def test_the_random_bytes_of_an_object_come_back_by_any_reads(site, folder):
    content = random_bytes(3 * MIB + 123)
    (site.root / "a").write_bytes(content)
    os.utime(site.root / "a", (time.time() - 3600,) * 2)
    for _ in range(2):
        with open_stream(f"{site.url}/a", cache=folder) as stream:
            for offset, nbytes in ((2 * MIB - 5, 10), (0, 7), (3 * MIB, 200), (MIB, MIB), (17, 3 * MIB)):
                stream.seek(offset)
                assert stream.read(nbytes) == content[offset : offset + nbytes]
