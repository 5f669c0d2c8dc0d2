"""One file for all ranks of a group: whole, in parts, into modules; and an error of one rank is an error of all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import samples
import torch

import tensorizer.distributed as td
from tensorizer._system.threads import share_of_node
from tensorizer.stream_io import HTTPOptions
from tensorizer.torch import save_model

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5):
    pytest.skip("these tests use what torch.distributed has since torch 2.5", allow_module_level=True)
pytest.importorskip("torch.distributed.tensor")


def ranks_do(fresh_process, name, folder):
    program = f"""
        import pathlib, sys
        import loading_ranks
        loading_ranks.{name}(pathlib.Path(sys.argv[1]))
    """
    result = fresh_process(program, folder, timeout=200)
    assert result.returncode == 0, result.stderr + result.stdout


def test_every_rank_gets_all_tensors_and_all_ranks_together_read_the_file_once(fresh_process, tmp_path):
    ranks_do(fresh_process, "load_whole", tmp_path)


def test_eight_ranks_read_each_byte_once_whole_or_in_parts_of_which_some_are_empty(fresh_process, tmp_path):
    ranks_do(fresh_process, "load_on_eight_ranks", tmp_path)


def test_a_rank_that_fails_in_the_middle_makes_all_ranks_raise_its_error(fresh_process, tmp_path):
    ranks_do(fresh_process, "fail_in_the_middle", tmp_path)


def test_ranks_get_the_parts_that_placements_say_uneven_and_empty_ones_too(fresh_process, tmp_path):
    ranks_do(fresh_process, "load_parts", tmp_path)


def test_names_of_one_tensor_are_all_filled_whole_and_in_parts(fresh_process, tmp_path):
    ranks_do(fresh_process, "load_names_of_one_tensor", tmp_path)


def test_ranks_read_their_shards_and_together_the_file_once(fresh_process, tmp_path):
    ranks_do(fresh_process, "read_only_the_shards", tmp_path)


def test_modules_of_fsdp_and_tensor_parallelism_are_filled_on_meta_and_in_place(fresh_process, tmp_path):
    ranks_do(fresh_process, "load_modules", tmp_path)


def test_modules_are_filled_whose_tensors_the_file_calls_otherwise_or_lacks_by_right(fresh_process, tmp_path):
    ranks_do(fresh_process, "load_what_state_dicts_call_otherwise", tmp_path)


def test_without_a_group_one_process_loads_alone(tmp_path):
    tensors = {"a": samples.tensor((5, 3))}
    samples.write_state_dict(tmp_path / "f", tensors)
    for exchange in ("auto", "none", "all_gather"):
        found = td.load(tmp_path / "f", device="cpu", exchange=exchange)
        assert samples.same(found["a"], tensors["a"])
        assert found.report.exchange == "none"
        assert len(found.report.ranks) == 1
    state = {"a": None}
    report = td.load_sharded(state, tmp_path / "f", device="cpu", verify_hash=True)
    assert samples.same(state["a"], tensors["a"])
    assert report.bytes_received == 0


class Keeper(torch.nn.Linear):
    """A layer with extra state that is a tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = torch.zeros(2)

    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, state) -> None:
        self.scale = state


def test_extra_state_of_the_file_goes_to_the_modules_that_take_it(tmp_path):
    source = torch.nn.Sequential(Keeper(), torch.nn.Linear(2, 2))
    source[0].scale = torch.ones(2)
    for name in ("m.tensors", "m.safetensors"):
        save_model(source, tmp_path / name)
        target = torch.nn.Sequential(Keeper(), torch.nn.Linear(2, 2))
        report = td.load_sharded(target, tmp_path / name, device="cpu")
        assert (report.missing, report.unexpected) == ((), ())
        assert target[0].scale.equal(source[0].scale)
        assert target[0].weight.equal(source[0].weight)


def test_ranks_of_one_machine_share_its_connections_threads_and_pinned_memory(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert HTTPOptions().max_connections == 64
    assert share_of_node(16, 4) == 16
    for ranks, share in [(1, 64), (2, 32), (8, 8), (100, 4)]:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert HTTPOptions().max_connections == share
        assert HTTPOptions(max_connections=50).max_connections == 50


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
    example = Path(__file__).parents[1] / "examples" / "many_ranks.py"
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
        assert f"rank {rank}: its part" in result.stdout
    assert list(tmp_path.iterdir()) == []
