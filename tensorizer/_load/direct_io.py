"""Whether a local file is read past the page cache, straight from the disk to where its bytes go."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Optional

from tensorizer import _C
from tensorizer._system import cgroup, config
from tensorizer._system.checks import ranks_of_node

__all__ = ["DirectIO", "check_direct_io"]

_CHOICES = ("auto", "always", "never")

# ``auto`` reads past the cache what takes so much of it that it drives out what others have there, or itself.
_LARGE_NBYTES = 8 << 30
_SHARE_OF_MEMORY = 4


def check_direct_io(choice: Optional[str]) -> str:
    """The choice for a load: `choice`, else what ``TENSORIZER_DIRECT_IO`` says, else ``"auto"``.

    Raises:
        TypeError: Not a ``str`` or ``None``.
        ValueError: None of the three; the message names the argument, or the variable.
    """
    if choice is not None and not isinstance(choice, str):
        raise TypeError(f"direct_io: wanted one of {', '.join(map(repr, _CHOICES))}, found {type(choice).__name__}")
    named = "direct_io" if choice is not None else "environment variable TENSORIZER_DIRECT_IO"
    found = choice if choice is not None else config.env_text("TENSORIZER_DIRECT_IO") or "auto"
    if found not in _CHOICES:
        raise ValueError(f"{named}: wanted one of {', '.join(map(repr, _CHOICES))}, found {found!r:.100}")
    return found


class DirectIO:
    """The choice for one open file. May be used from several threads."""

    def __init__(self, source: _C.RangeSource, choice: str) -> None:
        self._undecided: Optional[_C.FileSource] = None
        self._alone = ranks_of_node() == 1  # others find in the cache what this one reads
        if not isinstance(source, _C.FileSource) or choice == "never":
            return
        if choice == "always":
            source.set_direct(True)
        elif not source.was_cached:
            self._undecided = source

    def read_alone(self) -> None:
        """Says that no other rank of the node reads the same: what one leaves in the cache is of no use to them."""
        self._alone = True

    def expect(self, nbytes: Callable[[], int]) -> None:
        """To be called before a load, with what tells how many bytes it takes of this file and others together.

        A large load decides for all that follow: what it did not leave in the cache is not there for them either.
        """
        source = self._undecided
        if source is None or not self._alone:
            return
        wanted = nbytes()
        if wanted >= _LARGE_NBYTES or wanted >= _available_nbytes() // _SHARE_OF_MEMORY:
            source.set_direct(True)
            self._undecided = None


def _available_nbytes() -> int:
    """Memory that this process may still take, the cache of files counted as free."""
    machine = _machine_available_nbytes()
    group = cgroup.memory_available()
    return machine if group is None else min(machine, group)


def _machine_available_nbytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii", errors="replace") as table:
            for line in table:
                name, _, value = line.partition(":")
                if name == "MemAvailable":
                    return int(value.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
