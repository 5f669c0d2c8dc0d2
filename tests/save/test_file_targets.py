"""Where a serializer writes: paths (whole or not at all), descriptors, open objects; and what it must refuse."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import stat
import subprocess
import sys
import tempfile

import pytest
import reference_format as fmt
import samples
import torch
from mounts import require_mounts, with_mounts
from samples import assert_same, load, state_dict_bytes, tensor

from tensorizer import TensorDeserializer, TensorSerializer, errors

VALUES = {"a": tensor((5, 3), seed=1), "b": tensor((70_000,), torch.uint8)}
OTHER = {"x": tensor((3,), seed=2)}
DATA = state_dict_bytes(VALUES)


# --- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [str, lambda p: p, lambda p: os.fsencode(p)], ids=["str", "PathLike", "bytes"])
def test_a_path_may_be_given_in_any_form(tmp_path, form):
    path = tmp_path / "ünï code.tensors"
    samples.write_state_dict(form(path), VALUES)
    assert path.read_bytes() == DATA
    assert samples.temporary_leftovers(tmp_path, path.name) == []


def test_a_path_that_is_no_text_is_written_and_read(tmp_path):
    path = os.fsencode(tmp_path) + b"/na\xefve"
    for form in (path, os.fsdecode(path)):
        samples.write_state_dict(form, VALUES)
        assert_same(load(form), VALUES)
        with open(path, "r+b") as stream:
            assert_same(load(stream), VALUES)
        os.unlink(path)
    with open(path, "wb+") as stream:
        stream.write(b"something else")
    with pytest.raises(errors.FormatError, match=r"na\\xefve") as caught:
        TensorDeserializer(path, device="cpu")
    assert caught.value.source.endswith("na\\xefve")


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_file_uri_is_written_like_its_path(tmp_path, scheme):
    path = tmp_path / "new folder" / "m.tensors"
    uri = f"{scheme}://{tmp_path}/new%20folder/m.tensors"
    samples.write_state_dict(uri, VALUES)
    assert path.read_bytes() == DATA
    serializer = TensorSerializer(uri)
    assert path.read_bytes() == DATA, "the old file stays until there is a new one"
    serializer.close()
    assert path.read_bytes() == DATA
    assert samples.temporary_leftovers(path.parent, path.name) == []
    samples.write_state_dict(uri, OTHER)
    assert_same(load(uri), OTHER)


def test_an_empty_path_is_no_file():
    with pytest.raises(FileNotFoundError):
        TensorSerializer("")


def test_missing_parent_directories_are_created(tmp_path):
    path = tmp_path / "a" / "b" / "c.tensors"
    samples.write_state_dict(path, VALUES)
    assert path.read_bytes() == DATA


def test_a_relative_path_means_the_directory_of_the_constructor(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    serializer = TensorSerializer("f.tensors")
    monkeypatch.chdir(tmp_path / "there")
    serializer.write_state_dict(VALUES)
    serializer.close()
    assert (tmp_path / "here" / "f.tensors").read_bytes() == DATA
    assert os.listdir(tmp_path / "there") == []


def test_nothing_stands_under_the_final_name_before_the_first_write_succeeds(tmp_path):
    path = tmp_path / "f"
    serializer = TensorSerializer(path)
    assert not path.exists()
    with pytest.raises(TypeError):
        serializer.write_state_dict({"a": "text"})
    assert not path.exists()
    serializer.write_state_dict(VALUES)
    assert path.read_bytes()[: fmt.PROLOGUE_NBYTES] == DATA[: fmt.PROLOGUE_NBYTES]
    assert samples.temporary_leftovers(tmp_path, "f") == []
    serializer.close()


def test_an_existing_file_is_untouched_until_the_first_write_succeeds(tmp_path):
    path = samples.write_state_dict(tmp_path / "f", OTHER)
    old = path.read_bytes()
    reader = TensorDeserializer(path, device="cpu", lazy_load=True)
    serializer = TensorSerializer(path)
    assert path.read_bytes() == old
    serializer.write_state_dict(VALUES)
    assert_same(load(path), VALUES)
    assert_same(reader.tree(), OTHER)  # who has the old file open goes on reading the old file
    reader.close()
    serializer.close()


def test_a_file_that_is_being_loaded_may_be_written_over_by_what_was_loaded(tmp_path):
    path = samples.write_state_dict(tmp_path / "f", VALUES)
    with TensorDeserializer(path, device="cpu", mmap=True) as deserializer:
        samples.write_state_dict(path, deserializer)
    assert_same(load(path), VALUES)


def test_closing_without_any_write_leaves_the_old_file_and_no_temporary_one(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old content")
    TensorSerializer(path).close()
    assert samples.temporary_leftovers(tmp_path, "f") == []


def test_a_failed_first_write_leaves_the_old_file_and_no_temporary_one(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old content")
    serializer = TensorSerializer(path)
    with pytest.raises(RuntimeError):
        serializer.write_state_dict({"a": tensor(), "bad": torch.eye(2).to_sparse()})
    del serializer
    assert path.read_bytes() == b"old content"
    assert samples.temporary_leftovers(tmp_path, "f") == []


def test_a_symbolic_link_stays_one_and_its_target_is_replaced(tmp_path):
    real = tmp_path / "store" / "real.tensors"
    real.parent.mkdir()
    real.write_bytes(b"old content")
    link = tmp_path / "link.tensors"
    link.symlink_to(real)
    serializer = TensorSerializer(link)
    assert samples.temporary_leftovers(tmp_path, "store", "link.tensors") == []  # it lies beside the real file
    serializer.write_state_dict(VALUES)
    serializer.close()
    assert link.is_symlink()
    assert real.read_bytes() == DATA
    assert samples.temporary_leftovers(real.parent, "real.tensors") == []


def test_a_dangling_link_is_written_through(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    samples.write_state_dict(link, VALUES)
    assert link.is_symlink()
    assert (tmp_path / "real").read_bytes() == DATA


def mode_bits(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("bits", [0o600, 0o640, 0o755, 0o666])
def test_the_mode_bits_of_an_existing_file_are_kept(tmp_path, bits):
    path = tmp_path / "f"
    path.write_bytes(b"old content")
    path.chmod(bits)
    samples.write_state_dict(path, VALUES)
    assert mode_bits(path) == bits
    assert path.read_bytes() == DATA


def test_a_new_file_has_the_mode_that_open_would_give_it(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    samples.write_state_dict(tmp_path / "f", VALUES)
    assert mode_bits(tmp_path / "f") == mode_bits(tmp_path / "plain")


def test_a_directory_as_target_is_an_error(tmp_path):
    with pytest.raises(IsADirectoryError):
        samples.write_state_dict(tmp_path, VALUES)
    assert os.listdir(tmp_path) == []


def test_a_file_where_a_directory_should_be_is_an_error(tmp_path):
    (tmp_path / "f").write_bytes(b"old content")
    with pytest.raises(OSError):
        samples.write_state_dict(tmp_path / "f" / "g", VALUES)
    assert (tmp_path / "f").read_bytes() == b"old content"


def test_a_file_that_may_be_written_in_a_directory_that_may_not_is_written_in_place(fresh_process):
    program = """
import io, os, tempfile, torch
from tensorizer import TensorDeserializer, TensorSerializer
TensorSerializer(io.BytesIO()).write_state_dict({"a": torch.ones(1)})  # imports what a save needs, while it may
folder = tempfile.mkdtemp()
target = os.path.join(folder, "f")
with open(target, "wb") as file:
    file.write(b"old" * 100_000)
os.chmod(target, 0o666)
os.chmod(folder, 0o555)
child = os.fork()
if child == 0:
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    serializer = TensorSerializer(target)
    serializer.write_state_dict({"a": torch.arange(5)})
    serializer.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert TensorDeserializer(target, device="cpu")["a"].tolist() == [0, 1, 2, 3, 4]
assert os.path.getsize(target) < 10_000 and os.listdir(folder) == ["f"]
os.chmod(folder, 0o755)
os.unlink(target)
os.rmdir(folder)
"""
    done = fresh_process(program)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_neither_cuts_nor_writes_what_its_parent_is_saving(fresh_process):
    program = """
import io, os, sys, torch
from tensorizer import TensorDeserializer, TensorSerializer
target = sys.argv[1]
for open_target in (lambda: target, lambda: open(target, "wb+")):
    serializer = TensorSerializer(open_target())
    serializer.write_state_dict({"a": torch.arange(100_000)})
    class Fails(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.big = torch.nn.Parameter(torch.ones(3_000_000))
    child = os.fork()
    if child == 0:
        try:
            serializer.write_module(Fails())
            os._exit(1)
        except ValueError as error:
            assert "forked child" in str(error) and target in str(error), error
        serializer.close()
        del serializer
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    serializer.write_state_dict({"b": torch.arange(7)})
    serializer.close()
    with TensorDeserializer(target, device="cpu") as tensors:
        assert tensors["a"].tolist() == list(range(100_000)) and tensors["b"].tolist() == list(range(7))
"""
    with tempfile.TemporaryDirectory() as folder:
        done = fresh_process(program, os.path.join(folder, "f"))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs files without a name")
def test_a_file_without_a_name_is_written_through_its_descriptor():
    descriptor = os.memfd_create("f")
    os.write(descriptor, b"old" * 100_000)
    path = f"/proc/self/fd/{descriptor}"
    samples.write_state_dict(path, VALUES)
    assert_same(load(path), VALUES)
    assert os.fstat(descriptor).st_size < 300_000
    assert not os.path.lexists(os.path.realpath(path))
    os.close(descriptor)


def test_remote_sources_cannot_be_written():
    for uri in ("http://127.0.0.1:1/f", "https://127.0.0.1:1/f", "redis://127.0.0.1:1/f"):
        with pytest.raises(ValueError):
            TensorSerializer(uri)


@pytest.mark.parametrize("target", [None, 3.5, object(), ["f"]], ids=lambda value: type(value).__name__)
def test_what_is_no_target_is_a_type_error(target):
    with pytest.raises(TypeError):
        TensorSerializer(target)


def test_fsync_may_be_turned_off(tmp_path):
    assert samples.write_state_dict(tmp_path / "f", VALUES, fsync=False).read_bytes() == DATA


# --- descriptors ----------------------------------------------------------------------------------------------------


def test_a_descriptor_is_written_from_its_position(tmp_path, leaves_no_descriptors):
    path = tmp_path / "f"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    samples.write_state_dict(descriptor, VALUES)
    assert path.read_bytes() == DATA
    os.lseek(descriptor, 0, os.SEEK_SET)
    assert os.read(descriptor, 5) == b"|TZR|"  # a descriptor stays the caller's
    os.close(descriptor)


def test_a_descriptor_in_the_middle_of_a_file_is_respected(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"x" * 64)
    with path.open("rb+", buffering=0) as stream:
        stream.seek(64)
        samples.write_state_dict(stream.fileno(), VALUES)
    assert path.read_bytes()[:64] == b"x" * 64
    with path.open("rb") as stream:
        stream.seek(64)
        assert_same(load(stream), VALUES)


def test_a_descriptor_that_is_not_open_is_an_os_error():
    with pytest.raises(OSError):
        TensorSerializer(999_999)


# --- open objects ---------------------------------------------------------------------------------------------------


class Recorder:
    """The smallest object that a serializer must accept."""

    def __init__(self, data: bytes = b"", position: int = 0) -> None:
        self.stream = io.BytesIO(data)
        self.stream.seek(position)
        self.closed_times = 0

    def write(self, data) -> int:
        return self.stream.write(data)

    def seek(self, position: int, whence: int = 0) -> int:
        return self.stream.seek(position, whence)

    def tell(self) -> int:
        return self.stream.tell()

    def close(self) -> None:
        self.closed_times += 1


def test_an_object_needs_write_seek_tell_and_close_only():
    recorder = Recorder()
    samples.write_state_dict(recorder, VALUES)
    assert recorder.stream.getvalue() == DATA
    assert recorder.closed_times == 1


class Stingy(Recorder):
    """Writes a little at a time, as an unbuffered file may."""

    def write(self, data) -> int:
        return self.stream.write(bytes(memoryview(data).cast("B")[:1000]))


def test_short_writes_are_continued():
    stingy = Stingy()
    samples.write_state_dict(stingy, VALUES)
    assert stingy.stream.getvalue() == DATA


class Stuck(Recorder):
    def write(self, data) -> int:
        return 0 if self.stream.tell() > 1000 else self.stream.write(data)


def test_an_object_that_takes_nothing_is_an_os_error():
    with pytest.raises(OSError):
        samples.write_state_dict(Stuck(), VALUES)


@pytest.mark.parametrize("buffering", [-1, 0, 1 << 16])
@pytest.mark.parametrize("mode", ["wb+", "rb+", "xb+"])
def test_an_open_file_of_any_readable_and_writable_mode_is_accepted(tmp_path, mode, buffering):
    path = tmp_path / "f"
    if mode == "rb+":
        path.write_bytes(b"")
    with path.open(mode, buffering=buffering) as stream:
        serializer = TensorSerializer(stream)
        serializer.write_state_dict(VALUES)
        assert_same(load(path), VALUES)  # flushed: another handle sees everything
        serializer.close()
    assert path.read_bytes() == DATA


def test_temporary_files_are_accepted():
    with tempfile.TemporaryFile() as stream:
        serializer = TensorSerializer(stream)
        serializer.write_state_dict(VALUES)
        stream.seek(0)
        assert stream.read() == DATA
        serializer.close()
    with tempfile.NamedTemporaryFile() as stream:
        serializer = TensorSerializer(stream)
        serializer.write_state_dict(VALUES)
        assert_same(load(stream.name), VALUES)
        serializer.close()


@pytest.mark.parametrize("make", ["file", "raw file", "memory", "object"])
def test_writing_starts_at_the_position_of_the_object_and_offsets_include_it(tmp_path, make):
    before, after = samples.stream(100, "before"), samples.stream(1 << 20, "after")
    if make == "memory":
        stream = samples.KeptBytesIO(before + after)
    elif make == "object":
        stream = Recorder(before + after, 100)
    else:
        (tmp_path / "f").write_bytes(before + after)
        stream = (tmp_path / "f").open("rb+", buffering=0 if make == "raw file" else -1)
    stream.seek(100)
    samples.write_state_dict(stream, VALUES)
    if make == "memory":
        data = stream.getvalue()
    elif make == "object":
        data = stream.stream.getvalue()
    else:
        data = (tmp_path / "f").read_bytes()
    assert data[:100] == before
    assert len(data) == len(before + after)  # not truncated
    file = fmt.read_file(data, start=100)
    assert file.contents() == {(name,): samples.raw(value) for name, value in VALUES.items()}
    assert all(record.entry.data_offset % 64 == 0 for record in file.records)
    end = 100 + len(fmt.rewrite(file, start=100))
    assert data[100:end] == fmt.rewrite(file, start=100)
    assert data[end:] == (before + after)[end:]
    source = io.BytesIO(data)
    source.seek(100)
    assert_same(load(source, verify_hash=True), VALUES)


REFUSED = {
    "write only": lambda path: path.open("wb"),
    "append": lambda path: path.open("ab+"),
    "append, unbuffered": lambda path: path.open("ab+", buffering=0),
    "read only": lambda path: path.open("rb"),
    "text": lambda path: path.open("w+"),
    "append only": lambda path: path.open("ab"),
    "text in memory": lambda path: io.StringIO(),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_object_in_the_wrong_mode_is_refused_before_anything_is_written(tmp_path, kind):
    path = tmp_path / "f"
    path.write_bytes(b"old content")
    with REFUSED[kind](path) as stream:
        kept = path.read_bytes()
        with pytest.raises(ValueError, match="wb\\+"):
            TensorSerializer(stream)
    assert path.read_bytes() == kept


def test_an_append_descriptor_is_refused(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old content")
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    with pytest.raises(ValueError):
        TensorSerializer(descriptor)
    assert path.read_bytes() == b"old content"
    os.close(descriptor)


class NotSeekable(io.BytesIO):
    def seekable(self) -> bool:
        return False


class NotWritable(io.BytesIO):
    def writable(self) -> bool:
        return False


class NotReadable(io.BytesIO):
    def readable(self) -> bool:
        return False


@pytest.mark.parametrize("kind", [NotSeekable, NotWritable, NotReadable])
def test_an_object_that_says_it_cannot_is_refused(kind):
    stream = kind(b"old content")
    with pytest.raises(ValueError):
        TensorSerializer(stream)
    assert stream.getvalue() == b"old content"


def test_a_pipe_is_refused():
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "wb") as stream:
        with pytest.raises(ValueError):
            TensorSerializer(stream)
        with pytest.raises((ValueError, OSError)):
            TensorSerializer(writer)


def test_a_closed_object_is_refused():
    stream = io.BytesIO()
    stream.close()
    with pytest.raises(ValueError):
        TensorSerializer(stream)


# --- failing devices ------------------------------------------------------------------------------------------------


class Full(samples.KeptBytesIO):
    """An object whose device is full after a while."""

    def write(self, data) -> int:
        if self.tell() + len(memoryview(data).cast("B")) > 300_000:
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_an_error_of_the_object_reaches_the_caller_as_it_is():
    serializer = TensorSerializer(Full())
    with pytest.raises(OSError, match="No space left") as caught:
        serializer.write_state_dict({"a": tensor((1 << 19,), torch.uint8)})
    assert caught.value.errno == 28
    serializer.close()


def test_an_object_that_fails_in_a_later_call_keeps_the_last_complete_content():
    stream = Full()
    serializer = TensorSerializer(stream)
    serializer.write_state_dict(OTHER)
    with pytest.raises(OSError, match="No space left"):
        serializer.write_state_dict({"a": tensor((1 << 19,), torch.uint8)})
    assert_same(load(io.BytesIO(stream.getvalue()), verify_hash=True), OTHER)
    serializer.close()
    assert_same(load(io.BytesIO(stream.getvalue()), verify_hash=True), OTHER)


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
        serializer = TensorSerializer(stream)
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
        serializer.close()
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


class Broken(samples.KeptBytesIO):
    def write(self, data) -> int:
        if self.tell() > 1000:
            raise ZeroDivisionError("broken object")
        return super().write(data)


def test_an_exception_of_the_object_keeps_its_class():
    serializer = TensorSerializer(Broken())
    with pytest.raises(ZeroDivisionError, match="broken object"):
        serializer.write_state_dict({str(i): tensor((1 << 16,), torch.uint8) for i in range(4)})


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_FSIZE and /proc")
@pytest.mark.parametrize("close", [[], ["close"]], ids=["dropped", "closed"])
def test_a_full_disk_during_the_first_call_leaves_the_old_file_and_nothing_else(run_limited, tmp_path, close):
    (tmp_path / "f").write_bytes(b"old content")
    output = run_limited(tmp_path, *close)
    assert "OSError" in output
    assert (tmp_path / "f").read_bytes() == b"old content"
    assert samples.temporary_leftovers(tmp_path, "f") == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_FSIZE and /proc")
@pytest.mark.parametrize("close", [[], ["close"]], ids=["dropped", "closed"])
@pytest.mark.parametrize("outgrow", [[], ["outgrow"]], ids=["appended", "laid out anew"])
def test_a_full_disk_during_a_later_call_leaves_the_last_complete_content(run_limited, tmp_path, close, outgrow):
    run_limited(tmp_path, "second", *close, *outgrow)
    assert_same(load(tmp_path / "f", verify_hash=True), {"small": torch.ones(5)})
    assert samples.temporary_leftovers(tmp_path, "f") == []


FULL = """
import errno, os, sys, torch
mount = sys.argv[1]
from tensorizer import TensorSerializer
target = os.path.join(mount, "target.tensors")
with open(target, "wb") as stream:
    stream.write(b"old content")
try:
    TensorSerializer(target).write_state_dict({"a": torch.ones(8 << 20, dtype=torch.uint8)})
except OSError as error:
    print(error.errno == errno.ENOSPC, "target.tensors" in f"{error} {getattr(error, 'source', '')}")
print(os.listdir(mount), open(target, "rb").read())
"""


def test_a_full_file_system_is_an_os_error_that_names_the_file(tmp_path):
    require_mounts()
    command = with_mounts(f"mount -t tmpfs -o size=2m none {tmp_path}", sys.executable, "-c", FULL, tmp_path)
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "True True\n['target.tensors'] b'old content'\n", result.stdout + result.stderr


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


def test_a_target_below_a_file_is_refused_with_the_name_of_that_file(tmp_path):
    (tmp_path / "file").write_bytes(b"old content")
    with pytest.raises(FileExistsError, match="file"):
        TensorSerializer(tmp_path / "file" / "child")
    assert (tmp_path / "file").read_bytes() == b"old content"


# --- file systems without files that have no name ---------------------------------------------------------------------

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


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs a system with files that have no name")
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
