"""Saves that fail or end early: errors of file objects, full disks, killed processes."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys

import pytest
import samples
import torch
from mounts import require_mounts, with_mounts
from samples import assert_same, load, tensor

from tensorizer import TensorSerializer, errors

OTHER = {"x": tensor((3,), seed=2)}


# --- failing devices -------------------------------------------------------------------------------------------------


class Full(samples.KeptBytesIO):
    """An object whose device is full after a while."""

    error: Exception = OSError(28, "No space left on device")

    def write(self, data) -> int:
        if self.tell() + len(memoryview(data).cast("B")) > 300_000:
            raise self.error
        return super().write(data)


def test_an_error_of_the_object_reaches_the_caller_as_it_is_and_the_last_complete_content_stays():
    stream = Full()
    with TensorSerializer(stream) as serializer:
        serializer.write_state_dict(OTHER)
        with pytest.raises(OSError, match="No space left") as caught:
            serializer.write_state_dict({"a": tensor((1 << 19,), torch.uint8)})
        assert caught.value.errno == 28
        assert_same(load(io.BytesIO(stream.getvalue()), verify_hash=True), OTHER)
    assert_same(load(io.BytesIO(stream.getvalue()), verify_hash=True), OTHER)
    stream = Full()
    stream.error = ZeroDivisionError("broken object")
    with TensorSerializer(stream) as serializer, pytest.raises(ZeroDivisionError, match="broken object"):
        serializer.write_state_dict({"a": tensor((1 << 19,), torch.uint8)})


class FailsOnce(samples.KeptBytesIO):
    """An object whose operation number `fails_at` raises, counted from `armed` on."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.fails_at, self.operations, self.armed = fails_at, 0, False

    def _count(self) -> None:
        self.operations += self.armed
        if self.armed and self.operations == self.fails_at:
            raise OSError(5, "Input/output error")

    def write(self, data) -> int:
        self._count()
        return super().write(data)

    def seek(self, *where) -> int:
        self._count()
        return super().seek(*where)

    def readinto(self, into) -> int:
        self._count()
        return super().readinto(into)

    def flush(self) -> None:
        self._count()
        super().flush()


CALLS = {
    "small": [{f"{call}.{i}": torch.full((300,), float(call)) for i in range(3)} for call in range(4)],
    "retagged": [{"0": torch.ones(5)}, {"1": torch.ones(6)}, {"2": torch.empty(1 << 33, 0)}, {"3": torch.ones(7)}],
    "outgrown": [
        {f"{call}.{'n' * 200}.{i}": torch.full((300,), float(call)) for i in range(1 + 60 * call)} for call in range(4)
    ],
}


@pytest.mark.parametrize("kind", CALLS)
def test_whichever_operation_of_an_object_fails_the_content_is_that_of_the_calls_that_succeeded(kind):
    for fails_at in range(1, 1000):
        stream = FailsOnce(fails_at)
        serializer = TensorSerializer(stream)
        complete: dict[str, torch.Tensor] = {}
        for call in CALLS[kind]:
            stream.armed = True
            with contextlib.suppress(OSError):
                serializer.write_state_dict(call)
                complete.update(call)
            stream.armed = False
            if complete:
                assert_same(load(io.BytesIO(stream.getvalue()), verify_hash=True), complete)
        serializer.close()
        if stream.operations < fails_at:
            return  # every operation has had its turn
    raise AssertionError("the calls never came to an end")


def test_an_object_that_fails_while_its_content_moves_is_not_written_to_any_more():
    """The index outgrows its room, the records move behind a larger one, and half of them are on their way."""

    class FailsForGood(FailsOnce):
        def _count(self) -> None:
            self.operations += self.armed
            if self.operations >= self.fails_at:
                raise OSError(5, "Input/output error")

    call = {f"{'n' * 200}.{i}": torch.ones(1) for i in range(300)}
    outcomes = set()
    for fails_at in range(1, 60):
        stream = FailsForGood(fails_at)
        with TensorSerializer(stream) as serializer:
            serializer.write_state_dict({"large": torch.ones(1 << 20)})
            stream.armed = True
            with pytest.raises(OSError):
                serializer.write_state_dict(call)
            stream.fails_at = 1 << 40
            try:
                serializer.write_state_dict(call)
            except errors.StreamError as error:
                outcomes.add(str(error).rpartition(", and ")[2])
            else:
                outcomes.add("complete")
                assert len(load(io.BytesIO(stream.getvalue()), verify_hash=True)) == 301
        if outcomes == {"complete", "nothing more can be written"}:
            return
    raise AssertionError(outcomes)


def test_a_call_that_was_interrupted_before_its_first_byte_may_be_made_again():
    class Interrupting(samples.KeptBytesIO):
        armed = False

        def flush(self) -> None:  # the index outgrows its room, which is done before the call's own data are written
            if self.armed:
                self.armed = False
                os.kill(os.getpid(), signal.SIGINT)

    stream = Interrupting()
    serializer = TensorSerializer(stream)
    serializer.write_state_dict(OTHER)
    more = {f"{'n' * 200}.{i}": torch.ones(1) for i in range(300)}
    stream.armed = True
    with pytest.raises(KeyboardInterrupt):
        serializer.write_state_dict(more)
    assert_same(load(io.BytesIO(stream.getvalue()), verify_hash=True), OTHER)
    serializer.write_state_dict(more)
    assert_same(load(io.BytesIO(stream.getvalue()), verify_hash=True), {**OTHER, **more})


LIMITED = """
import resource, signal, sys
from pathlib import Path
import torch
from tensorizer import TensorSerializer
folder = Path(sys.argv[1])
target = folder / "f"
limit = 4 << 20
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
serializer = TensorSerializer(target)
if "second" in sys.argv:
    serializer.write_state_dict({"small": torch.ones(5)})
values = {str(i): torch.zeros(1 << 20, dtype=torch.uint8) for i in range(16)}
if "outgrow" in sys.argv:
    values.update((f"{i}.{'n' * 100}", torch.zeros(1)) for i in range(6000))
try:
    serializer.write_state_dict(values)
except OSError as error:
    print(type(error).__mro__)
    print("message", error)
else:
    raise SystemExit("no error")
if "close" in sys.argv:
    try:
        serializer.close()
    except OSError as error:
        print(error)
del serializer
"""


@pytest.fixture
def run_limited(fresh_process):
    def run(folder, *words):
        result = fresh_process(LIMITED, folder, *words)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        return result.stdout

    return run


@pytest.mark.parametrize("end", ["drop", "close"])
@pytest.mark.parametrize("words", ["first", "second", "second outgrow"])
def test_a_full_disk_leaves_the_old_file_or_the_last_complete_content(run_limited, tmp_path, words, end):
    (tmp_path / "f").write_bytes(b"old content")
    assert "OSError" in run_limited(tmp_path, *words.split(), end)
    if words == "first":
        assert (tmp_path / "f").read_bytes() == b"old content"
    else:
        assert_same(load(tmp_path / "f", verify_hash=True), {"small": torch.ones(5)})
    assert samples.temporary_leftovers(tmp_path, "f") == []


GROWN_UNTIL_FULL = """
import errno, os, sys, torch
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer, TensorType
mount = sys.argv[1]
target, key = os.path.join(mount, "target.tensors"), bytes(range(32))
with open(target, "wb") as stream:
    stream.write(b"old content")
try:
    TensorSerializer(target).write_state_dict({"a": torch.ones(16 << 20, dtype=torch.uint8)})
except OSError as error:
    assert error.errno == errno.ENOSPC and "target.tensors" in f"{error} {getattr(error, 'source', '')}", error
else:
    raise SystemExit("no error")
assert os.listdir(mount) == ["target.tensors"] and open(target, "rb").read() == b"old content"
for options in ({}, {"encryption": EncryptionParams(key)}, {"metadata": {"step": "3"}}):
    os.unlink(target)
    assert os.statvfs(mount).f_bfree == os.statvfs(mount).f_blocks, "the serializer keeps the file open"
    serializer, written = TensorSerializer(target, **options), {}
    try:
        for i in range(40):
            value = torch.full((100_000,), float(i))
            serializer.write_tensor(0, str(i), TensorType.PARAM, value)
            written[str(i)] = value
    except OSError:
        serializer.close()
    decryption = DecryptionParams.from_key(key) if "encryption" in options else None
    with TensorDeserializer(target, device="cpu", encryption=decryption, verify_hash=True) as found:
        assert 15 < len(written) < 21, len(written)
        assert found.keys() == written.keys(), (options, found.keys())
        assert all(torch.equal(found[name], written[name]) for name in written)
"""


def test_a_full_file_system_is_an_error_that_names_the_file_and_every_tensor_whose_call_returned_is_there(tmp_path):
    require_mounts()
    command = with_mounts(
        f"mount -t tmpfs -o size=8m none {tmp_path}", sys.executable, "-c", GROWN_UNTIL_FULL, tmp_path
    )
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_process_that_is_killed_while_it_saves_leaves_the_old_file(fresh_process, tmp_path):
    path = samples.write_state_dict(tmp_path / "f", OTHER)
    program = """
        import os, signal, sys, threading, torch
        from tensorizer import TensorSerializer
        values = {str(i): torch.zeros(1 << 20, dtype=torch.uint8) for i in range(200)}
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            TensorSerializer(sys.argv[1]).write_state_dict(values)
            values["more"] = torch.zeros(1)
        """
    assert fresh_process(program, path).returncode == -9
    found = load(path, verify_hash=True)  # complete, whichever of them it is
    assert set(found) in ({"x"}, {str(i) for i in range(200)}, {*map(str, range(200)), "more"})


@pytest.mark.parametrize("delay", [0.005, 0.02, 0.06])
def test_a_process_that_is_killed_in_a_later_call_leaves_the_last_complete_content(fresh_process, tmp_path, delay):
    program = """
        import os, signal, sys, threading, torch
        from tensorizer import TensorSerializer
        serializer = TensorSerializer(sys.argv[1], fsync=False)
        serializer.write_state_dict({"first": torch.ones(1000)})
        threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()
        for step in range(1000):
            many = {f"{step}.{i}.{'n' * 100}": torch.full((1,), step) for i in range(500)}
            serializer.write_state_dict({f"{step}": torch.zeros(1 << 20, dtype=torch.uint8), **many})
        """
    path = tmp_path / "f"
    assert fresh_process(program, path, delay).returncode == -9
    found = load(path, verify_hash=True)
    assert torch.equal(found.pop("first"), torch.ones(1000))
    assert len(found) % 501 == 0  # whole calls
    assert all(int(value[0]) == int(name.split(".")[0]) for name, value in found.items() if "n" in name)


# --- file systems without files that have no name --------------------------------------------------------------------

NO_UNNAMED_FILES = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>
int open64(const char *path, int flags, ...) {
  if ((flags & O_TMPFILE) == O_TMPFILE) return errno = EOPNOTSUPP, -1;
  va_list more;
  va_start(more, flags);
  const int mode = flags & O_CREAT ? va_arg(more, int) : 0;
  va_end(more);
  return syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
int open(const char *path, int flags, ...) __attribute__((alias("open64")));
"""

SAVES_WITH_A_HIDDEN_NAME = """
import os, sys, torch
from tensorizer import TensorDeserializer, TensorSerializer
folder, seen = sys.argv[1], []
target = os.path.join(folder, "f")
for round, value in enumerate([1.0, 2.0]):
    watch = lambda *_: seen.append(os.listdir(folder))
    with TensorSerializer(target, progress=watch) as serializer:
        serializer.write_state_dict({"a": torch.full((3_000_000,), value)})
        assert os.listdir(folder) == ["f"]
    assert TensorDeserializer(target, device="cpu")["a"][-1] == value
    hidden = {name for names in seen for name in names if name != "f"}
    assert len(hidden) == round + 1, seen
    assert all(name.startswith(".f.") for name in hidden), hidden

def stop(*_):
    raise KeyboardInterrupt

try:
    TensorSerializer(target, progress=stop).write_state_dict({"a": torch.full((3_000_000,), 3.0)})
except KeyboardInterrupt:
    pass
assert os.listdir(folder) == ["f"]
assert TensorDeserializer(target, device="cpu")["a"][-1] == 2.0
"""


def test_where_every_file_has_a_name_a_hidden_one_serves_until_the_content_is_whole(tmp_path):
    shim = tmp_path / "shim.so"
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(shim)]
    subprocess.run(compiler, input=NO_UNNAMED_FILES, text=True, check=True)
    (tmp_path / "target").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", SAVES_WITH_A_HIDDEN_NAME, str(tmp_path / "target")],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
