"""Every other file system, by way of the optional package ``fsspec``: ``gs://``, ``az://``, ``hf://``, ``memory://``.

Loads read ranges in parallel, through Python. Writers that go straight on stream to the file system's own upload; those
that jump back, as :class:`~tensorizer.TensorSerializer` does, write to a temporary file that is uploaded at the end.
Either way the file appears when it is whole: where the file system writes in place, under another name until then.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import secrets
import shutil
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, BinaryIO, Optional, cast

from tensorizer._io.upload_on_close import Forgettable, UploadOnClose
from tensorizer._io.uri import scheme_of
from tensorizer._io.window import WindowedReader
from tensorizer._system import config
from tensorizer._system.config import env_int
from tensorizer._system.redaction import shown_uri, without_secrets
from tensorizer.errors import StreamError, StreamNotFoundError, TruncatedError

if TYPE_CHECKING:
    from tensorizer import _C
    from tensorizer._io.node_cache import Cache, CachedFile

_CONNECTIONS = 8
_UNIT_NBYTES = 8 << 20
_GAP_NBYTES = 1 << 20
_MODES = ("rb", "wb", "wb+", "ab", "xb")


def open(
    uri: str,
    mode: str = "rb",
    *,
    buffer_size: Optional[int] = None,
    begin: Optional[int] = None,
    cache: Optional[Cache] = None,
) -> BinaryIO:
    """Opens a file of any file system that ``fsspec`` knows.

    Args:
        uri: ``scheme://...``; settings of the file system come from fsspec's own configuration.
        mode: ``rb`` to read; ``wb``, ``xb`` and ``ab`` (where the file system can append) to write straight on; ``wb+``
            for a seekable temporary file that is uploaded when it is closed.
        buffer_size: Bytes that small reads fetch ahead; ``None`` for the file system's own choice.
        begin: First position of a reader.
        cache: Where a reader keeps what it reads, if the file system tells versions.

    Raises:
        ValueError: fsspec or the scheme's driver is not installed, an unsupported scheme, or another mode.
        OSError: The file cannot be opened.
    """
    wanted = config.binary_mode(mode, _MODES, scheme_of(uri))
    if wanted == "rb" and scheme_of(uri) == "hf":
        from tensorizer._io import hub_cache

        file = hub_cache.open_file(uri, lambda: _open(uri, wanted, buffer_size, None, cache))
        file.seek(begin or 0)
        return file
    return _open(uri, wanted, buffer_size, begin, cache)


def _open(uri: str, wanted: str, buffer_size: Optional[int], begin: Optional[int], cache: Optional[Cache]) -> BinaryIO:
    fs, path = _file_system(uri, is_asked=cache is None or not cache.offline)
    if wanted == "rb":
        cached = None if cache is None else _open_cached(cache, fs, path, uri, buffer_size, begin or 0)
        return cast(BinaryIO, cached or FsspecReader(fs, path, uri, buffer_size, begin or 0))
    if wanted == "wb+":
        return cast(BinaryIO, UploadOnClose(lambda local, _threads: _store(local, fs, path, uri), shown_uri(uri)))
    if wanted == "xb":
        with _turn(fs):
            exists = fs.exists(path)
        if exists:
            raise FileExistsError(f"{shown_uri(uri)} exists")
    return cast(BinaryIO, FsspecWriter(fs, path, uri, append=wanted == "ab"))


def allows_threads(uri: str) -> bool:
    """Whether several threads may open files of a file system at a time. Raises ``ValueError`` as :func:`open`."""
    fs, _ = _file_system(uri)
    return _allows_threads(fs)


def remove(uri: str) -> None:
    """Removes a file. Raises ``OSError`` where the file system refuses or cannot, and as :func:`open`."""
    fs, path = _file_system(uri)
    for remove_it in (fs.rm_file, fs.rm):  # some file systems have the second one alone
        with contextlib.suppress(NotImplementedError), _calls(fs, shown_uri(uri)):
            remove_it(path)
            return
    raise StreamError(f"{shown_uri(uri)}: this file system removes no files")


def _open_cached(
    cache: Cache, fs: Any, path: str, uri: str, buffer_size: Optional[int], begin: int
) -> Optional[CachedFile]:
    """The file through the cache, as its one ``info()`` says; ``None`` where it is not to be cached."""
    from tensorizer._io.node_cache import CachedFile, CachedObject, version_of_info

    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    cached = CachedObject(cache, f"{protocol}://{path}")
    if cache.offline:
        return cached.open_offline()
    name = shown_uri(uri)
    with _calls(fs, name):
        info = fs.info(path)
    size = info.get("size")
    source = cached.over(_ranges(fs, path, name, size or 0), version_of_info(info), size, name)
    return None if source is None else CachedFile(source, cached, begin, _window_nbytes(buffer_size))


def _ranges(fs: Any, path: str, name: str, size: int) -> _C.RangeSource:
    """Reads of ranges, safe from many threads."""
    from tensorizer import _C

    def read(offset: int, nbytes: int) -> bytes:
        with _calls(fs, name):
            data: bytes = fs.cat_file(path, start=offset, end=offset + nbytes)
        return data

    return _C.PyRangeSource(
        read,
        size,
        name,
        concurrency=min(_CONNECTIONS, env_int("TENSORIZER_MAX_CONNECTIONS", 1) or _CONNECTIONS)
        if _allows_threads(fs)
        else 1,
        unit_nbytes=_UNIT_NBYTES,
        gap_nbytes=_GAP_NBYTES,
    )


def _window_nbytes(buffer_size: Optional[int]) -> int:
    return _UNIT_NBYTES if buffer_size is None else max(1, buffer_size)


_locks: weakref.WeakKeyDictionary[Any, AbstractContextManager[Any]] = weakref.WeakKeyDictionary()
_making_a_lock = threading.RLock()  # a collection within it may close a file


def _allows_threads(fs: Any) -> bool:
    """Whether several threads may call a file system at a time; many have one connection for everything, as FTP has.

    Those that work on an event loop of their own do, and a few that are known. A subclass may do anything.
    """
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.memory import MemoryFileSystem

    if isinstance(fs, DirFileSystem):
        return _allows_threads(fs.fs)
    kind = type(fs)
    known = kind in (LocalFileSystem, MemoryFileSystem) or kind.__module__.startswith("huggingface_hub.")
    return known or kind.async_impl is True  # of the class: caches answer for what lies behind them


def _turn(fs: Any) -> AbstractContextManager[Any]:
    """The right to call a file system: one thread after the other, unless it allows more."""
    with _making_a_lock:
        lock = _locks.get(fs)
    if lock is None:
        if _allows_threads(fs):
            return contextlib.nullcontext()
        with _making_a_lock:
            lock = _locks.setdefault(fs, threading.RLock())
    return lock


@contextlib.contextmanager
def _calls(fs: Any, name: str) -> Iterator[None]:
    """Calls of a file system, in turn. Drivers raise what their HTTP clients raise; callers know ``OSError``."""
    try:
        with _turn(fs):
            yield
    except FileNotFoundError:  # of which drivers show the path, with what stood in the query
        raise StreamNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from None
    except (OSError, ValueError, TypeError, NotImplementedError, ImportError):
        raise
    except Exception as error:
        message = without_secrets(str(error))
        cause = error if message == str(error) else None  # tracebacks, too
        raise StreamError(f"{name}: {type(error).__name__}: {message}") from cause


def _file_system(uri: str, is_asked: bool = True) -> tuple[Any, str]:
    """The file system and the path. Its class is enough if nothing is asked: an instance looks for credentials."""
    scheme = scheme_of(uri)
    try:
        import fsspec
    except ImportError:
        raise ValueError(
            f"{scheme}:// is no scheme that tensorizer speaks itself; install tensorizer[fsspec] for what fsspec speaks"
        ) from None
    try:
        if not is_asked and "::" not in uri:
            driver = fsspec.get_filesystem_class(scheme)
            return driver, driver._strip_protocol(uri)
        fs, path = fsspec.core.url_to_fs(uri)
    except ImportError as error:
        raise ValueError(f"URL scheme {scheme!r}: install the fsspec driver for it ({error})") from error
    except ValueError as error:
        if scheme in fsspec.available_protocols():
            raise
        raise ValueError(f"unsupported URL scheme {scheme!r}: install the fsspec driver for it ({error})") from error
    return fs, path


def _store(local: str, fs: Any, path: str, uri: str) -> None:
    """Uploads a local file."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    if isinstance(fs, AsyncFileSystem) or type(fs).put_file is not AbstractFileSystem.put_file:
        with _calls(fs, shown_uri(uri)):
            fs.put_file(local, path)
        return
    with builtins.open(local, "rb") as source, FsspecWriter(fs, path, uri, append=False) as target:
        shutil.copyfileobj(source, target, _UNIT_NBYTES)


def _can_rename(fs: Any) -> bool:
    """Whether files of the file system can take another name; object stores need not, their uploads end at once."""
    from fsspec.spec import AbstractFileSystem

    def has_own(name: str) -> bool:
        return getattr(type(fs), name) is not getattr(AbstractFileSystem, name)

    return has_own("mv") or (has_own("cp_file") and (has_own("rm_file") or has_own("_rm")))


def _rename(fs: Any, source: str, target: str) -> None:
    from fsspec.spec import AbstractFileSystem

    if type(fs).mv is AbstractFileSystem.mv:  # which takes brackets and asterisks in names for patterns
        fs.cp_file(source, target)
        fs.rm_file(source)
        return
    try:
        fs.mv(source, target)
    except Exception:
        if not fs.exists(target):
            raise
        fs.rm_file(target)  # some servers replace nothing
        fs.mv(source, target)


class FsspecReader(WindowedReader):
    """A file of an fsspec file system, for reading. Loads go around it, by ranges and in parallel."""

    def __init__(self, fs: Any, path: str, uri: str, buffer_size: Optional[int], begin: int) -> None:
        super().__init__()
        self._fs, self._path, self.name = fs, path, shown_uri(uri)
        self._name = self.name
        self._source: Optional[_C.RangeSource] = None
        self._size: Optional[int] = None
        options = {} if buffer_size is None else {"block_size": max(1, buffer_size)}
        with contextlib.ExitStack() as after_errors:
            after_errors.callback(super().close)  # nothing is open then that the interpreter would have to close
            with _calls(self._fs, self.name):
                self._file = fs.open(path, "rb", **options)
            after_errors.callback(self._close_file)
            with contextlib.suppress(TypeError, io.UnsupportedOperation), _turn(fs):  # drivers that know no size
                self._size = int(self._file.seek(0, io.SEEK_END))
            with _turn(fs):
                self._file.seek(begin)
            after_errors.pop_all()
        self._position, self._buffer_nbytes = begin, _window_nbytes(buffer_size)

    def _tensorizer_source(self) -> _C.RangeSource:
        from tensorizer import _C

        if self._source is None:
            with _calls(self._fs, self.name):
                size = self._fs.size(self._path)
            if size is None:  # read to its end, in order
                self._source = _C.PyFileSource(self._file, self.name)
            else:
                self._source = _ranges(self._fs, self._path, self.name, int(size))
        return self._source

    def _limit(self) -> Optional[int]:
        return self._size

    def _knows_size(self) -> bool:
        return self._size is not None

    def _fetch_some(self, offset: int, into: memoryview) -> int:
        with _calls(self._fs, self.name):
            self._file.seek(offset)
            data = self._file.read(len(into))
        into[: len(data)] = data
        return len(data)

    def _fetch_all(self, offset: int, into: memoryview) -> None:
        while len(into) > 0:
            got = self._fetch_some(offset, into)
            if got == 0:
                raise TruncatedError(f"{self.name}: expected {self._size} bytes, got {offset}")
            offset, into = offset + got, into[got:]

    def _close_file(self) -> None:
        with _turn(self._fs):
            self._file.close()

    def close(self) -> None:
        if not self.closed:
            self._close_file()
            self._window = memoryview(b"")
        super().close()


class FsspecWriter(Forgettable, io.BufferedIOBase):
    """A file of an fsspec file system, written straight on.

    Blocks go to the file system's own upload, which ends with :meth:`close`. Where it has none and writes in place,
    they go to a file beside the target, which takes its name then; so what was there stays until the new one is whole.
    Leaving a ``with`` block by an exception, a write that fails, and :meth:`discard` give the file up.
    """

    def __init__(self, fs: Any, path: str, uri: str, append: bool) -> None:
        super().__init__()
        self._fs, self._path, self._append, self.name = fs, path, append, shown_uri(uri)
        self._mode = "ab" if append else "wb"
        self._beside: Optional[str] = None  # the name until close()
        self._written = False
        try:
            with _calls(self._fs, self.name):
                self._file = self._open_beside() if _can_rename(fs) else fs.open(path, self._mode)
        except BaseException:
            super().close()  # nothing is open that the interpreter would have to close
            raise
        self._begin(self.name)

    def _open_beside(self) -> Any:
        beside = f"{self._path}.{secrets.token_hex(4)}.part"
        with contextlib.suppress(Exception):
            self._fs.makedirs(self._fs._parent(self._path), exist_ok=True)
        file = self._fs.open(beside, "wb")
        if _is_upload(file):
            _abandon(file)
            return self._fs.open(self._path, self._mode)
        self._beside = beside
        if self._append and self._fs.exists(self._path):
            with self._fs.open(self._path, "rb") as before:
                shutil.copyfileobj(before, file, _UNIT_NBYTES)
        return file

    def __repr__(self) -> str:
        return f"<FsspecWriter {self.name}>"

    def __exit__(self, kind: Optional[type[BaseException]], *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def write(self, data: Any, /) -> int:
        """Writes all of ``data``; returns its size in bytes."""
        if self.closed:
            raise ValueError(f"write to closed file {self.name}")
        with self._whole_or_nothing(), _calls(self._fs, self.name):
            with memoryview(data) as view:
                nbytes = view.nbytes
            self._file.write(data)
        self._written = True
        return nbytes

    def writelines(self, lines: Iterable[Any], /) -> None:
        """Writes one after the other."""
        with self._whole_or_nothing():
            for line in lines:
                self.write(line)

    def tell(self) -> int:
        return int(self._file.tell())

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Does nothing: file systems take blocks of their own size, and the rest at the end."""

    def close(self) -> None:
        """Completes the file. A second call does nothing."""
        if self.closed:
            return
        try:
            with _calls(self._fs, self.name):
                self._file.close()
                if self._beside is not None:
                    _rename(self._fs, self._beside, self._path)
        except BaseException:
            self.discard()
            raise
        self._end_life()
        super().close()

    def discard(self) -> None:
        """Closes without completing the file."""
        if self.closed:
            return
        self._end_life()
        with _turn(self._fs):
            _abandon(self._file)
            unfinished = self._path if self._beside is None and not self._append else self._beside
            if unfinished is not None and not _is_upload(self._file):
                with contextlib.suppress(Exception):
                    self._fs.rm_file(unfinished)
        super().close()

    def _holds_content(self) -> bool:
        return self._written

    def _complete(self, with_threads: bool) -> None:
        self.close()

    def _let_go(self) -> None:
        self._end_life()
        if _is_upload(self._file):
            self._file.closed = True
        super().close()


def _is_upload(file: Any) -> bool:
    """Whether what is written becomes a file at the end only."""
    from fsspec.spec import AbstractBufferedFile

    return isinstance(file, AbstractBufferedFile)


def _abandon(file: Any) -> None:
    """Lets go of a file without completing its upload."""
    with contextlib.suppress(Exception):
        file.discard()
    if _is_upload(file):
        file.closed = True  # what close() looks at before it completes the upload
    else:
        with contextlib.suppress(Exception):
            file.close()
