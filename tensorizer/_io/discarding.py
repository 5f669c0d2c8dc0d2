"""Streams whose content appears as a whole: completed by ``close()``, given up by ``discard()``."""

from __future__ import annotations

from types import TracebackType
from typing import Optional, Protocol

__all__ = ["ClosesOrDiscards"]


class _Both(Protocol):
    def close(self) -> None: ...

    def discard(self) -> None: ...


class ClosesOrDiscards:
    """How such a stream leaves a ``with`` block: closed, or discarded where an exception ends the block."""

    def __exit__(
        self: _Both,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()
