"""Two sets of weights in one folder: refused by name, unless one says that it was made from the other."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil

import pytest
import torch
from servers.file_server import serve_folder

import tensorizer
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, load_file, save_file
from tensorizer.errors import FormatError
from tensorizer.torch import safe_open

OLD, NEW = {"w": torch.zeros(300)}, {"w": torch.ones(300)}
FORMS = ("model.safetensors", "model.tensors", "model.safetensors.index.json", "model.tensors.index.json")


def write(folder, name, tensors):
    """A file of that name, or shards and their index."""
    os.makedirs(folder, exist_ok=True)
    if name.endswith(".index.json"):
        more = {**tensors, "more": torch.ones(300)}
        single = name[: -len(".index.json")]
        save_file(more, f"{folder}/shards-{single}", max_shard_size=1200)
        os.rename(f"{folder}/shards-{single}.index.json", f"{folder}/{name}")
    else:
        save_file(tensors, f"{folder}/{name}")


def by_deserializer(source):
    with TensorDeserializer(source, device="cpu") as file:
        return {name: tensor.detach().clone() for name, tensor in file.items()}


def by_safe_open(source):
    with safe_open(source, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def by_convert(source, **options):
    tensorizer.convert(source, "memory://converted.tensors", **options)
    return load_file("memory://converted.tensors")


DOORS = {
    "TensorDeserializer": by_deserializer,
    "load_file": load_file,
    "safe_open": by_safe_open,
    "convert": by_convert,
    "verify": lambda source: bool(tensorizer.verify(source)),
    "inspect": lambda source: tensorizer.inspect(source).tensors,
    "diff": lambda source: bool(tensorizer.diff(source, source)),
}


@contextlib.contextmanager
def place_of(kind, folder):
    """The folder as itself, behind a web server, and in a file system of fsspec."""
    if kind == "http":
        with serve_folder(folder.parent) as url:
            yield f"{url}/{folder.name}"
    elif kind == "memory":
        fsspec = pytest.importorskip("fsspec")
        files = fsspec.filesystem("memory")
        files.put(str(folder), f"/{folder.parent.name}/{folder.name}", recursive=True)
        yield f"memory://{folder.parent.name}/{folder.name}"
        files.rm(f"/{folder.parent.name}", recursive=True)
    else:
        yield str(folder)


@pytest.mark.parametrize("kind", ["local", "http", "memory"])
@pytest.mark.parametrize("door", DOORS)
def test_two_sets_of_weights_are_refused_by_every_door_and_place(tmp_path, door, kind):
    for number, (one, other) in enumerate([FORMS[:2], FORMS[1:3], (FORMS[0], FORMS[2]), (FORMS[1], FORMS[3])]):
        folder = tmp_path / f"model{number}"
        write(folder, one, OLD)
        write(folder, other, NEW)
        with place_of(kind, folder) as source:
            with pytest.raises(FormatError) as caught:
                DOORS[door](source)
            assert set(re.findall(r"model\.[\w.]+(?=[ ,])", str(caught.value))) == {one, other}
            assert f"{folder.name}: found both" in str(caught.value)
            DOORS[door](f"{source}/{one}")  # the one that is named


@pytest.mark.parametrize("stem", ["diffusion_pytorch_model", "model.fp16", "adapter_model"])
def test_two_sets_under_another_name_are_refused_too(tmp_path, stem):
    for ending in ("safetensors", "tensors"):
        write(tmp_path, f"{stem}.{ending}", NEW)
    with pytest.raises(FormatError, match=rf"both {stem}\.safetensors and {stem}\.tensors"):
        load_file(tmp_path)
    os.unlink(tmp_path / f"{stem}.tensors")
    write(tmp_path, f"{stem}.safetensors.index.json", NEW)
    with pytest.raises(FormatError, match=rf"both {stem}\.safetensors\.index\.json and {stem}\.safetensors,"):
        load_file(tmp_path)


@pytest.mark.parametrize("kind", ["local", "http", "memory"])
@pytest.mark.parametrize("source", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("shards", [None, 600])
def test_a_file_that_convert_made_beside_its_source_is_read_as_long_as_the_source_is_the_same(
    tmp_path, caplog, kind, source, shards
):
    folder = tmp_path / "model"
    write(folder, source, NEW)
    tensorizer.convert(folder, folder / "model.tensors", max_shard_size=shards, dtype=torch.float16)
    caplog.set_level(logging.WARNING)
    with place_of(kind, folder) as place:
        assert {door: DOORS[door](place) for door in ("inspect", "verify", "diff")}["verify"]
        for door in (by_deserializer, load_file, by_safe_open, by_convert):
            assert door(place)["w"].equal(NEW["w"].half())  # what was made
    hashed = [record for record in caplog.records if "SHA-256" in record.getMessage()]
    assert bool(hashed) == (kind != "local")  # a local file whose size and time are the same is not read
    write(folder, source, OLD)
    with place_of(kind, folder) as place, pytest.raises(FormatError, match="has changed since"):
        load_file(place)


def test_the_first_shard_says_what_shards_were_made_from_wherever_the_index_names_it(tmp_path):
    tensors = {"z": torch.ones(300), "a": torch.ones(600, dtype=torch.float16)}  # in this order
    save_file(tensors, tmp_path / "model.safetensors")
    tensorizer.convert(tmp_path, tmp_path, max_shard_size=1200)
    assert len(list(tmp_path.glob("model-*.tensors"))) == 2
    with TensorDeserializer(tmp_path, device="cpu") as file:
        assert file.format == "tensors"
        assert file.metadata == {}


def test_a_copy_of_a_converted_folder_is_compared_by_its_content(tmp_path, caplog):
    folder = tmp_path / "model"
    write(folder, "model.safetensors", NEW)
    tensorizer.convert(folder, folder)
    os.utime(folder / "model.safetensors", (1, 1))
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in os.listdir(folder):
        shutil.copyfile(folder / name, copy / name)
    with TensorDeserializer(copy, device="cpu") as file:
        assert file.format == "tensors"
    assert caplog.text.count("SHA-256") == 1
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)  # of the same size
    with pytest.raises(FormatError, match="has changed since"):
        load_file(copy)


def test_what_a_file_was_made_from_is_no_metadata_of_the_user_and_is_not_handed_on(tmp_path):
    for metadata in (None, {"format": "pt"}):
        folder = tmp_path / str(bool(metadata))
        folder.mkdir()
        save_file(NEW, folder / "model.safetensors", metadata)
        tensorizer.convert(folder, folder / "model.tensors")
        with TensorDeserializer(folder / "model.tensors", device="cpu") as file:
            assert file.metadata == (metadata or {})
        assert tensorizer.inspect(folder / "model.tensors").metadata == (metadata or {})
        tensorizer.convert(folder / "model.tensors", tmp_path / "again.safetensors", keep_order=True)
        assert (tmp_path / "again.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        tensorizer.convert(folder / "model.tensors", tmp_path / "elsewhere.tensors")
        assert b"made_from" in (folder / "model.tensors").read_bytes()
        assert b"made_from" not in (tmp_path / "elsewhere.tensors").read_bytes()


def test_a_converted_folder_may_be_converted_again_in_place(tmp_path):
    write(tmp_path, "model.safetensors", NEW)
    tensorizer.convert(tmp_path, tmp_path)
    tensorizer.convert(tmp_path, tmp_path, dtype=torch.float16)  # from model.tensors, which was made
    assert load_file(tmp_path)["w"].equal(NEW["w"].half())
    write(tmp_path, "model.safetensors", OLD)
    with pytest.raises(FormatError, match="has changed since"):
        tensorizer.convert(tmp_path, tmp_path)
    tensorizer.convert(tmp_path / "model.safetensors", tmp_path)
    assert load_file(tmp_path)["w"].equal(OLD["w"])


def test_an_encrypted_file_that_was_made_from_a_plain_one_is_read_with_its_key_and_refused_without(tmp_path):
    key = EncryptionParams.random()
    write(tmp_path, "model.safetensors", NEW)
    tensorizer.convert(tmp_path, tmp_path, encryption=key)
    assert load_file(tmp_path, encryption=DecryptionParams.from_key(key.key))["w"].equal(NEW["w"])
    with pytest.raises(FormatError, match="both"):
        load_file(tmp_path)
    assert b"made_from" not in (tmp_path / "model.tensors").read_bytes()


def test_an_index_of_the_single_file_beside_it_is_no_second_set(tmp_path):
    write(tmp_path, "model.safetensors", NEW)
    index = {"metadata": {"total_size": 1200}, "weight_map": {"w": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_file(tmp_path)["w"].equal(NEW["w"])


@pytest.mark.parametrize(
    "note",
    [
        "",
        "null",
        "[]",
        '{"model.safetensors":1}',
        '{"model.safetensors":[1]}',
        '{"model.safetensors":[1320,null,"0"]}',
        json.dumps({"../model.safetensors": [1320, None, "0" * 64]}),
        json.dumps({"model.safetensors": [1320, None, "0" * 64], "/etc/passwd": [1, None, "0" * 64]}),
        "[" * 100_000,
    ],
)
def test_a_note_of_another_form_marks_nothing(tmp_path, note):
    write(tmp_path, "model.safetensors", NEW)
    save_file(NEW, tmp_path / "model.tensors", {"tensorizer.made_from": note})
    with pytest.raises(FormatError, match="both"):
        load_file(tmp_path)


def test_a_damaged_file_beside_another_one_is_named_and_not_passed_over(tmp_path):
    write(tmp_path, "model.safetensors", NEW)
    (tmp_path / "model.tensors").write_bytes(b"no tensors")
    with pytest.raises(FormatError, match=r"both model\.safetensors and model\.tensors"):
        load_file(tmp_path)
