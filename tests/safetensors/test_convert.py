"""Conversions between formats: the same tensors, the same bytes where that can be, and nothing half done."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import signal
import zipfile

import memory
import pytest
import samples
import torch
from servers.s3_recorder import S3Recorder
from torch_versions import reads_pickles

import tensorizer
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer._files.copy import copy_file
from tensorizer._io.call_options import CallOptions
from tensorizer.errors import FormatError, StreamExistsError
from tensorizer.torch import load_file, save, save_file

safetensors_torch = pytest.importorskip("safetensors.torch")
MIB = 1 << 20


def state():
    return {
        "b": samples.tensor((33, 7), torch.float32, 1),
        "a": samples.tensor((5,), torch.bfloat16, 2),
        "steps": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "mask": torch.tensor([True, False]),
        "large": samples.tensor((9 * MIB,), torch.uint8, 3),
    }


def write(path, tensors, **options):
    with TensorSerializer(path, **options) as serializer:
        serializer.write_state_dict(tensors)
    return path


def assert_equal(found, wanted):
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        same = found[name].detach().reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
        assert same or tensor.numel() == 0, name


def test_tensors_become_the_safetensors_file_that_the_reference_writes(tmp_path):
    source = write(tmp_path / "m.tensors", state())
    report = tensorizer.convert(source, tmp_path / "m.safetensors")
    assert (report["format"], report["tensors"], report["checked"]) == ("safetensors", 6, True)
    safetensors_torch.save_file(state(), tmp_path / "theirs.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_a_reference_file_comes_back_byte_for_byte_also_through_encryption(tmp_path):
    theirs = tmp_path / "theirs.safetensors"
    safetensors_torch.save_file(state(), theirs, metadata={"format": "pt"})
    key = EncryptionParams.random()
    for encryption in (None, key):
        decryption = None if encryption is None else DecryptionParams.from_key(key.key)
        tensorizer.convert(theirs, tmp_path / "m.tensors", encryption=encryption)
        again = tmp_path / "again.safetensors"
        tensorizer.convert(tmp_path / "m.tensors", again, decryption=decryption, keep_order=True)
        assert again.read_bytes() == theirs.read_bytes()


def test_modules_keep_kinds_and_numbers_in_another_tensors_file(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    with TensorSerializer(tmp_path / "m.tensors") as serializer:
        serializer.write_module(module)
    tensorizer.convert(tmp_path / "m.tensors", tmp_path / "n.tensors", encryption=EncryptionParams(bytes(32)))
    decryption = DecryptionParams.from_key(bytes(32))
    with (
        TensorDeserializer(tmp_path / "m.tensors", device="cpu", lazy_load=True) as a,
        TensorDeserializer(tmp_path / "n.tensors", device="cpu", lazy_load=True, encryption=decryption) as b,
    ):
        facts = [[(idx, kind, name) for idx, kind, name, _ in file.read_tensors()] for file in (a, b)]
    assert facts[0] == facts[1]


def test_dtype_changes_wide_floating_point_types_alone(tmp_path):
    source = write(tmp_path / "m.tensors", state())
    tensorizer.convert(source, tmp_path / "half.tensors", dtype=torch.float16)
    with TensorDeserializer(tmp_path / "half.tensors", device="cpu") as found:
        dtypes = {name: tensor.dtype for name, tensor in found.items()}
        wanted = state()["b"].half()
        assert found["b"].detach().view(torch.int16).equal(wanted.view(torch.int16))
    assert dtypes == {
        "b": torch.float16,
        "a": torch.float16,
        "steps": torch.int64,
        "empty": torch.float16,
        "mask": torch.bool,
        "large": torch.uint8,
    }


def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    cases = {
        "complex128": {"x": torch.zeros(2, dtype=torch.complex128), "y": torch.zeros(2, dtype=torch.complex128)},
        "nested": {"x": {"y": torch.zeros(1)}},
    }
    for name, tensors in cases.items():
        source = write(tmp_path / f"{name}.tensors", tensors)
        target = tmp_path / f"{name}.safetensors"
        target.write_bytes(b"old")
        with pytest.raises(tensorizer.UnsupportedContentError, match="x"):
            tensorizer.convert(source, target)
        assert target.read_bytes() == b"old"
    tensorizer.convert(tmp_path / "nested.tensors", tmp_path / "flat.safetensors", flatten=True)
    assert list(safetensors_torch.load_file(tmp_path / "flat.safetensors")) == ["x.y"]
    with pytest.raises(tensorizer.UnsupportedContentError):
        tensorizer.convert(tmp_path / "nested.tensors", target, encryption=EncryptionParams.random())


def test_a_damaged_source_leaves_the_old_target(tmp_path):
    source = write(tmp_path / "m.tensors", state())
    with TensorDeserializer(source, device="cpu", lazy_load=True) as file:
        at = next(entry.data_offset for entry in file.entries() if entry.name == "large")
    content = bytearray(source.read_bytes())
    content[at] ^= 1
    source.write_bytes(content)
    for target in (tmp_path / "t.tensors", tmp_path / "t.safetensors"):
        target.write_bytes(b"old")
        with pytest.raises(tensorizer.HashMismatchError, match="large"):
            tensorizer.convert(source, target)
        assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.tensors", "t.safetensors", "t.tensors"]


def test_shards_hold_all_tensors_and_an_index_that_names_them(tmp_path):
    source = write(tmp_path / "m.tensors", {f"t{i}": samples.tensor((MIB,), torch.uint8, i) for i in range(5)})
    report = tensorizer.convert(source, tmp_path / "model.safetensors", max_shard_size="2.2MB")
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [path.rpartition("/")[2] for path in report["files"]] == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * MIB
    assert index["weight_map"] == {f"t{i}": names[i // 2] for i in range(5)}
    for name in names:
        found = safetensors_torch.load_file(tmp_path / name)
        for key, tensor in found.items():
            assert tensor.equal(samples.tensor((MIB,), torch.uint8, int(key[1:])))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names, "m.tensors", "model.safetensors.index.json"])


@reads_pickles
def test_pickled_state_dicts_are_read_without_running_them(tmp_path):
    shared = torch.arange(6.0)
    content = {"epoch": 3, "state_dict": {"a": shared, "b": shared, "c": shared.reshape(2, 3).t(), "note": "text"}}
    torch.save(content, tmp_path / "m.pt")
    report = tensorizer.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    assert report["ties"] == {"b": "a"}
    assert report["skipped"] == ("note",)
    found = safetensors_torch.load_file(tmp_path / "m.safetensors")
    assert found["a"].equal(shared)
    assert found["c"].equal(shared.reshape(2, 3).t())
    with pytest.raises(tensorizer.UnsupportedContentError, match="a"):
        tensorizer.convert(tmp_path / "m.pt", tmp_path / "x.safetensors", ties="error")
    tensorizer.convert(tmp_path / "m.pt", tmp_path / "twice.safetensors", ties="twice")
    assert set(safetensors_torch.load_file(tmp_path / "twice.safetensors")) == {"a", "b", "c"}
    torch.save({"elsewhere": content}, tmp_path / "deep.pt")
    with pytest.raises(tensorizer.FormatError, match="no state dict"):
        tensorizer.convert(tmp_path / "deep.pt", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@reads_pickles
def test_a_packed_pickle_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path):
    torch.save({"w": torch.zeros(10 * MIB)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for info in plain.infolist():
            packed.writestr(info.filename, plain.read(info))
    assert (tmp_path / "packed.pt").stat().st_size < MIB
    with pytest.raises(FormatError, match=r"packed\.pt: expected an archive that unpacks to at most 100 times"):
        tensorizer.convert(tmp_path / "packed.pt", tmp_path / "m.tensors")
    tensorizer.convert(tmp_path / "plain.pt", tmp_path / "m.tensors")


@reads_pickles
def test_a_mapping_of_tensors_that_skip_non_tensors_leaves_out_is_warned_of(tmp_path, caplog):
    content = {"step": torch.tensor(3), "epoch": 1, "model": {"a": torch.arange(6.0)}}
    torch.save(content, tmp_path / "m.pt")
    report = tensorizer.convert(tmp_path / "m.pt", tmp_path / "m.tensors", skip_non_tensors=True)
    assert report["skipped"] == ("epoch", "model")
    (record,) = caplog.records
    assert record.message == f"{tmp_path}/m.pt: 'model' is left out, although it holds tensors"


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@reads_pickles
def test_pickled_files_that_cannot_be_mapped_are_read(tmp_path, monkeypatch):
    def fail(*_arguments):
        raise RuntimeError("unable to mmap 24 bytes from file <m.pt>: No such device (19)")

    torch.save({"a": torch.arange(6.0)}, tmp_path / "m.pt")
    monkeypatch.setattr(torch.UntypedStorage, "from_file", fail)
    tensorizer.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    assert tensorizer.load_file(tmp_path / "m.safetensors")["a"].equal(torch.arange(6.0))


def test_a_safetensors_file_whose_first_byte_is_that_of_a_pickle_keeps_its_metadata(tmp_path):
    source, target = tmp_path / "m.safetensors", tmp_path / "new.safetensors"
    begun = 0
    for spare in range(0, 1024, 8):  # as is the size of the header
        data = save({"a": torch.arange(3.0)}, {"note": "x" * spare})
        if data[0] == 0x80:
            begun += 1
            source.write_bytes(data)
            tensorizer.convert(source, target)
            assert target.read_bytes() == data
    assert begun == 4


@reads_pickles
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path):
    canary = tmp_path / "canary"
    torch.save({"a": torch.zeros(1), "b": Canary(canary)}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"a": Canary(canary)}, protocol=2))
    for name in ("zip.pt", "plain.pt"):
        with pytest.raises(tensorizer.FormatError):
            tensorizer.convert(tmp_path / name, tmp_path / "out.tensors")
    assert not canary.exists()
    assert not (tmp_path / "out.tensors").exists()


def test_a_dry_run_writes_nothing_and_an_existing_target_needs_force(tmp_path):
    source = write(tmp_path / "m.tensors", state())
    report = tensorizer.convert(source, tmp_path / "m.safetensors", dry_run=True)
    assert report["tensors"] == 6
    assert not report["checked"]
    assert not (tmp_path / "m.safetensors").exists()
    with pytest.raises(FileExistsError):
        tensorizer.convert(source, source, force=False)
    assert_equal(dict(TensorDeserializer(source, device="cpu")), state())


def test_zero_filled_tensors_stay_without_data(tmp_path):
    source = write(tmp_path / "m.tensors", {"a": torch.zeros(1), "meta": torch.empty(1000, 1000, device="meta")})
    tensorizer.convert(source, tmp_path / "n.tensors")
    assert (tmp_path / "n.tensors").stat().st_size < 10_000
    with TensorDeserializer(tmp_path / "n.tensors", device="cpu") as found:
        assert not found["meta"].any()


def test_shards_are_converted_into_one_file_or_other_shards_with_what_lies_beside_them(tmp_path):
    tensors = {f"layers.{i}.weight": samples.tensor((MIB // 8,), torch.uint8, i) for i in range(6)}
    folder = tmp_path / "model"
    state = {**tensors, "tied.weight": tensors["layers.5.weight"]}
    save_file(state, folder / "model.safetensors", max_shard_size="300KB")
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"a model in another format")
    (folder / ".cache").mkdir()
    for source in (folder, folder / "model.safetensors.index.json", f"{folder}/"):
        report = tensorizer.convert(source, tmp_path / "one.tensors")
        assert (report["tensors"], report["checked"], dict(report["ties"])) == (
            6,
            True,
            {"tied.weight": "layers.5.weight"},
        )
        found = load_file(tmp_path / "one.tensors")
        assert_equal(found, state)
        assert found["tied.weight"] is found["layers.5.weight"]

    report = tensorizer.convert(folder, f"{tmp_path}/out/", all_files=True, max_shard_size="400KB")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        *(f"model-0000{i}-of-00002.tensors" for i in (1, 2)),
        "model.tensors.index.json",
    ]
    assert report["copied"] == (str(tmp_path / "out" / "config.json"),)
    assert_equal(load_file(tmp_path / "out"), state)
    for name in ("model-00002-of-00002.tensors", "model.tensors.index.json", "config.json"):
        kept = (tmp_path / "out" / name).read_bytes()
        for other in set(os.listdir(tmp_path / "out")) - {name}:
            (tmp_path / "out" / other).unlink()
        with pytest.raises(StreamExistsError, match=name):
            tensorizer.convert(folder, tmp_path / "out", all_files=True, max_shard_size="400KB", force=False)
        assert os.listdir(tmp_path / "out") == [name]
        assert (tmp_path / "out" / name).read_bytes() == kept
        tensorizer.convert(folder, tmp_path / "out", all_files=True, max_shard_size="400KB")
    with pytest.raises(ValueError, match="all_files"):
        tensorizer.convert(io.BytesIO(save(tensors)), tmp_path / "x.tensors", all_files=True)


@pytest.mark.parametrize("target", ["served", "s3://bucket/served", "s3://bucket/served?versionId=1", "served.old"])
def test_convert_of_all_files_wants_a_target_that_says_whether_it_is_a_folder(tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    save_file({"weight": torch.ones(2)}, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="put / at the end"):
        tensorizer.convert(source, target, all_files=True)
    assert os.listdir(tmp_path) == ["source"]


def test_ties_and_metadata_survive_in_shards_of_both_formats(tmp_path):
    weight = samples.tensor((MIB // 8,), torch.uint8, 1)
    tensors = {"embed.weight": weight, "other": samples.tensor((MIB // 8,), torch.uint8, 2), "lm_head.weight": weight}
    key = EncryptionParams.random()
    for name, options in (("m.safetensors", {}), ("m.tensors", {}), ("k.tensors", {"encryption": key})):
        folder = tmp_path / name
        save_file(tensors, folder / name, {"note": "private text"}, max_shard_size="150KB", **options)
        decryption = DecryptionParams.from_key(key.key) if options else None
        found = load_file(folder, encryption=decryption)
        assert_equal(found, tensors)
        assert found["lm_head.weight"] is found["embed.weight"], name
        with TensorDeserializer(folder, device="cpu", encryption=decryption, lazy_load=True) as file:
            assert file.metadata["note"] == "private text"
            assert file.ties == {"lm_head.weight": "embed.weight"}
        index = (folder / f"{name}.index.json").read_text()
        assert ("private text" in index) == (name == "m.safetensors")
    nested = {"optimizer": {"state": [torch.ones(9), torch.zeros(9)], "name/with.dots": torch.ones(3)}}
    source = write(tmp_path / "nested.tensors", nested)
    tensorizer.convert(source, tmp_path / "nested" / "model.tensors", max_shard_size=40)
    found = load_file(tmp_path / "nested")["optimizer"]
    assert found["state"][1].equal(torch.zeros(9))
    assert found["name/with.dots"].equal(torch.ones(3))


def test_a_tie_that_readers_of_safetensors_would_not_recognise_is_stored_twice(tmp_path):
    weight = torch.arange(9.0)
    for names in (("a", "b.c"), ("a b", "c d"), ("", "x"), ("note", "z")):
        state = dict.fromkeys(names, weight)
        for options in ({}, {"max_shard_size": 36}):
            folder = tmp_path / f"{names[0]}-{len(options)}"
            save_file(state, folder / "model.safetensors", {"note": "text"}, **options)
            assert_equal(load_file(folder), state)
            with TensorDeserializer(folder, device="cpu", lazy_load=True) as file:
                assert file.metadata["note"] == "text"


def test_no_older_form_of_a_model_stays_beside_the_new_one(tmp_path):
    old, new = ({"a": torch.full((1000,), value), "b": torch.full((1000,), value)} for value in (1.0, 2.0))
    other = tmp_path / "model-00001-of-00002.safetensors.bak"
    other.write_bytes(b"of somebody else")
    for size, count in ((4000, 3), (8000, 1), (4000, 3), ("1GB", 1)):
        old, new = new, old
        save_file(new, tmp_path / "model.safetensors", max_shard_size=size)
        assert_equal(load_file(tmp_path), new)
        assert len(os.listdir(tmp_path)) == count + 1
    with pytest.raises(StreamExistsError):
        tensorizer.convert(io.BytesIO(save(new)), tmp_path / "model.safetensors", max_shard_size=4000, force=False)
    assert other.read_bytes() == b"of somebody else"


def test_a_folder_that_lies_leaves_the_old_target(tmp_path):
    folder = tmp_path / "model"
    save_file({"a": torch.ones(9), "b": torch.ones(9)}, folder / "model.safetensors", max_shard_size=40)
    (tmp_path / "out.tensors").write_bytes(b"old")
    (folder / "model-00002-of-00002.safetensors").rename(folder / "moved")
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        tensorizer.convert(folder, tmp_path / "out.tensors")
    (folder / "moved").rename(folder / "model-00002-of-00002.safetensors")
    save_file({"other": torch.ones(9)}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(FormatError, match="'b'"):
        tensorizer.convert(folder, tmp_path / "out.tensors")
    assert (tmp_path / "out.tensors").read_bytes() == b"old"


@reads_pickles
def test_pickled_shards_are_one_model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"a": torch.ones(3)}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(2)}, folder / "pytorch_model-00002-of-00002.bin")
    names = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    for source in (folder, index):
        tensorizer.convert(source, tmp_path / "m.safetensors")
        assert_equal(load_file(tmp_path / "m.safetensors"), {"a": torch.ones(3), "b": torch.zeros(2)})
    for wrong, error in (("../x.bin", FormatError), ("absent.bin", FileNotFoundError)):
        index.write_text(json.dumps({"weight_map": {**names, "c": wrong}}))
        with pytest.raises(error, match=wrong):
            tensorizer.convert(folder, tmp_path / "m.safetensors")


def test_an_interrupted_conversion_leaves_what_was_there(tmp_path):
    source = write(tmp_path / "m.tensors", {f"t{i}": samples.tensor((24 * MIB,), torch.uint8, i) for i in range(4)})

    def interrupt(progress):
        if progress.bytes_done:
            raise KeyboardInterrupt

    first = "t-00001-of-00004.safetensors"
    for name, old, options in (
        ("t.tensors", "t.tensors", {}),
        ("t.safetensors", "t.safetensors", {}),
        ("t.safetensors", first, {"max_shard_size": "30MB"}),
    ):
        folder = tmp_path / "out"
        folder.mkdir()
        (folder / old).write_bytes(b"old")
        with pytest.raises(KeyboardInterrupt):
            tensorizer.convert(source, folder / name, progress=interrupt, **options)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {old: b"old"}
        (folder / old).unlink()
        folder.rmdir()


def test_shards_are_not_written_beside_another_form_of_the_model(tmp_path):
    source = write(tmp_path / "m.tensors", {f"t{i}": torch.full((1000,), float(i)) for i in range(4)})
    target = tmp_path / "out" / "t.safetensors"
    for size, other in (("5KB", 9_000), (9_000, "1GB"), ("1GB", "5KB")):
        target.parent.mkdir()
        tensorizer.convert(source, target, max_shard_size=size)
        before = {path: path.read_bytes() for path in target.parent.iterdir()}
        for dry_run in (False, True):
            with pytest.raises(StreamExistsError, match=r"another form of .*t\.safetensors.*remove it first"):
                tensorizer.convert(source, target, max_shard_size=other, dry_run=dry_run)
        assert {path: path.read_bytes() for path in target.parent.iterdir()} == before
        tensorizer.convert(source, target, max_shard_size=size)
        assert {*target.parent.iterdir()} == {*before}
        for path in before:
            path.unlink()
        target.parent.rmdir()


FULL_DISK = """
import resource, signal, sys
import tensorizer
folder = sys.argv[1]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))  # files cannot grow beyond it, as on a disk that is full
for name, size in (("a.tensors", None), ("b.safetensors", None), ("c.safetensors", "13MB")):
    try:
        tensorizer.convert(f"{folder}/m.tensors", f"{folder}/out/{name}", max_shard_size=size)
    except OSError:
        print(name)
"""


def test_models_are_written_only_under_names_under_which_they_are_found_again(tmp_path):
    two = {"a": torch.ones(9), "b": torch.ones(9)}
    for name in ("served", "model.bin", "model.v2"):
        with pytest.raises(ValueError, match=rf"max_shard_size: expected a name .*got {tmp_path}/{name}$"):
            save_file(two, tmp_path / name, format="tensors", max_shard_size=40)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"expected the name of a file of tensors, got .*/m\.tensors\.index\.json$"):
        save_file(two, tmp_path / "m.tensors.index.json")
    assert list(tmp_path.iterdir()) == []
    save_file(two, tmp_path / "served", max_shard_size="1GB")  # one file is
    assert load_file(tmp_path / "served").keys() == two.keys()


@pytest.mark.parametrize("shards", [2, 300])
def test_shards_appear_together_or_not_at_all_and_many_of_them_keep_few_files_open(tmp_path, monkeypatch, shards):
    tensors = {f"t{i:03}": torch.full((9,), float(i)) for i in range(shards)}
    seen = []

    def read_back(*_):
        seen.append({path.name for path in tmp_path.iterdir() if not path.name.startswith(".")})
        if len(seen) == shards and len(failures) == 0:
            failures.append(True)
            raise tensorizer.HashMismatchError("not what was read")

    failures = []
    with monkeypatch.context() as patch:
        patch.setattr("tensorizer._files.write._Writing._read_back", read_back)
        with pytest.raises(tensorizer.HashMismatchError):
            save_file(tensors, tmp_path / "m.safetensors", max_shard_size=40)
    assert list(tmp_path.iterdir()) == []
    assert not any(seen)
    save_file(tensors, tmp_path / "m.safetensors", max_shard_size=40)
    assert len(list(tmp_path.iterdir())) == shards + 1
    assert_equal(load_file(tmp_path), tensors)


def test_a_save_in_shards_that_was_killed_leaves_nothing_under_their_names(fresh_process, tmp_path):
    program = """
        import os, signal, sys, torch
        from tensorizer.torch import save_file
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        save_file({"a": torch.ones(9), "b": torch.ones(9)}, sys.argv[1], max_shard_size=40)
        """
    target = tmp_path / "m.safetensors"
    assert fresh_process(program, target).returncode == -signal.SIGKILL
    left = [path.name for path in tmp_path.iterdir()]  # the one that was about to take its name has a hidden one
    assert len(left) <= 1
    assert all(name.startswith(".m-") for name in left)
    save_file({"a": torch.ones(9), "b": torch.ones(9)}, target, max_shard_size=40)
    assert set(load_file(tmp_path)) == {"a", "b"}


def test_a_disk_without_room_leaves_what_was_there(fresh_process, tmp_path):
    write(tmp_path / "m.tensors", {f"t{i}": samples.tensor((6 * MIB,), torch.uint8, i) for i in range(3)})
    names = ["a.tensors", "b.safetensors", "c.safetensors"]
    (tmp_path / "out").mkdir()
    for name in names:
        (tmp_path / "out" / name).write_bytes(b"old")
    result = fresh_process(FULL_DISK, tmp_path)
    assert (result.returncode, result.stdout.split()) == (0, names), result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert all((tmp_path / "out" / name).read_bytes() == b"old" for name in names)


def large_file(path, nbytes, tensors=None):
    """A canonical ``.safetensors`` file of so many tensors, of 24 MiB each by default, written without holding it."""
    each = 24 * MIB if tensors is None else nbytes // tensors
    names = [f"layers.{i:03}.weight" for i in range(nbytes // each)]
    header = {
        name: {"dtype": "F16", "shape": [each // 2048, 1024], "data_offsets": [i * each, (i + 1) * each]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        piece = samples.tensor((each,), torch.uint8, 7).numpy()
        for i in range(len(names)):
            piece[:8] = i % 256  # no two alike
            file.write(piece)
    return path


def sha256(path):
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(MIB):
            digest.update(piece)
    return digest.hexdigest()


def convert_there_and_back(folder, nbytes, tensors=None):
    """Bytes above what was resident before, at most, while a file goes to ``.tensors`` and back."""
    source = large_file(folder / "m.safetensors", nbytes, tensors)
    with memory.peak_growth() as growth:
        there = tensorizer.convert(source, folder / "m.tensors")
        back = tensorizer.convert(folder / "m.tensors", folder / "again.safetensors", keep_order=True)
    assert (there["checked"], back["checked"]) == (True, True)
    assert sha256(folder / "again.safetensors") == sha256(source)
    for path in folder.iterdir():  # pytest keeps the folders of three runs
        path.unlink()
    return growth.peak


@pytest.mark.skipif(not memory.can_measure(), reason="the peak of the resident set cannot be measured here")
def test_a_conversion_needs_memory_for_a_few_batches_and_not_for_the_file(tmp_path):
    assert convert_there_and_back(tmp_path, 312 * MIB) < 220 * MIB


@pytest.mark.skipif(not memory.can_measure(), reason="the peak of the resident set cannot be measured here")
def test_a_conversion_of_large_tensors_holds_one_of_them_at_a_time(tmp_path):
    assert convert_there_and_back(tmp_path, 480 * MIB, tensors=3) < 300 * MIB  # two of them are 320


@pytest.mark.slow
@pytest.mark.skipif(not memory.can_measure(), reason="the peak of the resident set cannot be measured here")
def test_a_large_conversion_needs_no_more_memory_than_a_small_one(tmp_path):
    assert convert_there_and_back(tmp_path, 1536 * MIB) < 300 * MIB


def test_a_target_that_is_not_what_was_read_never_appears(tmp_path, monkeypatch):
    source = write(tmp_path / "m.tensors", state())

    def refuse(*_):
        raise tensorizer.HashMismatchError("not what was read")

    monkeypatch.setattr("tensorizer._files.write._Writing._read_back", refuse)
    for name in ("t.tensors", "t.safetensors"):
        folder = tmp_path / name.replace(".", "-")
        for old in (None, b"old"):
            for tmpfile in (True, False):
                with monkeypatch.context() as patch:
                    if not tmpfile:
                        patch.delattr(os, "O_TMPFILE")
                    folder.mkdir()
                    if old is not None:
                        (folder / name).write_bytes(old)
                    with pytest.raises(tensorizer.HashMismatchError):
                        tensorizer.convert(source, folder / name)
                    assert {path.name: path.read_bytes() for path in folder.iterdir()} == ({name: old} if old else {})
                    for path in [*folder.iterdir(), folder]:
                        path.rmdir() if path.is_dir() else path.unlink()


def test_a_target_keeps_its_links_mode_bits_and_owner_with_and_without_a_check(tmp_path, monkeypatch):
    source = write(tmp_path / "m.tensors", state())
    (tmp_path / "real").mkdir()
    for check in (True, False):
        for tmpfile in (True, False):
            with monkeypatch.context() as patch:
                if not tmpfile:
                    patch.delattr(os, "O_TMPFILE")
                link, real = tmp_path / "link.safetensors", tmp_path / "real" / "file.safetensors"
                real.write_bytes(b"old")
                with contextlib.suppress(PermissionError):  # only root gives files away
                    os.chown(real, 1234, 2345)
                real.chmod(0o640)
                before = real.stat()
                link.symlink_to(real)
                tensorizer.convert(source, link, check=check)
                assert link.is_symlink()
                after = real.stat()
                assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
                assert_equal(load_file(real), state())
                assert [path.name for path in real.parent.iterdir()] == [real.name]
                link.unlink()


def test_blobs_of_a_hub_cache_are_never_written_through(tmp_path):
    cache = tmp_path / "hub" / "models--org--name"
    blob = cache / "blobs" / ("0" * 64)
    blob.parent.mkdir(parents=True)
    snapshot = cache / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    source = write(tmp_path / "m.tensors", state())
    actions = {
        "convert": lambda path: tensorizer.convert(source, path),
        "no check": lambda path: tensorizer.convert(source, path, check=False),
        "save_file": lambda path: save_file(state(), path),
        "serializer": lambda path: write(path, state()),
        "shards": lambda path: save_file(state(), path, max_shard_size="1MB"),
    }
    for what, action in actions.items():
        blob.write_bytes(b"of the hub")
        link = snapshot / "model.safetensors"
        link.symlink_to(os.path.relpath(blob, snapshot))
        other = tmp_path / "model.safetensors"  # a link to the link
        other.symlink_to(link)
        for path in (other, link):
            action(path)
            assert blob.read_bytes() == b"of the hub", what
            assert what == "shards" or not path.is_symlink(), what
            assert what == "shards" or load_file(path).keys() == state().keys(), what
        for path in (other, link):
            path.unlink(missing_ok=True)


def test_a_misspelt_dtype_is_refused_with_the_name_to_write(tmp_path):
    source = write(tmp_path / "m.tensors", state())
    with pytest.raises(TypeError, match=r"dtype: .*did you mean 'float16'"):
        tensorizer.convert(source, tmp_path / "t.tensors", dtype="fp16")
    assert not (tmp_path / "t.tensors").exists()


def test_an_empty_file_beside_a_model_is_copied_wherever_the_model_goes(tmp_path):
    pytest.importorskip("boto3")
    memory = pytest.importorskip("fsspec").filesystem("memory")
    empty = tmp_path / "empty"
    empty.touch()
    with S3Recorder() as store:
        for target in ("s3://bucket/empty", "memory://copies/empty", str(tmp_path / "copy")):
            copy_file(empty, target, CallOptions.to_write(stream_options=store.arguments))
        assert store.objects == {"/bucket/empty": b""}
    assert memory.cat_file("/copies/empty") == b""
    assert (tmp_path / "copy").read_bytes() == b""
