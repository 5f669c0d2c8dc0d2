"""transformers' own ``from_pretrained``, on the file that safetensors wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contender import Contender

if TYPE_CHECKING:
    import torch


class Transformers(Contender):
    name = "transformers"
    label = "transformers"
    suffix = ".safetensors"
    shares = "safetensors"

    def import_library(self) -> None:
        import transformers  # noqa: F401

    def version(self) -> str:
        import transformers

        return str(transformers.__version__)

    def from_pretrained(self, folder: Path) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder)
        return model
