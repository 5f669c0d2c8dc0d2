"""Listing the tensors of a module or a nested object, and putting tensors back; the bodies are in private folders."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tensorizer._format.names import Path, display
from tensorizer._format.tree import branch, flatten
from tensorizer._load.modules import insert_into_module, live_tensors
from tensorizer._save.records import ModuleTensor, walk_module

__all__ = [
    "ModuleTensor",
    "Path",
    "branch",
    "check_module",
    "display",
    "flatten",
    "insert_into_module",
    "live_tensors",
    "walk_module",
]


def check_module(module: object, for_mappings: str = "") -> None:
    """Refuses what is no module; an object that answers ``named_modules()`` with modules counts as one.

    Args:
        module: What was passed.
        for_mappings: What to use for a state dict, as the end of a sentence.

    Raises:
        TypeError: Another type.
    """
    if isinstance(module, type) and issubclass(module, torch.nn.Module):
        raise TypeError(f"wanted a torch.nn.Module, found the class {module.__name__} itself: pass an instance")
    if isinstance(module, torch.nn.Module) or callable(getattr(module, "named_modules", None)):
        return
    hint = for_mappings if isinstance(module, Mapping) else ""
    if isinstance(module, torch.Tensor):
        hint = "write_tensor writes single tensors"
    raise TypeError(f"wanted a torch.nn.Module, found {type(module).__name__}" + (hint and f"; {hint}"))
