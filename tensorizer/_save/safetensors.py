"""Writing ``.safetensors``: header first, payloads behind it, by the sinks that ``.tensors`` are written with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Callable, Optional

import torch

from tensorizer import _C
from tensorizer._format.payloads import contiguous
from tensorizer._format.safetensors import HeaderEntry, header_bytes
from tensorizer._io.sinks import open_sink

__all__ = ["SafetensorsWriter"]


class SafetensorsWriter:
    """Writes one file whose content is known beforehand; it appears under its name when it is complete.

    A context manager: an exception inside the block abandons the file, and what was there before stays.

    Args:
        target: A path, ``s3://`` URI or open binary file object.
        entries: The tensors, in the order of the file.
        metadata: Texts to store, in their order; ``None`` stores no such member.
        stream_options: Keywords for opening a URI.

    Raises:
        UnsupportedContentError: Something that the format cannot hold; nothing was opened then.
        OSError: The target cannot be written.
    """

    def __init__(
        self,
        target: Any,
        entries: Sequence[HeaderEntry],
        metadata: Optional[Mapping[str, str]] = None,
        *,
        stream_options: Optional[Mapping[str, Any]] = None,
    ) -> None:
        header = header_bytes(entries, metadata)
        self._entries = entries
        self._opened = open_sink(target, True, stream_options)
        self._writer = _C.PlainWriter(self._opened.sink)
        self._at = self._opened.start + len(header)
        self._next = 0
        self._end = self._at + sum(entry.nbytes for entry in entries)
        self._writer.reserve(self._end)
        self._writer.write_bytes(self._opened.start, header)

    def write(self, tensors: Sequence[torch.Tensor], progress: Optional[Callable[[int], None]] = None) -> None:
        """Writes the next tensors, in order; each on any device, of the dtype and shape that were announced."""
        pieces: list[tuple[int, int, int]] = []
        kept = []  # alive until the call returns
        for tensor in tensors:
            entry = self._entries[self._next]
            if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
                raise ValueError(
                    f"tensor {entry.name!r}: wanted {entry.dtype} {entry.shape}, "
                    f"found {tensor.dtype} {tuple(tensor.shape)}"
                )
            data = contiguous(tensor, on_device=False)
            kept.append(data)
            if entry.nbytes:
                pieces.append((self._at, data.data_ptr(), entry.nbytes))
            self._at += entry.nbytes
            self._next += 1
        self._writer.write(pieces, progress)

    def finish(self) -> None:
        """Makes the file appear. Raises OSError where it cannot be completed."""
        if self._next != len(self._entries):
            raise ValueError(f"wanted {len(self._entries)} tensors, found {self._next}")
        try:
            self._writer.publish(self._end)
            self._writer.finish()
        finally:
            self._opened.close()

    def abandon(self) -> None:
        """Gives up; the target stays what it was."""
        try:
            self._writer.abandon()
        finally:
            self._opened.close()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        exc_type: Optional[type[BaseException]],
        exc: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if exc_type is None:
            self.finish()
        else:
            self.abandon()
