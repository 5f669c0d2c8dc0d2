"""Checkpoint folders among the sources of commands: the module that reads them."""

from __future__ import annotations

import importlib
from typing import Any


def reader() -> Any:
    """The module that reads checkpoints as files are read. It is above this folder and needs torch, so it is imported
    by its name when a checkpoint was found."""
    return importlib.import_module("tensorizer.distributed._checkpoint.as_file")
