"""What ``open_stream`` gives for writing where a destination takes whole files only: uploaded when it is closed."""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, BinaryIO, Optional, cast

__all__ = ["UploadOnClose"]

_open_files: weakref.WeakSet[UploadOnClose] = weakref.WeakSet()


class UploadOnClose:
    """A temporary file, readable, writable and seekable, with a real descriptor, uploaded by :meth:`close`.

    Leaving a ``with`` block closes it too, unless by an exception: then nothing is uploaded. A file that is forgotten
    is uploaded when it is collected, or when the interpreter ends. The local file is deleted in every case.

    Args:
        upload: Called once with the path of the complete file, and whether threads may be used.
        target: What messages call the destination.
    """

    def __init__(self, upload: Callable[[str, bool], None], target: str) -> None:
        descriptor, self.name = tempfile.mkstemp(prefix="tensorizer-")
        self._upload: Optional[Callable[[str, bool], None]] = upload
        self._target = target
        self._owner = os.getpid()
        self.file: BinaryIO = cast(BinaryIO, os.fdopen(descriptor, "wb+"))
        _open_files.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} for {self._target}{', closed' if self.closed else ''}>"

    def __getattr__(self, name: str) -> Any:
        # Everything that is not about the end of its life is the file's own.
        if name == "file":
            raise AttributeError(name)
        return getattr(self.file, name)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.file)

    @property
    def closed(self) -> bool:
        return self.file.closed

    def close(self) -> None:
        """Uploads the content, once. A second call does nothing.

        Raises:
            Exception: What the upload raises; the content is gone then.
        """
        self._finish(with_threads=True)

    def discard(self) -> None:
        """Closes without an upload."""
        self._upload = None
        self._finish(with_threads=True)

    def _finish(self, with_threads: bool) -> None:
        upload, self._upload = self._upload, None
        if self.file.closed:
            return
        try:
            self.file.close()  # flushes
            if upload is not None and self._owner == os.getpid():
                upload(self.name, with_threads)
        finally:
            if self._owner == os.getpid():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.name)

    def __enter__(self) -> UploadOnClose:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if "file" in self.__dict__ and not self.file.closed:
            self.close()


@atexit.register
def _finish_open_files() -> None:
    for file in list(_open_files):
        file._finish(with_threads=False)  # the interpreter starts no threads any more
