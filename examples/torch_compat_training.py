"""Checkpoints of a training loop through torch.save and torch.load, the tensors in .tensors files beside them.

    python torch_compat_training.py --out-dir ./checkpoints --steps 20
    python torch_compat_training.py --out-dir ./checkpoints --steps 40 --resume
    python torch_compat_training.py --out-dir ./checkpoints --steps 20 --background

Runs offline, on a small network. The loop itself does not use tensorizer: it calls torch.save and torch.load as always,
with model, optimizer, scheduler and random state in one dictionary. With --background, a thread writes the
tensors while training continues.
"""

from __future__ import annotations

import argparse
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tensorizer import TensorSerializer
from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving


class Training:
    """A small network that learns to add, with everything that has to survive a restart."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=100)
        self.step = 0

    def train_step(self) -> float:
        inputs = torch.rand(32, 8)
        loss = torch.nn.functional.mse_loss(self.model(inputs), inputs.sum(1, keepdim=True))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return loss.item()

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "step": self.step,
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
        self.step = state["step"]


class BackgroundWriter:
    """A save_func: copies the tensors to the host at once, writes them in a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._pending: list[Future[None]] = []

    def __call__(self, file_obj: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> None:
        copies = [tensor.to("cpu", copy=True) for tensor in tensors]  # training changes the originals
        self._pending.append(self._pool.submit(self._write, file_obj, copies, kwargs))

    @staticmethod
    def _write(file_obj: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> None:
        serializer = TensorSerializer(file_obj, **kwargs)
        serializer.write_state_dict(tensors)
        serializer.close()

    def finish(self) -> None:
        self._pool.shutdown(wait=True)
        for future in self._pending:
            future.result()  # an error of the thread surfaces here


def latest_checkpoint(folder: Path) -> Path | None:
    return max(folder.glob("step-*.pt"), key=lambda path: int(path.stem.split("-")[1]), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-dir", type=Path, default=Path("checkpoints"), help="folder for the checkpoints")
    parser.add_argument("--steps", type=int, default=20, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint")
    parser.add_argument("--background", action="store_true", help="write checkpoints in a thread")
    args = parser.parse_args()
    if args.save_every < 1:
        parser.error("--save-every: expected 1 or more")
    args.out_dir.mkdir(parents=True, exist_ok=True)

    training = Training()
    if args.resume:
        checkpoint = latest_checkpoint(args.out_dir)
        if checkpoint is None:
            parser.error(f"no checkpoint in {args.out_dir}")
        with tensorizer_loading(num_readers=2):
            training.load(checkpoint)
        print(f"Resumed from {checkpoint.name}")

    writer = BackgroundWriter() if args.background else None
    with tensorizer_saving(save_func=writer, limit_cpu_concurrency=1):
        while training.step < args.steps:
            loss = training.train_step()
            if training.step % args.save_every == 0:
                training.save(args.out_dir / f"step-{training.step}.pt")
                print(f"Step {training.step}: loss {loss:.6f}")
    if writer is not None:
        writer.finish()


if __name__ == "__main__":
    main()
