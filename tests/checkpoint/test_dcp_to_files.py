"""``dcp_to_files``: checkpoints as files of whole tensors, by one process and by several ranks."""

from __future__ import annotations

import json

import pytest
import samples
import torch
from checkpoint_tools import MARKS, save
from servers.s3_recorder import S3Recorder

import tensorizer.distributed as td
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer
from tensorizer.errors import CryptographyError, HashMismatchError, UnsupportedContentError
from tensorizer.torch import load_file, safe_open

pytestmark = MARKS

MODEL = {
    "layer.weight": torch.arange(300.0 * 70).view(300, 70),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 2),
}
NBYTES = sum(tensor.nbytes for tensor in MODEL.values())


@pytest.fixture
def checkpoint(tmp_path):
    training = {"model": MODEL, "optimizer": {"exp": torch.zeros(7)}, "epoch": 3}
    save({"training": training, "step": 4}, tmp_path / "in")
    return tmp_path / "in"


def is_the_model(place, **options) -> None:
    found = load_file(place, **options)
    assert found.keys() == MODEL.keys()
    assert all(samples.same(found[name], tensor) for name, tensor in MODEL.items())


def test_a_prefix_is_selected_and_removed_in_both_formats(checkpoint, tmp_path):
    for name in ("m.tensors", "m.safetensors"):
        assert td.dcp_to_files(checkpoint, tmp_path / name, prefix="training.model.", verify_hash=True) == [NBYTES]
        is_the_model(tmp_path / name)
    with TensorDeserializer(tmp_path / "m.tensors", device="cpu", verify_hash=True) as file:
        assert file.metadata is None or "checkpoint.values" not in file.metadata
    td.dcp_to_files(checkpoint, tmp_path / "all.tensors")
    assert load_file(tmp_path / "all.tensors").keys() == {
        *(f"training.model.{name}" for name in MODEL),
        "training.optimizer.exp",
    }


def test_numbers_and_texts_become_metadata_and_other_leaves_a_warning(tmp_path):
    save({"run": {"w": torch.ones(3), "step": 4, "who": "me"}, "other": 5}, tmp_path / "in")
    for name in ("m.tensors", "m.safetensors"):
        td.dcp_to_files(tmp_path / "in", tmp_path / name, prefix="run.")
        with safe_open(tmp_path / name, "pt") as file:
            assert json.loads(file.metadata()["checkpoint.values"]) == {"step": 4, "who": "me"}
    save({"w": torch.ones(3), "device": torch.device("cpu")}, tmp_path / "in")
    with pytest.warns(UserWarning, match=r"not in .*m\.tensors: 'device'"):
        td.dcp_to_files(tmp_path / "in", tmp_path / "m.tensors")


def test_a_prefix_is_literal_and_one_that_selects_nothing_names_those_there_are(checkpoint, tmp_path):
    for prefix in ("model.", "training.model.layer.weight", "training.*", "TRAINING."):
        with pytest.raises(ValueError, match="selects no tensor; their names begin with") as caught:
            td.dcp_to_files(checkpoint, tmp_path / "m.tensors", prefix=prefix)
        assert "'training.model.'" in str(caught.value)
        assert "'training.optimizer.'" in str(caught.value)
        assert repr(prefix) in str(caught.value)
    with pytest.raises(TypeError, match="prefix: expected a str"):
        td.dcp_to_files(checkpoint, tmp_path / "m.tensors", prefix=None)
    assert not (tmp_path / "m.tensors").exists()


def test_a_folder_gets_a_model_file_or_shards_with_their_index_as_the_hub_has_them(checkpoint, tmp_path):
    for format, name in ((None, "model.safetensors"), ("tensors", "model.tensors")):
        folder = tmp_path / str(format)
        folder.mkdir()
        td.dcp_to_files(checkpoint, folder, prefix="training.model.", format=format)
        assert [path.name for path in folder.iterdir()] == [name]
        is_the_model(folder)
        td.dcp_to_files(checkpoint, f"{folder}/", prefix="training.model.", format=format, max_shard_size=100)
        names = {path.name for path in folder.iterdir()}
        assert f"{name}.index.json" in names
        assert name not in names
        assert len(names) == 3
        is_the_model(folder)
    shard = next((tmp_path / "None").glob("*-of-*"))
    with safe_open(shard, "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_keys_open_the_checkpoint_and_seal_the_file(tmp_path):
    key = EncryptionParams.random()
    unlock = DecryptionParams.from_key(key.key)
    save(MODEL, tmp_path / "in", encryption=key)
    with pytest.raises(CryptographyError):
        td.dcp_to_files(tmp_path / "in", tmp_path / "m.tensors")
    td.dcp_to_files(tmp_path / "in", tmp_path / "m.tensors", decryption=unlock, encryption=key)
    is_the_model(tmp_path / "m.tensors", encryption=unlock)
    with pytest.raises(UnsupportedContentError, match="cannot be encrypted"):
        td.dcp_to_files(tmp_path / "in", tmp_path / "m.safetensors", decryption=unlock, encryption=key)
    assert not (tmp_path / "m.safetensors").exists()


def test_verify_hash_finds_a_byte_that_differs_and_leaves_the_target_as_it_was(checkpoint, tmp_path):
    (file,) = checkpoint.glob("r*.tensors")
    data = bytearray(file.read_bytes())
    data[data.index(MODEL["layer.weight"].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    (tmp_path / "m.tensors").write_text("before")
    with pytest.raises(HashMismatchError, match=r"layer\.weight"):
        td.dcp_to_files(checkpoint, tmp_path / "m.tensors", verify_hash=True)
    assert (tmp_path / "m.tensors").read_text() == "before"


def test_checkpoint_and_target_may_be_in_a_store_and_a_checkpoint_without_tensors_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with S3Recorder() as store:
        options = {"stream_options": store.arguments}
        save({"model": MODEL}, "s3://bucket/in", **options)
        target = "s3://bucket/out/"
        assert td.dcp_to_files("s3://bucket/in", target, prefix="model.", max_shard_size=100, **options) == [NBYTES]
        is_the_model("s3://bucket/out", **options)
    save({"step": 1}, tmp_path / "none")
    with pytest.raises(UnsupportedContentError, match="expected a checkpoint with tensors"):
        td.dcp_to_files(tmp_path / "none", tmp_path / "m.tensors")


@pytest.mark.parametrize("program", ["write_together", "round_trip"])
def test_ranks_write_their_share(fresh_process, tmp_path, program):
    text = f"""
        import pathlib, sys, warnings
        warnings.simplefilter("ignore")
        import to_files_ranks
        to_files_ranks.{program}(pathlib.Path(sys.argv[1]))
    """
    result = fresh_process(text, tmp_path, timeout=200)
    assert result.returncode == 0, result.stderr + result.stdout
