"""Listing the tensors of a module or a nested object, and putting tensors back; the bodies are in private folders."""

from __future__ import annotations

from tensorizer._format.extra_state import check_module
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
