"""Where runs lie: a folder, a prefix of a store that speaks S3, a folder of an HTTP server."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Optional, TypeVar

from tensorizer._io.call_options import PLAIN, CallOptions
from tensorizer._io.http import CURLStreamFile
from tensorizer._io.new_files import NewFile
from tensorizer._io.s3.access import params_of
from tensorizer._io.s3.conditional import ConditionalObject, NotMetError, Read
from tensorizer._io.s3.objects import S3Prefix
from tensorizer._io.uri import folder_uri, local_path, scheme_of
from tensorizer._sync.pointer import POINTER_NAME, version_of
from tensorizer._system.redaction import shown_uri
from tensorizer.errors import ConflictError, StreamError, StreamNotFoundError, TensorizerError, stream_errors

_Error = TypeVar("_Error", bound=TensorizerError)
_User = TypeVar("_User", bound="StoreUser")

_LOCK_NAME = ".lock"
_READS = 5  # of a pointer that is replaced while it is read


class Store:
    """What followers need of a place, and, of those that can be written, publishers.

    Attributes:
        name: For messages.
    """

    name: str

    def error(self, kind: type[_Error], text: str) -> _Error:
        """An error about this place."""
        error = kind(f"{self.name}: {text}")
        error.source = self.name
        return error

    def read_pointer(self, known: Optional[Read]) -> Optional[Read]:
        """The pointer, which is `known` itself if it is still that one; ``None``: there is none. Raises ``OSError``."""
        raise NotImplementedError

    def place_of(self, name: str) -> str:
        """The path or URI of a file."""
        raise NotImplementedError

    # ---- of places that can be written ------------------------------------------------------------------------------

    #: For opening files, and for those that are written; they share what this place keeps for them.
    read_options: CallOptions = PLAIN
    write_options: CallOptions = PLAIN

    def lock(self) -> None:
        """Makes sure that no other publisher writes here, where the place can.

        Raises:
            ConflictError: Another one does.
        """

    def close(self) -> None:
        """Lets others publish, and ends connections."""

    def write_pointer(self, content: bytes, known: Optional[Read]) -> Read:
        """Replaces `known`, or what is not there; durable when it returns.

        Raises:
            NotMetError: It is another one by now.
            OSError: It cannot be written.
        """
        raise NotImplementedError

    def names(self) -> list[str]:
        """Names of anchors and deltas that are there."""
        raise NotImplementedError

    def delete(self, names: Sequence[str]) -> None:
        """Deletes files in this order; those that are gone already are no error."""
        raise NotImplementedError

    def refuses_existing(self, error: OSError) -> bool:
        """Whether a file could not be written because its name is taken."""
        return False

    def without_conditions(self, error: OSError) -> bool:
        """Whether a write failed because the place knows no conditions; from then on it gets none."""
        return False


def open_store(location: Any, stream_options: Optional[Mapping[str, Any]], *, writes: bool) -> Store:
    """The place that users mean.

    Raises:
        TypeError: No path and no URI; unknown `stream_options`.
        ValueError: A place of another kind.
    """
    options = CallOptions.to_read(stream_options=stream_options)
    if not isinstance(location, (str, os.PathLike)):
        raise TypeError(f"location: expected a path or a URI, got {type(location).__name__}")
    path = local_path(location) if scheme_of(location) in (None, "file", "local") else None
    if path is not None:
        return FolderStore(path)
    scheme = scheme_of(location)
    if scheme == "s3":
        return S3Store(str(location), options)
    if scheme in ("http", "https") and not writes:
        return HttpStore(str(location), options)
    known = "a folder, file:// or s3://" if writes else "a folder, file://, s3:// or http(s)://"
    raise ValueError(f"location: expected {known}, got {shown_uri(str(location))}")


# --- folders ----------------------------------------------------------------------------------------------------------

_locks: weakref.WeakSet[FolderStore] = weakref.WeakSet()


class FolderStore(Store):
    """A folder of this machine, or of one that it mounts."""

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        self._lock: Optional[int] = None
        self.name = self._path

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        lock = self.__dict__.get("_lock")  # of a publisher that nobody closed
        if lock is not None:
            close(lock)

    def place_of(self, name: str) -> str:
        return os.path.join(self._path, name)

    @stream_errors()
    def read_pointer(self, known: Optional[Read]) -> Optional[Read]:
        try:
            with open(self.place_of(POINTER_NAME), "rb") as file:
                status = os.fstat(file.fileno())
                tag = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
                if known is not None and known.tag == tag:
                    return known
                content = file.read()
        except FileNotFoundError:
            return None
        return known if known is not None and known.content == content else Read(content, tag)

    @stream_errors()
    def lock(self) -> None:
        if self._lock is not None:
            return
        os.makedirs(self._path, exist_ok=True)
        lock = os.open(self.place_of(_LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise self.error(ConflictError, f"another publisher writes here and holds {_LOCK_NAME}") from None
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        _locks.add(self)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            _locks.discard(self)

    def write_pointer(self, content: bytes, known: Optional[Read]) -> Read:
        with NewFile(self.place_of(POINTER_NAME)) as file:
            file.write(content)
            file.publish()
        read = self.read_pointer(None)
        if read is None or read.content != content:
            raise NotMetError
        return read

    @stream_errors()
    def names(self) -> list[str]:
        return [name for name in os.listdir(self._path) if version_of(name) is not None]

    @stream_errors()
    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.place_of(name))


def _forget_locks() -> None:
    """In a forked child: the lock is the parent's, and ends with it."""
    for store in list(_locks):
        store.close()


os.register_at_fork(after_in_child=_forget_locks)


# --- object stores ----------------------------------------------------------------------------------------------------


class S3Store(Store):
    """A prefix of a bucket."""

    def __init__(self, uri: str, options: CallOptions) -> None:
        self._folder = folder_uri(uri)
        self.read_options = options
        self._pointer = ConditionalObject(self.place_of(POINTER_NAME), options)
        self._new_only = True
        self.name = shown_uri(self._folder)

    def place_of(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def read_pointer(self, known: Optional[Read]) -> Optional[Read]:
        return self._pointer.read(known)

    @property
    def write_options(self) -> CallOptions:  # type: ignore[override]
        stream = self.read_options.stream
        given = {kind: dict(names) for kind, names in (stream.s3_extra_args or {}).items()}
        put = {name: value for name, value in given.get("put", {}).items() if name[:2] != "If"}
        if self._new_only:
            put["IfNoneMatch"] = "*"
        extra_args = {**given, "put": put}
        return self.read_options._replace(stream=dataclasses.replace(stream, s3_extra_args=extra_args))

    def lock(self) -> None:
        self._pointer.for_writing()
        self._new_only = bool(params_of(self._pointer.client, "put_object", {"IfNoneMatch": "*"})) and self._new_only

    def write_pointer(self, content: bytes, known: Optional[Read]) -> Read:
        return self._pointer.write(content, known)

    def close(self) -> None:
        self._pointer.close()

    def names(self) -> list[str]:
        return [name for name in S3Prefix(self._folder, self.read_options).names() if version_of(name) is not None]

    def delete(self, names: Sequence[str]) -> None:
        if names:
            prefix = S3Prefix(self._folder, self.read_options)
            for name in names:
                prefix.delete([name])

    def refuses_existing(self, error: OSError) -> bool:
        return getattr(error, "status", None) in (409, 412)

    def without_conditions(self, error: OSError) -> bool:
        if self._new_only and getattr(error, "status", None) == 501:
            self._new_only = False
            return True
        return False


class _Known:
    """What an open of the pointer knows of it: nothing is sent if it is still that one."""

    known = None

    def __init__(self, read: Optional[Read]) -> None:
        self._read = read

    def condition(self) -> dict[str, Any]:
        read = self._read
        if read is None or not read.tag or read.tag.startswith("W/"):
            return {}
        return {"known_etag": read.tag, "known_nbytes": len(read.content)}

    def over_http(self, http: Any) -> None:
        return None

    def closed(self, over: Any) -> None:
        pass


class HttpStore(Store):
    """A folder of an HTTP server, for followers."""

    def __init__(self, uri: str, options: CallOptions) -> None:
        self._folder = folder_uri(uri)
        self.read_options = options
        self.name = shown_uri(self._folder)

    def place_of(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def read_pointer(self, known: Optional[Read]) -> Optional[Read]:
        for left in reversed(range(_READS)):
            try:
                return self._read_pointer(known)
            except StreamNotFoundError:
                return None
            except StreamError as error:
                if error.status is None or error.status >= 400 or not left:
                    raise
        raise AssertionError

    def _read_pointer(self, known: Optional[Read]) -> Optional[Read]:
        cached: Any = _Known(known)
        stream = CURLStreamFile(
            self.place_of(POINTER_NAME),
            headers={"Cache-Control": "no-cache"},
            cached=cached,
            certificate_handling=self.read_options.stream.certificate_handling,
            http_options=self.read_options.stream.http_options,
        )
        with contextlib.closing(stream):
            if stream.is_known:
                return known
            content = stream.read()
            tag = stream.response_headers.get("etag")
        return known if known is not None and known.content == content else Read(content, tag)


# --- who uses them ----------------------------------------------------------------------------------------------------


class StoreUser:
    """What publishers and followers have in common: a place, a lock for the caller's threads, and an end."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._store.close()

    def __enter__(self: _User) -> _User:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} can be neither copied nor pickled")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the {type(self).__name__} of {self._store.name} is closed")
