"""One file, many ranks: ``torchrun --nproc-per-node 2 examples/many_ranks.py [folder]``.

First each rank reads only its part of a model that FSDP2 has sharded on the meta device. Then rank 0 alone reads the
file, and torch broadcasts it. Runs on CUDA if there is a device for every rank, else on the CPU.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tensorizer.distributed import TensorizerReader
from tensorizer.torch import load_file, save_file


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))


def sharded_model(device: torch.device) -> torch.nn.Module:
    """A model in memory that nobody has written to yet."""
    with torch.device("meta"):
        model = make_model()
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    return model.to_empty(device=device)


def check(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor().cpu(), expected[name])


def main() -> None:
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    if on_cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    rank = dist.get_rank()
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    path = os.path.join(folder, "many_ranks.tensors")

    torch.manual_seed(0)
    expected = make_model().state_dict()
    if rank == 0:
        save_file(expected, path)
    dist.barrier()

    model = sharded_model(device)
    state = get_model_state_dict(model)
    reader = TensorizerReader(path)
    dcp.load(state, storage_reader=reader)
    set_model_state_dict(model, state)
    check(model, expected)
    print(f"rank {rank}: its part, {reader.total_bytes_read} bytes read", flush=True)

    model = sharded_model(device)
    whole = load_file(path) if rank == 0 else {}
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    check(model, expected)
    print(f"rank {rank}: its part, from rank 0", flush=True)

    dist.barrier()
    if rank == 0:
        os.remove(path)
    # What FSDP2 has sharded holds groups in reference cycles; gloo may abort the process if they outlive the next line.
    del model, state
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
