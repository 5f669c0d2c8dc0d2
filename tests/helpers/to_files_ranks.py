"""Programs for ``fresh_process``: ranks that write a checkpoint to files together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import samples
import torch
import torch._dynamo  # imported late otherwise, by each rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from paths import EXAMPLES
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import tensorizer.distributed as td
from tensorizer._files import write
from tensorizer.errors import StreamError
from tensorizer.torch import load_file, load_model

assert td.dcp_to_files  # imported now, once for all ranks
assert fully_shard


def write_together(folder: Path) -> None:
    """Every rank writes shards, and rank 0 the index. If one rank fails, all raise, and no file appears."""
    tensors = {f"t{i}": samples.tensor((64, 8), torch.float32, i) for i in range(5)}

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
        dcp.save({"model": state}, storage_writer=td.TensorizerWriter(folder / "in"))
        dist.barrier()
        for target in ("model.tensors", "model.safetensors"):
            options = {"prefix": "model.", "max_shard_size": 2048}
            assert td.dcp_to_files(folder / "in", folder / target, **options) == [4096, 4096, 2048]
            found = load_file(folder / f"{target}.index.json")
            assert all(samples.same(found[name], tensor) for name, tensor in tensors.items())
            dist.barrier()
        assert td.dcp_to_files(folder / "in", folder / "one.tensors", prefix="model.") == [10240, 0, 0]
        assert load_file(folder / "one.tensors").keys() == tensors.keys()
        dist.barrier()

        with pytest.raises(ValueError, match="expected the same arguments on all ranks"):
            td.dcp_to_files(folder / "in", folder / "x.tensors", prefix="model." if rank else "")
        dist.barrier()

        original = write._Writing._write_one

        def failing(self, target, run):
            if rank == 1:
                raise StreamError("the cable is cut")
            return original(self, target, run)

        write._Writing._write_one = failing
        with pytest.raises(StreamError, match="the cable is cut"):
            td.dcp_to_files(folder / "in", folder / "x.tensors", max_shard_size=2048)
        write._Writing._write_one = original
        dist.barrier()
        assert not [path for path in folder.iterdir() if path.name.startswith(("x", "."))]

    run_ranks(3, work)


def round_trip(folder: Path) -> None:
    """The checkpoint of the FSDP2 example becomes a file from which the plain model loads every name."""
    sys.path.insert(0, str(EXAMPLES))
    import distributed_checkpoint as example

    def work(rank: int) -> None:
        training = example.Training("cpu")
        training.run(2)
        dcp.save({"training": training}, storage_writer=td.TensorizerWriter(folder / "in"))
        full = {name: value.full_tensor() for name, value in training.model.state_dict().items()}
        td.dcp_to_files(folder / "in", folder / "model.safetensors", prefix="training.model.")
        dist.barrier()
        plain = example.make_model()
        report = load_model(plain, folder / "model.safetensors", strict=True)
        assert sorted(report.loaded) == sorted(full)
        assert all(torch.equal(value, full[name]) for name, value in plain.state_dict().items())

    run_ranks(2, work)
