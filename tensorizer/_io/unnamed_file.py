"""A local file that takes its name when its content is known to be right."""

from __future__ import annotations

import contextlib
import os
import tempfile
from types import TracebackType
from typing import BinaryIO, Optional

__all__ = ["UnnamedFile"]

_DESCRIPTORS = "/proc/self/fd"


class UnnamedFile(contextlib.AbstractContextManager["UnnamedFile"]):
    """A new file beside `path`; without a name where the file system can, so that nothing is left whatever happens.

    Args:
        path: The name that :meth:`publish` gives it; what has that name is replaced.
        mode: Mode bits; ``None`` for those of any new file.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, path: str, mode: Optional[int]) -> None:
        self._path, self._folder = path, os.path.dirname(path)
        self._temporary: Optional[str] = None
        flags = getattr(os, "O_TMPFILE", 0)
        self._descriptor = -1
        if flags and os.path.isdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):  # a file system that has no such files
                self._descriptor = os.open(self._folder, flags | os.O_RDWR | os.O_CLOEXEC, 0o666)
        if self._descriptor < 0:
            self._temporary = self._unused_name()
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
            self._descriptor = os.open(self._temporary, flags, 0o666)
        if mode is not None:
            os.fchmod(self._descriptor, mode)

    def _unused_name(self) -> str:
        return tempfile.mktemp(prefix=f".{os.path.basename(self._path)[:100]}.", dir=self._folder)

    def open(self, mode: str) -> BinaryIO:
        """The file from its first byte, under the name that it will have; as often as needed, one after the other."""

        def opener(path: str, flags: int) -> int:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            return os.dup(self._descriptor)

        return open(self._path, mode, opener=opener)  # type: ignore[return-value]

    def publish(self) -> None:
        """Gives the file its name, on the disk as well."""
        os.fsync(self._descriptor)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if self._temporary is None:
                temporary = self._unused_name()
                # Only with the descriptor of a folder does Python make a link to what the link stands for.
                os.link(f"{_DESCRIPTORS}/{self._descriptor}", os.path.basename(temporary), dst_dir_fd=folder)
                self._temporary = temporary
            os.replace(self._temporary, self._path)
            self._temporary = None
            with contextlib.suppress(OSError):  # not every file system can; the name stands either way
                os.fsync(folder)
        finally:
            os.close(folder)

    def __exit__(
        self,
        exc_type: Optional[type[BaseException]],
        exc: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        os.close(self._descriptor)
        if self._temporary is not None:
            os.unlink(self._temporary)
