"""Several files that appear together: each is written beside its name and takes it when all of them are complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Optional

from tensorizer._io.whole_file import WholeFile

__all__ = ["TogetherOrNot"]


class TogetherOrNot(AbstractContextManager["TogetherOrNot"]):
    """Places to write files to, and one last file that refers to them.

    Local files are written to a hidden folder beside their target and renamed when :meth:`finish` is called, the last
    file after all others; an exception leaves the old files. Objects of a store are written under their own names,
    which nothing refers to before the last file is there.

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
            self._folder = tempfile.mkdtemp(prefix=".tensorizer-", dir=parent)

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
