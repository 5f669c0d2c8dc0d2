"""Local paths as callers write them."""

from __future__ import annotations

import os

__all__ = ["expanded"]


def expanded(path: str) -> str:
    """The path with ``~`` or ``~name`` in front replaced by that home folder, as a shell does.

    A file that is really called so, in the current folder, is meant where there is one.
    """
    return os.path.expanduser(path) if path.startswith("~") and not os.path.lexists(path) else path
