"""``TensorizerReader`` over one file or the shards of a model: what ``dcp.load`` gets from it, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys

import cache_tools
import pytest
import samples
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_tools import MARKS, cause_of, load, save
from paths import EXAMPLES
from servers.s3_recorder import S3Recorder
from torch.distributed.checkpoint.api import CheckpointException

import tensorizer.distributed as td
from tensorizer import DecryptionParams, EncryptionParams, SigningKey, TensorSerializer
from tensorizer._io.http_options import most_connections
from tensorizer._io.node_cache import finish
from tensorizer._system.config import share_of_node
from tensorizer.errors import AuthenticationError, HashMismatchError, MissingHashError
from tensorizer.stream_io import HTTPOptions
from tensorizer.torch import save_file, save_model

pytestmark = MARKS
state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")  # since torch 2.2

environment, folder, site = cache_tools.environment, cache_tools.folder, cache_tools.site

TENSORS = {
    "weight": torch.arange(12.0).view(3, 4),
    "half": torch.arange(6.0).to(torch.bfloat16),
    "number": torch.tensor(5),
    "nothing": torch.zeros(0, 3),
}


def empty() -> dict:
    return {name: torch.full_like(tensor, 9) for name, tensor in TENSORS.items()}


def loads(place, **options) -> None:
    state = empty()
    load(state, place, **options)
    assert all(samples.same(state[name], tensor) for name, tensor in TENSORS.items())


def refusal(place, *, while_reading: bool = False, **options) -> BaseException:
    state = empty()
    with pytest.raises(CheckpointException) as caught:
        load(state, place, **options)
    assert while_reading or all(bool((tensor == 9).all()) for tensor in state.values())
    return cause_of(caught.value)


@pytest.mark.parametrize(
    "name", ["m.tensors", "m.safetensors", "shards", "shards/", "shards/model.safetensors.index.json", "one"]
)
def test_files_shards_and_folders_of_a_model_load(tmp_path, name):
    for folder in ("shards", "one"):
        (tmp_path / folder).mkdir()
    save_file(TENSORS, tmp_path / "m.tensors")
    save_file(TENSORS, tmp_path / "m.safetensors")
    save_file(TENSORS, tmp_path / "one" / "weights.safetensors")
    save_file(TENSORS, tmp_path / "shards" / "model.safetensors", max_shard_size=40)
    loads(f"{tmp_path}/{name}")
    loads(f"file://{tmp_path}/{name}")
    assert td.TensorizerReader.validate_checkpoint_id(f"{tmp_path}/{name}")


def test_models_load_from_s3_by_file_and_by_prefix_and_checkpoints_as_before(monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with S3Recorder() as store:
        options = {"stream_options": store.arguments}
        save_file(TENSORS, "s3://bucket/m.tensors", **options)
        save_file(TENSORS, "s3://bucket/model/model.safetensors", max_shard_size=40, **options)
        save(TENSORS, "s3://bucket/checkpoint", **options)
        for place in ("m.tensors", "model", "model/model.safetensors.index.json", "checkpoint"):
            loads(f"s3://bucket/{place}", **options)
        message = str(refusal("s3://bucket/gone", **options))
        assert "s3://bucket/gone" in message
        assert "expected a checkpoint" in message


def test_what_the_cache_of_the_node_holds_is_not_asked_for_again(site, folder):
    wanted = cache_tools.write(site.root / "m.tensors", cache_tools.tensors())
    options = {"stream_options": {"cache": folder}}
    for expected in (None, [(304, 0)]):
        state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        load(state, f"{site.url}/m.tensors", **options)
        finish()
        assert cache_tools.same(state, wanted)
        requests = site.requests()
        assert expected is None or requests == expected


def test_a_module_is_filled_whatever_wrote_its_file(tmp_path):
    class Keeper(torch.nn.Linear):
        scale = None

        def get_extra_state(self):
            return self.scale

        def set_extra_state(self, state):
            self.scale = state

    def made(scale) -> torch.nn.Module:
        model = torch.nn.Sequential(Keeper(3, 2), torch.nn.Linear(2, 3))
        model.add_module("tied", model[1])
        model[0].scale = scale
        return model

    for scale in (torch.ones(2), {"amax": torch.ones(3)}):
        reference = made(scale)
        save_model(reference, tmp_path / "model.tensors")
        with TensorSerializer(tmp_path / "module.tensors") as serializer:
            serializer.write_module(reference, include_extra_state=True)
        for name in ("model.tensors", "module.tensors"):
            model = made({"amax": torch.zeros(3)} if isinstance(scale, dict) else torch.zeros(2))
            state = state_dict.get_model_state_dict(model)
            planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # write_module has one name of tied tensors
            dcp.load(state, storage_reader=td.TensorizerReader(tmp_path / name), planner=planner)
            state_dict.set_model_state_dict(model, state)
            for key, value in reference.state_dict().items():
                found = model.state_dict()[key]
                assert found.equal(value) if isinstance(value, torch.Tensor) else found["amax"].equal(value["amax"])


def test_names_of_one_tensor_each_get_it_and_nested_names_are_joined_with_dots(tmp_path):
    shared = torch.arange(8.0).view(4, 2)
    save_file({"embed": shared, "head": shared}, tmp_path / "tied.tensors")
    samples.write_state_dict(tmp_path / "nested.tensors", {"a": {"b": shared, "c": [shared + 1]}})
    state = {"embed": torch.zeros(4, 2), "head": torch.zeros(4, 2)}
    load(state, tmp_path / "tied.tensors")
    assert state["embed"].equal(shared)
    assert state["head"].equal(shared)
    nested = {"a": {"b": torch.zeros(4, 2), "c": [torch.zeros(4, 2)]}}
    load(nested, tmp_path / "nested.tensors")
    assert nested["a"]["b"].equal(shared)
    assert nested["a"]["c"][0].equal(shared + 1)


def test_the_dtype_and_the_strides_are_those_of_the_state_dict(tmp_path):
    save_file(TENSORS, tmp_path / "m.tensors")
    state = {"weight": torch.zeros(4, 3, dtype=torch.float64).t(), "half": torch.zeros(6)}
    load(state, tmp_path / "m.tensors")
    assert state["weight"].equal(TENSORS["weight"].double())
    assert not state["weight"].is_contiguous()
    assert state["half"].equal(TENSORS["half"].float())


def test_verify_hash_compares_whole_tensors_and_refuses_files_without_digests(tmp_path):
    save_file(TENSORS, tmp_path / "m.tensors")
    save_file(TENSORS, tmp_path / "m.safetensors")
    save_file(TENSORS, tmp_path / "bare.tensors", hashes=None)
    loads(tmp_path / "m.tensors", verify_hash=True)
    for name in ("m.safetensors", "bare.tensors"):
        error = refusal(tmp_path / name, verify_hash=True, while_reading=name == "bare.tensors")
        assert isinstance(error, MissingHashError)
        assert name in str(error)
        assert "verify_hash=False" in str(error)
    data = bytearray((tmp_path / "m.tensors").read_bytes())
    data[data.index(TENSORS["weight"].numpy().tobytes()) + 5] ^= 1
    (tmp_path / "m.tensors").write_bytes(data)
    error = refusal(tmp_path / "m.tensors", verify_hash=True, while_reading=True)
    assert isinstance(error, HashMismatchError)
    assert "weight" in str(error)


def test_keys_and_signatures_are_checked_and_what_lacks_them_is_refused_by_name(tmp_path):
    key, signer = EncryptionParams.random(), SigningKey.generate()
    unlock, wrong = (DecryptionParams.from_key(k.key) for k in (key, EncryptionParams.random()))
    save_file(TENSORS, tmp_path / "secret.tensors", encryption=key)
    samples.write_state_dict(tmp_path / "signed.tensors", TENSORS, signing_key=signer)
    loads(tmp_path / "secret.tensors", encryption=lambda: unlock, require_authenticated=True)
    loads(tmp_path / "signed.tensors", public_key=signer.public_key, require_authenticated=True)
    for name, options, text in [
        ("secret.tensors", {}, "encrypted"),
        ("secret.tensors", {"encryption": wrong}, "key"),
        ("signed.tensors", {"public_key": SigningKey.generate().public_key}, "sign"),
        ("secret.tensors", {"public_key": signer.public_key, "encryption": unlock}, "sign"),
    ]:
        message = str(refusal(tmp_path / name, **options))
        assert name in message
        assert text in message
    data = bytearray((tmp_path / "signed.tensors").read_bytes())
    data[data.index(TENSORS["weight"].numpy().tobytes()) + 5] ^= 1
    (tmp_path / "signed.tensors").write_bytes(data)
    error = refusal(tmp_path / "signed.tensors", public_key=signer.public_key, while_reading=True)
    assert isinstance(error, HashMismatchError)
    with pytest.raises(AuthenticationError):
        td.TensorizerReader(tmp_path / "signed.tensors", require_authenticated=True).read_metadata()


def test_errors_of_the_first_look_name_the_place_and_the_cause(tmp_path):
    save_file(TENSORS, tmp_path / "cut.tensors")
    (tmp_path / "cut.tensors").write_bytes((tmp_path / "cut.tensors").read_bytes()[:300])
    (tmp_path / "text.safetensors").write_text("nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "shards").mkdir()
    save_file(TENSORS, tmp_path / "shards" / "model.safetensors", max_shard_size=40)
    missing = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())["weight_map"]["weight"]
    (tmp_path / "shards" / missing).unlink()
    for name, text in [
        ("gone", "expected a checkpoint"),
        ("gone.safetensors", "expected a checkpoint"),
        ("empty", "expected a checkpoint"),
        ("cut.tensors", "ends"),
        ("text.safetensors", ""),
        ("shards", missing),
    ]:
        message = str(refusal(tmp_path / name))
        assert str(tmp_path / name) in message
        assert text in message, message


def test_checkpoints_of_torch_itself_and_unfinished_ones_are_refused_as_such(tmp_path):
    dcp.save(TENSORS, checkpoint_id=tmp_path / "torch", no_dist=True)
    for _ in range(2):
        message = str(refusal(tmp_path / "torch"))
        assert str(tmp_path / "torch") in message
        assert "(.distcp files): load it with FileSystemReader" in message
        with pytest.raises(ValueError, match="distcp"):
            td.TensorizerReader(tmp_path / "torch").read_metadata()
        (tmp_path / "torch" / ".metadata").unlink(missing_ok=True)
    save(TENSORS, tmp_path / "killed")
    (tmp_path / "killed" / ".metadata").unlink()  # its one file would be a model otherwise
    with pytest.raises(FileNotFoundError):
        td.TensorizerReader(tmp_path / "killed").read_metadata()


def test_a_reader_may_load_again_from_another_place_after_an_error(tmp_path):
    save_file(TENSORS, tmp_path / "m.tensors")
    save(TENSORS, tmp_path / "checkpoint")
    reader = td.TensorizerReader(tmp_path / "gone")
    for place in ("gone", "m.tensors", "checkpoint", "m.tensors"):
        state = empty()
        if place == "gone":
            with pytest.raises(CheckpointException):
                dcp.load(state, storage_reader=reader)
            continue
        dcp.load(state, storage_reader=reader, checkpoint_id=tmp_path / place)
        assert all(samples.same(state[name], tensor) for name, tensor in TENSORS.items())
    shutil.rmtree(tmp_path / "checkpoint")
    with td.dcp_default():
        state = empty()
        dcp.load(state, checkpoint_id=tmp_path / "m.tensors")
    assert all(samples.same(state[name], tensor) for name, tensor in TENSORS.items())


def test_load_into_module_and_load_model_refuse_dtensors_and_name_the_way(tmp_path, fresh_process):
    result = fresh_process(
        "import pathlib, sys, model_ranks; model_ranks.give_whole_tensors(pathlib.Path(sys.argv[1]))", tmp_path
    )
    assert result.returncode == 0, result.stderr + result.stdout


def test_ranks_of_one_machine_share_its_connections_threads_and_pinned_memory(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert most_connections() == 64
    assert share_of_node(16, 4) == 16
    for ranks, share in [(1, 64), (2, 32), (8, 8), (100, 4)]:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert most_connections() == HTTPOptions()._native().max_connections == share


def test_models_of_transformers_come_from_slices_and_with_tensor_parallelism_each_rank_reads_its_half(
    fresh_process, tmp_path
):
    pytest.importorskip("transformers")
    program = """
        import pathlib, sys
        import transformers_ranks
        transformers_ranks.load_models(pathlib.Path(sys.argv[1]))
    """
    result = fresh_process(program, tmp_path, timeout=200)
    assert result.returncode == 0, result.stderr + result.stdout


def test_the_example_of_the_guide_runs_with_torchrun(tmp_path):
    example = EXAMPLES / "many_ranks.py"
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example, tmp_path],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert f"rank {rank}: its part, from rank 0" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", ["fill_modules", "read_only_parts", "see_different_files"])
def test_ranks_share_a_model(fresh_process, tmp_path, program):
    text = f"""
        import pathlib, sys
        import model_ranks
        model_ranks.{program}(pathlib.Path(sys.argv[1]))
    """
    result = fresh_process(text, tmp_path, timeout=200)
    assert result.returncode == 0, result.stderr + result.stdout


def test_verify_of_the_reader_compares_whole_files_of_a_model_with_a_list(tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    save_file(TENSORS, place / "model.safetensors", max_shard_size=40)
    shards = sorted(place.glob("model-*"))
    sums = tmp_path / "SHA256SUMS"
    sums.write_text("".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in shards))
    loads(place, verify=sums)
    part = {"half": torch.zeros(6, dtype=torch.bfloat16)}
    load(part, place, verify=str(sums))
    content = bytearray(shards[0].read_bytes())
    content[-1] ^= 1
    shards[0].write_bytes(content)
    error = refusal(place, verify=sums, while_reading=True)
    assert isinstance(error, HashMismatchError)
    assert shards[0].name in str(error)
    sums.write_text(f"{'0' * 64}  other\n")
    assert "expected a line for" in str(refusal(place, verify=sums))
    save(TENSORS, tmp_path / "checkpoint")
    assert "expected a model" in str(refusal(tmp_path / "checkpoint", verify=sums))


def test_verify_auto_of_the_reader_compares_digests_where_there_are_some(tmp_path):
    save_file(TENSORS, tmp_path / "m.tensors")
    save_file(TENSORS, tmp_path / "m.safetensors")
    for name in ("m.tensors", "m.safetensors"):
        loads(tmp_path / name, verify="auto")
    content = bytearray((tmp_path / "m.tensors").read_bytes())
    content[content.index(TENSORS["weight"].numpy().tobytes()) + 4] ^= 1
    (tmp_path / "m.tensors").write_bytes(content)
    assert isinstance(refusal(tmp_path / "m.tensors", verify="auto", while_reading=True), HashMismatchError)
