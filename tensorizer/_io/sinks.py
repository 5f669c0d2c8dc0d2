"""From what callers pass as ``file_obj`` to the extension's sink, and who closes what."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import stat
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

from tensorizer import _C
from tensorizer._io.sources import Lent, describe, inside, is_path, real_file
from tensorizer._io.stream_options import check_stream_options
from tensorizer._io.upload_on_close import UploadOnClose
from tensorizer._io.uri import LOCAL_SCHEMES, expanded, path_of_file_uri, scheme_of
from tensorizer._system.os_errors import stream_errors

__all__ = ["OpenedSink", "Place", "open_sink", "place_of_new_file"]

_MODE_WANTED = "wb+"

# Of a repository in a cache of huggingface_hub: names below snapshots/ are links to files below blobs/.
_HUB_FOLDER = re.compile(r"(models|datasets|spaces)--")


def _nothing() -> None:
    """For sinks that finish by themselves."""


class OpenedSink(NamedTuple):
    """A sink ready to be written."""

    sink: _C.RangeSink
    start: int  # position of the container in it
    stream: Any = None  # the caller's object; None for paths
    close: Callable[[], None] = _nothing
    discard: Callable[[], None] = _nothing  # in place of close() after a failure
    appears_on_close: bool = False  # no complete call shows before close()
    is_lent: bool = False  # the stream ends the sink, if nobody else does


def open_sink(file_obj: Any, fsync: bool, stream_options: Optional[Mapping[str, Any]] = None) -> OpenedSink:
    """Opens what ``TensorSerializer`` was given. Nothing is written, and no existing file is touched.

    Args:
        file_obj: A path, URI, descriptor, or open binary file object.
        fsync: Sync files before they take their name.
        stream_options: Further keywords for opening a URI.

    Raises:
        OSError: The target cannot be written.
        ValueError: A text file, one that is not readable and writable or not seekable, append mode, a read-only scheme.
        TypeError: Not something that can be written, or unknown `stream_options`.
    """
    check_stream_options(stream_options)
    if isinstance(file_obj, Lent):
        opened = _open_object(file_obj.file)
        # An upload that failed is given up; any other object is the caller's affair.
        is_upload = isinstance(file_obj.file, UploadOnClose)
        return opened._replace(close=_nothing, discard=opened.discard if is_upload else _nothing)
    if not is_path(file_obj):
        return _open_object(file_obj)
    if isinstance(file_obj, int):
        return _open_descriptor(file_obj)
    scheme = scheme_of(file_obj)
    if scheme is None:
        return _open_path(expanded(os.fsdecode(file_obj)), fsync)
    if scheme in LOCAL_SCHEMES:
        return _open_path(path_of_file_uri(file_obj), fsync)
    from tensorizer import stream_io

    stream: Any = stream_io.open_stream(file_obj, "wb+", **(stream_options or {}))
    sink = stream.detach_sink() if isinstance(stream, UploadOnClose) else None
    return _open_object(stream) if sink is None else OpenedSink(sink, 0, appears_on_close=True)


class Place(NamedTuple):
    """Where a new local file goes."""

    path: str  # with links resolved
    mode: Optional[int]  # of the file that it replaces


def place_of_new_file(file_obj: Any) -> Optional[Place]:
    """The place of a target that is a local path which a new file can take; ``None`` for all other targets.

    Raises:
        OSError: The target cannot be written.
    """
    scheme = scheme_of(file_obj)
    if not is_path(file_obj) or isinstance(file_obj, int) or (scheme is not None and scheme not in LOCAL_SCHEMES):
        return None
    return _place_of(expanded(os.fsdecode(file_obj)) if scheme is None else path_of_file_uri(file_obj))


def _open_path(path: str, fsync: bool) -> OpenedSink:
    place = _place_of(path)
    with stream_errors():
        if place is not None:
            return OpenedSink(_C.FileSink.replace(os.fsencode(place.path), fsync, place.mode), 0)
        # Devices are written to, not replaced.
        return _open_object(open(path, "wb+" if stat.S_ISREG(os.stat(path).st_mode) else "rb+"))


@stream_errors()
def _place_of(path: str) -> Optional[Place]:
    if not path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    target = _without_links(path)
    folder = os.path.dirname(target)
    try:
        existing: Optional[os.stat_result] = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):  # for the latter makedirs says which name is in the way
        existing = None
        os.makedirs(folder, exist_ok=True)
    if path.endswith(os.sep) or (existing is not None and stat.S_ISDIR(existing.st_mode)):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if existing is None:
        return Place(target, None)
    if not stat.S_ISREG(existing.st_mode):
        return None
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return Place(target, stat.S_IMODE(existing.st_mode)) if _can_be_replaced(target, folder, existing) else None


def _without_links(path: str) -> str:
    """The path of the file itself; of a link to a blob of a hub cache, which other names share, that of the link."""
    target = os.path.realpath(path)
    folder, kind = os.path.split(os.path.dirname(target))
    if os.path.islink(path) and kind == "blobs" and _HUB_FOLDER.match(os.path.basename(folder)):
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return target


def _can_be_replaced(target: str, folder: str, existing: os.stat_result) -> bool:
    """Whether another file can take the name: not for files without one (``/proc/self/fd/N``) or in a locked folder."""
    try:
        named = os.path.samestat(os.stat(target), existing)
    except OSError:
        named = False
    return named and os.access(folder, os.W_OK | os.X_OK)


def _open_descriptor(descriptor: int) -> OpenedSink:
    _refuse_append(descriptor)
    start = os.lseek(descriptor, 0, os.SEEK_CUR)
    return OpenedSink(_C.FileSink.overwrite(descriptor, f"<descriptor {descriptor}>"), start)


def _open_object(file_obj: Any) -> OpenedSink:
    _check_object(file_obj)
    close = discard = file_obj.close
    if isinstance(file_obj, UploadOnClose):
        discard = file_obj.discard
        sink = file_obj.take_over()
        if sink is not None:
            return OpenedSink(sink, 0, file_obj, close, discard, is_lent=True)
    descriptor = real_file(file_obj)
    if descriptor is None:
        return OpenedSink(_C.PyFileSink(file_obj, describe(file_obj)), file_obj.tell(), file_obj, close, discard)
    _refuse_append(descriptor)
    file_obj.flush()
    start = file_obj.tell()
    return OpenedSink(_C.FileSink.overwrite(descriptor, describe(file_obj)), start, file_obj, close, discard)


def _refuse_append(descriptor: int) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
        raise ValueError(
            f"wanted a file opened with mode {_MODE_WANTED}, found append mode, whose writes all land at the end"
        )


def _check_object(file_obj: Any) -> None:
    mode = getattr(file_obj, "mode", "unknown")
    if isinstance(file_obj, io.TextIOBase):
        raise ValueError(f"wanted a binary file opened with mode {_MODE_WANTED}, found a text file (mode {mode!r})")
    if not hasattr(file_obj, "write"):
        raise TypeError(f"wanted a path or an open binary file, found {type(file_obj).__name__}")
    # The file of an upload is binary, and looking at it would make one.
    if not isinstance(file_obj, UploadOnClose) and isinstance(inside(file_obj), io.TextIOBase):
        raise TypeError(
            f"wanted a binary file opened with mode {_MODE_WANTED}, found text in {type(file_obj).__name__}"
        )
    if isinstance(mode, str) and "a" in mode and not mode.startswith("unknown"):
        raise ValueError(f"wanted a file opened with mode {_MODE_WANTED}, found append mode {mode!r}")
    for ability in ("readable", "writable"):
        check = getattr(file_obj, ability, None)
        if check is not None and not check():
            raise ValueError(
                f"wanted a file opened with mode {_MODE_WANTED}, found mode {mode!r}, which is not {ability}"
            )
    seekable = getattr(file_obj, "seekable", None)
    if seekable is not None and not seekable():
        raise ValueError(f"wanted a seekable file opened with mode {_MODE_WANTED}, found one that cannot seek")
