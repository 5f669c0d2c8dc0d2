"""Training checkpoints under torch_compat: stop, start again, and end with the same bits."""

from __future__ import annotations

import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("transformers")]


def assert_same_bits(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


# --- a plain loop --------------------------------------------------------------------------------------------------


class Loop:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=10)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(torch.randn(8, 4)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()

    def save(self, path: Path) -> None:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "random": torch.get_rng_state()}, path)

    def load(self, path: Path, **arguments) -> None:
        state = torch.load(path, **arguments)
        torch.set_rng_state(state.pop("random"))
        for name, values in state.items():
            getattr(self, name).load_state_dict(values)


@pytest.mark.parametrize("arguments", [{}, {"weights_only": True}, {"map_location": "cpu"}], ids=str)
def test_a_plain_loop_resumes_bit_by_bit(tmp_path, arguments):
    whole = Loop()
    whole.run(10)
    first = Loop()
    first.run(4)
    if arguments.get("weights_only"):
        first.save(tmp_path / "plain.pt")
        try:
            torch.load(tmp_path / "plain.pt", weights_only=True)
        except pickle.UnpicklingError as error:  # torch 2.1: the scheduler holds a method
            pytest.skip(f"this torch refuses its own file: {str(error)[-100:]}")
    with tensorizer_saving():
        first.save(tmp_path / "checkpoint.pt")
    assert (tmp_path / "checkpoint.pt.tensors").stat().st_size > 4000
    torch.rand(7)  # whatever else happens in between
    second = Loop()
    with tensorizer_loading():
        second.load(tmp_path / "checkpoint.pt", **arguments)
    second.run(6)
    assert_same_bits(whole.model.state_dict(), second.model.state_dict())
    assert whole.scheduler.get_last_lr() == second.scheduler.get_last_lr()


# --- transformers.Trainer ------------------------------------------------------------------------------------------


def make_trainer(folder: Path, **arguments):
    import tiny_models
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(0)
    model = tiny_models.llama(attention_dropout=0.1).train()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, tiny_models.VOCABULARY, (24, 8), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in rows]
    settings = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=6, save_steps=3, save_strategy="steps",
        logging_strategy="no", report_to=[], use_cpu=True, learning_rate=1e-2, lr_scheduler_type="cosine", seed=3,
        disable_tqdm=True, dataloader_num_workers=0, **arguments,
    )  # fmt: skip
    return Trainer(model=model, args=settings, train_dataset=data)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of six steps that was saved after three."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    folder = tmp_path_factory.mktemp("trained")
    with tensorizer_saving():
        trainer = make_trainer(folder)
        trainer.train()
    return trainer, folder / "checkpoint-3"


def test_the_trainer_of_transformers_resumes_bit_by_bit(trained, tmp_path):
    whole, checkpoint = trained
    assert (checkpoint / "optimizer.pt.tensors").exists()
    assert (checkpoint / "optimizer.pt").stat().st_size < (checkpoint / "optimizer.pt.tensors").stat().st_size
    assert (checkpoint / "rng_state.pth").exists()

    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    resumed = make_trainer(tmp_path / "again")
    with tensorizer_loading(device="cpu"), tensorizer_saving():
        resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 6
    assert_same_bits(whole.model.state_dict(), resumed.model.state_dict())
    left, right = whole.optimizer.state_dict(), resumed.optimizer.state_dict()
    assert left["param_groups"] == right["param_groups"]
    for index, slots in left["state"].items():
        assert_same_bits(slots, right["state"][index])


def test_the_trainer_cannot_resume_without_its_sidecar(trained, tmp_path):
    _, checkpoint = trained
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint-3")
    (copy / "optimizer.pt.tensors").unlink()
    resumed = make_trainer(tmp_path / "again")
    with tensorizer_loading(device="cpu"), pytest.raises(FileNotFoundError, match=r"optimizer\.pt\.tensors"):
        resumed.train(resume_from_checkpoint=str(copy))


# --- accelerate ----------------------------------------------------------------------------------------------------


class AccelerateLoop:
    def __init__(self):
        from accelerate import Accelerator
        from accelerate.utils import set_seed

        set_seed(0)
        self.accelerator = Accelerator(cpu=True)
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(torch.randn(8, 4)).square().mean()
            self.optimizer.zero_grad()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()


@pytest.mark.parametrize("safe_serialization", [False, True])
def test_accelerate_resumes_bit_by_bit(tmp_path, safe_serialization):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    whole = AccelerateLoop()
    whole.run(4)
    with tensorizer_saving():
        whole.accelerator.save_state(str(tmp_path), safe_serialization=safe_serialization)
    whole.run(6)
    names = {path.name for path in tmp_path.iterdir()}
    assert "optimizer.bin.tensors" in names
    assert ("pytorch_model.bin.tensors" in names) is not safe_serialization

    resumed = AccelerateLoop()
    with tensorizer_loading(device="cpu"):
        resumed.accelerator.load_state(str(tmp_path))
    resumed.run(6)
    assert_same_bits(whole.model.state_dict(), resumed.model.state_dict())
    assert whole.scheduler.get_last_lr() == resumed.scheduler.get_last_lr()
