"""Every exception class of the package.

Each class derives from :class:`TensorizerError` *and* from the builtin that callers of the reference already catch.
``docs/errors.md`` says which situation raises which class and what to do about it.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Any, Optional

__all__ = [
    "AuthenticationError",
    "ConflictError",
    "CryptographyError",
    "DeviceError",
    "FieldRangeError",
    "FormatError",
    "HashMismatchError",
    "InvalidVersionError",
    "LoadError",
    "MissingHashError",
    "StateMismatchError",
    "StreamError",
    "StreamExistsError",
    "StreamIsADirectoryError",
    "StreamNotADirectoryError",
    "StreamNotFoundError",
    "StreamPermissionError",
    "TensorizerError",
    "TruncatedError",
    "UnsupportedContentError",
    "VerificationError",
    "VersionNotFoundError",
]


class TensorizerError(Exception):
    """Base of all errors that this package defines.

    Attributes:
        source: The file, URL or object concerned, without credentials or signed query; ``None`` if there is none.
        offset: Absolute byte position in the source where the problem was seen; ``None`` if unknown.
    """

    source: Optional[str] = None
    offset: Optional[int] = None


class FieldRangeError(TensorizerError, ValueError, struct.error):
    """A name, number or shape that its field in the file cannot hold."""


class FormatError(TensorizerError, ValueError):
    """The bytes contradict the file format (docs/format.md)."""


class InvalidVersionError(FormatError):
    """The file has a data version that this release cannot read.

    Attributes:
        version: The data version found in the file.
    """

    version: int = -1


class TruncatedError(FormatError, OSError):
    """The source ended before the format said it would: a cut file, an incomplete download."""


class VerificationError(TensorizerError):
    """Base of the errors of verification: data differ from their digest or version, or have no digest."""


class HashMismatchError(VerificationError):
    """A stored digest disagrees with the data it belongs to."""


class StateMismatchError(VerificationError):
    """Tensors of a follower differ from the published version (docs/weight-sync.md). They were not written."""


class MissingHashError(VerificationError):
    """A tensor has data, but no digest in the file with which the data could be verified."""


class LoadError(TensorizerError, RuntimeError):
    """The tensors of a file do not fit the module that was to be filled. The module is unchanged.

    Attributes:
        report: What fits and what does not, a :class:`tensorizer.LoadReport`.
    """

    report: Any = None


class CryptographyError(TensorizerError):
    """Encryption or decryption failed: no key, a wrong key, altered ciphertext."""


class AuthenticationError(CryptographyError):
    """A file does not match its key or signature, or has neither although one is required."""


class StreamError(TensorizerError, OSError):
    """The source or destination could not answer, after all retries; ``errno`` is set if a system call failed."""

    status: Optional[int] = None
    """The HTTP status of the last answer; ``None`` where there was none."""


class StreamNotFoundError(StreamError, FileNotFoundError):
    """The source says that there is no such file, object or key."""


class StreamPermissionError(StreamError, PermissionError):
    """The file, or a folder on the way to it, may not be read or written."""


class StreamIsADirectoryError(StreamError, IsADirectoryError):
    """The path is a folder, but a file was expected."""


class StreamNotADirectoryError(StreamError, NotADirectoryError):
    """The path is a file, but a folder was expected."""


class StreamExistsError(StreamError, FileExistsError):
    """A new file or folder was to be created, but the path exists."""


class ConflictError(StreamError):
    """Another publisher writes to the same location (docs/weight-sync.md)."""


class VersionNotFoundError(TensorizerError, LookupError):
    """The location of a follower has no files of this version, or they were deleted (docs/weight-sync.md)."""


class DeviceError(TensorizerError, RuntimeError):
    """The accelerator or its driver failed."""


class UnsupportedContentError(TensorizerError, ValueError):
    """The format of the target cannot hold a tensor or a name; nothing was written."""


# --- errors of the operating system about files: our classes, which are also the builtin ones -------------------------

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
        kind = _CLASSES.get(type(error))
        if kind is None:
            raise
        if error.filename is None:
            raise kind(*error.args) from None
        raise kind(error.errno, error.strerror, error.filename, None, error.filename2) from None


# Codes of answers with status 403 that refuse the credentials, not the name.
_WRONG_KEYS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestTimeTooSkewed", "InvalidToken", "ExpiredToken")

#: Added to an error about a missing object if the store answered 403.
MAY_BE_FORBIDDEN = (
    "the store answered 403: the credentials may not read it, or it is not there and they may not list the bucket"
)


def is_denied(error: BaseException) -> bool:
    """Whether a store refused to say whether the name exists, as stores do for credentials that may not list."""
    status = getattr(error, "status", None)
    if status == 403:
        return not any(f"[{code}]" in str(error) for code in _WRONG_KEYS)
    return status is None and isinstance(error, PermissionError)  # errors of fsspec drivers


def is_absent(error: BaseException) -> bool:
    """Whether an error of opening a name in a store, which is only tried, counts as "there is none".

    A bucket that does not exist has no other names either: its error is told as it is.
    """
    if "NoSuchBucket" in str(error):
        return False
    return isinstance(error, FileNotFoundError) or is_denied(error)


def named(name: str, function: Any, *arguments: Any) -> Any:
    """function(*arguments), with the file's name in errors about its content."""
    try:
        return function(*arguments)
    except TensorizerError as error:
        if error.source is not None:
            raise
        told = type(error)(f"{name}: {error}")
        told.source, told.offset = name, error.offset
        raise told from None
