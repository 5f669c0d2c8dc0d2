"""open_stream: which kind of stream for which path, and local files."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from http_tools import quick, random_bytes
from servers.http_faults import FaultyServer
from torch_versions import HAS_CHECKPOINTS

import tensorizer
from tensorizer import stream_io
from tensorizer.stream_io import CAInfo, CURLStreamFile, HTTPOptions, open_stream
from tensorizer.torch_compat import tensorizer_saving


@pytest.mark.parametrize("as_type", [str, Path])
def test_a_local_path_is_written_and_read_back(tmp_path, as_type):
    path = as_type(tmp_path / "new" / "folders" / "file.bin")
    with open_stream(path, "wb+") as stream:
        stream.write(b"0123456789")
    with open_stream(path) as stream:
        assert stream.read() == b"0123456789"
    with open_stream(path, begin=4, end=6) as stream:
        assert stream.read() == b"456789"


def test_mode_letters_come_in_any_order(tmp_path):
    with open_stream(str(tmp_path / "x"), "bw") as stream:
        stream.write(b"1")
    with open_stream(str(tmp_path / "x"), "br") as stream:
        assert stream.read() == b"1"


def test_buffer_size_zero_gives_a_raw_file(tmp_path):
    with open_stream(str(tmp_path / "x"), "wb", buffer_size=0) as stream:
        assert isinstance(stream, io.FileIO)


def test_s3_arguments_are_ignored_for_local_and_http_paths(tmp_path):
    extra = {
        "s3_access_key_id": "a", "s3_secret_access_key": "b", "s3_endpoint": "c", "s3_config_path": "d",
        "force_http": True,
        "s3_region_name": "e", "s3_signature_version": "f", "s3_session_token": "g", "s3_profile": "h",
    }  # fmt: skip
    (tmp_path / "x").write_bytes(b"1")
    with open_stream(str(tmp_path / "x"), "rb", certificate_handling=CAInfo(allow_untrusted=True), **extra) as stream:
        assert stream.read() == b"1"
    with FaultyServer(b"2") as server, open_stream(server.url, "rb", http_options=quick(), **extra) as stream:
        assert stream.read() == b"2"


def test_text_modes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="binary"):
        open_stream(str(tmp_path / "x"), "w")
    assert not (tmp_path / "x").exists()


def test_local_errors_are_those_of_open(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_stream(str(tmp_path / "missing"))
    with pytest.raises(IsADirectoryError):
        open_stream(str(tmp_path))
    (tmp_path / "there").write_bytes(b"")
    with pytest.raises(FileExistsError):
        open_stream(tmp_path / "there", "xb")
    with pytest.raises(OSError):
        open_stream(tmp_path / "there", begin=-1)


def test_a_begin_in_a_writing_mode_leaves_a_hole(tmp_path):
    with open_stream(str(tmp_path / "x"), "wb", begin=3) as stream:
        stream.write(b"1")
    assert (tmp_path / "x").read_bytes() == b"\0\0\0001"


def test_a_pipe_cannot_be_opened_because_it_cannot_be_positioned(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(io.UnsupportedOperation):
        open_stream(str(tmp_path / "pipe"), "rb+")


class PathOf:
    """A path object that keeps both slashes."""

    def __init__(self, text):
        self._text = text

    def __fspath__(self):
        return self._text


STATE = {"a": torch.ones(1)}


def written_by_a_serializer(path):
    with tensorizer.TensorSerializer(path) as file:
        file.write_state_dict(STATE)


def written_by_a_stream(path):
    with open_stream(path, "wb") as stream:
        stream.write(b"1")


def written_beside_a_pickle(path):
    with tensorizer_saving(lambda _: path):
        torch.save(STATE, "x.pt")


def written_as_a_checkpoint(path):
    if not HAS_CHECKPOINTS:
        pytest.skip(f"torch {torch.__version__} is too old for distributed checkpoints")
    import torch.distributed.checkpoint as checkpoint

    from tensorizer.distributed import TensorizerWriter

    checkpoint.save(STATE, storage_writer=TensorizerWriter(path))


def written_by_lightning(path):
    pytest.importorskip("lightning")
    from tensorizer.integrations.lightning import TensorizerCheckpointIO

    for async_save in (False, True):
        plugin = TensorizerCheckpointIO(async_save=async_save)
        with contextlib.ExitStack() as stack:
            stack.callback(plugin.teardown)
            plugin.save_checkpoint(STATE, path)


def written_as_a_model(path):
    transformers = pytest.importorskip("transformers")
    from tensorizer.integrations.huggingface import save_pretrained

    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    save_pretrained(transformers.GPT2LMHeadModel(config), path)


def written_as_a_folder(path):
    from tensorizer import serialize_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        serialize_model(torch.nn.Linear(1, 1), {"a": 1}, path)


def loaded_as_a_model(path):
    pytest.importorskip("transformers")
    from tensorizer.integrations.huggingface import from_pretrained

    return from_pretrained(path)


WRITERS = {
    "TensorSerializer": written_by_a_serializer,
    "open_stream": written_by_a_stream,
    "tensorizer_saving": written_beside_a_pickle,
    "TensorizerWriter": written_as_a_checkpoint,
    "TensorizerCheckpointIO": written_by_lightning,
    "save_pretrained": written_as_a_model,
    "save_file": lambda path: tensorizer.save_file(STATE, path),
    "save_file of shards": lambda path: tensorizer.save_file(STATE, path, max_shard_size=4),
    "convert": lambda path: tensorizer.convert("m.tensors", path),
    "serialize_model": written_as_a_folder,
}
READERS = {
    "TensorDeserializer": lambda path: tensorizer.TensorDeserializer(path, device="cpu"),
    "open_stream": open_stream,
    "load_file": tensorizer.load_file,
    "inspect": tensorizer.inspect,
    "verify": tensorizer.verify,
    "convert": lambda path: tensorizer.convert(path, "other.tensors"),
    "from_pretrained": loaded_as_a_model,
    "cache": lambda path: open_stream("http://127.0.0.1:1/x", cache=path),
}


@pytest.mark.parametrize("door", WRITERS)
def test_a_uri_that_lost_a_slash_is_refused_by_all_that_write(door, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensorizer.save_file(STATE, "m.tensors")
    for path in (Path("s3://bucket/m.tensors"), "s3:/bucket/m.tensors", "https:/host/m.tensors", PathOf("hf://org/m.tensors"),
                 Path("redis://h/m.tensors"), "simplecache::gs:/bucket/m.tensors"):  # fmt: skip
        try:
            WRITERS[door](path)
        except Exception as error:
            inner = [failure[0] for failure in getattr(error, "failures", {}).values()] or [error]
            assert isinstance(inner[0], ValueError), (path, inner[0])
            assert "://" in str(inner[0])
        else:
            pytest.fail(f"{path!r} was written")
    assert {path.name for path in tmp_path.iterdir()} <= {"m.tensors", "x.pt"}


@pytest.mark.parametrize("door", READERS)
def test_a_uri_that_lost_a_slash_is_refused_by_all_that_read(door, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (Path("s3://bucket/m.tensors"), "s3:/bucket/m.tensors", PathOf("http://host/m.tensors")):
        with pytest.raises(ValueError, match="://"):
            READERS[door](path)
    assert list(tmp_path.iterdir()) == []


def test_a_path_object_of_a_uri_is_refused_also_where_there_is_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("s3:/bucket")
    tensorizer.save_file(STATE, "m.tensors")
    for door in (*WRITERS.values(), *READERS.values()):
        if door not in (WRITERS["TensorizerWriter"], READERS["cache"]):
            with pytest.raises(ValueError, match="as a text"):
                door(Path("s3://bucket/m.tensors"))
    assert os.listdir("s3:/bucket") == []


def test_a_text_names_a_folder_with_a_colon_that_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("run:")
    for path in ("run:/m.tensors", "./new:/m.tensors", "c:/m.tensors", tmp_path / "s3:/m.tensors", "12:30/m.tensors"):
        tensorizer.save_file(STATE, path)
        assert tensorizer.load_file(path)["a"].tolist() == [1.0]


def test_the_message_about_a_lost_slash_shows_no_password(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (Path("https://user:topsecret@host/x?sig=topsecret"), "https:/user:topsecret@host/x?sig=topsecret"):
        with pytest.raises(ValueError, match="https://host/x") as caught:
            open_stream(path)
        assert "topsecret" not in str(caught.value)


def test_text_that_is_no_scheme_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_stream("./a b://c", "wb") as stream:
        stream.write(b"1")
    assert (tmp_path / "a b:" / "c").read_bytes() == b"1"


def test_a_file_uri_is_its_path(tmp_path):
    with open_stream(f"file://{tmp_path}/with%20blank", "wb") as stream:
        stream.write(b"1")
    assert (tmp_path / "with blank").read_bytes() == b"1"
    with open_stream(f"FILE://localhost{tmp_path}/with%20blank") as stream:
        assert stream.read() == b"1"
    with pytest.raises(ValueError, match="elsewhere"):
        open_stream("file://elsewhere/x")


@pytest.mark.parametrize("path", [b"bytes", 3, None, 1.5])
def test_other_types_are_refused(path):
    with pytest.raises(TypeError, match="path_uri"):
        open_stream(path)


def test_paths_of_bytes_in_a_path_object_are_refused():
    class BytesPath:
        def __fspath__(self):
            return b"x"

    with pytest.raises(TypeError, match="bytes"):
        open_stream(BytesPath())


@pytest.mark.parametrize("scheme", ["http", "HTTPS", "redis"])
@pytest.mark.parametrize("mode", ["wb", "rb+", "ab", "r", "rbb", ""])
def test_streams_of_servers_are_read_only(scheme, mode):
    with pytest.raises(ValueError, match=r"\brb\b"):
        open_stream(f"{scheme}://127.0.0.1:1/x", mode)


@pytest.mark.parametrize("mode", ["rb+", "xb", "w", "rwb"])
def test_objects_of_s3_are_read_or_written_whole(mode):
    with pytest.raises(ValueError, match=r"\bwb\b"):
        open_stream("s3://bucket/key", mode)


def test_an_unknown_scheme_is_refused_and_makes_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        open_stream("gopher9://bucket/key", "wb")
    assert list(tmp_path.iterdir()) == []


def test_the_scheme_of_a_url_is_known_in_any_case():
    with FaultyServer(b"1") as server, open_stream(server.url.replace("http", "HtTp"), http_options=quick()) as stream:
        assert isinstance(stream, CURLStreamFile)
        assert stream.read() == b"1"


def test_the_range_of_a_url_is_passed_on():
    content = random_bytes(1000)
    with FaultyServer(content) as server:
        with open_stream(server.url, begin=10, end=20, http_options=quick()) as stream:
            assert stream.tell() == 10
            assert stream.read() == content[10:20]
        assert [request.range for request in server.requests] == [(10, 19)]


def test_importing_the_package_imports_no_optional_package():
    program = (
        "import sys, tensorizer.stream_io\n"
        "assert not {'boto3', 'botocore', 'redis', 'fsspec', 'requests'} & set(sys.modules), sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_defaults_and_helpers_are_found_where_callers_look():
    assert stream_io.default_s3_read_endpoint == "accel-object.ord1.coreweave.com"
    assert stream_io.default_s3_write_endpoint == "object.ord1.coreweave.com"
    assert all(os.path.isabs(path) for path in stream_io._s3_default_config_paths)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = stream_io.no_such_name


def test_ca_info_wants_exactly_one_choice(tmp_path):
    (tmp_path / "ca.pem").write_bytes(b"")
    file, folder = str(tmp_path / "ca.pem"), str(tmp_path)
    for arguments in ({}, {"cacert": file, "capath": folder}, {"cacert": file, "allow_untrusted": True},
                      {"cacert": folder}, {"capath": file}, {"cacert": file + "x"}):  # fmt: skip
        with pytest.raises(ValueError, match="CAInfo"):
            CAInfo(**arguments)
    assert CAInfo(cacert=file).curl_flags == ("--cacert", file)
    assert CAInfo(capath=folder).curl_flags == ("--capath", folder)
    assert CAInfo(allow_untrusted=True).curl_flags == ("--insecure",)
    assert CAInfo(cacert=file) == CAInfo(cacert=file) != CAInfo(capath=folder)
    assert len({CAInfo(cacert=file), CAInfo(cacert=file)}) == 1
    with pytest.raises(TypeError):
        CAInfo(file)


def test_options_take_their_defaults_from_the_environment(monkeypatch):
    defaults = HTTPOptions()
    assert (defaults.connect_timeout, defaults.stall_timeout, defaults.retries, defaults.retry_seconds) == (
        10, 30, None, 120,
    )  # fmt: skip
    monkeypatch.setenv("TENSORIZER_HTTP_CONNECT_TIMEOUT", "1.5")
    monkeypatch.setenv("TENSORIZER_HTTP_STALL_TIMEOUT", "2.5")
    monkeypatch.setenv("TENSORIZER_HTTP_RETRIES", "0")
    monkeypatch.setenv("TENSORIZER_HTTP_RETRY_SECONDS", "7")
    monkeypatch.setenv("TENSORIZER_MAX_CONNECTIONS", "3")
    changed = HTTPOptions()
    assert (changed.connect_timeout, changed.stall_timeout, changed.retries, changed.retry_seconds) == (1.5, 2.5, 0, 7)
    assert changed._native().max_connections == HTTPOptions(connections=20)._native().max_connections == 3
    assert HTTPOptions(connect_timeout=4).connect_timeout == 4


@pytest.mark.parametrize(
    "name", ["TENSORIZER_HTTP_CONNECT_TIMEOUT", "TENSORIZER_HTTP_RETRIES", "TENSORIZER_MAX_CONNECTIONS"]
)
def test_a_bad_variable_is_named(monkeypatch, name):
    monkeypatch.setenv(name, "many")
    with pytest.raises(ValueError, match=name):
        HTTPOptions()


@pytest.mark.parametrize(
    "arguments",
    [
        {"connect_timeout": 0}, {"stall_timeout": -1}, {"retries": -1}, {"retry_seconds": -0.1}, {"connections": 0},
        {"http_version": "3"}, {"headers": {"a b": "c"}}, {"headers": {"a": "b\r\nc: d"}},
        {"headers": {"Range": "bytes=0-1"}}, {"headers": {"if-match": "x"}},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        HTTPOptions(**arguments)


def test_options_show_neither_headers_nor_proxy():
    options = HTTPOptions(headers={"Authorization": "Bearer secret"}, proxy="http://user:secret@proxy:1")
    assert "secret" not in repr(options)


def test_certificate_handling_of_another_type_is_refused():
    with pytest.raises(TypeError, match="certificate_handling"):
        HTTPOptions(certificate_handling="ca.pem")
    with pytest.raises(TypeError, match="certificate_handling"):
        open_stream("https://127.0.0.1:1/x", certificate_handling="ca.pem")


def test_the_public_names_are_those_of_the_specification():
    assert stream_io.__all__ == ["open_stream", "CURLStreamFile", "RedisStreamFile", "CAInfo"]
