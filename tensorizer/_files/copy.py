"""Bytes of a file as they are, from one place to another."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, Optional

from tensorizer import _C
from tensorizer._io.sources import open_source
from tensorizer._io.uri import LOCAL_SCHEMES, path_of_file_uri, scheme_of
from tensorizer._io.whole_file import WholeFile
from tensorizer._load.authenticity import signature_place
from tensorizer._system.redaction import shown_location
from tensorizer.errors import StreamExistsError
from tensorizer.progress import ProgressArgument, progress_reporter

__all__ = ["check_target", "copy_file", "exists", "sha256_of_file", "signature_beside"]

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
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> int:
    """Copies a file between any two places; the target appears when it is complete.

    Args:
        source: A path or URI; ``"-"`` is standard input.
        target: A path or URI; ``"-"`` is standard output.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening URIs.

    Returns:
        Bytes copied.

    Raises:
        OSError: It cannot be read or written.
    """
    if source == "-":
        return _from_stream(sys.stdin.buffer, target, stream_options)
    if _has_no_length(source):
        with open(source, "rb") as stream:
            return _from_stream(stream, target, stream_options)
    opened = open_source(source, stream_options)
    try:
        total = opened.source.size() or 0  # the bar shows no share where nobody knows it
        with progress_reporter(progress, total, "copying") as report:
            if target == "-":
                return _to_stream(opened.source, sys.stdout.buffer, report)
            with WholeFile(target, stream_options) as file:
                file.copy_from(opened.source, report)
            return file.nbytes
    finally:
        opened.close()


def sha256_of_file(source: Any, stream_options: Optional[Mapping[str, Any]] = None) -> bytes:
    """The SHA-256 of all bytes of a file at a path or URI."""
    opened = open_source(source, stream_options)
    try:
        return _C.sha256_of(opened.source)
    finally:
        opened.close()


def signature_beside(source: Any, target: Any) -> Optional[tuple[Any, Any]]:
    """The detached signature of a local file, and where it goes with a copy of that; ``None`` where there is none."""
    scheme = scheme_of(source)
    if "-" in (source, target) or scheme not in (None, *LOCAL_SCHEMES):
        return None
    place = signature_place(source)
    there = os.path.isfile(place if scheme is None else path_of_file_uri(place))
    return (place, signature_place(target)) if there else None


def _has_no_length(source: Any) -> bool:
    """Whether it is a local path whose length the system does not say: a device, a file of /proc. A pipe is ``-``."""
    if isinstance(source, str) and "://" in source:
        return False
    try:
        found = os.stat(source)
    except (OSError, ValueError, TypeError):  # opening it says what is wrong
        return False
    return stat.S_ISCHR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_size == 0)


def _to_stream(source: _C.RangeSource, stream: BinaryIO, report: Any) -> int:
    buffer = memoryview(bytearray(_PIECE_NBYTES))
    offset = 0
    while got := source.read_up_to(offset, buffer):
        stream.write(buffer[:got])
        offset += got
        if report is not None:
            report(offset)
    stream.flush()
    return offset


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
