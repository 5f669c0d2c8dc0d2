"""Every other file system, by way of the optional package ``fsspec``: ``gs://``, ``az://``, ``hf://``, ``memory://``.

Loads read ranges in parallel, through Python. Writers that go straight on stream to the file system's own upload; those
that jump back, as :class:`~tensorizer.TensorSerializer` does, write to a temporary file that is uploaded at the end.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Optional, cast

from .._config import env_int
from .._upload_on_close import UploadOnClose
from ..errors import StreamError

if TYPE_CHECKING:
    from .. import _C

__all__ = ["FsspecReader", "FsspecWriter", "open"]

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
    end: Optional[int] = None,
) -> BinaryIO:
    """Opens a file of any file system that ``fsspec`` knows.

    Args:
        uri: ``scheme://...``; settings of the file system come from fsspec's own configuration.
        mode: ``rb`` to read; ``wb``, ``xb`` and ``ab`` (where the file system can append) to write straight on; ``wb+``
            for a seekable temporary file that is uploaded when it is closed.
        buffer_size: Bytes that small reads fetch ahead; ``None`` for the file system's own choice.
        begin: First position of a reader.
        end: Ignored: a reader ends where the file ends.

    Raises:
        ValueError: fsspec or the scheme's driver is not installed, nobody knows the scheme, or another mode.
        OSError: The file cannot be opened.
    """
    wanted = "".join(sorted(mode, key="rwaxb+".find))
    if wanted not in _MODES:
        raise ValueError(f"mode for {_scheme(uri)}:// must be one of {', '.join(_MODES)}, found {mode!r}")
    fs, path = _file_system(uri)
    if wanted == "rb":
        return cast(BinaryIO, FsspecReader(fs, path, uri, buffer_size, begin or 0))
    if wanted == "wb+":
        return cast(BinaryIO, UploadOnClose(lambda local, _threads: fs.put_file(local, path), _shown(uri)))
    if wanted == "xb" and fs.exists(path):
        raise FileExistsError(f"{_shown(uri)} exists")
    return cast(BinaryIO, FsspecWriter(fs, path, uri, append=wanted == "ab"))


def _scheme(uri: str) -> str:
    return uri.partition("://")[0]


def _shown(uri: str) -> str:
    """The URI without credentials and query."""
    scheme, _, rest = uri.partition("://")
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2] if scheme not in ('az', 'abfs', 'abfss') else host}{slash}{path}"


@contextlib.contextmanager
def _network_errors(name: str) -> Iterator[None]:
    """Drivers raise what their HTTP clients raise; callers know ``OSError``."""
    try:
        yield
    except (OSError, ValueError, TypeError, NotImplementedError, ImportError):
        raise
    except Exception as error:
        message = re.sub(r"\?[^\s\"']*", "", str(error))  # signed URLs keep their secrets
        raise StreamError(f"{name}: {type(error).__name__}: {message}") from error


def _file_system(uri: str) -> tuple[Any, str]:
    scheme = _scheme(uri)
    try:
        import fsspec
    except ImportError:
        raise ValueError(
            f"{scheme}:// is no scheme that tensorizer speaks itself; install tensorizer[fsspec] for what fsspec speaks"
        ) from None
    try:
        fs, path = fsspec.core.url_to_fs(uri)
    except ImportError as error:
        raise ValueError(f"{scheme}:// needs a driver of fsspec that is not installed: {error}") from error
    except ValueError as error:
        if scheme.lower() in fsspec.available_protocols():
            raise
        raise ValueError(
            f"nobody knows the scheme {scheme}://: neither tensorizer nor fsspec (extra tensorizer[fsspec]): {error}"
        ) from error
    return fs, path


class FsspecReader(io.BufferedIOBase):
    """A file of an fsspec file system, for reading. Loads go around it, by ranges and in parallel."""

    def __init__(self, fs: Any, path: str, uri: str, buffer_size: Optional[int], begin: int) -> None:
        super().__init__()
        self._fs, self._path, self.name = fs, path, _shown(uri)
        options = {} if buffer_size is None else {"block_size": max(1, buffer_size)}
        with _network_errors(self.name):
            self._file = fs.open(path, "rb", **options)
        self._source: Optional[_C.RangeSource] = None
        try:
            self._file.seek(begin)
        except BaseException:
            self._file.close()
            raise

    def _tensorizer_source(self) -> _C.RangeSource:
        """Reads of ranges, safe from many threads."""
        from .. import _C

        if self._source is None:
            with _network_errors(self.name):
                size = int(self._fs.size(self._path))
            self._source = _C.PyRangeSource(
                self._read_range,
                size,
                self.name,
                concurrency=min(_CONNECTIONS, env_int("TENSORIZER_MAX_CONNECTIONS", 1) or _CONNECTIONS),
                unit_nbytes=_UNIT_NBYTES,
                gap_nbytes=_GAP_NBYTES,
            )
        return self._source

    def _read_range(self, offset: int, nbytes: int) -> bytes:
        with _network_errors(self.name):
            data: bytes = self._fs.cat_file(self._path, start=offset, end=offset + nbytes)
        return data

    def __repr__(self) -> str:
        return f"<FsspecReader {self.name}>"

    def read(self, size: Optional[int] = -1, /) -> bytes:
        """Up to ``size`` bytes; all the rest for ``None`` or a negative number."""
        with _network_errors(self.name):
            data: bytes = self._file.read(-1 if size is None else size)
        return data

    def read1(self, size: int = -1, /) -> bytes:
        """Same as :meth:`read`."""
        return self.read(size)

    def readinto(self, buffer: Any, /) -> int:
        """Fills ``buffer``; returns the bytes, fewer than its size only at the end."""
        with memoryview(buffer) as whole, whole.cast("B") as view:
            data = self.read(len(view))
            view[: len(data)] = data
        return len(data)

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves; returns the new position."""
        return int(self._file.seek(position, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class FsspecWriter(io.BufferedIOBase):
    """A file of an fsspec file system, written straight on.

    Leaving a ``with`` block by an exception gives the upload up, as far as the file system can, and completes nothing.
    """

    def __init__(self, fs: Any, path: str, uri: str, append: bool) -> None:
        super().__init__()
        self._fs, self._path, self._append, self.name = fs, path, append, _shown(uri)
        with _network_errors(self.name):
            self._file = fs.open(path, "ab" if append else "wb")

    def __repr__(self) -> str:
        return f"<FsspecWriter {self.name}>"

    def write(self, data: Any, /) -> int:
        """Writes all of ``data``; returns its size in bytes."""
        with memoryview(data) as view:
            nbytes = view.nbytes
        self._file.write(data)
        return nbytes

    def tell(self) -> int:
        return int(self._file.tell())

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Does nothing: file systems take blocks of their own size, and the rest at the end."""

    def close(self) -> None:
        if not self.closed:
            try:
                self._file.close()
            finally:
                super().close()

    def discard(self) -> None:
        """Closes without completing the upload; where the file system writes in place, the file is removed."""
        from fsspec.spec import AbstractBufferedFile

        if not self.closed:
            with contextlib.suppress(Exception):
                self._file.discard()
            if isinstance(self._file, AbstractBufferedFile):
                self._file.closed = True  # what close() looks at before it completes the upload
            elif not self._append:
                with contextlib.suppress(Exception):
                    self._file.close()
                    self._fs.rm_file(self._path)
        super().close()

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()
