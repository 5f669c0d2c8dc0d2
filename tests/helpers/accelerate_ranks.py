"""A program for ``fresh_process``: accelerate on two gloo ranks with FSDP, in ``dcp_default()``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch._dynamo  # imported late otherwise, by each rank
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from rank_processes import run_launched_ranks

import tensorizer.distributed as td

assert td.dcp_default, dcp  # imported now, once for all ranks


def prepared(accelerator: Accelerator):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return accelerator.prepare(model, optimizer)


def steps_of(accelerator: Accelerator, model, optimizer, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        x = torch.randn(6, 4, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_fsdp() -> Accelerator:
    """accelerate's FSDP2 on gloo. By default, accelerate uses FSDP only on GPUs; its code is the same on the CPU."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def shards(folder: Path) -> None:
    """FSDP in ``dcp_default()``: a resumed run has the same losses, and checkpoints of torch's writer load, too."""

    def work(accelerator: Accelerator) -> None:
        whole = steps_of(accelerator, *prepared(accelerator), range(6))
        accelerator.free_memory()
        model, optimizer = prepared(accelerator)
        steps_of(accelerator, model, optimizer, range(3))
        with td.dcp_default(writer={"hashes": "sha256"}):
            accelerator.save_state(folder / "ours")
        accelerator.save_state(folder / "theirs")
        accelerator.wait_for_everyone()
        for name in ("ours", "theirs"):
            accelerator.free_memory()
            model, optimizer = prepared(accelerator)
            with td.dcp_default(reader={"verify_hash": True}):
                accelerator.load_state(folder / name)
            assert steps_of(accelerator, model, optimizer, range(3, 6)) == whole[3:], name

    run_launched_ranks(2, lambda _: work(with_fsdp()), ACCELERATE_USE_CPU="true")
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert td.verify(folder / "ours" / part).ok
        assert len(list((folder / "ours" / part).glob("*.tensors"))) == 2
        assert list((folder / "theirs" / part).glob("*.distcp"))
