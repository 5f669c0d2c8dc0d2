"""Other file systems by way of fsspec: reads by ranges, writes that stream, and schemes that nobody knows."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from samples import assert_same, tensor

from tensorizer import TensorDeserializer, TensorSerializer
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
    assert "secret" not in str(caught.value)
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
    assert stream.closed


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
        with pytest.raises(ValueError, match=r"tensorizer\[fsspec\]"):
            open_stream(uri, mode)
    with pytest.raises(ValueError, match=r"tensorizer\[fsspec\]"):
        TensorSerializer(uri)
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
