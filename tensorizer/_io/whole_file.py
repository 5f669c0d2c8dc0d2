"""A file of plain bytes, written from its beginning to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Optional

from tensorizer import _C
from tensorizer._io.sinks import open_sink

__all__ = ["WholeFile"]

_Progress = Optional[Callable[[int], object]]


class WholeFile(contextlib.AbstractContextManager["WholeFile"]):
    """A file that appears under its name when the block ends; after an exception what was there stays.

    Args:
        target: A path, URI, descriptor or open binary file object.
        stream_options: Keywords for opening a URI.

    Raises:
        OSError: The target cannot be written.
    """

    def __init__(self, target: Any, stream_options: Optional[Mapping[str, Any]] = None) -> None:
        self._opened = open_sink(target, True, stream_options)
        self._writer = _C.PlainWriter(self._opened.sink)
        self._end = self._opened.start

    @property
    def nbytes(self) -> int:
        """What was written so far."""
        return self._end - self._opened.start

    def reserve(self, nbytes: int) -> None:
        """Makes room for what follows, where the target can; may raise OSError where it certainly cannot."""
        self._writer.reserve(self._end + nbytes)

    def append(self, content: bytes) -> None:
        self._writer.write_bytes(self._end, content)
        self._end += len(content)

    def append_memory(self, pieces: Sequence[tuple[int, int]], progress: _Progress = None) -> None:
        """Writes pieces of host memory, each an address and a number of bytes, by several threads."""
        placed = []
        for address, nbytes in pieces:
            if nbytes:
                placed.append((self._end, address, nbytes))
            self._end += nbytes
        self._writer.write(placed, progress)

    def copy_from(self, source: _C.RangeSource, progress: _Progress = None) -> None:
        """The whole of a source, as the whole of a target that begins at its first byte."""
        self._end = self._writer.copy_from(source, progress)

    def __exit__(
        self,
        exc_type: Optional[type[BaseException]],
        exc: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if exc_type is not None:
            self._abandon()
            return
        try:
            self._writer.publish(self._end)
            self._writer.finish()
        except BaseException:
            self._abandon()
            raise
        self._opened.close()

    def _abandon(self) -> None:
        with contextlib.suppress(Exception):  # the exception that is on its way tells more
            self._writer.abandon()
        with contextlib.suppress(Exception):
            self._opened.discard()
