"""Paths and descriptors as targets of a save."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import subprocess
import sys
import tempfile

import pytest
import samples
import torch
from mounts import require_mounts, with_mounts
from samples import assert_same, load, state_dict_bytes, tensor
from servers.fuse import MountRules, fuse_folder
from torch_versions import has_checkpoints

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


# --- mounts that are not like a disk ---------------------------------------------------------------------------------

DOORS = """
import os, sys, warnings, torch, tensorizer
import torch.distributed.checkpoint as dcp
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.distributed import TensorizerReader, TensorizerWriter
warnings.simplefilter("ignore")
os.chdir(sys.argv[1])
STATE = {"a": torch.arange(100_000.0), "b": torch.arange(7)}

def check(name):
    with TensorDeserializer(name, device="cpu") as file:
        assert all(torch.equal(file[key], value) for key, value in STATE.items()), name

def through_serializer(name, **options):
    with TensorSerializer(name, **options) as file:
        file.write_state_dict(STATE)
    check(name)

def through_calls(name):
    with TensorSerializer(name) as file:
        for key, value in STATE.items():
            file.write_state_dict({key: value})
    check(name)

def through_tensors(name):
    tensorizer.save_file(STATE, name, format="tensors")
    check(name)

def through_safetensors(name, **options):
    tensorizer.save_file(STATE, name, format="safetensors", **options)
    check(name)

def through_checkpoint(name, **options):
    dcp.save(STATE, storage_writer=TensorizerWriter(name, **options))
    found = {key: torch.zeros_like(value) for key, value in STATE.items()}
    dcp.load(found, storage_reader=TensorizerReader(name))
    assert all(torch.equal(found[key], value) for key, value in STATE.items())
"""


@pytest.fixture
def run_doors(fresh_process):
    """Runs a program with the functions above, and the folder as its argument; with `mounts`, after these commands."""

    def run(program, folder, mounts=None):
        if mounts is None:
            done = fresh_process(DOORS + program, folder, timeout=200)
        else:
            command = with_mounts(mounts, sys.executable, "-c", DOORS + program, str(folder))
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@has_checkpoints
def test_without_proc_a_save_takes_a_hidden_name_before_the_first_byte(tmp_path, run_doors):
    require_mounts()
    program = """
assert not os.path.exists("/proc/self")
for door in (through_serializer, through_calls, through_tensors):
    for _ in range(2):
        door("m.tensors")
through_safetensors("m.safetensors")
through_checkpoint("d")
assert sorted(os.listdir()) == ["d", "m.safetensors", "m.tensors"]
"""
    run_doors(program, tmp_path, "mount -t tmpfs none /proc")


def test_a_file_that_is_a_mount_point_is_written_in_place(tmp_path, run_doors):
    require_mounts()
    (tmp_path / "host").write_bytes(b"old" * 1_000_000)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "m.tensors").touch()
    program = """
before = os.stat("m.tensors").st_ino
for door in (through_serializer, through_calls, through_tensors, through_safetensors):
    door("m.tensors")
assert os.stat("m.tensors").st_ino == before
assert os.listdir() == ["m.tensors"]
"""
    run_doors(program, tmp_path / "app", f"mount --bind {tmp_path}/host {tmp_path}/app/m.tensors")
    assert TensorDeserializer(tmp_path / "host", device="cpu")["b"].tolist() == list(range(7))


@contextlib.contextmanager
def served(folder, rules):
    """Mounts a folder that a program serves; skips the test where that cannot be."""
    folder.mkdir()
    with contextlib.ExitStack() as mounted:
        try:
            mounted.enter_context(fuse_folder(folder, rules))
        except OSError as error:
            pytest.skip(f"no FUSE here: {error}")
        yield folder


ALL_DOORS = """
for door, name in [(through_serializer, "m.tensors"), (through_calls, "m.tensors"), (through_tensors, "m.tensors"),
                   (through_safetensors, "m.safetensors")]:
    for _ in range(2):
        door(name)
assert sorted(os.listdir()) == ["m.safetensors", "m.tensors"], os.listdir()
"""


@pytest.mark.parametrize(
    "rules", [MountRules(), MountRules(renames=False), MountRules(modes=False)], ids=["all", "no-renames", "no-modes"]
)
def test_a_mount_that_a_program_serves_takes_new_files_and_files_that_are_there(tmp_path, rules, run_doors):
    with served(tmp_path / "mount", rules) as folder:
        run_doors(ALL_DOORS, folder)


def test_a_mount_without_modes_costs_one_line_for_those_who_look_for_it(tmp_path, run_doors):
    with served(tmp_path / "mount", MountRules(modes=False)) as folder:
        program = """
import logging
through_serializer("m.tensors")
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record)
logging.getLogger("tensorizer.serialization").addHandler(handler)
logging.getLogger("tensorizer.serialization").setLevel(logging.DEBUG)
os.umask(0o077)  # so that the mode of the new file is another one
with TensorSerializer("m.tensors") as file:
    file.write_state_dict(STATE)
    file.write_state_dict({"c": torch.ones(1)})
assert [record.levelname for record in lines if "mode" in record.getMessage()] in ([], ["DEBUG"])
"""
        run_doors(program, folder)


def test_after_a_sync_that_failed_close_raises_and_publishes_no_call_that_waited(tmp_path, run_doors):
    with served(tmp_path / "mount", MountRules(failing_sync=2)) as folder:
        program = """
from tensorizer import TensorType
file = TensorSerializer("m.tensors")
failed = []
for name in "abcd":
    try:
        if name == "b":  # it waits for company
            file.write_tensor(0, name, TensorType.PARAM, STATE["b"])
        else:
            file.write_state_dict({name: STATE["b"]})
    except tensorizer.StreamError as error:
        failed.append(name)
        reason = str(error)
assert failed in (["c", "d"], ["b", "c", "d"]), failed
assert "an earlier sync failed" in reason and "m.tensors" in reason, reason
try:
    file.close()
    raise SystemExit("nothing was said")
except tensorizer.StreamError as error:
    assert "sync" in str(error)
with TensorDeserializer("m.tensors", device="cpu") as file:
    assert list(file) == ["a"]
"""
        run_doors(program, folder)


@has_checkpoints
def test_a_mount_that_takes_bytes_from_front_to_back_gets_what_can_be_written_like_that(tmp_path, run_doors):
    with served(tmp_path / "mount", MountRules(renames=False, any_order=False, modes=False, removes=False)) as folder:
        program = """
for _ in range(2):
    through_serializer("m.tensors", hashes=None, metadata={"k": "text"})
    through_safetensors("m.safetensors")
with TensorSerializer("one.tensors", hashes=None) as file:
    file.write_module(torch.nn.Linear(300, 4000))
TensorDeserializer("one.tensors", device="cpu", verify_hash=False).close()
tensorizer.convert("m.safetensors", "copy.safetensors")
check("copy.safetensors")
through_checkpoint(".", hashes=None)

from tensorizer import EncryptionParams
for options in ({}, {"hashes": "crc32"}, {"hashes": None, "encryption": EncryptionParams.random()}):
    for name in ("m.tensors", "refused.tensors"):
        try:
            through_serializer(name, **options)
            raise SystemExit("nothing was said")
        except tensorizer.StreamError as error:
            assert "front to back" in str(error) and "hashes=None" in str(error) and name in str(error)
check("m.tensors")  # nothing was written
try:
    with TensorSerializer("two.tensors", hashes=None) as file:
        file.write_state_dict({"a": STATE["a"]})
        file.write_state_dict({"b": STATE["b"]})
    raise SystemExit("nothing was said")
except tensorizer.StreamError as error:
    assert "second call" in str(error)
try:
    with open("object.tensors", "wb+") as stream, TensorSerializer(stream) as file:
        file.write_state_dict(STATE)
    raise SystemExit("nothing was said")
except tensorizer.StreamError as error:
    assert "front to back" in str(error)
found = set(os.listdir())
assert {"m.tensors", "m.safetensors", "copy.safetensors", "one.tensors"} <= found and "refused.tensors" not in found
assert [name for name in found if name.startswith(".")] == [".metadata"], found
"""
        run_doors(program, folder)


def test_a_file_keeps_the_mode_that_it_is_made_with_where_it_cannot_be_changed(tmp_path, monkeypatch, caplog):
    from tensorizer import _C
    from tensorizer._io.new_files import FileAccess, NewFile

    monkeypatch.setattr(_C, "set_access", lambda *_: False)
    with caplog.at_level(logging.DEBUG), NewFile(str(tmp_path / "key"), FileAccess(0o600)) as file:
        file.write(b"secret")
        file.publish()
    assert mode_bits(tmp_path / "key") == 0o600
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("refused", ["link", "replace"])
def test_a_small_file_that_can_get_no_name_is_written_in_place(tmp_path, monkeypatch, exclusive, refused):
    from tensorizer._io.new_files import NewFile

    def refuses(*_arguments, **_options):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, refused, refuses)
    path = tmp_path / "small"
    if not exclusive:
        path.write_bytes(b"what was there before")
    with NewFile(str(path)) as file:
        file.write(b"content")
        file.publish(exclusive)
    assert path.read_bytes() == b"content"
    with NewFile(str(path)) as file:
        file.write(b"other")
        with pytest.raises(FileExistsError):
            file.publish(exclusive=True)
    assert path.read_bytes() == b"content"
    assert os.listdir(tmp_path) == ["small"]


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
