"""The one way to open what callers pass as ``file_obj``: the extension's source of it, and what closes it.

:data:`OPENERS` is the table from the scheme of a URI to the function that opens it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import stat
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Optional, Protocol, TypeVar, Union, cast

from tensorizer import _C
from tensorizer._io.call_options import PLAIN, CallOptions
from tensorizer._io.upload_on_close import UploadOnClose
from tensorizer._io.uri import check_is_path, expanded, local_path, path_of_file_uri, scheme_of
from tensorizer._system import config
from tensorizer._system.config import env_text
from tensorizer._system.redaction import shown_uri
from tensorizer.errors import AuthenticationError, FormatError, StreamError, stream_errors

if TYPE_CHECKING:
    from tensorizer._io.node_cache import Cache

# --- what callers may pass as ``file_obj``, for type checkers and readers -------------------------------------------


class _PositionedFile(Protocol):
    def seek(self, offset: int, whence: int = ..., /) -> Any: ...

    def tell(self) -> int: ...

    def close(self) -> object: ...


class ReadableFile(_PositionedFile, Protocol):
    """A binary file object that can be read and positioned: what ``open(path, "rb")`` returns, ``io.BytesIO``."""

    def read(self, size: int = ..., /) -> Optional[bytes]: ...


class ReadintoFile(_PositionedFile, Protocol):
    """One that reads into memory it is given, as :class:`io.RawIOBase` does; faster."""

    def readinto(self, buffer: Any, /) -> Optional[int]: ...


class WritableFile(ReadableFile, Protocol):
    """A binary file object that can be written and read back: what ``open(path, "wb+")`` returns, ``io.BytesIO``."""

    def write(self, data: Any, /) -> Optional[int]: ...


#: A local path or a URI as ``str``; a local path as ``bytes`` or ``PathLike``; a descriptor.
PathArgument = Union[str, bytes, os.PathLike[str], os.PathLike[bytes], int]
#: What can be read.
SourceArgument = Union[PathArgument, ReadableFile, ReadintoFile]
#: What can be written.
TargetArgument = Union[PathArgument, WritableFile]


# --- opening it -------------------------------------------------------------------------------------------------------


class Lent(NamedTuple):
    """An open file object that stays open, and the caller's, when what reads or writes it is closed."""

    file: Any


def lent(file_obj: Any) -> Any:
    """An object that is open already, as :class:`Lent`; what names a file, as it is."""
    return file_obj if is_path(file_obj) else Lent(file_obj)


Read = TypeVar("Read")


class OpenedSource(NamedTuple):
    """A source ready to be read."""

    source: _C.RangeSource
    start: int  # position of the container in it
    stream: Any  # the caller's object, or the stream opened for a URI; None for local paths
    close: Callable[[], None]
    location: Any = None  # the path or URI it was opened by, and the options for that
    options: CallOptions = PLAIN

    def __repr__(self) -> str:
        """Without the options, which may hold passwords."""
        return f"OpenedSource({self.name!r})"

    @property
    def name(self) -> str:
        """For messages."""
        return self.source.name

    @property
    def locations(self) -> list[Any]:
        """The path or URI of what is open; ``None`` of an open object."""
        return [self.location]


def nothing() -> None:
    """Closes what another object owns."""


def is_path(file_obj: object) -> bool:
    """Whether the argument names something to open, as opposed to being an open object."""
    return isinstance(file_obj, (str, bytes, os.PathLike)) or (
        isinstance(file_obj, int) and not isinstance(file_obj, bool)
    )


def is_one_file(file_obj: Any) -> bool:
    """Whether it can only be one file: an open one, or a local path that is no folder and not called as an index."""
    if not is_path(file_obj) or isinstance(file_obj, int):
        return True
    path = local_path(file_obj)
    return path is not None and not path.endswith(".json") and not os.path.isdir(path)


#: What :func:`begins_as_tensors` needs of a file.
HEAD_NBYTES = 9


def begins_as_tensors(head: bytes) -> bool:
    """Whether the first :data:`HEAD_NBYTES` of a file are those of a ``.tensors`` or ``.safetensors`` file."""
    # JSON may have a brace as its ninth byte, too; no header of safetensors is longer than 100 MB.
    header_nbytes = int.from_bytes(head[:8], "little")
    return head.startswith(b"|TZR|") or (head[8:9] == b"{" and header_nbytes <= 100_000_000)


def read_checked(
    location: Any,
    options: CallOptions,
    check: Callable[[bytes], Read],
    most_nbytes: Optional[int] = None,
) -> Read:
    """What `check` makes of the bytes of a small file. If it refuses those of a copy in a cache, the copy is removed.

    Raises:
        FormatError: The file has more than `most_nbytes`, or does not say how many. Besides, what `check` raises.
        OSError: It cannot be read; :class:`StreamNotFoundError` where there is none.
    """
    with contextlib.closing(open_source(location, options)) as opened:
        nbytes = opened.source.size()
        if most_nbytes is not None and (nbytes is None or nbytes > most_nbytes):
            raise FormatError(f"{opened.name}: expected at most {most_nbytes} bytes, got {nbytes}")
        try:
            return check(_read_whole(opened.source))
        except (FormatError, AuthenticationError) as error:
            if opened.source.drop_copy():
                error.args = (f"{error}; the cached copy was removed; try again",)
            raise


def json_content(name: str, text: bytes, kind: type = dict) -> Any:
    """What a small file of JSON holds, a `kind`.

    Raises:
        ValueError: It is not JSON, or holds another kind.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        from tensorizer._format.foreign import tell_foreign  # for errors only

        told = ValueError(f"{name} is not JSON: {error}")
        tell_foreign(told, text, "JSON")
        raise told from None
    if not isinstance(content, kind):
        raise ValueError(f"{name}: expected a {kind.__name__} as its content, got a {type(content).__name__}")
    return content


def _read_whole(source: _C.RangeSource) -> bytes:
    """All bytes, of a known size or not."""
    nbytes = source.size()
    if nbytes is not None:
        return source.read(0, nbytes)
    content, piece = bytearray(), memoryview(bytearray(1 << 20))
    while got := source.read_up_to(len(content), piece):
        content += piece[:got]
    return bytes(content)


def open_source(file_obj: Any, options: CallOptions = PLAIN) -> OpenedSource:
    """Opens what ``TensorDeserializer`` was given.

    Raises:
        OSError: The file cannot be opened, or not positioned (``io.UnsupportedOperation``).
        ValueError: A text file, or one opened without reading.
        TypeError: Not something that can be read, or text in a wrapper.
    """
    if isinstance(file_obj, Lent):
        _check_object(file_obj.file)
        opened = _source_of(file_obj.file)
        # The source that a stream of ours offers is the stream's own.
        offered = hasattr(file_obj.file, "_tensorizer_source")
        return opened._replace(close=nothing if offered else opened.source.close)
    if not is_path(file_obj):
        return _open_object(file_obj)
    scheme = scheme_of(file_obj)
    if scheme is not None:
        stream = OPENERS.get(scheme, _open_other)(file_obj, "rb", options)
        source_of = getattr(stream, "_tensorizer_source", None)  # of streams of ours, which need no check
        if source_of is not None and options.stream.begin is None:
            opened = OpenedSource(source_of(), 0, stream, stream.close)
        else:
            opened = _open_object(stream)

        def close() -> None:
            opened.close()
            opened.source.close()  # no other reader has it: its descriptors need not wait for this object

        return opened._replace(close=close, location=file_obj, options=options)
    try:
        if isinstance(file_obj, int):
            return _open_descriptor(file_obj)
        path = local_path(file_obj)
        assert path is not None  # as it has no scheme
        return _open_path(path)._replace(location=file_obj)
    except OSError:
        with stream_errors():  # in here, so that only a call that fails enters it (benchmarks.walks)
            raise


def _open_descriptor(descriptor: int) -> OpenedSource:
    source = _C.FileSource(descriptor, f"<descriptor {descriptor}>")
    return OpenedSource(source, os.lseek(descriptor, 0, os.SEEK_CUR), None, source.close)


def _open_path(path: str) -> OpenedSource:
    if stat.S_ISFIFO(os.stat(path).st_mode):  # opening it would wait for a writer, to no purpose
        raise io.UnsupportedOperation(f"{path}: expected a seekable file, got a named pipe")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return _open_object(open(path, "rb"))  # directories raise here; devices are read like objects
        source = _C.FileSource(descriptor, shown_path(path))
    finally:
        os.close(descriptor)
    return OpenedSource(source, 0, None, source.close)


def files_at_once() -> int:
    """How many files one call keeps open at most: a quarter of what the process may, since others need some, too."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 256 if limit == resource.RLIM_INFINITY else max(4, min(256, limit // 4))


def close_between_reads(opened: OpenedSource) -> None:
    """Gives the descriptor of a local file back: each read opens it again, and raises if another one has its name."""
    path = local_path(opened.location)
    if path is not None and isinstance(opened.source, _C.FileSource):
        opened.source.close_between_reads(os.fsencode(os.path.abspath(path)))


def inside(file_obj: Any) -> Any:
    """The file in one of the wrappers that are known; else the object itself."""
    if isinstance(file_obj, (tempfile._TemporaryFileWrapper, tempfile.SpooledTemporaryFile, UploadOnClose)):
        return getattr(file_obj, "file", None) or getattr(file_obj, "_file", None)
    return file_obj


def real_file(file_obj: Any) -> Optional[int]:
    """The descriptor of a plain file object over a regular file, else ``None``.

    Only Python's own file classes are trusted, and subclasses that leave their methods alone: other objects may offer
    the descriptor of something they transform.
    """
    file_obj = inside(file_obj)
    raw = getattr(file_obj, "raw", file_obj)
    if not (_is_plain(file_obj, _FILE_CLASSES) and _is_plain(raw, (io.FileIO,))):
        return None
    descriptor = raw.fileno()
    return descriptor if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


_FILE_CLASSES = (io.FileIO, io.BufferedReader, io.BufferedRandom, io.BufferedWriter)
_DATA_METHODS = ("read", "read1", "readall", "readinto", "write", "seek", "tell")


def _is_plain(file_obj: Any, classes: tuple[type, ...]) -> bool:
    """Whether the object is one of `classes`, or of a subclass that moves bytes as they do."""
    for base in classes:
        if isinstance(file_obj, base):
            kind = type(file_obj)
            return all(getattr(kind, name, None) is getattr(base, name, None) for name in _DATA_METHODS)
    return False


def describe(file_obj: Any) -> str:
    """A name for messages, without credentials."""
    name = getattr(file_obj, "name", None)
    if isinstance(name, (str, bytes)):
        return shown_path(name)
    return f"<{type(file_obj).__name__}>"


def shown_path(path: Union[str, bytes]) -> str:
    """A path for messages: bytes that are no UTF-8 appear escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _open_object(file_obj: Any) -> OpenedSource:
    if not (hasattr(file_obj, "read") or hasattr(file_obj, "readinto")):
        raise TypeError(f"expected a path or an open binary file, got {type(file_obj).__name__}")
    try:
        _check_object(file_obj)
        return _source_of(file_obj)
    except BaseException:
        with contextlib.suppress(Exception):  # what came first says more
            file_obj.close()  # a failed constructor closes the file, from its opening on
        raise


def _source_of(file_obj: Any) -> OpenedSource:
    offered = getattr(file_obj, "_tensorizer_source", None)
    start = file_obj.tell()
    if offered is not None:
        return OpenedSource(offered(), start, file_obj, file_obj.close)
    descriptor = real_file(file_obj)
    if descriptor is not None:
        if getattr(file_obj, "writable", lambda: False)():
            file_obj.flush()
        source = _C.FileSource(descriptor, describe(file_obj))
        return OpenedSource(source, start, file_obj, functools.partial(_close_both, source, file_obj))
    return OpenedSource(_C.PyFileSource(file_obj, describe(file_obj)), start, file_obj, file_obj.close)


def _close_both(source: _C.RangeSource, file_obj: Any) -> None:
    source.close()
    file_obj.close()


def _check_object(file_obj: Any) -> None:
    if not (hasattr(file_obj, "read") or hasattr(file_obj, "readinto")):
        raise TypeError(f"expected a path or an open binary file, got {type(file_obj).__name__}")
    check_binary(file_obj, "rb")
    readable = getattr(file_obj, "readable", None)
    if readable is not None and not readable():
        raise ValueError(
            f"expected a readable file opened with mode rb, got mode {getattr(file_obj, 'mode', 'unknown')!r}"
        )
    seekable = getattr(file_obj, "seekable", None)
    if seekable is not None and not seekable() and not _seeks(file_obj):
        raise io.UnsupportedOperation(f"{describe(file_obj)}: expected a seekable file, got one that cannot seek")


def check_binary(file_obj: Any, mode: str) -> None:
    """Refuses files of text; messages say which mode was wanted."""
    if isinstance(file_obj, io.TextIOBase):
        found = getattr(file_obj, "mode", "unknown")
        raise ValueError(f"expected a binary file opened with mode {mode}, got a text file (mode {found!r})")
    # The file of an upload is binary, and looking at it would make one.
    if not isinstance(file_obj, UploadOnClose) and isinstance(inside(file_obj), io.TextIOBase):
        raise TypeError(f"expected a binary file opened with mode {mode}, got text in {type(file_obj).__name__}")


def _seeks(file_obj: Any) -> bool:
    """Whether an object that says it cannot seek does: io.RawIOBase says so for every subclass that does not object."""
    try:
        file_obj.seek(file_obj.tell())
    except (OSError, ValueError, AttributeError, NotImplementedError):
        return False
    return True


def reopener(opened: Any) -> Optional[Callable[[], OpenedSource]]:
    """What opens the same version of a file again, which may have been closed; it raises ``OSError`` for another one.

    ``None`` for what cannot be opened again: the caller's objects, descriptors, the shards of a model.
    """
    if not isinstance(opened, OpenedSource) or opened.location is None:
        return None
    location, options = opened.location, opened.options
    try:
        version = version_of(opened)
    except OSError:  # it is gone already; a process that has it open can still read it
        return None

    def reopen() -> OpenedSource:
        found = open_source(location, options)
        if version_of(found) != version:
            found.close()
            raise StreamError(f"{found.name}: it changed since it was loaded: load it again")
        return found

    return reopen


def version_of(opened: OpenedSource) -> tuple[Any, ...]:
    """What differs once another file has taken the place of an open one, as far as the file system or store tells."""
    if opened.location is None:
        return ()
    path = local_path(opened.location)
    if path is not None:
        found = os.stat(path)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    headers = getattr(opened.stream, "response_headers", None) or {}
    return opened.source.size(), headers.get("etag"), headers.get("last-modified")


# --- from the scheme of a URI to what opens it; packages are imported when a URI needs them ---------------------------

_S3_MODES = ("rb", "wb", "wb+")


def open_stream(location: Any, mode: str, options: CallOptions) -> Any:
    """A binary stream, as :func:`tensorizer.stream_io.open_stream` says, which raises the same errors."""
    if not isinstance(location, (str, os.PathLike)):
        raise TypeError(f"path_uri: expected str or os.PathLike, got {type(location).__name__}")
    scheme = scheme_of(location)
    if scheme is None:
        check_is_path(location)
        return _open_local(os.fspath(location), mode, options)
    return OPENERS.get(scheme, _open_other)(cast(str, location), mode, options)


@stream_errors()
def _open_local(path: Any, mode: str, options: CallOptions) -> BinaryIO:
    if not isinstance(path, str):
        raise TypeError(f"path_uri: expected a path of type str, got {type(path).__name__}")
    if "b" not in mode:
        raise ValueError(f"mode: expected a binary one, with a b, got {mode!r}")
    path = expanded(path)
    if any(letter in mode for letter in "wax"):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    buffer_size = options.stream.buffer_size
    buffering = io.DEFAULT_BUFFER_SIZE if buffer_size is None else buffer_size
    file = cast(BinaryIO, open(path, mode, buffering=buffering))  # noqa: SIM115 - the caller's to close
    try:
        file.seek(options.stream.begin or 0)
    except BaseException:
        file.close()
        raise
    return file


def _open_file_uri(uri: str, mode: str, options: CallOptions) -> BinaryIO:
    return _open_local(path_of_file_uri(uri), mode, options)


def _open_http(uri: str, mode: str, options: CallOptions) -> BinaryIO:
    config.binary_mode(mode, ("rb",), scheme_of(uri))
    stream, cache, cached = options.stream, _cache_for(uri, mode, options), None
    if cache is not None:
        from tensorizer._io.node_cache import CachedObject, http_location

        cached = CachedObject(cache, http_location(uri))
        if cache.offline:
            return cast(BinaryIO, cached.open_offline())
    from tensorizer._io.http import CURLStreamFile
    from tensorizer._io.http_options import HTTPOptions

    return cast(
        BinaryIO,
        CURLStreamFile(
            uri,
            begin=stream.begin,
            end=stream.end,
            buffer_size=stream.buffer_size,
            certificate_handling=stream.certificate_handling,
            http_options=stream.http_options or options.once(HTTPOptions, HTTPOptions),
            cached=cached,
        ),
    )


def _open_redis(uri: str, mode: str, options: CallOptions) -> BinaryIO:
    config.binary_mode(mode, ("rb",), scheme_of(uri))
    cache = _cache_for(uri, mode, options)
    if cache is not None:
        cache.leave(shown_uri(uri), "Redis tells no versions")
    from tensorizer._io.redis import RedisStreamFile

    stream = options.stream
    return cast(
        BinaryIO,
        RedisStreamFile(
            uri,
            begin=stream.begin,
            end=stream.end,
            buffer_size=stream.buffer_size,
            certificate_handling=stream.certificate_handling,
        ),
    )


def _open_s3(uri: str, mode: str, options: CallOptions) -> BinaryIO:
    if "a" in mode:
        raise ValueError(f"mode {mode!r}: objects in S3 cannot be appended to; expected {', '.join(_S3_MODES)}")
    if mode not in _S3_MODES:
        config.binary_mode(mode, _S3_MODES, "s3")
    from tensorizer._io.s3 import objects

    if "r" in mode:
        return cast(BinaryIO, objects.open_read(uri, options, _cache_for(uri, mode, options)))
    return objects.open_write(uri, options)


def _open_other(uri: str, mode: str, options: CallOptions) -> BinaryIO:
    from tensorizer._io import fsspec

    stream, cache = options.stream, _cache_for(uri, mode, options)
    with stream_errors():
        return fsspec.open(uri, mode, buffer_size=stream.buffer_size, begin=stream.begin, cache=cache)


#: By scheme; every other one is left to the drivers of fsspec.
OPENERS: dict[str, Callable[[str, str, CallOptions], BinaryIO]] = {
    "file": _open_file_uri,
    "local": _open_file_uri,
    "http": _open_http,
    "https": _open_http,
    "redis": _open_redis,
    "rediss": _open_redis,
    "s3": _open_s3,
}


def _cache_for(uri: str, mode: str, options: CallOptions) -> Optional[Cache]:
    """The cache that is set, if it may keep what is read. Where none is, nothing of it is imported."""
    stream = options.stream
    if "r" not in mode or stream.cache is False or (stream.cache is None and env_text("TENSORIZER_CACHE") is None):
        return None
    from tensorizer._io.node_cache import Cache

    cache = Cache.chosen(stream.cache)
    if cache is not None and (stream.begin is not None or stream.end is not None):
        cache.leave(shown_uri(uri), "only a part of it is read (begin, end)")
        return None
    return cache
