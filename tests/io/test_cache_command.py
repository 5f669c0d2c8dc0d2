"""The cache of the node: the command line and the module."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import cache_tools
import pytest
from cache_tools import MIB, entries, load, same, sent, tensors, write
from paths import EXAMPLES
from servers.http_faults import FaultyServer

from tensorizer import EncryptionParams, TensorDeserializer, cache
from tensorizer.stream_io import CacheOptions, open_stream

environment, folder, site = cache_tools.environment, cache_tools.folder, cache_tools.site


def command(*arguments, status=0, err="", capsys=None):
    from tensorizer.cli.main import main

    assert main(["cache", *map(str, arguments)]) == status
    out, said = capsys.readouterr()
    assert err in said
    return json.loads(out) if "--json" in arguments else out


def test_the_command_lists_adds_verifies_and_prunes(site, folder, capsys, monkeypatch):
    from tensorizer import cache

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
    assert cache.prune(all=True, location="").removed == []
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


def test_verifying_removes_what_is_damaged(site, folder, capsys):
    write(site.root / "a.tensors", tensors(4 * MIB))
    write(site.root / "b.tensors", tensors())
    write(site.root / "c.tensors", tensors(), encryption=EncryptionParams(b"k" * 32))
    load(f"{site.url}/a.tensors", folder)
    load(f"{site.url}/b.tensors", folder)
    (damaged,) = [p for p in entries(folder) if "b.tensors" in (p / "about.json").read_text()]
    with open_stream(f"{site.url}/c.tensors", cache=folder) as stream:
        stream.read()
    cache_tools.finish()
    with (damaged / "data").open("r+b") as data:
        data.seek(9 * MIB)
        data.write(b"\0" * 100)
    found = command("verify", "--cache", folder, "--json", status=1, capsys=capsys)
    by_name = {entry["location"][-9:]: entry for entry in found["entries"]}
    assert by_name["a.tensors"]["problem"] is None
    assert by_name["a.tensors"]["checked"] == 6
    assert by_name["b.tensors"]["problem"]
    assert by_name["c.tensors"]["problem"] is None
    assert damaged not in entries(folder)
    assert len(entries(folder)) == 2
    for path in entries(folder):
        os.utime(path / "about.json", (1e9, 1e9))
    command("verify", "--cache", folder, capsys=capsys)
    assert {(path / "about.json").stat().st_mtime for path in entries(folder)} == {1e9}, "checking is no use"


def test_adding_stores_what_is_not_there_and_says_what_cannot_be_stored(site, folder, capsys, tmp_path, monkeypatch):
    content = tensors(48 * MIB)
    write(site.root / "a.tensors", content)
    size = (site.root / "a.tensors").stat().st_size
    uri = f"{site.url}/a.tensors"
    for wanted in (size, 0):
        command("add", uri, "--cache", folder, capsys=capsys)
        assert sent(site.requests()) == wanted
    assert (entries(folder)[0] / "data").read_bytes() == (site.root / "a.tensors").read_bytes()
    command("add", f"{site.url}/nothing", "--cache", folder, status=3, capsys=capsys)
    with FaultyServer(b"x" * 1000, etag=None) as server:
        command("add", server.url, "--cache", folder, status=3, err="the server tells no version", capsys=capsys)
    write(site.root / "b.tensors", tensors())
    monkeypatch.setenv("TENSORIZER_CACHE_SIZE", "1MB")
    command("add", f"{site.url}/b.tensors", "--cache", folder, status=3, err="no room within its limits", capsys=capsys)
    (tmp_path / "file").write_bytes(b"x")
    command("add", tmp_path / "file", "--cache", folder, status=2, err="is a local file", capsys=capsys)
    monkeypatch.setenv("TENSORIZER_CACHE_OFFLINE", "1")
    command("add", uri, "--cache", folder, status=2, err="offline", capsys=capsys)


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
    command("ls", status=2, err="no cache: pass", capsys=capsys)


@pytest.mark.parametrize(
    "wrong", [("--max-size", "much"), ("--max-size", "-1"), ("--older-than", "-1"), ("--older-than", "nan")]
)
def test_what_prune_cannot_mean_is_refused_whatever_is_there(wrong, folder, capsys):
    command(
        "prune",
        "--cache",
        folder,
        f"{wrong[0]}={wrong[1]}",
        status=2,
        err=wrong[0],
        capsys=capsys,
    )


def test_sweeping_removes_what_a_killed_process_was_making_and_nothing_else(site, folder, capsys):
    write(site.root / "a.tensors", tensors(MIB))
    load(f"{site.url}/a.tensors", folder)
    (entry,) = entries(folder)
    places = {}
    for name, age in (("old", 4000), ("new", 0)):
        places[name] = entry.parent / name.encode().hex().zfill(32)
        places[name].mkdir(mode=0o700)
        for file in ("lock", "about.json", ".data.0123456789abcdef.tmp"):
            (places[name] / file).write_bytes(b"")
        os.utime(places[name] / "lock", (time.time() - age,) * 2)
    assert command("ls", "--cache", folder, "--json", capsys=capsys)["count"] == 1
    command("prune", "--cache", folder, capsys=capsys)
    assert {path.name for path in entry.parent.iterdir()} == {entry.name, places["new"].name}


def test_whatever_lies_in_an_entry_the_list_comes_to_its_end(site, folder, capsys):
    write(site.root / "a.tensors", tensors())
    load(f"{site.url}/a.tensors", folder)
    (entry,) = entries(folder)
    for about in (
        b"[" * 60000,
        b'{"confirmed": ' + b"9" * 400 + b"}",
        b"\xff",
        b"null",
        b'{"schema": 1, "size": 1e999}',
    ):
        (entry / "about.json").write_bytes(about)
        assert command("ls", "--cache", folder, "--json", capsys=capsys)["entries"][0]["location"] == "?"
    os.truncate(entry / "data", 1 << 43)
    (entry / "lock").unlink()
    os.mkfifo(entry / "lock")
    assert command("ls", "--cache", folder, "--json", capsys=capsys)["entries"][0]["cached"] == 0
    command("verify", "--cache", folder, status=1, capsys=capsys)
    assert entries(folder) == []


def test_a_thousand_entries_are_listed_by_one_scan(folder):
    from tensorizer import _C

    folder.mkdir()
    cache = _C.CacheFolder(str(folder), True)
    user = folder / "tensorizer-1" / str(os.geteuid())
    for i in range(1000):
        place = user / f"{i:032x}" / ("0" * 32)
        place.mkdir(parents=True, mode=0o700)
        for name in ("data", "lock", "about.json"):
            (place / name).write_bytes(b"")
    assert len(cache.scan()) == 1000


def test_an_entry_that_is_removed_while_the_cache_is_verified_has_no_problem(site, folder, monkeypatch):
    write(site.root / "m.tensors", tensors(MIB))
    load(f"{site.url}/m.tensors", folder)
    listed = cache._entries

    def list_and_remove(opened):
        found = listed(opened)
        monkeypatch.setattr(cache, "_entries", listed)
        assert len(cache.prune(folder, all=True).removed) == 1
        return found

    monkeypatch.setattr(cache, "_entries", list_and_remove)
    assert cache.verify(folder) == []
