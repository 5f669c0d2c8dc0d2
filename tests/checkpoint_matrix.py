"""A program for ``fresh_process``: one state saved and loaded on many meshes, and the rest of what needs ranks."""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch._dynamo  # which DTensor imports late; here for all ranks at once
import torch.distributed.checkpoint as dcp
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

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


def load_all(folder: str, layouts) -> None:
    names = sorted(LAYOUTS)
    for layout in layouts:
        for i, saved in enumerate(names, names.index(layout)):
            if i % 2 == 0:  # half of all pairs
                load_one(folder, layout, saved, verify_hash=i % 4 == 0)


def rows_alone(folder: str) -> None:
    """What a rank reads when rows are dealt out anew: its rows, an index and the marker."""
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


def main(folder: str) -> None:
    by_ranks: dict[int, list[str]] = {}
    for layout, (ranks, *_) in LAYOUTS.items():
        by_ranks.setdefault(ranks, []).append(layout)
    for work in (save_all, load_all):
        for ranks, layouts in by_ranks.items():
            run_ranks(ranks, lambda rank, work=work, layouts=layouts: work(folder, layouts))
    rows_alone(folder)
    alone = {"model": {name: torch.full_like(tensor, 99) for name, tensor in FULL.items()}, "step": 0}
    dcp.load(alone, storage_reader=td.TensorizerReader(os.path.join(folder, "2 x 2")), no_dist=True)
    assert all(torch.equal(alone["model"][name], tensor) for name, tensor in FULL.items())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
