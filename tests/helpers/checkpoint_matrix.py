"""Programs for ``fresh_process``: one state is saved and loaded on many meshes, with strided and partial shards."""

from __future__ import annotations

import os
import sys
import warnings

import pytest
import torch
import torch._dynamo  # which DTensor imports late; here for all ranks at once
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tensorizer.distributed as td

assert td.TensorizerReader, td.TensorizerWriter  # imported now

FULL = {
    "even": torch.arange(96.0).view(8, 12),
    "uneven": torch.arange(35, dtype=torch.int64).view(5, 7),
    "short": torch.arange(6.0).view(2, 3).to(torch.bfloat16),  # fewer rows than ranks
    "deep": torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5),
    "scalar": torch.tensor(5),
    "plain": torch.arange(9.0),
}
#: Ranks, shape of the mesh, placements by name.
LAYOUTS = {
    "1": (1, (1,), {}),
    "2 rows": (2, (2,), dict.fromkeys(FULL, (Shard(0),))),
    "3 rows": (3, (3,), dict.fromkeys(FULL, (Shard(0),))),
    "3 columns": (3, (3,), {"even": (Shard(1),), "uneven": (Shard(1),), "short": (Shard(1),), "deep": (Shard(2),)}),
    "4 rows": (4, (4,), dict.fromkeys(FULL, (Shard(0),))),
    "4 copies": (4, (4,), dict.fromkeys(FULL, (Replicate(),))),
    "8 rows": (8, (8,), dict.fromkeys(FULL, (Shard(0),))),
    "2 x 2": (4, (2, 2), dict.fromkeys(FULL, (Shard(0), Shard(1)))),
    "2 x 2 copies": (4, (2, 2), dict.fromkeys(FULL, (Replicate(), Shard(0)))),
    "4 mixed": (
        4,
        (2, 2),
        {"even": (Shard(1), Shard(0)), "deep": (Shard(3), Shard(1)), "uneven": (Shard(1), Replicate())},
    ),
}


def laid_out(layout: str, data):
    """The state of a rank with the tensors of `data`."""
    _, shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape)
    state = {}
    for name, tensor in data.items():
        if placements.get(name) is None or name in ("plain", "scalar"):
            state[name] = tensor.clone()
            continue
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements[name])
        local = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))].clone()
        state[name] = DTensor.from_local(
            local, mesh, placements[name], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return state


def load_one(folder: str, layout: str, saved: str, **options) -> None:
    state = {"model": laid_out(layout, {name: torch.full_like(tensor, 99) for name, tensor in FULL.items()}), "step": 0}
    dcp.load(state, storage_reader=td.TensorizerReader(os.path.join(folder, saved), **options))
    assert state["step"] == 7
    for name, tensor in laid_out(layout, FULL).items():
        found = state["model"][name]
        if isinstance(tensor, DTensor):
            tensor, found = tensor.to_local(), found.to_local()
        assert torch.equal(found, tensor), (layout, saved, name, found)


def save_all(folder: str, layouts) -> None:
    for layout in layouts:
        state = {"model": laid_out(layout, FULL), "step": 7}
        dcp.save(state, storage_writer=td.TensorizerWriter(os.path.join(folder, layout)))


def load_all(folder: str, layouts, stride: int) -> None:
    names = sorted(LAYOUTS)
    for layout in layouts:
        for i, saved in enumerate(names, names.index(layout)):
            if i % stride == 0:
                load_one(folder, layout, saved, verify_hash=i % 2 == 0)


def rows_alone(folder: str) -> None:
    """If other ranks load the rows, each rank reads only its own rows, an index and the marker."""
    path = os.path.join(folder, "large")

    def save(rank):
        rows = DTensor.from_local(torch.arange(1 << 20).view(1024, 1024) + (rank << 20), mesh(2), [Shard(0)])
        dcp.save({"w": rows}, storage_writer=td.TensorizerWriter(path))

    def load(rank):
        rows = DTensor.from_local(torch.zeros(2048 // 4, 1024, dtype=torch.int64), mesh(4), [Shard(0)])
        reader = td.TensorizerReader(path)
        dcp.load({"w": rows}, storage_reader=reader)
        needed = rows.to_local().nbytes
        assert torch.equal(rows.to_local().flatten(), torch.arange(1 << 19) + (rank << 19))
        assert needed <= reader.total_bytes_read <= 1.05 * needed, reader.total_bytes_read / needed

    def mesh(ranks):
        return init_device_mesh("cpu", (ranks,))

    run_ranks(2, save)
    run_ranks(4, load)


class Mlp(torch.nn.Module):
    def __init__(self, rows: int):
        super().__init__()
        self.up = torch.nn.Linear(12, rows)
        self.down = torch.nn.Linear(rows, 12)


def over_tensor_parallelism(folder: str) -> None:
    """Strided shards (``_StridedShard``) of FSDP over tensor parallelism, also uneven ones, load on other meshes."""

    def model(rows: int, fsdp: bool, tensor_parallel: bool):
        torch.manual_seed(rows)
        made = Mlp(rows)
        full = {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}
        shape = (2, 2) if tensor_parallel else (dist.get_world_size(),)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
        if tensor_parallel:
            parallelize_module(made, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if fsdp:
            fully_shard(made, mesh=mesh["dp"])
        return made, full

    def check(state, full):
        for name, tensor in state.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole.detach(), full[name]), name

    def save(_):
        strided = 0
        for rows in (8, 6, 3):
            made, full = model(rows, True, True)
            state = made.state_dict()
            strided += sum(type(p).__name__ == "_StridedShard" for t in state.values() for p in t.placements)
            dcp.save(state, storage_writer=td.TensorizerWriter(os.path.join(folder, f"strided-{rows}")))
            alone = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
            reader = td.TensorizerReader(os.path.join(folder, f"strided-{rows}"), verify_hash=True)
            dcp.load(alone, storage_reader=reader, no_dist=True)
            check(alone, full)
        assert strided > 3

    def load(ranks):
        for rows in (8, 6, 3):
            for fsdp, tensor_parallel in ((True, True), (True, False), (False, True)):
                if tensor_parallel and ranks != 4:
                    continue
                made, full = model(rows, fsdp, tensor_parallel)
                state = made.state_dict()
                with torch.no_grad():
                    for tensor in state.values():
                        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-1)
                dcp.load(state, storage_reader=td.TensorizerReader(os.path.join(folder, f"strided-{rows}")))
                check(state, full)

    run_ranks(4, save)
    for ranks in (2, 4):
        run_ranks(ranks, lambda _, ranks=ranks: load(ranks))


def rows_with_gaps(folder: str) -> None:
    """Strided shards that are not boxes are an error on all ranks, and never become other rows."""
    from torch.distributed.tensor.placement_types import _StridedShard

    path = os.path.join(folder, "gaps")
    full = torch.arange(8.0)

    def work(rank):
        dcp.save({"w": full}, storage_writer=td.TensorizerWriter(path))
        mesh = init_device_mesh("cpu", (2,))
        strided = DTensor.from_local(torch.zeros(4), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
        calls = (
            lambda: dcp.save({"w": strided}, storage_writer=td.TensorizerWriter(path)),
            lambda: dcp.load({"w": strided}, storage_reader=td.TensorizerReader(path)),
        )
        for number, call in enumerate(calls):
            with pytest.raises((CheckpointException, ValueError), match=("", "redistribute it to Shard first")[number]):
                call()
        whole = {"w": torch.zeros(8)}
        dcp.load(whole, storage_reader=td.TensorizerReader(path))
        assert torch.equal(whole["w"], full)

    run_ranks(2, work)


def main(folder: str, stride: int) -> None:
    """Every layout is saved, and loaded as every `stride`-th layout."""
    by_ranks: dict[int, list[str]] = {}
    for layout, (ranks, *_) in LAYOUTS.items():
        by_ranks.setdefault(ranks, []).append(layout)
    for ranks, layouts in by_ranks.items():
        run_ranks(ranks, lambda rank, layouts=layouts: save_all(folder, layouts))
    for ranks, layouts in by_ranks.items():
        run_ranks(ranks, lambda rank, layouts=layouts: load_all(folder, layouts, stride))
    rows_alone(folder)
    alone = {"model": {name: torch.full_like(tensor, 99) for name, tensor in FULL.items()}, "step": 0}
    dcp.load(alone, storage_reader=td.TensorizerReader(os.path.join(folder, "2 x 2")), no_dist=True)
    assert all(torch.equal(alone["model"][name], tensor) for name, tensor in FULL.items())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], 1)
