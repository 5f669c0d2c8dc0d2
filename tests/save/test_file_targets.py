"""Paths and descriptors as targets of a save."""

from __future__ import annotations

import os
import stat
import tempfile

import pytest
import samples
import torch
from samples import assert_same, load, state_dict_bytes, tensor

from tensorizer import TensorDeserializer, TensorSerializer, errors

VALUES = {"a": tensor((5, 3), seed=1), "b": tensor((70_000,), torch.uint8)}
OTHER = {"x": tensor((3,), seed=2)}
DATA = state_dict_bytes(VALUES)


# --- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [str, lambda p: p, lambda p: os.fsencode(p)], ids=["str", "PathLike", "bytes"])
def test_a_path_may_be_given_in_any_form_and_missing_folders_are_made(tmp_path, form):
    path = tmp_path / "a" / "b" / "ünï code.tensors"
    samples.write_state_dict(form(path), VALUES, fsync=form is str)
    assert path.read_bytes() == DATA
    assert samples.temporary_leftovers(path.parent, path.name) == []


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


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("", FileNotFoundError),
        (".", IsADirectoryError),
        ("f/g", FileExistsError),
        ("http://127.0.0.1:1/f", ValueError),
        ("https://127.0.0.1:1/f", ValueError),
        ("redis://127.0.0.1:1/f", ValueError),
        (999_999, OSError),
        (3.5, TypeError),
        (None, TypeError),
        (object(), TypeError),
        (["f"], TypeError),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, int)) else getattr(value, "__name__", type(value).__name__),
)
def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch, target, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_bytes(b"old content")
    with pytest.raises(error):
        samples.write_state_dict(target, VALUES)
    assert os.listdir(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old content"


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


@pytest.mark.parametrize("before", [None, b"old content"], ids=["nothing", "an old file"])
def test_the_final_name_has_what_it_had_until_the_first_write_succeeds(tmp_path, before):
    path = tmp_path / "f"
    if before is not None:
        path.write_bytes(before)

    def assert_untouched():
        assert (path.read_bytes() if path.exists() else None) == before
        assert samples.temporary_leftovers(tmp_path, "f") == []

    TensorSerializer(path).close()
    assert_untouched()
    serializer = TensorSerializer(path)
    assert_untouched()
    for bad in ("text", torch.eye(2).to_sparse()):
        with pytest.raises((TypeError, RuntimeError)):
            serializer.write_state_dict({"a": tensor(), "bad": bad})
        assert_untouched()
    serializer.write_state_dict(VALUES)
    assert_same(load(path), VALUES)
    assert samples.temporary_leftovers(tmp_path, "f") == []
    serializer.close()


def test_who_has_the_old_file_open_goes_on_reading_the_old_file(tmp_path):
    path = samples.write_state_dict(tmp_path / "f", OTHER)
    with TensorDeserializer(path, device="cpu", lazy_load=True) as reader:
        samples.write_state_dict(path, VALUES)
        assert_same(load(path), VALUES)
        assert_same(reader.tree(), OTHER)


def test_a_file_that_is_being_loaded_may_be_written_over_by_what_was_loaded(tmp_path):
    path = samples.write_state_dict(tmp_path / "f", VALUES)
    with TensorDeserializer(path, device="cpu", mmap=True) as deserializer:
        samples.write_state_dict(path, deserializer)
    assert_same(load(path), VALUES)


@pytest.mark.parametrize("dangling", [False, True])
def test_a_symbolic_link_stays_one_and_its_target_is_replaced_or_made(tmp_path, dangling):
    real, link = tmp_path / "store" / "real.tensors", tmp_path / "link.tensors"
    real.parent.mkdir()
    if not dangling:
        real.write_bytes(b"old content")
    link.symlink_to(real)
    with TensorSerializer(link) as serializer:
        assert samples.temporary_leftovers(tmp_path, "store", "link.tensors") == []  # it lies beside the real file
        serializer.write_state_dict(VALUES)
    assert link.is_symlink()
    assert real.read_bytes() == DATA
    assert samples.temporary_leftovers(real.parent, "real.tensors") == []


@pytest.mark.parametrize("name", ["f.tensors", "link"])
def test_a_file_that_another_save_replaces_meanwhile_is_replaced_and_never_cut(tmp_path, monkeypatch, name):
    path = tmp_path / "f.tensors"
    path.write_bytes(b"old")
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "new").write_bytes(DATA)
    may_write = os.access

    def another_save(*arguments, **options):  # the first call lies between two looks at the file
        if (tmp_path / "new").exists():
            os.replace(tmp_path / "new", path)
        return may_write(*arguments, **options)

    monkeypatch.setattr(os, "access", another_save)
    serializer = TensorSerializer(tmp_path / name)
    assert path.read_bytes() == DATA
    with path.open("rb") as reader:
        serializer.write_state_dict(OTHER)
        serializer.close()
        assert reader.read() == DATA, "who reads the other file goes on reading it"
    assert_same(load(path), OTHER)
    assert (tmp_path / "link").is_symlink()


def mode_bits(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("bits", [None, 0o600, 0o640, 0o755, 0o666], ids=str)
def test_the_mode_bits_of_an_existing_file_are_kept_and_a_new_one_has_those_that_open_gives(tmp_path, bits):
    path = tmp_path / "f"
    (tmp_path / "plain").write_bytes(b"")
    if bits is not None:
        path.write_bytes(b"old content")
        path.chmod(bits)
    samples.write_state_dict(path, VALUES)
    assert mode_bits(path) == (bits if bits is not None else mode_bits(tmp_path / "plain"))
    assert path.read_bytes() == DATA


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_an_existing_file_keeps_its_owner_and_group(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old content")
    os.chown(path, 1234, 2345)
    path.chmod(0o640)
    with TensorSerializer(path) as serializer:
        for name, value in VALUES.items():
            serializer.write_state_dict({name: value})
    status = path.stat()
    assert (status.st_uid, status.st_gid, mode_bits(path)) == (1234, 2345, 0o640)


@pytest.mark.parametrize("folder_bits", [0o555, 0o1777], ids=oct)
def test_a_file_that_may_be_written_where_none_may_take_its_name_is_written_in_place(fresh_process, folder_bits):
    program = """
import io, os, sys, tempfile, torch
from tensorizer import TensorDeserializer, TensorSerializer
TensorSerializer(io.BytesIO()).write_state_dict({"a": torch.ones(1)})  # imports what a save needs, while it may
folder = tempfile.mkdtemp()
target = os.path.join(folder, "f")
with open(target, "wb") as file:
    file.write(b"old" * 100_000)
os.chmod(target, 0o666)
os.chmod(folder, int(sys.argv[1]))
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
    done = fresh_process(program, folder_bits)
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


# --- descriptors -----------------------------------------------------------------------------------------------------


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
