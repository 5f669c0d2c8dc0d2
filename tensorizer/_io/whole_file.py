"""Files that appear whole or not at all: :class:`WholeFile` anywhere, :class:`NewFile` on a local disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, BinaryIO, Optional

from tensorizer import _C
from tensorizer._io.sinks import open_sink
from tensorizer._system.os_errors import stream_errors

__all__ = ["NewFile", "WholeFile"]

_DESCRIPTORS = "/proc/self/fd"

_Progress = Optional[Callable[[int], object]]


class WholeFile(contextlib.AbstractContextManager["WholeFile"]):
    """A file of plain bytes, written from its beginning to its end, that appears under its name when the block ends.

    After an exception what was there stays.

    Args:
        target: A path, URI, descriptor or open binary file object.
        stream_options: Keywords for opening a URI.
        fsync: Whether a local file is on the disk before it takes its name.

    Raises:
        OSError: The target cannot be written.
    """

    def __init__(self, target: Any, stream_options: Optional[Mapping[str, Any]] = None, fsync: bool = True) -> None:
        self._opened = open_sink(target, fsync, stream_options)
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


class NewFile(contextlib.AbstractContextManager["NewFile"]):
    """A new local file, complete first and published later: where it is read back before, or appears with others.

    It has no name until it is published where the file system can do that, so that nothing is left whatever happens;
    elsewhere, and where it `is_one_of_many`, a hidden one that the end of the block removes.

    Args:
        path: The name that :meth:`publish` gives it.
        mode: Mode bits; ``None`` for those of any new file.
        is_one_of_many: Keeps no descriptor open once the file is complete.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, path: str, mode: Optional[int] = None, is_one_of_many: bool = False) -> None:
        self._path, self._folder = path, os.path.dirname(path) or "."
        self._hidden: Optional[str] = None
        self._is_one_of_many = is_one_of_many
        self._descriptor = -1
        self._syncs = True
        flags = os.O_RDWR | os.O_CLOEXEC
        bits = 0o666 if mode is None else 0o600
        with stream_errors():
            if hasattr(os, "O_TMPFILE") and os.path.isdir(_DESCRIPTORS) and not is_one_of_many:
                with contextlib.suppress(OSError):  # a file system that has no such files
                    self._descriptor = os.open(self._folder, flags | os.O_TMPFILE, bits)
            if self._descriptor < 0:
                self._hidden = self._unused_name()
                self._descriptor = os.open(self._hidden, flags | os.O_CREAT | os.O_EXCL, bits)
            if mode is not None:
                os.fchmod(self._descriptor, mode)

    def _unused_name(self) -> str:
        name = f".{os.path.basename(self._path)[:100]}.{os.urandom(8).hex()}.tmp"
        return os.path.join(self._folder, name)

    def open(self, mode: str) -> BinaryIO:
        """The file from its first byte, under the name that it will have; as often as needed, one after the other."""

        def opener(path: str, flags: int) -> int:
            if self._descriptor < 0:
                return os.open(self._hidden or path, flags)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            return os.dup(self._descriptor)

        return open(self._path, mode, opener=opener)  # type: ignore[return-value]

    def write(self, content: bytes, fsync: bool = True) -> None:
        """All of a small file, which is complete then."""
        with self.open("wb") as file:
            file.write(content)
        self.complete(fsync)

    def complete(self, fsync: bool = True) -> None:
        """Says that nothing more will be written; with `fsync` the content is on the disk when this returns."""
        self._syncs = fsync
        with stream_errors():
            if fsync:
                os.fsync(self._descriptor)
            if self._is_one_of_many:
                os.close(self._descriptor)
                self._descriptor = -1

    def publish(self, exclusive: bool = False) -> None:
        """Gives the file its name, on the disk as well if its content is.

        Args:
            exclusive: Leaves a file that has the name as it is, instead of replacing it.

        Raises:
            FileExistsError: There is one, and `exclusive`.
        """
        with stream_errors():
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._take_name(folder, exclusive)
                if self._syncs:
                    with contextlib.suppress(OSError):  # not every file system can; the name stands either way
                        os.fsync(folder)
            finally:
                os.close(folder)

    def _take_name(self, folder: int, exclusive: bool) -> None:
        if self._hidden is None:
            name = self._path if exclusive else self._unused_name()
            # Only with the descriptor of a folder does Python make a link to what the link stands for.
            os.link(f"{_DESCRIPTORS}/{self._descriptor}", os.path.basename(name), dst_dir_fd=folder)
            if exclusive:
                return
            self._hidden = name
        if exclusive:
            os.link(self._hidden, self._path)  # the block's end removes the hidden name
            return
        os.replace(self._hidden, self._path)
        self._hidden = None

    def __exit__(
        self,
        exc_type: Optional[type[BaseException]],
        exc: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        if self._hidden is not None:
            os.unlink(self._hidden)
