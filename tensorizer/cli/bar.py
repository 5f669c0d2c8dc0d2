"""The progress bar of the command line: one line on standard error, drawn over itself."""

from __future__ import annotations

import sys
import time
from typing import Any

__all__ = ["Bar"]

_BETWEEN = 0.1  # seconds
_CELLS = 24


class Bar:
    """Called with a :class:`tensorizer.progress.Progress`; work that is over within `delay` seconds shows none."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._begin = time.monotonic()
        self._last = 0.0
        self._drawn = False

    def __call__(self, progress: Any) -> None:
        now = time.monotonic()
        done, total = progress.bytes_done, progress.bytes_total
        over = done >= total
        if now - self._begin < self._delay or (now - self._last < _BETWEEN and not over):
            return
        if over and not self._drawn:
            return
        from tensorizer._system.sizes import convert_bytes

        self._last, self._drawn = now, True
        share = done / total if total else 1.0
        cells = "#" * int(share * _CELLS)
        rate = f"{convert_bytes(progress.bytes_per_second)}/s"
        text = f"\r{share:4.0%} [{cells:<{_CELLS}}] {convert_bytes(done)} of {convert_bytes(total)}, {rate}"
        print(f"{text:<78}", end="\n" if over else "", file=sys.stderr, flush=True)
        if over:
            self._begin, self._drawn = now, False
