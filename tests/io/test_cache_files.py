"""The cache of the node: what is on the disk, and what is believed of it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource

import cache_tools
import pytest
import safetensors.torch as st
from cache_tools import MIB, entries, load, same, tensors, write
from servers.http_faults import FaultyServer

from tensorizer import DecryptionParams, EncryptionParams, SigningKey, TensorDeserializer, sign
from tensorizer.errors import FormatError, HashMismatchError

environment, folder, site = cache_tools.environment, cache_tools.folder, cache_tools.site


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
    from tensorizer._io.node_cache import http_location

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


def test_bytes_that_fail_a_check_as_they_come_are_not_kept(tmp_path, folder):
    wanted = write(tmp_path / "m.tensors", tensors())
    right = (tmp_path / "m.tensors").read_bytes()
    wrong = bytearray(right)
    wrong[9 * MIB] ^= 1
    with FaultyServer(bytes(wrong), etag='"one"') as server:
        with pytest.raises(HashMismatchError, match="tensor"):
            load(f"{server.url}/m.tensors", folder, verify_hash=True)
        server.content = right
        assert entries(folder) == []
        assert same(load(f"{server.url}/m.tensors", folder)[0], wanted)


def test_a_damaged_index_is_an_error_once(site, folder):
    wanted = write(site.root / "m.tensors", tensors())
    load(f"{site.url}/m.tensors", folder)
    with (entries(folder)[0] / "data").open("r+b") as file:
        file.write(b"\0" * 4096)
    with pytest.raises(ValueError, match=r"the cached copy was removed; try again$"):
        load(f"{site.url}/m.tensors", folder)
    assert same(load(f"{site.url}/m.tensors", folder)[0], wanted)


def test_damaged_files_beside_the_tensors_are_an_error_once(site, folder):
    wanted = write(site.root / "m.tensors", tensors(MIB))
    key = SigningKey.generate()
    sign(site.root / "m.tensors", key)
    st.save_file(wanted, site.root / "m-1.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(wanted, "m-1.safetensors")}
    (site.root / "m.safetensors.index.json").write_text(json.dumps(index))
    for path in site.root.iterdir():
        os.utime(path, (1e9, 1e9))
    for name, beside, options in (
        ("m.tensors", "m.tensors.sig", {"public_key": key.public_key}),
        ("m.safetensors.index.json", "m.safetensors.index.json", {}),
    ):
        load(f"{site.url}/{name}", folder, **options)
        (copy,) = [entry for entry in entries(folder) if f'/{beside}"' in (entry / "about.json").read_text()]
        with (copy / "data").open("r+b") as file:
            file.seek(30)
            file.write(b"\0\0")
        with pytest.raises(FormatError, match=r"the cached copy was removed; try again$"):
            load(f"{site.url}/{name}", folder, **options)
        assert same(load(f"{site.url}/{name}", folder, **options)[0], wanted)


@pytest.mark.parametrize("name", ["lock", "data", "about.json"])
@pytest.mark.parametrize("how", ["cut", "gone", "zeros"])
def test_damaged_files_of_the_cache_are_a_miss(name, how, site, folder):
    wanted = write(site.root / "m.tensors", tensors())
    load(f"{site.url}/m.tensors", folder)
    path = entries(folder)[0] / name
    if how == "cut":
        os.truncate(path, path.stat().st_size // 2 + 30)
    elif how == "gone":
        path.unlink()
    elif name != "data":
        path.write_bytes(b"\0" * path.stat().st_size)
    site.requests()
    found, file = load(f"{site.url}/m.tensors", folder)
    assert same(found, wanted)
    is_hit = (name, how) in {("data", "zeros"), ("lock", "zeros"), ("lock", "cut")}
    assert (file.cached_bytes_read > 0) is is_hit
    assert same(load(f"{site.url}/m.tensors", folder)[0], wanted)


def test_an_entry_stays_where_only_the_process_has_no_descriptors_left(site, folder):
    from tensorizer import _C

    write(site.root / "m.tensors", tensors(MIB))
    load(f"{site.url}/m.tensors", folder)
    (entry,) = entries(folder)
    cache = _C.CacheFolder(str(folder), False)
    nbytes = (entry / "data").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = os.dup(0)
    os.close(first)
    refused = 0
    for more in range(8):
        resource.setrlimit(resource.RLIMIT_NOFILE, (first + more, before[1]))
        try:
            _C.CacheSource.open(
                cache, None, location=entry.parent.name, version=entry.name, nbytes=nbytes, about="",
                max_nbytes=None, min_free_nbytes=0, name="m",
            )  # fmt: skip
        except OSError:
            refused += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert entries(folder) == [entry], more
    assert refused > 1


def test_connections_keep_half_of_the_descriptors(tmp_path, site, folder, caplog):
    for i in range(40):
        write(site.root / f"{i}.tensors", tensors(MIB))
        load(f"{site.url}/{i}.tensors", folder)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_open = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * is_open + 160, before[1]))
    try:
        with contextlib.ExitStack() as stack:
            files = [
                stack.enter_context(
                    TensorDeserializer(f"{site.url}/{i}.tensors", device="cpu", lazy_load=True,
                                       stream_options={"cache": folder})
                )
                for i in range(40)
            ]  # fmt: skip
            for file in files:
                assert same(dict(file), tensors(MIB))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    warnings = [record.message for record in caplog.records if record.name == "tensorizer.cache"]
    assert len(warnings) == 1
    assert "more than half of the" in warnings[0]
    assert 10 <= sum(file.cached_bytes_read > 0 for file in files) < 40
