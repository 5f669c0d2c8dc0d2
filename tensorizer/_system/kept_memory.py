"""How much memory of dropped tensors the process keeps for its next load, and how long."""

from __future__ import annotations

import functools
import os

from tensorizer import _C
from tensorizer._system import cgroup, config

__all__ = ["configure"]

_SECONDS = 3.0
_SHARE = 4


@functools.cache
def configure() -> None:
    """Reads the setting; called before the first load.

    Memory of tensors that came from plain files stays with the process for its next load, and the kernel may take it at
    any time. What is older than ``TENSORIZER_KEEP_MEMORY_SECONDS`` goes when more is kept: 3 by default, since a
    process that loads again does so at once; 0 keeps nothing. At most a quarter of the memory that the machine or the
    container has is kept.

    Raises:
        ValueError: The environment variable is no number >= 0.
    """
    seconds = config.env_seconds("TENSORIZER_KEEP_MEMORY_SECONDS")
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = min(physical, cgroup.memory_limit() or physical)
    _C.keep_memory(limit // _SHARE, _SECONDS if seconds is None else seconds)
