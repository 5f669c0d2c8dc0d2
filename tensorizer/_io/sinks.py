"""From what callers pass as ``file_obj`` to the extension's sink, and what closes it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

from tensorizer import _C
from tensorizer._io.call_options import PLAIN, CallOptions
from tensorizer._io.new_files import place_of, say_without_mode, traits_of, without_links
from tensorizer._io.sources import Lent, check_binary, describe, is_path, nothing, open_stream, real_file
from tensorizer._io.upload_on_close import UploadOnClose
from tensorizer._io.uri import local_path
from tensorizer.errors import stream_errors

logger = logging.getLogger("tensorizer.serialization")

_MODE_WANTED = "wb+"


class OpenedSink(NamedTuple):
    """A sink ready to be written."""

    sink: _C.RangeSink
    start: int  # position of the container in it
    stream: Any = None  # the caller's object; None for paths
    close: Callable[[], None] = nothing  # sinks finish by themselves
    discard: Callable[[], None] = nothing  # in place of close() after a failure
    appears_on_close: bool = False  # no complete call shows before close()
    is_lent: bool = False  # the stream ends the sink, if its caller does not
    forget: Optional[Callable[[], None]] = None  # in place of close() if the stream is never closed
    note_whole: Optional[Callable[[bool], None]] = None  # told when a call begins to write, and when it has written all


def open_sink(file_obj: Any, fsync: bool, options: CallOptions = PLAIN) -> OpenedSink:
    """Opens what ``TensorSerializer`` was given. Nothing is written, and no existing file is touched.

    Raises:
        OSError: The target cannot be written.
        ValueError: A text file, one that is not readable and writable or not seekable, append mode, a read-only scheme.
        TypeError: Not something that can be written.
    """
    if isinstance(file_obj, Lent):
        opened = _open_object(file_obj.file)
        # An upload that failed is given up; any other object is the caller's affair.
        is_upload = isinstance(file_obj.file, UploadOnClose)
        return opened._replace(close=nothing, discard=opened.discard if is_upload else nothing)
    if not is_path(file_obj):
        return _open_object(file_obj)
    if isinstance(file_obj, int):
        return _open_descriptor(file_obj)
    path = local_path(file_obj)
    if path is not None:
        return _open_path(path, fsync)

    stream = open_stream(file_obj, "wb+", options)
    sink = stream.detach_sink() if isinstance(stream, UploadOnClose) else None
    if sink is not None:
        return OpenedSink(sink, 0, appears_on_close=True)
    opened = _open_object(stream)
    return opened._replace(appears_on_close=True, forget=opened.discard)


def _open_path(path: str, fsync: bool) -> OpenedSink:
    place = place_of(path)
    with stream_errors():
        if place is not None:
            target, access = place
            sink = _C.FileSink.replace(os.fsencode(target), fsync, access)
            if not sink.has_mode:
                say_without_mode(target)
            return OpenedSink(sink, 0)
        if os.path.isfile(path) or not os.path.exists(path):
            in_order = not traits_of(os.path.dirname(without_links(path))).any_order
            return OpenedSink(_C.FileSink.in_place(os.fsencode(path), fsync, in_order), 0)
        return _open_object(open(path, "rb+"))  # devices are written to, not replaced


def _open_descriptor(descriptor: int) -> OpenedSink:
    _refuse_append(descriptor)
    start = os.lseek(descriptor, 0, os.SEEK_CUR)
    return OpenedSink(_C.FileSink.overwrite(descriptor, f"<descriptor {descriptor}>"), start)


def _open_object(file_obj: Any) -> OpenedSink:
    _check_object(file_obj)
    close = discard = file_obj.close
    forget: Optional[Callable[[], None]] = None
    if isinstance(file_obj, UploadOnClose):
        discard, forget = file_obj.discard, nothing  # a stream that is forgotten says so
        sink = file_obj.take_over()
        if sink is not None:
            return OpenedSink(sink, 0, file_obj, close, discard, is_lent=True)
    descriptor = real_file(file_obj)
    if descriptor is None:
        return OpenedSink(_C.PyFileSink(file_obj, describe(file_obj)), file_obj.tell(), file_obj, close, discard)
    _refuse_append(descriptor)
    file_obj.flush()
    start = file_obj.tell()
    overwritten = _C.FileSink.overwrite(descriptor, describe(file_obj))
    note_whole = file_obj.note_whole if isinstance(file_obj, UploadOnClose) else None
    return OpenedSink(overwritten, start, file_obj, close, discard, forget=forget, note_whole=note_whole)


def _refuse_append(descriptor: int) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
        raise ValueError(
            f"expected a file opened with mode {_MODE_WANTED}, got append mode, whose writes all land at the end"
        )


def _check_object(file_obj: Any) -> None:
    mode = getattr(file_obj, "mode", "unknown")
    if not hasattr(file_obj, "write"):
        raise TypeError(f"expected a path or an open binary file, got {type(file_obj).__name__}")
    check_binary(file_obj, _MODE_WANTED)
    if isinstance(mode, str) and "a" in mode and not mode.startswith("unknown"):
        raise ValueError(f"expected a file opened with mode {_MODE_WANTED}, got append mode {mode!r}")
    for ability in ("readable", "writable"):
        check = getattr(file_obj, ability, None)
        if check is not None and not check():
            raise ValueError(
                f"expected a file opened with mode {_MODE_WANTED}, got mode {mode!r}, which is not {ability}"
            )
    seekable = getattr(file_obj, "seekable", None)
    if seekable is not None and not seekable():
        raise ValueError(f"expected a seekable file opened with mode {_MODE_WANTED}, got one that cannot seek")


# --- files that appear whole ----------------------------------------------------------------------------------------

_Progress = Optional[Callable[[int], object]]


class WholeFile(contextlib.AbstractContextManager["WholeFile"]):
    """A file of plain bytes, written from its beginning to its end, that appears under its name when the block ends.

    A local file is on the disk before it takes its name. After an exception what was there stays.

    Raises:
        OSError: The target cannot be written.
    """

    def __init__(self, target: Any, options: CallOptions = PLAIN) -> None:
        self._opened = open_sink(target, True, options)
        self._sink = self._opened.sink
        self._sink.reserve(0)  # opens what is written in place
        self._end = self._opened.start

    @property
    def nbytes(self) -> int:
        """What was written so far."""
        return self._end - self._opened.start

    def reserve(self, nbytes: int) -> None:
        """Makes room for what follows, where the target can; may raise OSError where it certainly cannot."""
        self._sink.reserve(self._end + nbytes)

    def append(self, content: bytes) -> None:
        self._sink.write_at(self._end, content)
        self._end += len(content)

    def append_memory(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Writes pieces of host memory, each an address and a number of bytes, by several threads."""
        placed = []
        for address, nbytes in pieces:
            if nbytes:
                placed.append((self._end, address, nbytes))
            self._end += nbytes
        self._sink.write_pieces(placed)

    def copy_from(self, source: _C.RangeSource) -> None:
        """The whole of a source, as the whole of a target that begins at its first byte."""
        self._end = self._sink.copy_from(source)

    def __exit__(self, exc_type: Optional[type[BaseException]], *_: object) -> None:
        if exc_type is not None:
            self._abandon()
            return
        try:
            self._sink.publish(self._end)
            self._sink.finish()
            if isinstance(self._opened.stream, UploadOnClose) and not (self.nbytes or self._opened.is_lent):
                self._opened.stream.write(b"")  # without a write it would upload nothing
        except BaseException:
            self._abandon()
            raise
        self._opened.close()

    def _abandon(self) -> None:
        with contextlib.suppress(Exception):  # the exception that is on its way tells more
            self._sink.abandon()
        with contextlib.suppress(Exception):
            self._opened.discard()
