"""One file for all ranks of a group: whole, in parts, into modules; and an error of one rank is an error of all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import samples
import torch
from places import EXAMPLES

import tensorizer
import tensorizer.distributed as td
from tensorizer._io.options import HTTPOptions, most_connections
from tensorizer._system.config import share_of_node
from tensorizer.errors import LoadError
from tensorizer.torch import save_file, save_model

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


def test_ranks_share_the_reading_of_a_tensor_that_has_a_single_row(fresh_process, tmp_path):
    ranks_do(fresh_process, "load_a_single_row", tmp_path)


def test_a_rank_that_fails_in_the_middle_makes_all_ranks_raise_its_error(fresh_process, tmp_path):
    ranks_do(fresh_process, "fail_in_the_middle", tmp_path)


def test_all_ranks_raise_whichever_read_of_one_rank_fails(fresh_process, tmp_path):
    ranks_do(fresh_process, "fail_at_every_read_of_one_rank", tmp_path)


def test_a_rank_that_wants_a_signature_gets_no_byte_from_another_rank(fresh_process, tmp_path):
    ranks_do(fresh_process, "load_what_is_signed", tmp_path)


def test_ranks_get_the_parts_that_placements_say_uneven_and_empty_ones_too(fresh_process, tmp_path):
    ranks_do(fresh_process, "load_parts", tmp_path)


def test_names_of_one_tensor_are_all_filled_whole_and_in_parts(fresh_process, tmp_path):
    ranks_do(fresh_process, "load_names_of_one_tensor", tmp_path)


def test_ranks_read_their_shards_and_together_the_file_once(fresh_process, tmp_path):
    ranks_do(fresh_process, "read_only_the_shards", tmp_path)


def test_modules_of_fsdp_and_tensor_parallelism_are_filled_on_meta_and_in_place(fresh_process, tmp_path):
    ranks_do(fresh_process, "load_modules", tmp_path)


def test_a_module_of_dtensors_refuses_whole_tensors_and_stays_as_it_was(fresh_process, tmp_path):
    ranks_do(fresh_process, "give_whole_tensors", tmp_path)


def test_modules_are_filled_whose_tensors_the_file_calls_otherwise_or_lacks_by_right(fresh_process, tmp_path):
    ranks_do(fresh_process, "load_what_state_dicts_call_otherwise", tmp_path)


def test_hashes_cannot_vouch_for_tensors_of_another_dtype_and_nothing_is_filled(fresh_process, tmp_path):
    ranks_do(fresh_process, "verify_what_is_converted", tmp_path)


def test_mappings_get_their_part_of_extra_state(fresh_process, tmp_path):
    ranks_do(fresh_process, "load_parts_of_extra_state", tmp_path)


def test_without_a_group_one_process_loads_alone(tmp_path):
    tensors = {"a": samples.tensor((5, 3))}
    samples.write_state_dict(tmp_path / "f", tensors)
    for exchange in ("auto", "none", "all_gather"):
        found = td.load(tmp_path / "f", device="cpu", exchange=exchange)
        assert samples.same(found["a"], tensors["a"])
        assert found.report.exchange == "none"
        assert len(found.report.ranks) == 1
        assert (found.report.loaded, found.report.nbytes) == (("a",), 60)
    state = {"a": None}
    report = td.load_sharded(state, tmp_path / "f", device="cpu", verify_hash=True)
    assert samples.same(state["a"], tensors["a"])
    assert report.bytes_received == 0
    assert isinstance(report, tensorizer.LoadReport)  # the report of every load
    assert (report.loaded, report.nbytes, report.ok) == (("a",), 60, True)


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


def test_names_that_end_like_extra_state_are_ordinary_ones(tmp_path):
    class Named(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.my_extra_state = torch.nn.Parameter(torch.full((2,), value))
            self.inner = torch.nn.Module()
            self.inner.register_buffer("_extra_state", torch.full((2,), value))

    for name in ("m.tensors", "m.safetensors"):
        save_file(Named(1.0).state_dict(), tmp_path / name)
        target = Named(0.0)
        report = td.load_sharded(target, tmp_path / name, device="cpu")
        assert (report.missing, report.unexpected) == ((), ())
        assert target.my_extra_state.equal(torch.ones(2))
        assert target.inner._extra_state.equal(torch.ones(2))
        state = {"my_extra_state": torch.zeros(2), "opt_extra_state": torch.zeros(2)}
        with pytest.raises(LoadError, match="missing in the file: 'opt_extra_state';"):
            td.load_sharded(state, tmp_path / name, device="cpu")
        assert td.load_sharded(state, tmp_path / name, device="cpu", strict=False).missing == ("opt_extra_state",)
        assert state["my_extra_state"].equal(torch.ones(2))


def test_mappings_get_extra_state_by_its_name_wherever_the_file_holds_it(tmp_path):
    source = torch.nn.Sequential(Keeper(), torch.nn.Linear(2, 2))
    source[0].scale = torch.arange(3.0)  # of another shape than before: what it is, is for its module to say
    for name in ("m.tensors", "m.safetensors"):
        save_model(source, tmp_path / name)
        state = torch.nn.Sequential(Keeper(), torch.nn.Linear(2, 2)).state_dict()
        report = td.load_sharded(state, tmp_path / name, device="cpu")
        assert (report.missing, report.unexpected) == ((), ())
        assert all(state[key].equal(value) for key, value in source.state_dict().items())
        state = {"0._extra_state": None, "1._extra_state": torch.zeros(2)}
        text = f"{name}: missing in the file: '1._extra_state'"
        with pytest.raises(LoadError, match=text):
            td.load_sharded(state, tmp_path / name, device="cpu")
        assert td.load_sharded(state, tmp_path / name, device="cpu", strict=False).missing == ("1._extra_state",)
        assert state["0._extra_state"].equal(source[0].scale)
        assert state["1._extra_state"].equal(torch.zeros(2))
    source[0].scale = {"inner": {"scale": torch.ones(2)}}
    save_model(source, tmp_path / "d.tensors")
    state = source.state_dict()
    state["0._extra_state"] = None
    td.load_sharded(state, tmp_path / "d.tensors", device="cpu")
    assert state["0._extra_state"]["inner"]["scale"].equal(torch.ones(2))


def test_extra_state_that_a_module_takes_and_a_file_lacks_is_missing_and_one_that_it_does_not_take_unexpected(tmp_path):
    class Raising(Keeper):
        def get_extra_state(self):
            raise RuntimeError("not yet")

    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for name in ("m.tensors", "m.safetensors"):
        save_model(plain, tmp_path / name)
        for kind in (Keeper, Raising):
            target = torch.nn.Sequential(kind())
            text = rf"{name}: missing in the file: '0\._extra_state'; unexpected: nothing"
            with pytest.raises(LoadError, match=text):
                td.load_sharded(target, tmp_path / name, device="cpu")
            report = td.load_sharded(target, tmp_path / name, device="cpu", strict=False)
            assert (report.missing, report.unexpected) == (("0._extra_state",), ())
            assert target[0].weight.equal(plain[0].weight)
        target = torch.nn.Sequential(Keeper())
        target[0].scale = None
        assert td.load_sharded(target, tmp_path / name, device="cpu").missing == ()
        save_model(torch.nn.Sequential(Keeper()), tmp_path / f"state-{name}")
        target = torch.nn.Sequential(torch.nn.Linear(2, 2))
        with pytest.raises(LoadError, match=r"missing in the file: nothing; unexpected: '0\._extra_state'"):
            td.load_sharded(target, tmp_path / f"state-{name}", device="cpu")
        report = td.load_sharded(target, tmp_path / f"state-{name}", device="cpu", strict=False)
        assert (report.missing, report.unexpected) == ((), ("0._extra_state",))
        # nobody asks a module for what the file has
        target = torch.nn.Sequential(Raising())
        target[0].scale = torch.zeros(2) - 1
        td.load_sharded(target, tmp_path / f"state-{name}", device="cpu")
        assert target[0].scale.equal(torch.zeros(2))
        assert "get_extra_state" not in vars(target[0])


def test_extra_state_of_a_module_that_is_there_twice_needs_one_of_its_names(tmp_path):
    class Twice(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.enc = Keeper()
            self.enc.scale = torch.full((2,), value)
            self.dec = self.enc

    for name in ("m.tensors", "m.safetensors"):
        save_model(Twice(1.0), tmp_path / name)
        target = Twice(0.0)
        report = td.load_sharded(target, tmp_path / name, device="cpu")
        assert (report.missing, report.unexpected) == ((), ())
        assert target.dec.scale.equal(torch.ones(2))
    one = {name: value for name, value in Twice(2.0).state_dict().items() if not name.startswith("enc")}
    save_file(one, tmp_path / "one.safetensors")
    target = Twice(0.0)
    assert td.load_sharded(target, tmp_path / "one.safetensors", device="cpu").missing == ()
    assert target.enc.scale.equal(torch.full((2,), 2.0))
    del one["dec._extra_state"]
    save_file(one, tmp_path / "none.safetensors")
    with pytest.raises(LoadError, match=r"missing in the file: 'enc\._extra_state', 'dec\._extra_state'"):
        td.load_sharded(Twice(0.0), tmp_path / "none.safetensors", device="cpu")


def test_extra_state_reaches_modules_below_wrappers_that_state_dicts_do_not_show(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    source = torch.nn.Sequential(Keeper())
    source[0].scale = torch.ones(2)
    for name in ("m.tensors", "m.safetensors"):
        save_model(source, tmp_path / name)
        target = torch.nn.Sequential(checkpoint_wrapper(Keeper()))
        report = td.load_sharded(target, tmp_path / name, device="cpu")
        assert (report.missing, report.unexpected) == ((), ())
        assert target[0].scale.equal(torch.ones(2))


def test_a_module_whose_state_dict_has_copies_of_its_tensors_is_filled_and_not_the_copies(tmp_path):
    def copies(_, state, prefix, __):
        state.update({name: tensor.double() for name, tensor in state.items()})

    source, target = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    save_model(source, tmp_path / "m.tensors")
    target._register_state_dict_hook(copies)
    weight = target.weight
    report = td.load_sharded(target, tmp_path / "m.tensors", device="cpu")
    assert report.loaded == ("weight", "bias")
    assert target.weight is weight
    assert all(map(samples.same, target.parameters(), source.parameters()))

    target._register_state_dict_hook(lambda _, state, *__: state.update(ours=torch.zeros(1)))
    save_file({**source.state_dict(), "ours": torch.ones(1)}, tmp_path / "m.tensors")
    with pytest.raises(LoadError, match=r"m\.tensors.*'ours'"):
        td.load_sharded(target, tmp_path / "m.tensors", device="cpu")


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
        assert f"rank {rank}: its part" in result.stdout
    assert list(tmp_path.iterdir()) == []
