"""Programs for ``fresh_process``: Lightning's strategies that write shards, on gloo ranks."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from unittest import mock

import lightning
import numpy as np
import pytest
import torch
import torch._dynamo  # imported late otherwise, by each rank
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from rank_processes import run_launched_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import tensorizer.distributed as td
from tensorizer import DecryptionParams, EncryptionParams
from tensorizer.integrations.lightning import TensorizerFSDPStrategy, TensorizerModelParallelStrategy

assert dcp, td.verify  # imported now, once for all ranks

RANDOM = np.random.RandomState(1).get_state()
KEY = EncryptionParams.random()
ENCRYPTED = {"writer": {"encryption": KEY}, "reader": {"encryption": DecryptionParams.from_key(KEY.key)}}


class Whole(lightning.LightningModule):
    """Shards its layers itself: torch's older FSDP wraps on the CPU only what says so."""

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
        checkpoint["mine"] = {"epochs": self.current_epoch, "tensor": torch.arange(3), "random": RANDOM}

    def on_load_checkpoint(self, checkpoint):
        self.remembered = checkpoint["mine"]


class Theirs(FSDPStrategy):
    """Lightning refuses ``FSDPStrategy`` itself without a GPU, by its type."""


class Parallel(Whole):
    def configure_model(self):
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


class Hostile:
    """Unpickling it leaves a folder behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


class Ended(BaseException):
    """In place of the end of the process."""


def finish_and_end(*arguments, finish=td.TensorizerWriter.finish):
    """The end of a save that is killed right behind its marker."""
    finish(*arguments)
    raise Ended


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


def stop_and_resume(folder: Path, ours, theirs, model) -> None:
    def work(rank: int) -> None:
        _, whole = fit(folder / "whole", ours(), 4, model=model)
        for name, strategy in (("ours", ours), ("encrypted", lambda: ours(**ENCRYPTED)), ("theirs", theirs)):
            here = folder / name
            fit(here, strategy(), 2, model=model)
            resumed_by = ours if name == "theirs" else strategy  # what Lightning wrote loads too
            _, resumed = fit(here, resumed_by(), 4, here / "epoch=1.ckpt", model)
            assert resumed.losses == whole.losses[4:], (name, resumed.losses, whole.losses)
            assert resumed.remembered["epochs"] == 1
            assert resumed.remembered["tensor"].tolist() == [0, 1, 2]
            assert np.array_equal(resumed.remembered["random"][1], RANDOM[1])

        if rank == 0:  # a save over an older one that was killed behind the marker leaves the sign of the older one
            shutil.copy(folder / "ours" / "epoch=0.ckpt" / "meta.pt", folder / "ours" / "epoch=1.ckpt" / "meta.pt")
        torch.distributed.barrier()
        _, resumed = fit(folder / "again", ours(), 4, folder / "ours" / "epoch=1.ckpt", model)
        assert resumed.losses == whole.losses[4:]
        sign = folder / "ours" / "epoch=0.ckpt" / "meta.pt"
        if rank == 0:
            torch.save(Hostile(folder / "executed"), sign)
        torch.distributed.barrier()
        with pytest.raises(pickle.UnpicklingError):
            fit(folder / "hostile", ours(), 4, sign.parent, model)
        assert not (folder / "executed").exists()
        with mock.patch.object(td.TensorizerWriter, "finish", finish_and_end), pytest.raises(CheckpointException):
            resumed.trainer.save_checkpoint(folder / "cut.ckpt")
        _, resumed = fit(folder / "behind", ours(), 5, folder / "cut.ckpt", model)
        assert resumed.remembered["epochs"] == 4
        with pytest.raises(TypeError, match="storage_options"):
            resumed.trainer.strategy.save_checkpoint({}, folder / "x", storage_options={})
        with pytest.raises(TypeError):
            ours(writer={"wrong": 1})

    run_launched_ranks(2, work)
    checkpoint = folder / "ours" / "epoch=3.ckpt"
    assert td.verify(checkpoint).ok
    assert len(list(checkpoint.glob("r*.tensors"))) == 2
    encrypted = folder / "encrypted" / "epoch=3.ckpt"
    assert td.verify(encrypted, encryption=ENCRYPTED["reader"]["encryption"]).ok
    assert not any(b"epochs" in file.read_bytes() for file in encrypted.iterdir())  # a key that the model adds
    assert list((folder / "theirs" / "epoch=1.ckpt").glob("*.distcp"))


def fsdp(folder: Path) -> None:
    stop_and_resume(
        folder,
        lambda **options: TensorizerFSDPStrategy(process_group_backend="gloo", **options),
        lambda: Theirs(process_group_backend="gloo", state_dict_type="sharded"),
        Whole,
    )


def model_parallel(folder: Path) -> None:
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1, "process_group_backend": "gloo"}
    stop_and_resume(
        folder,
        lambda **options: TensorizerModelParallelStrategy(**sizes, **options),
        lambda: ModelParallelStrategy(**sizes),
        Parallel,
    )
