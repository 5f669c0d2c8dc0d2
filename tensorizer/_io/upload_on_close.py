"""What ``open_stream`` gives for writing where a destination takes whole files only: uploaded when it is closed."""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, Optional, cast

from tensorizer import _C  # first: it gives unfinished uploads up at exit, after what is registered here

logger = logging.getLogger("tensorizer.stream_io")

_open_files: weakref.WeakSet[Forgettable] = weakref.WeakSet()


class Forgettable:
    """What streams that store nothing before they are closed do when they are never closed.

    A stream that is forgotten is completed when it is collected, or when the interpreter ends: ``torch.save(x,
    open_stream(...))`` closes nothing. Nobody can tell then whether the content is whole, so this is said aloud.
    Nothing is stored while an exception is handled that came up since the stream was opened, and where one ended the
    program.
    """

    _target: str  # what messages call the destination
    _is_ended = True

    def _begin(self, target: str) -> None:
        self._target = target
        self._owner = os.getpid()
        self._handled_at_opening = id(sys.exc_info()[1])
        self._is_ended = False
        _open_files.add(self)

    def _end_life(self) -> None:
        """Call it where the stream ends: from then on a stream that is forgotten needs no warning."""
        self._is_ended = True
        _open_files.discard(self)

    @contextlib.contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """Gives the content up where the block fails: half of it must not be stored, even if the caller goes on."""
        try:
            yield
        except BaseException as error:
            if not self._is_ended:
                logger.warning("%s: nothing will be stored, as %s ended a write", self._target, type(error).__name__)
                self.discard()
            raise

    def discard(self) -> None:
        """Closes without storing anything."""
        raise NotImplementedError

    def _holds_content(self) -> bool:
        """Whether anybody wrote."""
        raise NotImplementedError

    def _complete(self, with_threads: bool) -> None:
        """Stores the content and closes the stream."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """Ends the copy that a fork made: file and upload are the parent's."""
        raise NotImplementedError

    def _finish_forgotten(self, error: Optional[BaseException], with_threads: bool) -> None:
        """Ends a stream that its caller did not end; a failure since its opening discards it."""
        if self._owner != os.getpid():
            self._let_go()
            return
        if error is not None and id(error) != self._handled_at_opening:
            logger.warning("%s: nothing was stored, as %s ended the writing", self._target, type(error).__name__)
            self.discard()
            return
        if not self._holds_content():
            self.discard()
            return
        try:
            self._complete(with_threads)
        except Exception as failure:
            logger.warning(
                "%s: nothing was stored: the stream was not closed, and its upload failed when it was collected (%s)",
                self._target,
                type(failure).__name__,
            )
            raise
        told = (
            f"{self._target}: the stream was not closed; what had been written was stored when it was collected. If "
            "its writer failed, the content is not whole: call close(), or use a with block"
        )
        logger.warning("%s", told)
        warnings.warn(told, ResourceWarning, stacklevel=2, source=self)

    def __del__(self) -> None:
        if not self._is_ended:
            self._finish_forgotten(sys.exc_info()[1], with_threads=True)


@atexit.register
def _finish_open_files() -> None:
    # What an interactive session remembers is an error of any time before.
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    for file in list(_open_files):
        with contextlib.suppress(Exception):  # it was logged; others are next
            file._finish_forgotten(error, with_threads=False)  # the interpreter starts no threads any more


class UploadOnClose(Forgettable):
    """A temporary file, readable, writable and seekable, with a real descriptor, uploaded by :meth:`close`.

    The file is made when something is first asked of it, and deleted in every case. One that was never written to is
    not uploaded. Leaving a ``with`` block closes the stream, or discards it where an exception ends the block. A write
    that fails discards the stream.

    A serializer takes a stream over that nothing was written to, and writes to a sink in place of the file. Closing the
    stream then completes what the sink holds, if a write call succeeded; nothing else can be done with it.

    Args:
        upload: Called once with the path of the complete file, and whether threads may be used.
        target: What messages call the destination.
        open_sink: Opens a sink for the same destination; ``None`` where there is no such thing.
    """

    def __init__(
        self,
        upload: Callable[[str, bool], None],
        target: str,
        open_sink: Optional[Callable[[], _C.MultipartSink]] = None,
    ) -> None:
        self._closed = False
        self._upload = upload
        self._open_sink = open_sink
        self._sink: Optional[_C.MultipartSink] = None
        self._file: Optional[BinaryIO] = None
        self._name: Optional[str] = None
        self._written = False
        self._is_whole = True
        self._begin(target)

    # -- the file ----------------------------------------------------------------------------------------------------

    mode = "rb+"

    @property
    def file(self) -> BinaryIO:
        """The temporary file."""
        if self._closed:
            raise ValueError(f"I/O operation on the closed stream for {self._target}")
        if self._sink is not None:
            raise io.UnsupportedOperation(
                f"a serializer uploads to {self._target} without a file: the stream can only be closed or discarded"
            )
        if self._file is None:
            descriptor, self._name = tempfile.mkstemp(prefix="tensorizer-")
            self._file = cast(BinaryIO, os.fdopen(descriptor, "wb+"))
        return self._file

    @property
    def name(self) -> str:
        """Path of the temporary file."""
        if self._name is None:
            _ = self.file
        assert self._name is not None
        return self._name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for {self._target}{', closed' if self._closed else ''}>"

    def __getattr__(self, name: str) -> Any:
        # Everything that is not about the end of its life is the file's own.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.file, name)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.file)

    def __enter__(self) -> UploadOnClose:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def write(self, data: Any, /) -> int:
        """Writes all of ``data``; returns its size in bytes."""
        with self._whole_or_nothing():
            nbytes = self.file.write(data)
        self._written = True
        return nbytes

    def writelines(self, lines: Iterable[Any], /) -> None:
        """Writes one after the other."""
        with self._whole_or_nothing():
            for line in lines:
                self.write(line)

    def truncate(self, size: Optional[int] = None, /) -> int:
        """Changes the size of the file; returns it."""
        with self._whole_or_nothing():
            size = self.file.truncate(size)
        self._written = True
        self._is_whole = self._is_whole or size == 0
        return size

    def flush(self) -> None:
        if self._file is not None:
            with self._whole_or_nothing():
                self.file.flush()

    def tell(self) -> int:
        return 0 if self._is_new() else self.file.tell()

    def readable(self) -> bool:
        return self._sink is None and (self._is_new() or self.file.readable())

    writable = seekable = readable  # as files of mode wb+ answer

    def _is_new(self) -> bool:
        """Whether no caller has asked for anything yet."""
        return self._file is None and self._sink is None and not self._closed

    def _has_content(self) -> bool:
        """Whether anybody wrote, also through the descriptor."""
        return self._file is not None and (self._written or os.fstat(self._file.fileno()).st_size > 0)

    # -- the sink ----------------------------------------------------------------------------------------------------

    def take_over(self) -> Optional[_C.MultipartSink]:
        """The sink that a serializer writes to; ``None`` where it has to write to the file."""
        if self._open_sink is None or self._closed or self._sink is not None:
            return None
        if self._has_content() or self.tell() != 0:
            return None
        self._sink = self._open_sink()
        self._remove_file()
        return self._sink

    def detach_sink(self) -> Optional[_C.MultipartSink]:
        """The sink of a new stream. It ends the stream: its owner finishes it."""
        sink = self.take_over()
        if sink is not None:
            self._sink = None
            self._end()
        return sink

    # -- the end -----------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` or :meth:`discard` was called."""
        return self._closed

    def close(self) -> None:
        """Uploads the content, once. A second call does nothing, nor does a call in a forked child.

        Raises:
            Exception: What the upload raises; the content is gone then.
        """
        if self._owner == os.getpid():
            self._complete(with_threads=True)
        else:
            self._let_go()

    def discard(self) -> None:
        """Closes without an upload."""
        if self._owner != os.getpid():
            self._let_go()
            return
        sink = self._end()
        try:
            if sink is not None:
                sink.abandon()
        finally:
            self._remove_file()

    def note_whole(self, is_whole: bool) -> None:
        """Told by a serializer that writes to the file: half of what it writes must not be stored."""
        self._is_whole = is_whole

    def _holds_content(self) -> bool:
        return self._has_content() if self._sink is None else self._sink.has_content

    def _complete(self, with_threads: bool) -> None:
        if not self._closed and not self._is_whole:
            logger.warning("%s: nothing was stored, as the last write call of its serializer failed", self._target)
            self.discard()
            return
        has_content = not self._closed and self._has_content()
        sink = self._end()
        try:
            if sink is not None:
                sink.finish()
            if self._file is not None:
                self._file.close()  # flushes
            if has_content and self._name is not None:
                self._upload(self._name, with_threads)
        finally:
            self._remove_file()

    def _end(self) -> Optional[_C.MultipartSink]:
        """Nothing can be done with the stream from here on. Returns the sink that is to be ended."""
        self._closed = True
        self._end_life()
        sink, self._sink = self._sink, None
        return sink

    def _let_go(self) -> None:
        self._end()
        self._file = None

    def _remove_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk has told already, or does not matter any more
                file.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(cast(str, self._name))


# --- serializers that are never closed ------------------------------------------------------------------------------


def tell_if_unclosed(owner: object, name: str) -> weakref.finalize[Any, Any]:
    """Warns a caller that forgets to close `owner`; its ``close()`` calls ``detach()`` of the result."""
    return weakref.finalize(owner, _warn_of_unclosed, name, os.getpid())


def _warn_of_unclosed(name: str, process: int) -> None:
    if os.getpid() != process:  # a copy of a fork; the upload is the parent's
        return
    text = f"{name}: nothing was stored, because the serializer was not closed; call close(), or use a with block"
    logger.warning("%s", text)
    warnings.warn(text, ResourceWarning, stacklevel=2)
