"""What the operating system says about files, as errors of this package that are the builtin ones, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tensorizer.errors import (
    StreamError,
    StreamExistsError,
    StreamIsADirectoryError,
    StreamNotADirectoryError,
    StreamNotFoundError,
    StreamPermissionError,
)

__all__ = ["as_stream_error", "stream_error_class", "stream_errors"]

_CLASSES: dict[type[OSError], type[StreamError]] = {
    OSError: StreamError,
    FileNotFoundError: StreamNotFoundError,
    PermissionError: StreamPermissionError,
    IsADirectoryError: StreamIsADirectoryError,
    NotADirectoryError: StreamNotADirectoryError,
    FileExistsError: StreamExistsError,
}


def stream_error_class(number: int) -> type[StreamError]:
    """The class for a system call that failed with this ``errno``. The extension asks here, too (bind/errors.cpp)."""
    return _CLASSES.get(type(OSError(number, "")), StreamError)  # OSError picks the builtin class


@contextlib.contextmanager
def stream_errors() -> Iterator[None]:
    """Within it an ``OSError`` of opening files becomes a :class:`StreamError` with the same number, text and names.

    Other kinds (``ConnectionError``, ``io.UnsupportedOperation``, those of file system drivers) go on as they are.
    """
    try:
        yield
    except OSError as error:
        found = as_stream_error(error)
        if found is error:
            raise
        raise found from None


def as_stream_error(error: OSError) -> OSError:
    """What :func:`stream_errors` raises for an error."""
    kind = _CLASSES.get(type(error))
    if kind is None:
        return error
    if error.filename is None:
        return kind(*error.args)
    return kind(error.errno, error.strerror, error.filename, None, error.filename2)
