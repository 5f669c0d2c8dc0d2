"""Counts time and bytes of the whole process, for benchmarks; off unless ``TENSORIZER_ENABLE_PERF_STATS`` is set."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from tensorizer._system import locks
from tensorizer._system.config import env_text

#: Whether counting was on when the package was imported.
enabled: bool = env_text("TENSORIZER_ENABLE_PERF_STATS") is not None

_lock = threading.Lock()
locks.makers[sys.modules[__name__]] = threading.Lock
_totals: dict[str, float] = {
    "tensor_to_device_secs": 0.0,
    "tensor_to_device_bytes": 0,
    "file_readinto_secs": 0.0,
    "file_readinto_bytes": 0,
}


@contextlib.contextmanager
def measured(kind: str, nbytes: int) -> Iterator[None]:
    """Adds the time of the block and `nbytes` to the counters of `kind` (``file_readinto``, ``tensor_to_device``)."""
    if not enabled:
        yield
        return
    begin = time.perf_counter()
    yield
    elapsed = time.perf_counter() - begin
    with _lock:
        _totals[f"{kind}_secs"] += elapsed
        _totals[f"{kind}_bytes"] += nbytes


def totals() -> dict[str, float]:
    """Returns a copy of the counters.

    Raises:
        RuntimeError: Counting is off.
    """
    if not enabled:
        raise RuntimeError("performance counters are off: set TENSORIZER_ENABLE_PERF_STATS before importing tensorizer")
    with _lock:
        return dict(_totals)
