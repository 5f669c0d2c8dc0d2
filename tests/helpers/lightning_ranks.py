"""Programs for ``fresh_process``: Lightning's strategies that write shards, in ``dcp_default()``, on gloo ranks."""

from __future__ import annotations

from pathlib import Path

import lightning
import torch
import torch._dynamo  # imported late otherwise, by each rank
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from rank_processes import run_launched_ranks
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import tensorizer.distributed as td

assert dcp, td.verify  # imported now, once for all ranks


class Whole(lightning.LightningModule):
    """Shards its layers itself, because torch's older FSDP wraps modules on the CPU only on request."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.losses = []
        self.remembered = None

    def configure_model(self):
        if not isinstance(self.layers, FullyShardedDataParallel):
            self.layers = FullyShardedDataParallel(self.layers, device_id=torch.device("cpu"), use_orig_params=True)

    def training_step(self, batch, _):
        loss = (self.layers(batch[0]) - batch[1]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"epochs": self.current_epoch, "tensor": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint):
        self.remembered = checkpoint["mine"]


class Gloo(FSDPStrategy):
    """Lightning refuses ``FSDPStrategy`` itself without a GPU, by its type."""


class Parallel(Whole):
    def configure_model(self):
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def fit(folder: Path, strategy, epochs: int, resume=None, model=Whole, **arguments):
    torch.manual_seed(0)
    model = model()
    data = torch.utils.data.TensorDataset(torch.arange(48.0).view(12, 4) / 48, torch.arange(12.0).view(12, 1) / 12)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=3), ckpt_path=resume, **arguments)
    return trainer, model


def stop_and_resume(folder: Path, strategy, model) -> None:
    def work(rank: int) -> None:
        _, whole = fit(folder / "theirs", strategy(), 4, model=model)
        with td.dcp_default():
            fit(folder / "ours", strategy(), 2, model=model)
            for name in ("ours", "theirs"):  # a checkpoint that Lightning wrote outside of the block loads, too
                _, resumed = fit(folder / f"after {name}", strategy(), 4, folder / name / "epoch=1.ckpt", model)
                assert resumed.losses == whole.losses[4:], (name, resumed.losses, whole.losses)
                assert resumed.remembered["epochs"] == 1
                assert resumed.remembered["tensor"].tolist() == [0, 1, 2]

    run_launched_ranks(2, work)
    checkpoint = folder / "ours" / "epoch=1.ckpt"
    assert td.verify(checkpoint).ok
    assert len(list(checkpoint.glob("r*.tensors"))) == 2
    assert list((folder / "theirs" / "epoch=1.ckpt").glob("*.distcp"))


def fsdp(folder: Path) -> None:
    stop_and_resume(folder, lambda: Gloo(process_group_backend="gloo", state_dict_type="sharded"), Whole)


def model_parallel(folder: Path) -> None:
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1, "process_group_backend": "gloo"}
    stop_and_resume(folder, lambda: ModelParallelStrategy(**sizes), Parallel)
