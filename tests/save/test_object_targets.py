"""File objects as targets of a save: what they must have, and what is refused."""

from __future__ import annotations

import io
import os
import tempfile

import pytest
import reference_format as fmt
import samples
import torch
from samples import assert_same, load, state_dict_bytes, tensor

from tensorizer import TensorSerializer

VALUES = {"a": tensor((5, 3), seed=1), "b": tensor((70_000,), torch.uint8)}
DATA = state_dict_bytes(VALUES)


class Recorder:
    """The smallest object that a serializer must accept."""

    def __init__(self, data: bytes = b"") -> None:
        self.stream = io.BytesIO(data)
        self.closed_times = 0

    def write(self, data) -> int:
        return self.stream.write(data)

    def seek(self, position: int, whence: int = 0) -> int:
        return self.stream.seek(position, whence)

    def tell(self) -> int:
        return self.stream.tell()

    def close(self) -> None:
        self.closed_times += 1


class Stingy(Recorder):
    """Writes a little at a time, as an unbuffered file may."""

    def write(self, data) -> int:
        return self.stream.write(bytes(memoryview(data).cast("B")[:1000]))


@pytest.mark.parametrize("kind", [Recorder, Stingy])
def test_an_object_needs_write_seek_tell_and_close_only_and_short_writes_are_continued(kind):
    recorder = samples.write_state_dict(kind(), VALUES)
    assert recorder.stream.getvalue() == DATA
    assert recorder.closed_times == 1


def test_an_object_that_takes_nothing_is_an_os_error():
    class Stuck(Recorder):
        def write(self, data) -> int:
            return 0 if self.stream.tell() > 1000 else self.stream.write(data)

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
    for make in (tempfile.TemporaryFile, tempfile.NamedTemporaryFile):
        with make() as stream:
            serializer = TensorSerializer(stream)
            serializer.write_state_dict(VALUES)
            stream.seek(0)
            assert stream.read() == DATA
            serializer.close()


@pytest.mark.parametrize("make", ["file", "raw file", "memory", "object"])
def test_writing_starts_at_the_position_of_the_object_and_offsets_include_it(tmp_path, make):
    before, after = samples.stream(100, "before"), samples.stream(1 << 20, "after")
    path = tmp_path / "f"
    path.write_bytes(before + after)
    stream, content = {
        "file": lambda: (path.open("rb+"), path.read_bytes),
        "raw file": lambda: (path.open("rb+", buffering=0), path.read_bytes),
        "memory": lambda: ((kept := samples.KeptBytesIO(before + after)), kept.getvalue),
        "object": lambda: ((recorder := Recorder(before + after)), recorder.stream.getvalue),
    }[make]()
    stream.seek(100)
    samples.write_state_dict(stream, VALUES)
    data = content()
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
        if "append" in kind:
            with pytest.raises(ValueError):
                TensorSerializer(stream.fileno())
    assert path.read_bytes() == kept


@pytest.mark.parametrize("ability", ["seekable", "writable", "readable"])
def test_an_object_that_says_it_cannot_is_refused(ability):
    stream = type("Limited", (io.BytesIO,), {ability: lambda self: False})(b"old content")
    with pytest.raises(ValueError):
        TensorSerializer(stream)
    assert stream.getvalue() == b"old content"


def test_a_pipe_and_a_closed_object_are_refused():
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "wb") as stream:
        with pytest.raises(ValueError):
            TensorSerializer(stream)
        with pytest.raises((ValueError, OSError)):
            TensorSerializer(writer)
    with pytest.raises(ValueError):
        TensorSerializer(stream)
