"""Other file systems by way of fsspec: reads by ranges, writes that stream, and schemes that nobody knows."""

from __future__ import annotations

import contextlib
import gc
import logging
import subprocess
import sys
import threading
import traceback
from typing import ClassVar

import pytest
import torch
from samples import assert_same, tensor

from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer._io.fsspec import FsspecReader, FsspecWriter
from tensorizer.errors import StreamError, TruncatedError
from tensorizer.stream_io import open_stream

fsspec = pytest.importorskip("fsspec")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def memory():
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


def state():
    big = {f"t{i}": tensor((300_000,), torch.float32, seed=i) for i in range(10)}
    return {**big, "half": tensor((7,), torch.float16), "none": tensor((0,), torch.int8)}


def fail_inside(context, write):
    with context as opened:
        write(opened)
        raise RuntimeError("on purpose")


def test_a_model_is_written_and_read_back(memory):
    expected = state()
    with TensorSerializer("memory://dir/model") as serializer:
        serializer.write_state_dict(expected)
        assert not memory.exists("/dir/model")
    with TensorDeserializer("memory://dir/model", device="cpu", verify_hash=True) as loaded:
        assert_same(dict(loaded.items()), expected)


class ClientError(Exception):
    """What the HTTP clients below some drivers raise."""


@pytest.mark.parametrize("method", ["open", "size", "cat_file"])
def test_what_a_driver_raises_is_an_os_error_without_secrets(memory, monkeypatch, method):
    with TensorSerializer("memory://model") as serializer:
        serializer.write_state_dict(state())

    def fail(self, *args, **kwargs):
        raise ClientError("503 for https://host/model?signature=secret")

    monkeypatch.setattr(type(memory), method, fail)
    with pytest.raises(OSError, match="ClientError: 503 for https://host/model") as caught:
        TensorDeserializer("memory://model", device="cpu")
    assert "signature" not in "".join(traceback.format_exception(caught.type, caught.value, caught.tb))


def test_the_error_of_a_driver_is_the_cause_where_it_shows_no_secret(memory, monkeypatch):
    def fail(self, *args, **kwargs):
        raise ClientError("503 for https://host/model")

    monkeypatch.setattr(type(memory), "open", fail)
    with pytest.raises(StreamError, match="503") as caught:
        open_stream("memory://model")
    assert isinstance(caught.value.__cause__, ClientError)


def test_loads_ask_for_ranges_from_several_threads(memory, monkeypatch):
    expected = state()
    with TensorSerializer("memory://model") as serializer:
        serializer.write_state_dict(expected)
    seen, threads = [], set()
    original = type(memory).cat_file

    def cat_file(self, path, start=None, end=None, **kwargs):
        seen.append(end - start)
        threads.add(threading.get_ident())
        return original(self, path, start=start, end=end, **kwargs)

    monkeypatch.setattr(type(memory), "cat_file", cat_file)
    lazy = TensorDeserializer("memory://model", device="cpu", lazy_load=True)
    assert sum(seen) < 4_000_000, "opening reads no more than the beginning"
    assert_same({"t3": lazy["t3"]}, {"t3": expected["t3"]})
    loaded = TensorDeserializer("memory://model", device="cpu", num_readers=4)
    assert_same(dict(loaded.items()), expected)


def test_a_failed_save_stores_nothing(memory):
    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside(TensorSerializer("memory://failed"), lambda serializer: serializer.write_state_dict(state()))
    assert not memory.exists("/failed")


def test_reading_follows_io_conventions(memory):
    memory.pipe_file("/f", bytes(range(256)) * 100)
    with open_stream("memory://f", begin=10) as stream:
        assert stream.tell() == 10
        assert stream.read(3) == bytes([10, 11, 12])
        buffer = bytearray(4)
        assert stream.readinto(buffer) == 4
        assert bytes(buffer) == bytes([13, 14, 15, 16])
        assert stream.seek(-5, 2) == 25_595
        assert stream.read() == bytes(range(251, 256))
        assert stream.read(1) == b""
        assert (stream.readable(), stream.writable(), stream.seekable()) == (True, False, True)
        stream.seek(0)
        assert stream.readline() == bytes(range(11))
        assert stream.peek(1)[:1] == b"\x0b"
        assert len(stream.read1()) < 25_600
        stream.seek(0)
        assert stream.read(-1) == bytes(range(256)) * 100
        with pytest.raises(ValueError):
            stream.seek(-1)
        with pytest.raises(OSError):
            stream.fileno()
    assert stream.closed
    with pytest.raises(OSError):
        stream.read(1)


def test_large_reads_come_back_whole_and_a_file_that_shrinks_is_an_error(memory):
    content = bytes(range(256)) * 20_000
    memory.pipe_file("/f", content)
    with open_stream("memory://f") as stream:
        assert stream.read(10) + stream.read(3_000_000) == content[:3_000_010]
        assert stream.read() == content[3_000_010:]
        stream.seek(100)
        stream._file.truncate(2_000_000)
        with pytest.raises(TruncatedError):
            stream.readinto(bytearray(4_000_000))


def test_writing_streams_and_an_exception_stores_nothing(memory):
    with open_stream("memory://w", "wb") as stream:
        assert stream.write(b"abc") == 3
        assert stream.tell() == 3
    assert memory.cat_file("/w") == b"abc"
    with open_stream("memory://w", "ab") as stream:
        stream.write(b"def")
    assert memory.cat_file("/w") == b"abcdef"
    with pytest.raises(FileExistsError):
        open_stream("memory://w", "xb")
    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside(open_stream("memory://half", "wb"), lambda stream: stream.write(b"half"))
    assert not memory.exists("/half")


@pytest.mark.parametrize("mode", ["wb", "wb+", "ab"])
def test_what_is_there_stays_until_the_new_file_is_whole(memory, mode):
    memory.pipe_file("/dir/a[b]*", b"old")
    with open_stream("memory://dir/a[b]*", mode) as stream:
        stream.write(b"new")
        assert memory.cat_file("/dir/a[b]*") == b"old"
    complete = b"oldnew" if mode == "ab" else b"new"
    assert memory.cat_file("/dir/a[b]*") == complete
    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside(open_stream("memory://dir/a[b]*", mode), lambda stream: stream.write(b"half"))
    assert memory.cat_file("/dir/a[b]*") == complete
    assert list(memory.store) == ["/dir/a[b]*"], "nothing else is left"


def test_a_new_file_appears_when_it_is_closed(memory):
    stream = open_stream("memory://new", "wb")
    stream.write(b"abc")
    assert not memory.exists("/new")
    stream.close()
    stream.close()
    assert memory.cat_file("/new") == b"abc"
    with pytest.raises(ValueError, match="closed"):
        stream.write(b"d")


@pytest.mark.parametrize("fails", ["write", "close"])
def test_a_driver_that_fails_gives_the_file_up(memory, monkeypatch, fails):
    memory.pipe_file("/f", b"old")

    def fail(self, *args):
        raise ClientError("503 for https://host/f?signature=secret")

    stream = open_stream("memory://f", "wb")
    monkeypatch.setattr(type(stream._file), fails, fail)

    def write_and_close():
        stream.write(b"new")
        stream.close()

    with pytest.raises(StreamError, match="503") as caught:
        write_and_close()
    assert "signature" not in "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    assert stream.closed
    assert list(memory.store) == ["/f"]
    assert memory.cat_file("/f") == b"old"


class StoreFile(fsspec.spec.AbstractBufferedFile):
    """A file of an object store: parts go up while they are written, and become an object at the end."""

    def _initiate_upload(self):
        self.fs.parts[self.path] = []

    def _upload_chunk(self, final=False):
        self.fs.parts[self.path].append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = b"".join(self.fs.parts.pop(self.path))
        return True

    def discard(self):
        self.fs.parts.pop(self.path, None)


class Store(fsspec.AbstractFileSystem):
    protocol = "store"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}
    parts: ClassVar[dict[str, list[bytes]]] = {}

    def _open(self, path, mode="rb", block_size=None, **kwargs):
        return StoreFile(self, path, mode, block_size=1 << 20, **kwargs)


@pytest.fixture
def store():
    fsspec.register_implementation("store", Store, clobber=True)
    yield Store
    Store.objects.clear()
    Store.parts.clear()


def test_a_writer_of_an_object_store_goes_up_while_it_is_written(store):
    with open_stream("store://b/k", "wb") as stream:
        for _ in range(5):
            stream.write(bytes(600_000))
        assert list(store.parts) == ["b/k"]
        assert sum(map(len, store.parts["b/k"])) > 1 << 20
        assert store.objects == {}
    assert store.objects == {"b/k": bytes(3_000_000)}
    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside(open_stream("store://b/k", "wb"), lambda stream: stream.write(bytes(3_000_001)))
    assert store.objects == {"b/k": bytes(3_000_000)}
    assert store.parts == {}


def test_a_model_goes_to_an_object_store_when_it_is_whole(store):
    with TensorSerializer("store://b/model") as serializer:
        serializer.write_state_dict(state())
        assert (store.objects, store.parts) == ({}, {})
    assert list(store.objects) == ["b/model"]
    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside(TensorSerializer("store://b/model2"), lambda serializer: serializer.write_state_dict(state()))
    assert list(store.objects) == ["b/model"]


def test_missing_files_are_not_found():
    with pytest.raises(FileNotFoundError):
        TensorDeserializer("memory://nothing/here", device="cpu")


@pytest.mark.parametrize("mode", ["r", "w", "rb+", "r+b", "x"])
def test_other_modes_are_refused(mode):
    with pytest.raises(ValueError, match="mode for memory://"):
        open_stream("memory://f", mode)


@pytest.mark.parametrize("uri", ["nobody://x/y", "gs2://bucket/key"])
def test_unknown_schemes_name_the_extra_and_make_no_folder(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for mode in ("rb", "wb", "wb+"):
        with pytest.raises(ValueError, match=r"install the fsspec driver"):
            open_stream(uri, mode)
    with pytest.raises(ValueError, match=r"install the fsspec driver"):
        TensorSerializer(uri)
    assert list(tmp_path.iterdir()) == []


def test_chained_schemes_are_read_through_fsspec_and_make_no_folder(memory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with TensorSerializer("memory://model.tensors") as serializer:
        serializer.write_state_dict(state())
    for lazy_load in (True, False):
        with TensorDeserializer("simplecache::memory://model.tensors", device="cpu", lazy_load=lazy_load) as file:
            assert_same(dict(file.items()), state())
    with pytest.raises(ValueError, match="nobody::memory"):
        TensorSerializer("nobody::memory://x/y")
    assert list(tmp_path.iterdir()) == []


def test_without_fsspec_the_error_names_the_extra(tmp_path):
    program = (
        "import sys; sys.modules['fsspec'] = None\n"
        "from tensorizer import stream_io\n"
        "try: stream_io.open_stream('gs://bucket/key', 'wb')\n"
        "except ValueError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "gs://" in run.stdout
    assert "tensorizer[fsspec]" in run.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_driver_that_is_missing_is_a_value_error(monkeypatch):
    def fail(*_args, **_kwargs):
        raise ImportError("please install gcsfs")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    with pytest.raises(ValueError, match="gcsfs"):
        open_stream("gs://bucket/key")


def test_errors_show_no_credentials(memory):
    with pytest.raises(ValueError) as caught:
        open_stream("nobody://user:topsecret@host/path?sig=alsosecret")
    assert "topsecret" not in str(caught.value)


@pytest.mark.parametrize("mode", ["rb", "wb"])
def test_a_file_that_could_not_be_opened_is_closed_so_that_python_3_13_reports_nothing(mode):
    class Refuses(type(fsspec.filesystem("memory"))):
        cachable = False

        def _open(self, path, mode="rb", **options):
            raise FileNotFoundError(path) if mode == "rb" else PermissionError(path)

    make, arguments = (FsspecReader, (None, 0)) if mode == "rb" else (FsspecWriter, (False,))
    with pytest.raises(OSError, match="absent") as caught:
        make(Refuses(), "/absent", "memory://absent", *arguments)
    (half_made,) = [entry.frame.f_locals["self"] for entry in caught.traceback if entry.name == "__init__"]
    assert half_made.closed


# --- streams that nobody closes ------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("mode", ["wb", "wb+"])


@pytest.fixture(params=["memory", "store"])
def place(request, memory):
    """A URI, and what is there: of a file system that writes in place, and of one that uploads."""
    if request.param == "memory":
        memory.pipe("/d/x", b"old")
        return "memory://d/x", lambda: memory.cat("/d/x")
    objects = request.getfixturevalue("store").objects
    objects["d/x"] = b"old"
    return "store://d/x", lambda: objects["d/x"]


def half_written(uri, mode):
    stream = open_stream(uri, mode)
    stream.write(b"half")
    raise RuntimeError("on purpose")


@BOTH
def test_a_forgotten_stream_is_stored_and_said_aloud(place, mode, caplog):
    uri, content = place
    with pytest.warns(ResourceWarning, match=f"{uri}: the stream was not closed"), contextlib.suppress(RuntimeError):
        half_written(uri, mode)
    assert content() == b"half"
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("tensorizer.stream_io", logging.WARNING)
    assert uri in record.getMessage()


@BOTH
def test_a_stream_that_is_collected_while_an_exception_is_handled_stores_nothing(place, mode, caplog):
    uri, content = place
    try:
        half_written(uri, mode)
    except RuntimeError as error:
        traceback.clear_frames(error.__traceback__)  # which held the stream
        gc.collect()
    assert content() == b"old"
    assert f"{uri}: nothing was stored, as RuntimeError ended the writing" in caplog.text


@BOTH
def test_a_stream_of_an_exception_handler_is_stored(place, mode):
    uri, content = place
    try:
        raise RuntimeError("on purpose")
    except RuntimeError:
        stream = open_stream(uri, mode)
        stream.write(b"new")
        owned = [stream]
        del stream
        with pytest.warns(ResourceWarning):
            owned.clear()
    assert content() == b"new"


@BOTH
def test_a_forgotten_stream_that_nobody_wrote_to_stores_nothing(place, mode):
    uri, content = place
    stream = open_stream(uri, mode)
    del stream
    gc.collect()
    assert content() == b"old"


@BOTH
@pytest.mark.parametrize("call", ["write", "writelines"])
def test_a_write_that_fails_half_way_stores_nothing_whatever_the_caller_does_then(place, mode, call, caplog):
    uri, content = place

    def lines():
        yield b"half"
        raise TypeError("on purpose")

    stream = open_stream(uri, mode)
    stream.write(b"first")
    write, data = (stream.writelines, lines()) if call == "writelines" else (stream.write, "text")
    with pytest.raises(TypeError):
        write(data)
    del write, data
    assert stream.closed
    stream.close()
    del stream
    gc.collect()
    assert content() == b"old"
    assert f"{uri}: nothing will be stored, as TypeError ended a write" in caplog.text


def test_a_serializer_of_a_uri_that_is_dropped_stores_nothing_and_says_so(place, caplog):
    uri, content = place
    serializer = TensorSerializer(uri)
    serializer.write_state_dict(state())
    owned = [serializer]
    del serializer
    with pytest.warns(ResourceWarning, match=f"{uri}: nothing was stored"):
        owned.clear()
    assert content() == b"old"
    assert f"{uri}: nothing was stored, because the serializer was not closed" in caplog.text


def test_a_stream_whose_serializer_is_dropped_is_stored_and_said_aloud(memory):
    expected = state()
    with pytest.warns(ResourceWarning, match="memory://d/x: the stream was not closed"):
        TensorSerializer(open_stream("memory://d/x", "wb+")).write_state_dict(expected)
    with TensorDeserializer("memory://d/x", device="cpu") as loaded:
        assert_same(dict(loaded.items()), expected)


@pytest.mark.parametrize("before", [False, True], ids=["first call", "second call"])
@pytest.mark.parametrize("end", ["close", "leave the block", "close the serializer", "drop"])
def test_a_write_call_that_fails_stores_nothing(place, before, end, caplog):
    uri, content = place
    fails = []

    def progress(done):
        if fails:
            raise KeyError("on purpose")

    with open_stream(uri, "wb+") as stream:
        serializer = TensorSerializer(stream, progress=progress)
        if before:
            serializer.write_state_dict({"a": torch.ones(3)})
        fails.append(True)
        with pytest.raises(KeyError):
            serializer.write_state_dict(state())
        if end == "close":
            stream.close()
        elif end == "close the serializer":
            serializer.close()
        elif end == "drop":
            del stream, serializer
            gc.collect()
    gc.collect()
    assert content() == b"old"
    assert f"{uri}: nothing was stored, as the last write call of its serializer failed" in caplog.text


def test_a_write_call_that_succeeds_after_one_that_failed_is_stored(memory):
    fails = [True]

    def progress(done):
        if fails:
            raise KeyError("on purpose")

    expected = state()
    with open_stream("memory://x", "wb+") as stream:
        serializer = TensorSerializer(stream, progress=progress)
        with pytest.raises(KeyError):
            serializer.write_state_dict({"a": torch.ones(3)})
        fails.clear()
        serializer.write_state_dict(expected)
    with TensorDeserializer("memory://x", device="cpu") as loaded:
        assert_same(dict(loaded.items()), expected)


AT_THE_END = """
import sys, fsspec
from fsspec.implementations.local import LocalFileSystem
from tensorizer.stream_io import open_stream

class Disk(LocalFileSystem):
    protocol = "disk"

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(path.replace("disk://", ""))

fsspec.register_implementation("disk", Disk, clobber=True)
stream = open_stream("disk://" + sys.argv[1], sys.argv[2])
stream.write(b"new")
if sys.argv[3] == "exception": raise RuntimeError("on purpose")
"""


@BOTH
@pytest.mark.parametrize("ending", ["exit", "exception"])
def test_a_stream_that_is_open_at_the_end_is_stored_unless_an_exception_ended_the_program(
    fresh_process, tmp_path, mode, ending
):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    shown = fresh_process(AT_THE_END, str(path), mode, ending).stderr
    assert path.read_bytes() == (b"new" if ending == "exit" else b"old")
    said = "the stream was not closed" if ending == "exit" else "nothing was stored, as RuntimeError ended the writing"
    assert f"x: {said}" in shown
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


class Counted(type(fsspec.filesystem("memory"))):
    """A file system in memory that counts how many of its calls run at the same time."""

    protocol = "counted"
    cachable = False
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    lock: ClassVar = threading.Lock()
    now: ClassVar = 0
    most: ClassVar = 0

    def _counted(name):
        def call(self, *arguments, **options):
            with Counted.lock:
                Counted.now += 1
                Counted.most = max(Counted.most, Counted.now)
            threading.Event().wait(0.005)
            try:
                return getattr(super(), name)(*arguments, **options)
            finally:
                with Counted.lock:
                    Counted.now -= 1

        return call

    cat_file, _open, info = map(_counted, ("cat_file", "_open", "info"))


@pytest.mark.parametrize("allows", [False, True], ids=["one thread", "threads"])
def test_a_file_system_is_called_by_several_threads_only_where_it_allows_that(monkeypatch, allows):
    fsspec.register_implementation("counted", Counted, clobber=True)
    shared = Counted()
    monkeypatch.setattr(Counted, "async_impl", allows)
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda uri, **_options: (shared, Counted._strip_protocol(uri)))
    Counted.store.clear()
    values = {f"t{i}": tensor((2_000_000,), torch.float32, seed=i) for i in range(8)}
    with TensorSerializer("counted://model.tensors") as serializer:
        serializer.write_state_dict(values)
    Counted.most = Counted.now = 0
    found = [{}, {}]

    def load(number):
        with TensorDeserializer("counted://model.tensors", device="cpu") as file:
            found[number].update(file)

    threads = [threading.Thread(target=load, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(found[0], values)
    assert_same(found[1], values)
    assert (Counted.most > 1) == allows, Counted.most
