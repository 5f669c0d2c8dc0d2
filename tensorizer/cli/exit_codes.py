"""What the exit status says (docs/cli.md, "Exit status")."""

from __future__ import annotations

import errno

__all__ = [
    "DIFFERS",
    "INTERRUPTED",
    "INVALID",
    "KEY",
    "OK",
    "TARGET",
    "UNREACHABLE",
    "USAGE",
    "UsageError",
    "status_of",
]

OK = 0
DIFFERS = 1  # the answer is no: a digest that does not match, files that differ
USAGE = 2
UNREACHABLE = 3  # not found, no access, network, disk full
INVALID = 4  # not a valid file
KEY = 5  # missing, wrong or not wanted; authentication failed, a signature too
TARGET = 6  # it exists, or its format cannot hold the content
INTERRUPTED = 130


class UsageError(Exception):
    """Arguments that contradict each other, found after they were parsed."""


def status_of(error: BaseException) -> int:
    """The exit status for an error that ended a command; ``-1`` for one that nobody expected."""
    from tensorizer import errors

    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, errors.CryptographyError):
        return KEY
    if isinstance(error, errors.HashMismatchError):
        return DIFFERS
    if isinstance(error, (errors.StreamExistsError, errors.UnsupportedContentError, errors.FieldRangeError)):
        return TARGET
    if isinstance(error, errors.FormatError):
        return INVALID
    if isinstance(error, FileExistsError) or getattr(error, "errno", None) == errno.EEXIST:
        return TARGET
    if isinstance(error, (OSError, ImportError)):
        return UNREACHABLE
    if isinstance(error, (ValueError, TypeError)):
        return USAGE
    return -1
