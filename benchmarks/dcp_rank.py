"""One rank of a measurement of distributed checkpoints: ``python -m benchmarks.dcp_rank``, started by ``cases/dcp.py``.

Each tensor is cut along dimension 0. A rank holds its part of constant data, whose value follows from the name.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from pathlib import Path
from typing import Any

from benchmarks.contenders import contender
from benchmarks.models import llm_shapes

_TINY_NBYTES = 1 << 20


def state_of(nbytes: int, filled: bool) -> dict[str, Any]:
    """The part of this rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    state = {}
    for name, shape in llm_shapes(nbytes):
        rows = -(-shape[0] // ranks)
        own = max(0, min(rows, shape[0] - rank * rows))
        value = value_of(name) if filled else -1
        local = torch.full((own, *shape[1:]), value, dtype=torch.bfloat16)
        stride = torch.empty(shape, device="meta").stride()
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return state


def write_model(nbytes: int, folder: Path) -> None:
    """The whole model as the hub has it: three shards of ``.safetensors`` and their index."""
    import torch

    from tensorizer.torch import save_file

    folder.mkdir(parents=True)
    state = {name: torch.full(shape, value_of(name), dtype=torch.bfloat16) for name, shape in llm_shapes(nbytes)}
    save_file(state, folder / "model.safetensors", max_shard_size=nbytes // 3 + (1 << 20))


def value_of(name: str) -> int:
    """A number that bfloat16 holds."""
    return zlib.crc32(name.encode()) % 128


def run(who: Any, operation: str, nbytes: int, path: Path) -> dict[str, Any]:
    """What ``operation`` took, after a look at what it gave.

    Raises:
        RuntimeError: The tensors are not those that were saved, or more was read than a rank needs.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if operation == "shards":
        if dist.get_rank() == 0:
            write_model(nbytes, path)
        dist.barrier()
        return {}
    saves = operation == "save"
    state = state_of(nbytes, filled=saves)
    make = {"save": who.dcp_writer, "load": who.dcp_reader, "load-model": who.dcp_model_reader}
    storage = make[operation](path)
    dist.barrier()
    begin = time.perf_counter()
    if saves:
        dcp.save(state, storage_writer=storage)
    else:
        dcp.load(state, storage_reader=storage)
    dist.barrier()
    seconds = time.perf_counter() - begin
    local = {name: tensor.to_local() for name, tensor in state.items()}
    if not all(bool((tensor == value_of(name)).all()) for name, tensor in local.items()):
        raise RuntimeError(f"{who.label}: wrong data")
    needed = sum(tensor.nbytes for tensor in local.values())
    read = getattr(storage, "total_bytes_read", None)
    if read is not None and not saves and read > 1.05 * needed + (64 << 10):
        raise RuntimeError(f"{who.label}: read {read} bytes for {needed}")
    return {"seconds": seconds, "needed": needed, "read": read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("who")
    parser.add_argument(
        "operations", help="some of save, load, shards and load-model, with commas; the last one is reported"
    )
    parser.add_argument("rank", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("nbytes", type=int)
    parser.add_argument("store", type=Path)
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()

    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{arguments.store}", rank=arguments.rank, world_size=arguments.ranks
    )
    who: Any = contender(arguments.who)
    # Once on little data, so that imports and what is set up once are in no figure.
    tiny = arguments.path.with_name(arguments.path.name + "-tiny")
    for operation in ("save", "load"):
        run(who, operation, _TINY_NBYTES, tiny)
    for operation in arguments.operations.split(","):
        outcome = run(who, operation, arguments.nbytes, arguments.path)
    print(json.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
