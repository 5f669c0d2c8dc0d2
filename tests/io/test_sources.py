"""What a deserializer reads from: paths, descriptors, open files, objects with ``readinto``; and open_stream."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import tempfile

import pytest
import samples
import torch
from samples import WRONG_ANSWERS, assert_released, assert_same, load, state_dict_bytes, tensor

from tensorizer import TensorDeserializer, TensorSerializer, stream_io

VALUES = {"a": tensor((5, 3), seed=1), "b": tensor((700_000,), torch.uint8), "c": tensor((), torch.int64)}
DATA = state_dict_bytes(VALUES)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ünï code.tensors"
    path.write_bytes(DATA)
    return path


@pytest.mark.parametrize("form", [str, lambda p: p, os.fsencode], ids=["str", "PathLike", "bytes"])
def test_a_path_may_be_given_in_any_form(path, form, leaves_no_descriptors):
    assert_same(load(form(path), verify_hash=True), VALUES)


def test_a_descriptor_is_read_and_stays_the_callers(path, leaves_no_descriptors):
    descriptor = os.open(path, os.O_RDONLY)
    assert_same(load(descriptor), VALUES)
    assert os.read(descriptor, 5) == b"|TZR|"
    os.close(descriptor)


@pytest.mark.parametrize("lazy_load", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: p.open("rb"),
        lambda p: p.open("rb", buffering=0),
        lambda p: p.open("rb+"),
        lambda p: io.BytesIO(p.read_bytes()),
        lambda p: io.BufferedReader(io.BytesIO(p.read_bytes())),
        lambda p: stream_io.open_stream(p),
        lambda p: stream_io.open_stream(str(p), "rb", buffer_size=0),
    ],
    ids=["file", "raw file", "read-write file", "BytesIO", "BufferedReader", "open_stream", "raw open_stream"],
)
def test_an_open_object_is_read(path, make, lazy_load, leaves_no_descriptors):
    stream = make(path)
    assert_same(load(stream, lazy_load=lazy_load, verify_hash=True), VALUES)
    assert stream.closed


def test_temporary_files_are_read():
    with tempfile.TemporaryFile() as stream:
        stream.write(DATA)
        stream.seek(0)
        assert_same(load(stream), VALUES)
    with tempfile.NamedTemporaryFile() as stream:
        stream.write(DATA)
        stream.seek(0)
        assert_same(load(stream), VALUES)


class Minimal:
    """The smallest object that a deserializer must accept."""

    def __init__(self, data: bytes) -> None:
        self.stream = io.BytesIO(data)

    @property
    def closed(self) -> bool:
        return self.stream.closed

    def read(self, size: int = -1) -> bytes:
        return self.stream.read(size)

    def readinto(self, buffer) -> int:
        return self.stream.readinto(buffer)

    def seek(self, position: int) -> int:
        return self.stream.seek(position)

    def tell(self) -> int:
        return self.stream.tell()

    def close(self) -> None:
        self.stream.close()


@pytest.mark.parametrize("lazy_load", [False, True], ids=["eager", "lazy"])
def test_an_object_needs_read_readinto_seek_tell_and_close_only(lazy_load):
    assert_same(load(Minimal(DATA), lazy_load=lazy_load, verify_hash=True), VALUES)


class Stingy(Minimal):
    """Gives a few bytes at a time, as ``readinto`` of a raw file may."""

    def readinto(self, buffer) -> int:
        return self.stream.readinto(memoryview(buffer).cast("B")[:4099])

    def read(self, size: int = -1) -> bytes:
        return self.stream.read(min(size, 4099) if size > 0 else size)


def test_short_reads_of_an_object_are_continued():
    assert_same(load(Stingy(DATA), verify_hash=True), VALUES)


class Watched(Minimal):
    """Knows how many bytes went to which addresses."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.filled: dict[int, int] = {}

    def readinto(self, buffer) -> int:
        self.filled[torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()] = memoryview(buffer).nbytes
        return self.stream.readinto(buffer)


def test_an_object_fills_large_tensors_where_they_stay():
    values = {str(i): tensor((n,), torch.uint8) for i, n in enumerate((100, 300_000, 7, 70_000, 9, 100_000))}
    stream = Watched(state_dict_bytes(values))
    found = load(stream)
    assert_same(found, values)
    for value in found.values():
        assert (stream.filled.get(value.data_ptr()) == value.nbytes) is (value.nbytes >= 65536)


class Broken(Minimal):
    def readinto(self, buffer) -> int:
        if self.stream.tell() > 100_000:
            raise ZeroDivisionError("broken object")
        return self.stream.readinto(memoryview(buffer).cast("B")[:50_000])

    read = None


@pytest.mark.parametrize("lazy_load", [False, True], ids=["eager", "lazy"])
def test_an_exception_of_the_object_reaches_the_caller(lazy_load):
    stream = Broken(DATA)
    with pytest.raises(ZeroDivisionError, match="broken object"):
        load(stream, lazy_load=lazy_load)
    assert stream.closed


class Liar(Minimal):
    """Claims more bytes than it was asked for."""

    def readinto(self, buffer) -> int:
        return len(memoryview(buffer).cast("B")) + 10

    def read(self, size: int = -1) -> bytes:
        return bytes(size + 10)


def test_an_object_that_claims_too_many_bytes_is_an_error_and_not_a_crash():
    with pytest.raises((OSError, ValueError)):
        load(Liar(DATA))


def test_reading_starts_at_the_position_of_the_object_and_offsets_are_absolute(tmp_path):
    stream = samples.KeptBytesIO(bytes(1000))
    stream.seek(1000)
    samples.write_state_dict(stream, VALUES)
    (tmp_path / "f").write_bytes(stream.getvalue())
    for source in (
        io.BytesIO(stream.getvalue()),
        (tmp_path / "f").open("rb"),
        (tmp_path / "f").open("rb", buffering=0),
    ):
        source.seek(1000)
        assert_same(load(source, verify_hash=True, num_readers=2 if hasattr(source, "name") else None), VALUES)
    assert_same(load(stream_io.open_stream(tmp_path / "f", begin=1000)), VALUES)
    with (tmp_path / "f").open("rb") as source:
        source.seek(1000)
        assert_same(load(source, mmap=True), VALUES)
    with pytest.raises(ValueError):
        load(tmp_path / "f")


def test_the_position_of_a_buffered_file_is_respected_after_reads(tmp_path):
    (tmp_path / "f").write_bytes(b"some text\n" + bytes(90))
    with (tmp_path / "f").open("rb+") as stream:
        stream.seek(100)
        samples.write_state_dict(stream, VALUES)
    with (tmp_path / "f").open("rb") as stream:
        assert stream.readline() == b"some text\n"
        stream.read(90)
        assert_same(load(stream), VALUES)


def test_an_open_file_that_was_removed_or_replaced_is_still_read(tmp_path):
    (tmp_path / "f").write_bytes(DATA)
    with (tmp_path / "f").open("rb") as stream:
        os.replace(samples.write_state_dict(tmp_path / "g", {"other": tensor()}), tmp_path / "f")
        assert_same(load(stream, num_readers=2), VALUES)


@pytest.mark.parametrize(
    "make",
    [lambda p: p.open("r"), lambda p: p.open("ab"), lambda p: io.StringIO("text")],
    ids=["text", "ab", "StringIO"],
)
def test_an_object_in_the_wrong_mode_is_a_value_error_that_names_the_right_one(path, make):
    with make(path) as stream, pytest.raises(ValueError, match="rb"):
        TensorDeserializer(stream, device="cpu")


def test_a_closed_object_is_refused(path):
    stream = path.open("rb")
    stream.close()
    with pytest.raises(ValueError):
        TensorDeserializer(stream, device="cpu")


class Lent(io.BytesIO):
    """Keeps what it was lent; answers what ``answer`` makes of the count."""

    def __init__(self, data: bytes, answer) -> None:
        super().__init__(data)
        self.kept: list = []
        self.answer = answer

    def readinto(self, buffer):
        self.kept.append(buffer)
        return self.answer(super().readinto(buffer))


@pytest.mark.parametrize(("answer", "error"), WRONG_ANSWERS.values(), ids=WRONG_ANSWERS)
def test_a_readinto_that_answers_nonsense_or_fails_is_an_error_and_keeps_no_memory(answer, error):
    source = Lent(DATA, answer)
    with pytest.raises(error):
        TensorDeserializer(source, device="cpu")
    assert_released(source.kept)


def test_a_readinto_that_answers_none_is_believed_as_far_as_its_position_moved():
    assert_same(load(Lent(DATA, lambda n: None)), VALUES)

    class Idle(io.BytesIO):
        def readinto(self, buffer):
            return None

    with pytest.raises(OSError, match="cut short"):
        TensorDeserializer(Idle(DATA), device="cpu")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_an_object_without_readinto_may_read_any_kind_of_bytes(kind):
    class Reads:
        def __init__(self, data):
            self.inner = io.BytesIO(data)
            self.seek, self.tell, self.close = self.inner.seek, self.inner.tell, self.inner.close

        def read(self, size):
            return kind(self.inner.read(size))

    assert_same(load(Reads(DATA)), VALUES)


def test_a_pipe_is_refused():
    reader, writer = os.pipe()
    os.write(writer, DATA[:1000])
    os.close(writer)
    with open(reader, "rb") as stream, pytest.raises((OSError, ValueError)):
        TensorDeserializer(stream, device="cpu")


def test_a_named_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(io.UnsupportedOperation, match="pipe"):
        TensorDeserializer(tmp_path / "pipe", device="cpu")


def test_what_is_no_regular_file_cannot_be_mapped():
    reader, writer = os.pipe()
    os.close(writer)
    with open(reader, "rb") as stream, pytest.raises((OSError, ValueError)):
        TensorDeserializer(stream, device="cpu", mmap=True)
    with pytest.raises((OSError, ValueError)):
        TensorDeserializer("/dev/null", device="cpu", mmap=True)


def test_a_missing_file_and_a_directory_are_the_errors_of_open(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        TensorDeserializer(tmp_path / "absent", device="cpu")
    with pytest.raises(IsADirectoryError):
        TensorDeserializer(tmp_path, device="cpu")
    with pytest.raises(OSError):
        TensorDeserializer(999_999, device="cpu")


@pytest.mark.parametrize("source", [None, 3.5, object(), ["f"]], ids=lambda value: type(value).__name__)
def test_what_is_no_source_is_a_type_error(source):
    with pytest.raises(TypeError):
        TensorDeserializer(source, device="cpu")


def test_a_failed_constructor_closes_the_callers_file_from_the_opening_on(path):
    stream = io.BytesIO(b"not a tensors file at all" * 10)
    with pytest.raises(ValueError):
        TensorDeserializer(stream, device="cpu")
    assert stream.closed
    stream = io.BytesIO(DATA)
    with pytest.raises(TypeError):
        TensorDeserializer(stream, device="cpu", encryption="no such thing")
    assert not stream.closed
    with pytest.raises(RuntimeError):
        TensorDeserializer(stream, device="no such device")
    assert not stream.closed


def test_the_name_of_the_file_is_in_the_error(tmp_path):
    path = tmp_path / "broken.tensors"
    path.write_bytes(DATA[:-100_000])
    with pytest.raises(ValueError, match=r"broken\.tensors"):
        load(path)
    with pytest.raises(ValueError, match="b"):
        load(path)


def test_reading_a_real_file_does_not_move_its_position(path):
    for buffering in (0, -1):
        stream = path.open("rb", buffering=buffering)
        with TensorDeserializer(stream, device="cpu", lazy_load=True, num_readers=2) as deserializer:
            assert_same(deserializer.tree(), VALUES)
            assert stream.tell() == 0
            assert os.lseek(stream.fileno(), 0, os.SEEK_CUR) == 0  # positional reads, on the descriptor itself


def test_an_object_that_transforms_what_it_reads_is_read_through_its_methods(path):
    class Inverted(io.FileIO):
        def readinto(self, buffer):
            count = super().readinto(buffer)
            view = memoryview(buffer).cast("B")
            view[:count] = bytes(byte ^ 0xFF for byte in view[:count])
            return count

        def read(self, size=-1):
            return bytes(byte ^ 0xFF for byte in super().read(size))

    small = {"a": tensor((100,), torch.uint8)}
    path.write_bytes(bytes(byte ^ 0xFF for byte in state_dict_bytes(small)))
    assert_same(load(Inverted(path, "rb")), small)


# --- open_stream for local paths ------------------------------------------------------------------------------------


def test_open_stream_opens_local_files_like_open(tmp_path):
    path = tmp_path / "new" / "folder" / "f"
    with stream_io.open_stream(path, "wb+") as stream:
        stream.write(b"0123456789")
    with stream_io.open_stream(str(path)) as stream:
        assert stream.read() == b"0123456789"
        assert stream.name == str(path)
    with stream_io.open_stream(path, "br", begin=4) as stream:
        assert stream.tell() == 4
        assert stream.read(3) == b"456"
    with stream_io.open_stream(path, mode="rb+", buffer_size=0) as stream:
        assert isinstance(stream, io.FileIO)
    with stream_io.open_stream(path, "ab", end=3) as stream:
        stream.write(b"x")
    assert path.read_bytes() == b"0123456789x"


def test_open_stream_ignores_what_does_not_concern_local_files(path):
    options = {
        "s3_access_key_id": "k",
        "s3_secret_access_key": "s",
        "s3_endpoint": "e",
        "s3_region_name": "r",
        "s3_signature_version": "s3v4",
        "force_http": True,
        "end": 5,
    }
    with stream_io.open_stream(path, **options) as stream:
        assert stream.read() == DATA


@pytest.mark.parametrize("mode", ["r", "w", "rt", "w+"])
def test_open_stream_wants_a_binary_mode(path, mode):
    with pytest.raises(ValueError):
        stream_io.open_stream(path, mode)


def test_open_stream_raises_the_errors_of_open(tmp_path):
    with pytest.raises(FileNotFoundError):
        stream_io.open_stream(tmp_path / "absent")
    with pytest.raises(IsADirectoryError):
        stream_io.open_stream(tmp_path)
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(FileExistsError):
        stream_io.open_stream(tmp_path / "f", "xb")
    with pytest.raises((OSError, ValueError)):
        stream_io.open_stream(tmp_path / "f", begin=-1)


def test_a_write_without_close_inside_an_open_stream_block_is_complete(tmp_path):
    from tensorizer import TensorSerializer

    with stream_io.open_stream(tmp_path / "f", "wb+") as stream:
        TensorSerializer(stream).write_module(torch.nn.Linear(2, 2))
    assert list(load(tmp_path / "f")) == [".weight", ".bias"]
    with stream_io.open_stream(tmp_path / "g", mode="wb+") as stream:
        serializer = TensorSerializer(stream)
        serializer.write_module(torch.nn.Linear(2, 2))
        serializer.close()
    assert list(load(tmp_path / "g")) == [".weight", ".bias"]


def test_a_lazy_source_over_a_stream_that_is_closed_by_its_block_is_an_error_later(path):
    with stream_io.open_stream(path) as stream:
        deserializer = TensorDeserializer(stream, device="cpu", lazy_load=True)
        first = deserializer["a"]
    assert deserializer["a"] is first
    deserializer.close()


def test_stdin_that_is_a_file_is_read(fresh_process, path):
    program = """
        import sys
        from tensorizer import TensorDeserializer
        print(list(TensorDeserializer(sys.stdin.buffer, device="cpu")))
        """
    result = fresh_process(program, stdin=path)
    assert result.stdout.strip() == str(list(VALUES)), result.stderr


class SaysItCannotSeek(io.RawIOBase):
    """``io.RawIOBase`` answers False to ``seekable()`` unless a subclass overrides it, whether or not it can seek."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._inner = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        return self._inner.readinto(buffer)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._inner.seek(offset, whence)

    def tell(self) -> int:
        return self._inner.tell()


@pytest.mark.parametrize("lazy_load", [False, True])
def test_an_object_that_seeks_is_read_although_it_says_it_cannot(lazy_load):
    values = {"a": samples.tensor((50, 50)), "b": samples.tensor((3,), torch.int64)}
    source = SaysItCannotSeek(samples.state_dict_bytes(values))
    with TensorDeserializer(source, device="cpu", lazy_load=lazy_load) as deserializer:
        samples.assert_same(deserializer.tree(), values)


def test_a_pipe_is_refused_and_closed():
    reading, writing = os.pipe()
    os.close(writing)
    pipe = os.fdopen(reading, "rb")
    with pytest.raises(io.UnsupportedOperation):
        TensorDeserializer(pipe, device="cpu")
    assert pipe.closed


class Measured(io.BytesIO):
    """An object that somebody interrupts while its end is looked for."""

    interruption: BaseException = KeyboardInterrupt()

    def seek(self, offset, whence=0):
        if whence == 2:
            raise self.interruption
        return super().seek(offset, whence)


def test_an_interruption_while_an_object_is_measured_reaches_the_caller(path):
    for interruption in (KeyboardInterrupt(), SystemExit(3)):
        stream = Measured(path.read_bytes())
        stream.interruption = interruption
        with pytest.raises(type(interruption)):
            TensorDeserializer(stream, device="cpu")
        assert stream.closed
    for refusal in (io.UnsupportedOperation("no end"), OSError("no end"), NotImplementedError(), TypeError()):
        stream = Measured(path.read_bytes())
        stream.interruption = refusal
        with TensorDeserializer(stream, device="cpu") as deserializer:
            assert len(deserializer) > 0


def test_text_behind_a_wrapper_is_a_type_error_that_says_how_to_open_it():
    for make, content in itertools.product(
        (tempfile.NamedTemporaryFile, tempfile.SpooledTemporaryFile), ("", "|TZR|" + "x" * 1000)
    ):
        with make(mode="w+") as stream:
            stream.write(content)
            stream.seek(0)
            with pytest.raises(TypeError, match=rf"expected a binary file.*mode rb,.*text in {type(stream).__name__}"):
                TensorDeserializer(stream, device="cpu")
        with make(mode="w+") as stream, pytest.raises(TypeError, match=r"expected a binary file.*text"):
            TensorSerializer(stream)


def test_text_from_an_object_that_nobody_knows_is_a_type_error_that_says_how_to_open_it():
    class Texts:
        def __init__(self):
            self.inner = io.StringIO("|TZR|" + "x" * 1000)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    with pytest.raises(TypeError, match=r"read\(\), got str; open the file in binary mode"):
        TensorDeserializer(Texts(), device="cpu")


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
