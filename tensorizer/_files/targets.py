"""What a conversion writes to: one class per format, given all names and shapes before the first payload."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Optional

import torch

from tensorizer import _C
from tensorizer._crypto.keys import check_encryption, encryption_key
from tensorizer._files.contents import Content
from tensorizer._format import dtypes
from tensorizer._format.names import Name, Path
from tensorizer._format.safetensors import HeaderEntry
from tensorizer._io.sinks import open_sink
from tensorizer._save.safetensors import SafetensorsWriter

__all__ = ["SafetensorsTarget", "Target", "TensorsTarget"]


class Target:
    """A file that is being written; a context manager that abandons it when an exception passes."""

    def write(self, tensors: Sequence[torch.Tensor], progress: Optional[Callable[[int], None]] = None) -> None:
        """The next tensors, in the order that was announced."""
        raise NotImplementedError

    def finish(self) -> None:
        """Makes the file appear."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Leaves what was there before."""
        raise NotImplementedError

    def __enter__(self) -> Target:
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
            with contextlib.suppress(Exception):  # the exception that is on its way tells more
                self.abandon()


class SafetensorsTarget(Target):
    """A ``.safetensors`` file."""

    def __init__(
        self,
        target: Any,
        items: Sequence[Content],
        names: Sequence[str],
        metadata: Optional[Mapping[str, str]],
        stream_options: Optional[Mapping[str, Any]],
    ) -> None:
        entries = [HeaderEntry(name, item.dtype, item.shape) for name, item in zip(names, items)]
        self._writer = SafetensorsWriter(target, entries, metadata, stream_options=stream_options)

    def write(self, tensors: Sequence[torch.Tensor], progress: Optional[Callable[[int], None]] = None) -> None:
        self._writer.write(tensors, progress)

    def finish(self) -> None:
        self._writer.finish()

    def abandon(self) -> None:
        self._writer.abandon()


class TensorsTarget(Target):
    """A ``.tensors`` file, written by one call of the extension's session, so that it appears whole."""

    def __init__(
        self,
        target: Any,
        items: Sequence[Content],
        *,
        encryption: Any,
        hashes: frozenset[str],
        metadata: Mapping[str, str],
        ties: Mapping[Name, Name],
        stored_ties: Mapping[Name, Name],
        stream_options: Optional[Mapping[str, Any]],
    ) -> None:
        check_encryption(encryption)
        key, derivation = encryption_key(encryption)
        self._items = items
        self._next = 0
        opened = open_sink(target, True, stream_options)
        self._close_stream = opened.close
        self._session = _C.SaveSession(
            opened.sink,
            opened.start,
            crc32="crc32" in hashes and key is None,
            sha256="sha256" in hashes,
            key=key,
            derivation=derivation,
            metadata=list(metadata.items()),
        )
        try:
            tied = [(_path(alias), _path(kept), False) for alias, kept in ties.items()]
            tied += [(_path(alias), _path(kept), True) for alias, kept in stored_ties.items()]
            self._session.begin_call([_described(item) for item in items], False, tied)
        except BaseException:
            self.abandon()
            raise

    def write(self, tensors: Sequence[torch.Tensor], progress: Optional[Callable[[int], None]] = None) -> None:
        payloads = []
        for tensor in tensors:
            item = self._items[self._next]
            empty = item.without_data or tensor.numel() == 0
            payloads.append((self._next, 0 if empty else tensor.data_ptr(), 0 if empty else item.nbytes))
            self._next += 1
        self._session.write_payloads(payloads, progress=progress)

    def finish(self) -> None:
        try:
            self._session.finish_call()
            self._session.finish()
        finally:
            self._close_stream()

    def abandon(self) -> None:
        try:
            self._session.abandon()
        finally:
            self._close_stream()


def _path(name: Name) -> Path:
    return (name,) if isinstance(name, str) else name


def _described(item: Content) -> tuple[Any, ...]:
    stored = dtypes.stored_for_tensor(item.dtype)
    scalar = item.without_data and not item.shape
    nbytes = item.dtype.itemsize if scalar else item.nbytes
    return (_path(item.name), stored.encode(), item.shape, int(item.type), item.module_idx, nbytes, item.without_data)
