"""One file, many ranks: ``torchrun --nproc-per-node 2 examples/many_ranks.py [folder]``.

First every rank gets all tensors of a file, and reads only its share of them. Then each rank gets its part of a model
that FSDP2 has sharded on the meta device. Runs on CUDA if there is a device for every rank, else on the CPU.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tensorizer.distributed as td
from tensorizer import TensorSerializer


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))


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
    reference = make_model()
    if rank == 0:
        with TensorSerializer(path) as serializer:
            serializer.write_module(reference)
    dist.barrier()

    tensors = td.load(path, device=device, exchange="all_gather")
    for name, expected in reference.state_dict().items():
        assert torch.equal(tensors[name].cpu(), expected)
    report = tensors.report
    print(f"rank {rank}: all tensors, {report.bytes_read} bytes read, {report.bytes_received} received", flush=True)

    with torch.device("meta"):
        model = make_model()
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    report = td.load_sharded(model, path, device=device)
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor().cpu(), reference.state_dict()[name])
    print(f"rank {rank}: its part, {report.bytes_read} bytes read", flush=True)
    dist.barrier()
    if rank == 0:
        os.remove(path)
    # What FSDP2 has sharded holds groups in reference cycles; gloo may abort the process if they outlive the next line.
    del model, value
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
