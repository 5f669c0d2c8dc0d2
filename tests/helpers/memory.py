"""Measures the memory that a block takes: the peak of the resident set, which Linux lets a process reset."""

from __future__ import annotations

import contextlib
from pathlib import Path

MIB = 1 << 20
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def resident() -> int:
    """Bytes of this process in memory now, without those that the kernel may reclaim at any time."""
    return _field("VmRSS") - _lazily_free()


def _lazily_free() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("LazyFree:"):
            return int(line.split()[1]) * 1024
    return 0


def can_measure() -> bool:
    try:
        _CLEAR.write_text("5")
        return _field("VmHWM") > 0
    except (OSError, LookupError):
        return False


class Growth:
    """The result of ``peak_growth``: bytes above the resident set at the start."""

    peak = 0


@contextlib.contextmanager
def peak_growth():
    """Measures how far the resident set of the process rises above where it is now."""
    growth = Growth()
    _CLEAR.write_text("5")
    before = _field("VmRSS")  # like the peak, with pages that the kernel may reclaim
    yield growth
    growth.peak = _field("VmHWM") - before
