"""This project with ``mmap=True``: models whose tensors are views of the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contender import Contender
from benchmarks.contenders.ours import Ours

if TYPE_CHECKING:
    import torch


class OursMapped(Contender):
    name = "ours-mapped"
    label = "this project, mapped"
    suffix = Ours.suffix
    role = "variant"
    shares = Ours.name

    def __init__(self) -> None:
        self._ours = Ours()

    def import_library(self) -> None:
        self._ours.import_library()

    def version(self) -> str:
        return self._ours.version()

    def from_pretrained(self, folder: Path) -> torch.nn.Module:
        from tensorizer.integrations.huggingface import from_pretrained

        model: torch.nn.Module = from_pretrained(None, folder, mmap=True)
        return model
