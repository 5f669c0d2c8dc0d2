"""Several files that appear together: each is written beside its name and takes it when all of them are complete."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Optional

from tensorizer._io.whole_file import WholeFile

__all__ = ["TogetherOrNot"]

_PREFIX = ".tensorizer-"
# In such a folder: our word, and what machine its process runs on. That process has it locked.
_OWNER = ".owner"
_OWNER_FORM = re.compile(rb"tensorizer [!-~]{1,1000}")
# A folder of a process that cannot be asked after is left alone until nothing in it has changed for so long.
_REST_SECONDS = 24 * 3600


class TogetherOrNot(AbstractContextManager["TogetherOrNot"]):
    """Places to write files to, and one last file that refers to them.

    Local files are written to a hidden folder beside their target and renamed when :meth:`finish` is called, the last
    file after all others; an exception leaves the old files. Such a folder of a process that was killed is removed by
    the next one that writes beside it; what has another mark than ours is left alone. Objects of
    a store are written under their own names, which nothing refers to before the last file is there.

    Args:
        names: Paths in one folder, or URIs.
        stream_options: Keywords for opening URIs.
    """

    def __init__(self, names: Sequence[str], stream_options: Optional[Mapping[str, Any]] = None) -> None:
        self._names, self._stream_options = names, stream_options
        self._folder: Optional[str] = None
        if "://" not in names[0]:
            parent = os.path.dirname(os.path.abspath(names[0]))
            os.makedirs(parent, exist_ok=True)
            _remove_abandoned(parent)
            self._folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            try:
                self._lock = _lock(self._folder)
            except BaseException:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise

    def __iter__(self) -> Iterator[str]:
        for name in self._names:
            yield name if self._folder is None else os.path.join(self._folder, os.path.basename(name))

    def finish(self, last: str, content: bytes) -> None:
        """Gives all files their names, then writes the last one."""
        if self._folder is not None:
            for place, name in zip(self, self._names):
                os.replace(place, name)
        with WholeFile(last, self._stream_options) as file:
            file.append(content)

    def __exit__(
        self,
        exc_type: Optional[type[BaseException]],
        exc: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)


def _lock(folder: str) -> int:
    """Marks a folder as that of this process, for as long as the descriptor is open. The mark appears locked."""
    descriptor, name = tempfile.mkstemp(dir=folder)
    os.write(descriptor, _machine())
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(name, os.path.join(folder, _OWNER))
    return descriptor


def _machine() -> bytes:
    """What the processes have in common that see each other's locks, on every file system."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            name = file.read().strip()
    except OSError:
        name = socket.gethostname().encode("ascii", "backslashreplace")
    return b"tensorizer " + name


def _remove_abandoned(parent: str) -> None:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False) and _is_abandoned(entry.path):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_abandoned(folder: str) -> bool:
    """Whether the process that made a folder is gone."""
    try:
        with open(os.path.join(folder, _OWNER), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = file.read(2000)
            if owner == _machine():
                return True
            if not _OWNER_FORM.fullmatch(owner):
                return False
    except OSError:  # locked, or no folder of ours
        return False
    # Another machine may have locked it unseen.
    try:
        with os.scandir(folder) as entries:
            times = [os.stat(folder).st_mtime, *(entry.stat(follow_symlinks=False).st_mtime for entry in entries)]
    except OSError:
        return False
    return time.time() - max(times) > _REST_SECONDS
