"""Memory of the machine: what loads keep of it for the next load, and what they read past the page cache."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Optional

import torch

from tensorizer import _C
from tensorizer._system import cgroup, cuda_engine
from tensorizer._system.config import ranks_of_node

# --- memory that is kept for the next load --------------------------------------------------------------------------

_KEPT_SECONDS = 3.0
_KEPT_SHARE = 4


@functools.cache
def keep_memory() -> None:
    """Says how much memory of dropped tensors this process keeps for its next load; called before the first one.

    Memory of tensors that came from plain files stays with the process for its next load, and the kernel may take it at
    any time. What is older than three seconds goes when more is kept, since a process that loads again does so at once.
    At most a quarter of the memory that the machine or the container has is kept.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = min(physical, cgroup.memory_limit() or physical)
    _C.keep_memory(limit // _KEPT_SHARE, _KEPT_SECONDS)


# --- past the page cache --------------------------------------------------------------------------------------------

_DIRECT_IO = ("auto", "always", "never")

# ``auto`` reads past the cache what takes so much of it that it drives out what others have there, or itself.
_LARGE_NBYTES = 8 << 30
_SHARE_OF_MEMORY = 4


def check_direct_io(choice: Optional[str]) -> str:
    """The argument ``direct_io`` of a load; ``None`` is ``"auto"``.

    Raises:
        TypeError: Not a ``str`` or ``None``.
        ValueError: None of the three.
    """
    if choice is not None and not isinstance(choice, str):
        raise TypeError(f"direct_io: expected one of {', '.join(map(repr, _DIRECT_IO))}, got {type(choice).__name__}")
    if choice is None:
        return "auto"
    if choice not in _DIRECT_IO:
        raise ValueError(f"direct_io: expected one of {', '.join(map(repr, _DIRECT_IO))}, got {choice!r:.100}")
    return choice


class DirectIO:
    """Whether one open file is read past the page cache, straight from the disk to where its bytes go.

    May be used from several threads.
    """

    def __init__(self, source: _C.FileSource, choice: str) -> None:
        self._undecided: Optional[_C.FileSource] = None
        self._kept: Optional[_C.FileSource] = None
        if choice == "never":
            return
        self._kept = source
        if choice == "always":
            source.set_direct(True)
        elif not source.was_cached:
            self._undecided = source

    def expect(self, nbytes: Callable[[], int]) -> None:
        """To be called before a load, with what tells how many bytes it takes of this file and others together.

        A large load decides for all that follow: what it did not leave in the cache is not there for them either.
        """
        source = self._undecided
        if source is None or ranks_of_node() != 1:  # others find in the cache what this one reads
            return
        wanted = nbytes()
        if wanted >= _LARGE_NBYTES or wanted >= cgroup.available_nbytes() // _SHARE_OF_MEMORY:
            source.set_direct(True)
            self._undecided = None

    def load_to(self, device: torch.device) -> None:
        """To be called before a load to `device`.

        Where that shares the memory of the host, the model would be there twice: what is read leaves the page cache,
        for this load and all that follow.
        """
        if self._kept is None or device.type != "cuda" or ranks_of_node() != 1:
            return
        if cuda_engine.shares_host_memory(device):
            self._kept.let_go_behind()
            self._kept = None
