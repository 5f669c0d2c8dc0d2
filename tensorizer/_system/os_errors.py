"""What the operating system says about files, as errors of this package that are the builtin ones, too."""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Iterator
from typing import Optional

from tensorizer.errors import (
    StreamError,
    StreamExistsError,
    StreamIsADirectoryError,
    StreamNotADirectoryError,
    StreamNotFoundError,
    StreamPermissionError,
)

__all__ = ["stream_error_class", "stream_errors"]

# As OSError picks its subclasses.
_CLASS_OF_ERRNO: dict[int, type[StreamError]] = {
    errno.ENOENT: StreamNotFoundError,
    errno.EACCES: StreamPermissionError,
    errno.EPERM: StreamPermissionError,
    errno.EISDIR: StreamIsADirectoryError,
    errno.ENOTDIR: StreamNotADirectoryError,
    errno.EEXIST: StreamExistsError,
}


def stream_error_class(number: Optional[int]) -> type[StreamError]:
    """The class for a system call that failed with this ``errno``. The extension asks here, too (bind/errors.cpp)."""
    return StreamError if number is None else _CLASS_OF_ERRNO.get(number, StreamError)


@contextlib.contextmanager
def stream_errors() -> Iterator[None]:
    """Within it an ``OSError`` becomes a :class:`StreamError` with the same number, text and file names."""
    try:
        yield
    except (StreamError, io.UnsupportedOperation):
        raise
    except OSError as error:
        kind = stream_error_class(error.errno)
        if error.filename is None:
            raise kind(*error.args) from None
        raise kind(error.errno, error.strerror, error.filename, None, error.filename2) from None
