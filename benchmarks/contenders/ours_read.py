"""This project with ``mmap=False``: models whose tensors have memory of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contender import Contender
from benchmarks.contenders.ours import Ours

if TYPE_CHECKING:
    import torch


class OursRead(Contender):
    name = "ours-read"
    label = "this project, read"
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

        model: torch.nn.Module = from_pretrained(folder, mmap=False)
        return model
