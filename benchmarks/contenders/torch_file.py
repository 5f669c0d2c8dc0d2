"""torch's own files: ``torch.save`` and ``torch.load``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.contender import Contender, State
from benchmarks.sync import fsync_path


class Torch(Contender):
    name = "torch"
    label = "torch.load / torch.save"
    suffix = ".pt"

    def import_library(self) -> None:
        import torch  # noqa: F401

    def version(self) -> str:
        import torch

        return str(torch.__version__)

    def prepare(self, state: State, path: Path) -> None:
        self.save(state, path)

    def load(self, path: Path) -> State:
        import torch

        return torch.load(path, map_location="cpu", weights_only=True)

    def load_mapped(self, path: Path) -> State:
        import torch

        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    def load_buffered(self, path: Path) -> State:
        """Mapped and copied: the way to torch's own file that reads ahead."""
        return {name: tensor.clone() for name, tensor in self.load_mapped(path).items()}

    def load_one(self, path: Path, name: str) -> State:
        return {name: self.load_mapped(path)[name]}

    def load_gpu(self, path: Path) -> State:
        import torch

        return torch.load(path, map_location="cuda:0", weights_only=True, mmap=True)

    def save_gpu(self, state: State, path: Path) -> None:
        self.save(state, path)

    def save(self, state: State, path: Path, *, sync: bool = False) -> None:
        import torch

        torch.save(dict(state), path)
        if sync:
            fsync_path(path)

    save_crc32 = save
