"""What goes wrong with files: errors of the package that are the builtin ones, too, with what to do about it."""

from __future__ import annotations

import errno
import gzip
import inspect
import io
import json
import os
import pickle

import pytest
import samples
import torch
from servers.file_server import serve_folder
from torch_versions import reads_pickles

import tensorizer
import tensorizer.torch
from tensorizer import (
    FormatError,
    StreamError,
    StreamIsADirectoryError,
    StreamNotADirectoryError,
    StreamNotFoundError,
    TensorDeserializer,
    TensorSerializer,
    stream_io,
)
from tensorizer.errors import stream_error_class, stream_errors
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving

VALUES = {"weight": torch.arange(5.0)}


def save(target, **keywords) -> None:
    samples.write_state_dict(target, VALUES, **keywords)


def load(source, **keywords) -> dict:
    with TensorDeserializer(source, device="cpu", **keywords) as deserializer:
        return dict(deserializer)


def read(path) -> bytes:
    with stream_io.open_stream(path) as stream:
        return stream.read()


def write(path) -> None:
    with stream_io.open_stream(path, "wb+") as stream:
        stream.write(b"x")


def test_every_way_of_opening_a_file_says_what_the_system_said(tmp_path):
    (tmp_path / "file").write_bytes(b"here")
    cases = [
        ((load, read), tmp_path / "absent", FileNotFoundError, StreamNotFoundError, errno.ENOENT),
        ((load, read, save, write), tmp_path, IsADirectoryError, StreamIsADirectoryError, errno.EISDIR),
        ((load, read), tmp_path / "file" / "below", NotADirectoryError, StreamNotADirectoryError, errno.ENOTDIR),
        ((save, write), tmp_path / "file" / "below", FileExistsError, StreamError, errno.EEXIST),
        ((load, read, save, write), tmp_path / ("n" * 300), OSError, StreamError, errno.ENAMETOOLONG),
    ]
    for ways, path, builtin, ours, number in cases:
        for way in ways:
            with pytest.raises(builtin) as caught:
                way(path)
            error = caught.value
            assert isinstance(error, ours), (way, error)
            assert isinstance(error, StreamError), (way, error)
            assert error.errno == number, (way, error)
            named = tmp_path / "file" if builtin is FileExistsError else path
            assert str(named) in str(error), (way, error)


def test_a_folder_without_permission_is_a_permission_error(fresh_process):
    program = """
import errno, io, os, tempfile, torch
from tensorizer import StreamError, StreamPermissionError, TensorDeserializer, TensorSerializer, stream_io
folder = tempfile.mkdtemp()
model, locked, own = (os.path.join(folder, name) for name in ("model", "locked", "own"))
TensorSerializer(model).write_state_dict({"a": torch.ones(1)})
# What is imported when it is first needed may lie where only root may read: it is imported here.
TensorDeserializer(model).close()
stream_io.open_stream(os.path.join(folder, "first"), "wb+").close()
os.chmod(folder, 0o755)
os.chmod(model, 0o000)
os.mkdir(locked, 0o500)
os.mkdir(own, 0o777)
os.chmod(own, 0o777)
child = os.fork()
if child == 0:
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    else:
        os.chmod(locked, 0o500)
    def save(path):
        TensorSerializer(path).write_state_dict({"a": torch.ones(1)})
    def save_stream(path):
        stream_io.open_stream(path, "wb+")
    ways = [
        (TensorDeserializer, model), (stream_io.open_stream, model), (save, model), (save_stream, model),
        (save, os.path.join(locked, "f")), (save, os.path.join(locked, "below", "f")),
        (save_stream, os.path.join(locked, "f")),
    ]
    for way, path in ways:
        try:
            way(path)
        except PermissionError as error:
            assert isinstance(error, StreamPermissionError) and isinstance(error, StreamError), (way, path)
            assert error.errno == errno.EACCES, (way, path, error)
            assert locked in str(error) or model in str(error), (way, path, error)
        else:
            raise SystemExit(f"{way} {path}: no error")
    save(os.path.join(own, "f"))
    os._exit(0)
status = os.waitpid(child, 0)[1]
import shutil
shutil.rmtree(folder)
assert status == 0
"""
    done = fresh_process(program)
    assert done.returncode == 0, done.stderr


def test_errors_of_the_system_keep_number_text_and_names():
    for number in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EISDIR, errno.EROFS, errno.EIO):
        builtin = OSError(number, os.strerror(number), "a", None, "b")
        with pytest.raises(type(builtin)) as caught, stream_errors():
            raise builtin
        assert isinstance(caught.value, StreamError)
        assert isinstance(caught.value, stream_error_class(number))
        assert (caught.value.errno, caught.value.filename, caught.value.filename2) == (number, "a", "b")
        assert str(caught.value) == str(builtin)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), again.errno) == (type(caught.value), number)
    for other in (ConnectionResetError("x"), TimeoutError("x"), io.UnsupportedOperation("x"), StreamError("x")):
        with pytest.raises(type(other)) as caught, stream_errors():
            raise other
        assert caught.value is other
    with pytest.raises(StreamNotFoundError, match="the driver's words"), stream_errors():
        raise FileNotFoundError("the driver's words")


# --- files of another kind ------------------------------------------------------------------------------------------


def torch_file(**options) -> bytes:
    stream = io.BytesIO()
    torch.save(VALUES, stream, **options)
    return stream.getvalue()


OID = "sha256:" + "4d7a2146" * 8
OTHERS = {
    "model.gz": (gzip.compress(b"x" * 100), ["gzip", "unpack"]),
    "page.html": (b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>", ["HTML"]),
    "denied.xml": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', ["XML"]),
    "pointer": (
        f"version https://git-lfs.github.com/spec/v1\noid {OID}\nsize 7340032\n".encode(),
        ["git-lfs", "git lfs pull", OID, "7340032"],
    ),
    "pointer-of-xet": (f"# xet version 0\nfilesize = 7340032\nhash = '{'4d7a2146' * 8}'\n".encode(), ["Xet pointer"]),
    "pointer-of-xet.json": (f'{{"hash":"{"4d7a2146" * 8}","file_size":7340032}}'.encode(), ["Xet pointer"]),
    "model.gguf": (b"GGUF\x03\0\0\0" + bytes(200), ["GGUF", ".safetensors"]),
    "123-tensors.gguf": (b"GGUF\x03\0\0\0{" + bytes(200), ["GGUF"]),  # the byte where safetensors has its brace
    "error.json": (b'{"error":"Invalid username or password."}', ["JSON", "'Invalid username or password.'"]),
    "detail.json": (b'\xef\xbb\xbf\n{"detail": "Not Found"}', ["JSON", "'Not Found'"]),
    "nested.json": (b'{"error": {"code": 404, "message": "at http://h/x?token=1"}}', ["JSON", "'at http://h/x'"]),
    "other.json": (b'{"private_key": "%s"}' % (b"k" * 2000), ["JSON, perhaps the error message of a server"]),
    "empty.json": (b"{}", ["JSON"]),
    "short.txt": (b"denied", ["text"]),
    "nothing": (b"", ["it is empty"]),
}


def test_a_file_of_torch_is_told_to_be_one(tmp_path):
    files = {"model.pt": torch_file(), "old.pt": torch_file(_use_new_zipfile_serialization=False)}
    tell_what_they_are(tmp_path, {name: (data, ["torch.load"]) for name, data in files.items()})


def test_a_file_of_another_kind_is_told_what_it_is(tmp_path):
    tell_what_they_are(tmp_path, {**OTHERS, "bytes": (bytes(range(128, 256)), [])})


def test_an_error_about_json_does_not_quote_what_may_be_a_secret(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text('{"private_key": "sEcReTw0rd"}')
    with pytest.raises(FormatError, match="JSON") as caught:
        load(path)
    assert "sEcReTw0rd" not in str(caught.value)


DOORS = {
    "load_file": tensorizer.torch.load_file,
    "safe_open": tensorizer.torch.safe_open,
    "inspect": tensorizer.inspect,
    "verify": tensorizer.verify,
    "convert": lambda source: tensorizer.convert(source, io.BytesIO()),
    "stream": lambda source: load(stream_io.open_stream(source)),
    "cursor": lambda source: load(source, lazy_load=True),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_tells_what_a_file_is(tmp_path, door):
    for name, (data, _) in OTHERS.items():
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    with serve_folder(tmp_path) as address:
        for name, (_, words) in OTHERS.items():
            for source in (str(tmp_path / f"{name}.safetensors"), f"{address}/{name}.safetensors"):
                with pytest.raises(FormatError) as caught:
                    DOORS[door](source)
                assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("door", [load, tensorizer.torch.load_file, tensorizer.inspect, tensorizer.verify])
@pytest.mark.parametrize("uri", ["s3://", "s3:///", "s3:///model.tensors", "S3:///a/model.safetensors"])
def test_a_uri_without_a_bucket_is_a_value_error_that_says_so(door, uri):
    with pytest.raises(ValueError, match="bucket"):
        door(uri)


def test_a_folder_with_gguf_files_only_is_told_to_be_one(tmp_path):
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    (tmp_path / "README.md").write_text("a model")
    with pytest.raises(StreamIsADirectoryError, match=r"got GGUF.*model-q4\.gguf"):
        load(tmp_path)


@reads_pickles
@pytest.mark.parametrize("name", ["page.html", "pointer", "pointer-of-xet", "error.json"])
def test_pickled_weights_that_are_something_else_tell_what_they_are(tmp_path, name):
    data, words = OTHERS[name]
    index = {"metadata": {}, "weight_map": {"weight": "pytorch_model-00001-of-00001.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "pytorch_model-00001-of-00001.bin").write_bytes(data)
    with pytest.raises(FormatError) as caught:
        tensorizer.convert(tmp_path / "pytorch_model.bin.index.json", tmp_path / "x.tensors")
    assert words[0] in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", ["page.html", "pointer", "pointer-of-xet", "error.json"])
def test_an_index_of_shards_that_is_something_else_tells_what_it_is(tmp_path, name):
    data, words = OTHERS[name]
    (tmp_path / "model.safetensors.index.json").write_bytes(data)
    (tmp_path / "pytorch_model.bin.index.json").write_bytes(data)
    for load_it, source in ((load, tmp_path), (tensorizer.convert, tmp_path / "pytorch_model.bin.index.json")):
        with pytest.raises(FormatError) as caught:
            load_it(source, *([tmp_path / "x.tensors"] if load_it is tensorizer.convert else []))
        assert words[0] in str(caught.value), str(caught.value)
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(FormatError, match=r"weight_map \(at byte 16\)$"):
        load(tmp_path)


def tell_what_they_are(tmp_path, others):
    for name, (data, _) in others.items():
        (tmp_path / name).write_bytes(data)
    with serve_folder(tmp_path) as address:
        for name, (_, words) in others.items():
            sources = [tmp_path / name, f"{address}/{name}", io.BytesIO((tmp_path / name).read_bytes())]
            for source in sources:
                with pytest.raises(FormatError) as caught:
                    load(source)
                text = str(caught.value)
                assert all(word in text for word in words), text
                assert isinstance(source, io.BytesIO) or name in text, text
                assert words or not text.endswith(";"), text


# --- ~ --------------------------------------------------------------------------------------------------------------


def test_a_tilde_is_the_home_folder_in_every_call_that_takes_a_path(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    save("~/model.tensors")
    assert torch.equal(load("~/model.tensors")["weight"], VALUES["weight"])
    assert torch.equal(load(b"~/model.tensors")["weight"], VALUES["weight"])
    assert read("~/model.tensors") == (home / "model.tensors").read_bytes()
    write("~/new folder/bytes")
    assert (home / "new folder" / "bytes").read_bytes() == b"x"
    with tensorizer_saving("~/sidecar.tensors"):
        torch.save(VALUES, here / "model.pt")
    with tensorizer_loading("~/sidecar.tensors", device="cpu"):
        assert torch.equal(torch.load(here / "model.pt")["weight"], VALUES["weight"])
    assert sorted(path.name for path in home.iterdir()) == ["model.tensors", "new folder", "sidecar.tensors"]
    assert [path.name for path in here.iterdir()] == ["model.pt"]


def test_a_folder_that_is_really_called_tilde_is_meant_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    save("./~/model.tensors")
    assert torch.equal(load("~/model.tensors")["weight"], VALUES["weight"])
    with tensorizer_saving():
        torch.save(VALUES, "~/model.pt")  # torch's own word for ./~/model.pt
    with tensorizer_loading(device="cpu"):
        assert torch.equal(torch.load("~/model.pt")["weight"], VALUES["weight"])
    assert sorted(path.name for path in (tmp_path / "~").iterdir()) == [
        "model.pt",
        "model.pt.tensors",
        "model.tensors",
    ]
    assert not (tmp_path / "home").exists()


# --- stream_options -------------------------------------------------------------------------------------------------


def test_a_misspelt_stream_option_is_refused_whatever_is_opened(tmp_path):
    save(tmp_path / "model.tensors")
    data = (tmp_path / "model.tensors").read_bytes()
    sources = [
        tmp_path / "model.tensors",
        io.BytesIO(data),
        "http://127.0.0.1:1/model.tensors",
        "s3://bucket/model.tensors",
        "redis://127.0.0.1:1/model",
        "memory://model.tensors",
        (tmp_path / "model.tensors").as_uri(),
    ]
    targets = [tmp_path / "new", io.BytesIO(), "s3://bucket/new", "memory://new", (tmp_path / "new").as_uri()]
    for kind, places in ((TensorDeserializer, sources), (TensorSerializer, targets)):
        for place in places:
            for wrong, hint in (
                ({"s3_acess_key_id": "x"}, "s3_access_key_id"),
                ({"endpoint": "x"}, "s3_endpoint"),
                ({"retries": 3}, "HTTPOptions(retries=...)"),
                ({"zzz": 3}, "buffer_size"),
                ({"mode": "rb"}, "mode"),
            ):
                with pytest.raises(TypeError) as caught:
                    kind(place, stream_options=wrong)
                assert next(iter(wrong)) in str(caught.value)
                assert hint in str(caught.value)
            with pytest.raises(TypeError, match=r"stream_options.*list"):
                kind(place, stream_options=[("buffer_size", 1)])
    assert not (tmp_path / "new").exists()


def test_every_keyword_of_open_stream_is_a_stream_option(tmp_path):
    known = set(inspect.signature(stream_io.open_stream).parameters) - {"path_uri", "mode"}
    assert "http_options" in known
    save(tmp_path / "model.tensors", stream_options=dict.fromkeys(known))
    assert list(load(tmp_path / "model.tensors", stream_options=dict.fromkeys(known))) == ["weight"]
