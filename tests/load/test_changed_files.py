"""Local files that are written to while they are loaded: never a mix of two contents without an error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import samples
import torch
from mounts import require_mounts, with_mounts
from samples import assert_same, load

from tensorizer import TensorDeserializer, TensorSerializer, errors

OLD = {name: torch.full((300_000,), 1.0) for name in "abc"}
NEW = {name: torch.full((300_000,), 2.0) for name in "abc"}


def overwrite(path, data: bytes) -> None:
    """In place, as ``cp`` does: the same inode, other bytes."""
    with open(path, "rb+") as stream:
        stream.write(data)
        stream.truncate()


def touch_later(path) -> None:
    """Clocks of file systems tick every few milliseconds: what happens within one tick gets its own time here."""
    now = os.stat(path)
    os.utime(path, ns=(now.st_atime_ns, now.st_mtime_ns + 10_000_000))


@pytest.mark.parametrize("options", [{}, {"verify_hash": True}, {"mmap": True}], ids=str)
@pytest.mark.parametrize("content", ["another file", "damage"])
def test_a_file_that_was_overwritten_since_it_was_opened_is_an_error_that_says_so(tmp_path, options, content):
    path = samples.write_state_dict(tmp_path / "f", OLD)
    new = samples.state_dict_bytes(NEW) if content == "another file" else b"\xff" * path.stat().st_size
    with TensorDeserializer(path, device="cpu", lazy_load=True, **options) as deserializer:
        if not options.get("mmap"):
            assert_same(deserializer["a"], OLD["a"])
        overwrite(path, new)
        touch_later(path)
        with pytest.raises(errors.StreamError, match="changed while it was being loaded: it was written to") as caught:
            deserializer["b"]
        assert str(path) in str(caught.value)
    if content == "another file":
        assert_same(load(path), NEW)


def test_a_longer_or_shorter_content_is_an_error(tmp_path):
    other = samples.state_dict_bytes({"z": torch.ones(1), **NEW})
    alike = samples.state_dict_bytes({**NEW, "d": torch.ones(10)}, hashes=None)
    for data in (other, alike, other[:2_000_000], alike[:2_000_000]):
        path = samples.write_state_dict(tmp_path / "f", OLD)
        with TensorDeserializer(path, device="cpu", lazy_load=True) as deserializer:
            overwrite(path, data)
            with pytest.raises(OSError, match="changed while it was being loaded"):
                deserializer["a"]


@pytest.mark.parametrize("hashes", [None, {"sha256", "crc32"}], ids=["without digests", "with digests"])
def test_a_file_that_grew_or_was_cut_is_an_error_for_what_was_there_before_too(tmp_path, hashes):
    path = tmp_path / "f"
    serializer = TensorSerializer(path, hashes=hashes, fsync=False)
    serializer.write_state_dict(OLD)
    with TensorDeserializer(path, device="cpu", lazy_load=True, verify_hash=hashes is not None) as deserializer:
        assert_same(deserializer["a"], OLD["a"])
        serializer.write_state_dict({"more": torch.ones(100)})
        serializer.close()
        with pytest.raises(errors.StreamError, match="changed while it was being loaded: it had"):
            deserializer["b"]
        os.truncate(path, 2_000_000)
        with pytest.raises(errors.TruncatedError, match="changed while it was being loaded"):
            deserializer["b"]


def test_a_file_that_is_read_renamed_or_replaced_goes_on_being_read_as_it_was(tmp_path):
    path = samples.write_state_dict(tmp_path / "f", OLD)
    os.chmod(path, 0o600)
    with TensorDeserializer(path, device="cpu", lazy_load=True) as deserializer:
        os.chmod(path, 0o644)
        os.link(path, tmp_path / "other name")
        assert_same(deserializer["a"], OLD["a"])
        load(path)
        assert_same(deserializer["b"], OLD["b"])
        samples.write_state_dict(path, NEW)
        os.unlink(path)
        assert_same(deserializer.tree(), OLD)


COLD = """
import os, sys, time
from tensorizer import _C
with open(sys.argv[1], "rb") as file:
    os.fsync(file.fileno())
    for attempt in range(100):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        child = os.fork()
        if child == 0:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            os._exit(int(_C.FileSource(file.fileno(), "f").in_memory))
        cached = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not cached:
            break
        time.sleep(0.02)  # the kernel keeps pages now and then that it was asked to drop
    file.read()
    source = _C.FileSource(file.fileno(), "f")
    print(cached, int(source.in_memory), source.concurrency == _C.cpu_quota())
"""


def test_a_file_of_somebody_else_that_is_not_cached_is_not_taken_for_cached(fresh_process, tmp_path):
    """mincore() says that all of it is, where the process neither owns the file nor may write to it."""
    path = samples.write_state_dict(tmp_path / "f", {"a": torch.ones(4 << 20)})
    path.chmod(0o444)
    file_system = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=False).stdout
    if file_system.strip() in ("tmpfs", "ramfs"):
        pytest.skip("a file in memory is never dropped from it")
    done = fresh_process(COLD, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1", "True"]


WITHOUT_NOWAIT = """
import os, sys, time
from tensorizer import _C
found = []
for path in sys.argv[1:]:
    with open(path, "wb+") as file:
        file.write(b"x" * (4 << 20))
        file.flush()
        os.fsync(file.fileno())
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError:
            found.append(int(_C.FileSource(file.fileno(), "f").in_memory))
            for attempt in range(100):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                cached = int(_C.FileSource(file.fileno(), "f").in_memory)
                if not cached:
                    break
                time.sleep(0.02)
            found.append(cached)
print(*found)
"""


def test_files_of_containers_and_in_memory_are_cached_when_they_are(tmp_path):
    """overlayfs and tmpfs do not say whether a read would wait; nothing is ever dropped from the latter."""
    require_mounts()
    folders = [tmp_path / name for name in ("lower", "upper", "work", "overlay", "tmpfs")]
    for folder in folders:
        folder.mkdir()
    lower, upper, work, overlay, tmpfs = folders
    mounts = (
        f"mount -t overlay none -o lowerdir={lower},upperdir={upper},workdir={work} {overlay}\n"
        f"mount -t tmpfs none {tmpfs}"
    )
    (tmp_path / "program.py").write_text(WITHOUT_NOWAIT)
    command = with_mounts(mounts, sys.executable, tmp_path / "program.py", overlay / "f", tmpfs / "f")
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() in (["1", "0", "1", "1"], ["1", "0"], ["1", "1"], [])  # kernels learn to say it
