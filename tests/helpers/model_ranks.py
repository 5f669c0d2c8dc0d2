"""Programs for ``fresh_process``: ranks that load one model with ``TensorizerReader``."""

from __future__ import annotations

from pathlib import Path

import pytest
import samples
import torch
import torch._dynamo  # imported late otherwise, by each rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tensorizer.distributed as td
from tensorizer import TensorDeserializer
from tensorizer.torch import load_model, save_file, save_model

assert td.TensorizerReader  # imported now, once for all ranks


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 192)
        self.down = torch.nn.Linear(192, 64)
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(Block(), Block(), torch.nn.Linear(64, 5))


def load(state, place, **options) -> int:
    """Loads the model; returns the bytes that this rank read."""
    reader = td.TensorizerReader(place, **options)
    dcp.load(state, storage_reader=reader)
    return reader.total_bytes_read


def fill_modules(folder: Path) -> None:
    """Modules with FSDP2, tensor parallelism and both are filled from every form of the model."""
    reference = model()
    save_model(reference, folder / "m.tensors")
    save_model(reference, folder / "m.safetensors")
    (folder / "shards").mkdir()
    save_file(reference.state_dict(), folder / "shards" / "model.safetensors", max_shard_size=60_000)
    assert len(list((folder / "shards").iterdir())) > 3

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for tensor_parallel, fsdp in [(False, True), (True, False), (True, True)]:
            for name in ("m.tensors", "m.safetensors", "shards"):
                with torch.device("meta"):
                    target = model()
                if tensor_parallel:
                    for block in target[:2]:
                        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                if fsdp:
                    fully_shard(target, mesh=mesh["dp"])
                target.to_empty(device="cpu")
                state = get_model_state_dict(target)
                load(state, folder / name)
                set_model_state_dict(target, state)
                for key, value in target.state_dict().items():
                    full = value.full_tensor() if isinstance(value, DTensor) else value
                    assert samples.same(full.detach(), reference.state_dict()[key]), (name, key)

    run_ranks(4, work)


def read_only_parts(folder: Path) -> None:
    """Ranks fill uneven and empty parts by rows and columns. By rows, all ranks together read the file once."""
    shapes = {"w": (512, 256), "uneven": (701, 300), "few": (1, 2048), "v": (3,), "s": (), "none": (0, 8)}
    tensors = {name: samples.tensor(shape, torch.float32, name).nan_to_num() for name, shape in shapes.items()}
    for name in ("f.tensors", "f.safetensors"):
        save_file(tensors, folder / name)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())

    def work(rank: int) -> None:
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks,))
        for name in ("f.tensors", "f.safetensors"):
            index = load({"s": torch.zeros(())}, folder / name)
            for dim in (0, 1):
                wanted = {
                    key: distribute_tensor(tensor, mesh, [Shard(dim) if tensor.dim() > dim else Replicate()])
                    for key, tensor in tensors.items()
                }
                state = {
                    key: distribute_tensor(torch.full_like(tensor, 7), mesh, wanted[key].placements)
                    for key, tensor in tensors.items()
                }
                places = {key: value.to_local().data_ptr() for key, value in state.items()}
                read = torch.tensor(load(state, folder / name) - index)
                for key, value in wanted.items():
                    assert samples.same(state[key].to_local(), value.to_local()), (name, key, dim)
                    assert state[key].to_local().data_ptr() == places[key]
                dist.all_reduce(read)
                if dim == 0:
                    assert read <= 1.05 * nbytes + ranks * 8192, (name, read, nbytes)

    for ranks in (3, 4):
        run_ranks(ranks, work)


def see_different_files(folder: Path) -> None:
    """If ranks see different files, all raise and name the ranks. If one cannot open its file, all raise."""
    tensors = {"a": torch.arange(1000.0)}
    save_file(tensors, folder / "m.tensors")
    save_file({"a": torch.zeros(1000)}, folder / "other.tensors")
    save_file({"a": torch.zeros(1000), "b": torch.zeros(9)}, folder / "longer.tensors")
    dcp.save(tensors, storage_writer=td.TensorizerWriter(folder / "one"), no_dist=True)
    dcp.save(tensors, storage_writer=td.TensorizerWriter(folder / "two"), no_dist=True)

    def work(rank: int) -> None:
        def raises(text: str, first: str, second: str) -> None:
            state = {"a": torch.zeros(1000)}
            with pytest.raises(CheckpointException) as caught:
                load(state, folder / (first, second)[rank])
            assert text in str(caught.value), caught.value
            assert not state["a"].any()
            dist.barrier()

        different = "rank 1 and rank 0 read different files"
        raises(different, "m.tensors", "other.tensors")
        raises(different, "m.tensors", "longer.tensors")
        raises(different, "one", "two")
        raises(different, "one", "m.tensors")
        raises("gone.tensors", "m.tensors", "gone.tensors")
        state = {"a": torch.zeros(1000)}
        load(state, folder / "m.tensors")
        assert torch.equal(state["a"], tensors["a"])

    run_ranks(2, work)


def give_whole_tensors(folder: Path) -> None:
    """A module of DTensors refuses whole tensors and stays unchanged."""
    target = model()
    save_model(target, folder / "m.tensors")
    before = {name: parameter.detach().clone() for name, parameter in target.named_parameters()}

    def load_into_module() -> None:
        with TensorDeserializer(folder / "m.tensors", device="cpu") as file:
            file.load_into_module(target)

    def work(rank: int) -> None:
        fully_shard(target, mesh=init_device_mesh("cpu", (2,)))
        for call in (load_into_module, lambda: load_model(target, folder / "m.tensors")):
            with pytest.raises(NotImplementedError, match=r"is a DTensor .*TensorizerReader"):
                call()
        for name, parameter in target.named_parameters():
            assert samples.same(parameter.full_tensor().detach(), before[name])

    run_ranks(2, work)
