"""Listing the tensors of a module or a nested object, and putting tensors back; the bodies are in private folders."""

from __future__ import annotations

import torch

from tensorizer._format.names import Path, display
from tensorizer._format.tree import branch, flatten
from tensorizer._load.modules import insert_into_module, live_tensors
from tensorizer._save.modules import ModuleTensor, walk_module

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


def check_module(module: object) -> None:
    """Refuses what is no module; an object that answers ``named_modules()`` with modules counts as one.

    Raises:
        TypeError: Another type.
    """
    if not isinstance(module, torch.nn.Module) and not callable(getattr(module, "named_modules", None)):
        raise TypeError(f"wanted a torch.nn.Module, found {type(module).__name__}")
