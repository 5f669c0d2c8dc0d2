"""Bytes of a file as they are, from one place to another."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, Optional

from tensorizer import _C
from tensorizer._io.sources import open_source
from tensorizer._io.whole_file import WholeFile
from tensorizer._system.redaction import shown_location
from tensorizer.errors import HashMismatchError, StreamExistsError
from tensorizer.progress import ProgressArgument, progress_reporter

__all__ = ["check_target", "copy_file", "exists"]

_PIECE_NBYTES = 1 << 20


def exists(target: Any, stream_options: Optional[Mapping[str, Any]] = None) -> bool:
    """Whether there is something at a path or URI."""
    if not isinstance(target, str) or "://" not in target:
        return os.path.lexists(target)
    try:
        opened = open_source(target, stream_options)
    except FileNotFoundError:
        return False
    opened.close()
    return True


def check_target(target: Any, force: bool, stream_options: Optional[Mapping[str, Any]] = None) -> None:
    """Raises :class:`StreamExistsError` for a target that exists, unless `force`."""
    if not force and exists(target, stream_options):
        raise StreamExistsError(f"{shown_location(target)} exists (force replaces it)")


def copy_file(
    source: Any,
    target: Any,
    *,
    sha256: Optional[str] = None,
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> int:
    """Copies a file between any two places; the target appears when it is complete.

    Args:
        source: A path or URI; ``"-"`` is standard input.
        target: A path or URI; ``"-"`` is standard output.
        sha256: Hexadecimal SHA-256 that the source must have; a target that is a name appears only then.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening URIs.

    Returns:
        Bytes copied.

    Raises:
        HashMismatchError: The source has another digest.
        OSError: It cannot be read or written.
    """
    if source == "-":
        return _from_stream(sys.stdin.buffer, target, stream_options)
    opened = open_source(source, stream_options)
    try:
        total = opened.source.size() or 0
        if sha256 is not None:
            found = _C.sha256_of(opened.source).hex()
            if found != sha256.lower():
                raise HashMismatchError(f"{opened.source.name}: wanted SHA-256 {sha256.lower()}, found {found}")
        with progress_reporter(progress, total, "copying") as report:
            if target == "-":
                return _to_stream(opened.source, total, sys.stdout.buffer, report)
            with WholeFile(target, stream_options) as file:
                file.copy_from(opened.source, report)
            return file.nbytes
    finally:
        opened.close()


def _to_stream(source: _C.RangeSource, total: int, stream: BinaryIO, report: Any) -> int:
    for offset in range(0, total, _PIECE_NBYTES):
        stream.write(source.read(offset, min(_PIECE_NBYTES, total - offset)))
        if report is not None:
            report(min(offset + _PIECE_NBYTES, total))
    stream.flush()
    return total


def _from_stream(stream: BinaryIO, target: Any, stream_options: Optional[Mapping[str, Any]]) -> int:
    if target == "-":
        written = 0
        while piece := stream.read(_PIECE_NBYTES):
            written += sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return written
    with WholeFile(target, stream_options) as file:
        while piece := stream.read(_PIECE_NBYTES):
            file.append(piece)
    return file.nbytes
