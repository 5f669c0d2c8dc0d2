"""The cache of remote objects on the disk of the node: what is kept under which name, and when it may be used.

Imported only where a cache is set. The extension reads and writes the files (csrc/io/cache); this module decides.

Source: docs/node-cache.md.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, Optional, Union

from tensorizer import _C
from tensorizer._io.uri import local_path, split_uri
from tensorizer._io.window import WindowedReader
from tensorizer._system.config import env_text
from tensorizer._system.redaction import shown_uri
from tensorizer._system.sizes import parse_size
from tensorizer.errors import StreamError, StreamNotFoundError

logger = logging.getLogger("tensorizer.cache")

_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_STRONG_ETAG = re.compile(r'"[^"\r\n]*"')
_DEFAULT_MIN_FREE = "10%"
_CONFIRMED_AGAIN_SECONDS = 60
_OLD_SECONDS = 60  # a date that is younger may be that of two contents
# Parameters that sign a URL: they change, and the object stays.
_SIGNING = re.compile(
    r"(x-amz-.*|x-goog-.*|awsaccesskeyid|googleaccessid|signature|expires|policy|key-pair-id"
    r"|sig|se|sp|sv|sr|st|spr|ske|skt|sks|skv|skoid|sktid)",
    re.IGNORECASE,
)
_INFO_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "md5", "version_id")
_PATIENCE_SECONDS = 10.0  # with a disk that takes nothing, when the process ends

_warned: set[tuple[str, str]] = set()


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """Where remote objects are kept, and how much of them. Immutable; pass it as ``cache=``.

    If a field is ``None``, the environment variable in parentheses sets it.

    Attributes:
        folder: A folder of a local file system; ``~`` is expanded, a missing one is made (``TENSORIZER_CACHE``).
        max_size: Bytes that all entries of the user may take on the disk: a number, or text as ``"500GB"`` or
            ``"200GiB"`` (``TENSORIZER_CACHE_SIZE``; no limit).
        min_free: Bytes of the file system that stay free: a number, text, or a share such as ``"10%"``
            (``TENSORIZER_CACHE_MIN_FREE``; ``"10%"``).
        offline: Sends no request; reading what is not in the cache raises (``TENSORIZER_CACHE_OFFLINE``; ``False``).

    Raises:
        TypeError: A field has another type.
        ValueError: A size is negative or no size; the field or the variable is named.

    Examples:
        >>> from tensorizer.stream_io import open_stream
        >>> chosen = tensorizer.cache.CacheOptions("cache", max_size="500GB")
        >>> with open_stream("https://models.example/model.tensors", cache=chosen) as stream:
        ...     content = stream.read()
    """

    folder: Union[str, os.PathLike[str]]
    max_size: Union[int, str, None] = None
    min_free: Union[int, str, None] = None
    offline: Optional[bool] = None

    def __post_init__(self) -> None:
        if not isinstance(self.folder, (str, os.PathLike)) or not isinstance(os.fspath(self.folder), str):
            raise TypeError(f"cache: expected the folder as str or os.PathLike, got {type(self.folder).__name__}")
        if not os.fspath(self.folder):
            raise ValueError("cache: expected the path of a folder, got an empty text")
        if self.max_size is not None:
            parse_size("max_size", self.max_size)
        if self.min_free is not None:
            _parse_free("min_free", self.min_free)
        if self.offline is not None and not isinstance(self.offline, bool):
            raise TypeError(f"offline: expected bool or None, got {type(self.offline).__name__}")


def _parse_free(name: str, value: Union[int, str]) -> tuple[int, float]:
    """Bytes, and a share of the file system."""
    share = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if share is None:
        return parse_size(name, value), 0.0
    if float(share[1]) > 100:
        raise ValueError(f"{name}: expected a share of at most 100%, got {value!r}")
    return 0, float(share[1]) / 100


def parse_about(text: bytes) -> Optional[dict[str, Any]]:
    """What ``about.json`` says; ``None`` where it is damaged."""
    times = (int, float)
    kinds: dict[str, Any] = {"location": str, "version": str, "size": int, "created": times, "confirmed": times}
    try:
        about = json.loads(text)
        right = about["schema"] == 1 and all(isinstance(about[name], kind) for name, kind in kinds.items())
        return about if right and about["size"] >= 0 and math.isfinite(about["confirmed"]) else None
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return None


class Known(NamedTuple):
    """The version of an object that a server confirmed last, as far as the cache knows."""

    version: str
    nbytes: int
    confirmed: float


class Cache:
    """One folder with its settings."""

    def __init__(self, options: CacheOptions) -> None:
        def chosen(value: Any, variable: str, default: Any) -> tuple[str, Any]:
            if value is not None:
                return "cache", value
            found = env_text(variable)
            return f"environment variable {variable}", default if found is None else found

        name, size = chosen(options.max_size, "TENSORIZER_CACHE_SIZE", None)
        self.max_nbytes = None if size is None else parse_size(name, size)
        name, free = chosen(options.min_free, "TENSORIZER_CACHE_MIN_FREE", _DEFAULT_MIN_FREE)
        self._min_free, self._min_free_share = _parse_free(name, free)
        name, offline = chosen(options.offline, "TENSORIZER_CACHE_OFFLINE", "0")
        if offline not in (True, False, "0", "1"):
            raise ValueError(f"{name}: expected 1 or 0, got {offline!r}")
        self.offline = offline in (True, "1")
        path = local_path(options.folder)
        if path is None:
            raise ValueError(f"cache: expected a folder of this machine, got {shown_uri(os.fspath(options.folder))}")
        self.path = os.path.abspath(path)
        self.must_keep = False  # what is not to be cached is an error

    @classmethod
    def chosen(cls, value: Any) -> Optional[Cache]:
        """What ``cache=`` means; ``None`` for no cache.

        Raises:
            TypeError: Neither ``False``, ``None``, a path nor :class:`CacheOptions`.
            ValueError: A size or a variable has a wrong value.
        """
        if value is False:
            return None
        if value is None:
            value = env_text("TENSORIZER_CACHE")
            if value is None:
                return None
        if isinstance(value, Cache):
            return value
        if isinstance(value, CacheOptions):
            return cls(value)
        if not isinstance(value, (str, os.PathLike)):
            raise TypeError(f"cache: expected a folder, CacheOptions, False or None, got {type(value).__name__}")
        return cls(CacheOptions(value))

    def open_folder(self) -> Optional[_C.CacheFolder]:
        """The folder, made where it is missing; ``None``, with a warning, where it cannot be used.

        Raises:
            OSError: It cannot be used, and that is all that was asked for, or offline is set.
        """
        try:
            if not self.offline:
                _make_folder(self.path)
            return _C.CacheFolder(os.fsencode(self.path), not self.offline)
        except OSError as error:
            if self.offline and not isinstance(error, FileNotFoundError):
                raise self.useless(error) from None
            if self.must_keep:
                raise StreamError(f"the cache {self.path} cannot be used: {error}") from error
            if not self.offline:
                _warn(self.path, str(error))
            return None

    def useless(self, error: OSError) -> StreamError:
        return StreamError(f"the cache {self.path} cannot be used, and offline is set: {error}")

    def leave(self, shown: str, reason: str) -> None:
        """Says why an object is not cached.

        Raises:
            OSError: It has to be.
        """
        if self.offline:
            raise StreamNotFoundError(f"{shown} is not in the cache {self.path}, and offline is set: {reason}")
        if self.must_keep:
            raise StreamError(f"{shown} is not cached: {reason}")
        logger.info("%s is not cached: %s", shown, reason)

    def limits(self, folder: _C.CacheFolder) -> dict[str, Any]:
        free = max(self._min_free, int(self._min_free_share * folder.disk_nbytes()[0]))
        return {"max_nbytes": self.max_nbytes, "min_free_nbytes": free}


def _make_folder(path: str) -> None:
    """The folder and those above it; only its own mode is ours to say."""
    if not os.path.isdir(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)
        except FileExistsError:
            pass


class CachedObject:
    """One remote object, as the cache knows it."""

    def __init__(self, cache: Cache, location: str, version: Optional[str] = None) -> None:
        self.cache = cache
        self.location = location
        self._version = version  # that the location itself names
        self._name = hashlib.sha256(location.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        self._shown = shown_uri(location)
        self._folder = cache.open_folder()
        self._abouts: dict[str, dict[str, Any]] = {}
        self._held: Optional[_C.CacheSource] = None
        self.known = self._find_known()

    def _find_known(self) -> Optional[Known]:
        if self._folder is None:
            return None
        now, found = time.time(), []
        for version, text in self._folder.versions(self._name):
            about = parse_about(text)
            if about is None or version != _name_of(about["version"], about["size"]):
                self._folder.remove(self._name, version)
                continue
            self._abouts[version] = about
            confirmed = min(about["confirmed"], now)
            found.append(Known(about["version"], about["size"], confirmed))
        return max(found, key=lambda known: known.confirmed, default=None)

    def condition(self) -> dict[str, Any]:
        """Keywords of :meth:`_C.HttpSource.open` with which bytes that are here already do not come."""
        known = self.known
        if known is None or not _STRONG_ETAG.fullmatch(known.version) or self._folder is None:
            return {}
        with contextlib.suppress(OSError):
            _C.CacheSource.check_descriptors()
            # Open until the answer is here, so that no other process removes it.
            directory = _name_of(known.version, known.nbytes)
            self._held = open_to_look(self._folder, (self._name, directory), known.nbytes, self._shown)
        return {} if self._held is None else {"known_etag": known.version, "known_nbytes": known.nbytes}

    def over_http(self, http: _C.HttpSource) -> Optional[_C.CacheSource]:
        """The cache before an open object of a server; ``None`` where it is not to be cached."""
        known = self.known
        if http.is_known and known is not None:
            over = self._over(http, known.version, known.nbytes, http.name) or self._held
            self._held = None
            return over
        headers = {name.lower(): value for name, value in http.response_headers}
        if re.search(r"(?:^|[\s,])no-store(?:$|[\s,;])", headers.get("cache-control", ""), re.IGNORECASE):
            self.leave("the server forbids it (Cache-Control: no-store)")
            return None
        version = _version_of_headers(headers, self._version)
        return self.over(http, version, http.size(), http.name)

    def over(
        self, network: _C.RangeSource, version: Optional[str], nbytes: Optional[int], name: str
    ) -> Optional[_C.CacheSource]:
        """The cache before any source, of which the version is known or not."""
        if version is None:
            self.leave("the server tells no version")
            return None
        if not nbytes:
            self.leave("its size is unknown, or 0")
            return None
        return self._over(network, version, nbytes, name)

    def leave(self, reason: str) -> None:
        self.cache.leave(self._shown, reason)

    def _over(
        self, network: Optional[_C.RangeSource], version: str, nbytes: int, name: str
    ) -> Optional[_C.CacheSource]:
        if self._folder is None:
            return None
        now = time.time()
        directory = _name_of(version, nbytes)
        before = self._abouts.get(directory)
        # Without its query: what does not sign may still be a secret.
        about = {
            "schema": 1,
            "location": self._shown,
            "version": version,
            "size": nbytes,
            "created": now if before is None else before["created"],
            "confirmed": now,
        }
        try:
            source = _C.CacheSource.open(
                self._folder,
                network,
                location=self._name,
                version=directory,
                nbytes=nbytes,
                about=json.dumps(about),
                name=name,
                **self.cache.limits(self._folder),
            )
        except (OSError, MemoryError) as error:  # for example, a wrong size
            if network is None and isinstance(error, OSError):
                raise self.cache.useless(error) from None
            self._folder = None  # and its descriptor
            _warn(self.cache.path, str(error))
            return None
        if source is None:
            return None
        is_newest = self.known is not None and self.known.version == version
        is_fresh = before is None or (is_newest and now - min(before["confirmed"], now) < _CONFIRMED_AGAIN_SECONDS)
        if network is not None and not is_fresh:
            source.write_about(json.dumps(about))
        return source

    def open_offline(self) -> CachedFile:
        """What is here, as a file; no request is sent.

        Raises:
            StreamNotFoundError: There is nothing.
        """
        source = None
        if self.known is not None:
            source = self._over(None, self.known.version, self.known.nbytes, self._shown)
        if source is None:
            raise StreamNotFoundError(f"{self._shown} is not in the cache {self.cache.path}, and offline is set")
        return CachedFile(source, self)

    def closed(self, source: _C.CacheSource) -> None:
        """Lets the entry go, and says what came of it."""
        source.release()
        cached = source.cached_bytes_read
        logger.debug(
            "%s: %d bytes from the cache, %d from the network, %d stored%s",
            self._shown,
            cached,
            source.bytes_read - cached,
            source.stored_nbytes,
            f" ({source.trouble})" if source.trouble else "",
        )
        _warn_of_troubles()


def open_to_look(folder: _C.CacheFolder, key: tuple[str, str], nbytes: int, name: str) -> Optional[_C.CacheSource]:
    """An entry, which stays until it is closed; ``None`` if it is missing or damaged."""
    return _C.CacheSource.open(
        folder, None, location=key[0], version=key[1], nbytes=nbytes, about="",
        max_nbytes=None, min_free_nbytes=0, name=name,
    )  # fmt: skip


def _warn(path: str, reason: str) -> None:
    """Says once per process, folder and reason that a cache is of no use."""
    if (path, reason) not in _warned:
        _warned.add((path, reason))
        logger.warning("cache %s is not used: %s", path, reason)


def _warn_of_troubles() -> None:
    """What the thread that writes has met with since the last time."""
    for path, reason in _C.take_cache_troubles():
        _warn(path, reason)


@atexit.register
def finish() -> None:
    """Returns when what loads have left to be written is written, or the disk takes nothing more."""
    with contextlib.suppress(KeyboardInterrupt):
        _C.finish_caches(_PATIENCE_SECONDS)
    _warn_of_troubles()


def _name_of(version: str, nbytes: int) -> str:
    return hashlib.sha256(f"{version}\0{nbytes}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def http_location(url: str) -> str:
    """What names an object behind a URL, without user, password, signature and fragment."""
    parts = split_uri(url)
    host = parts.authority.rpartition("@")[2].lower()
    default = {"http": ":80", "https": ":443"}[parts.scheme]
    if host.endswith(default):
        host = host[: -len(default)]
    query = "&".join(p for p in parts.query.split("&") if p and not _SIGNING.fullmatch(p.partition("=")[0]))
    return f"{parts.scheme}://{host}/{parts.path}" + (f"?{query}" if query else "")


def _version_of_headers(headers: Mapping[str, str], named: Optional[str]) -> Optional[str]:
    etag = headers.get("etag", "")
    if _STRONG_ETAG.fullmatch(etag):
        return etag
    if named is not None:
        return f"versionId={named}"
    modified, date = headers.get("last-modified"), headers.get("date")
    try:
        age = parsedate_to_datetime(date or "") - parsedate_to_datetime(modified or "")
    except (TypeError, ValueError, IndexError):
        return None
    return f"Last-Modified={modified}" if age.total_seconds() >= _OLD_SECONDS else None


def version_of_info(info: Mapping[str, Any]) -> Optional[str]:
    """What tells a version in the ``info()`` of a file system of fsspec; a time alone does not."""
    lfs = info.get("lfs")
    if isinstance(lfs, Mapping) and lfs.get("sha256"):
        return f"sha256={lfs['sha256']}"
    for name in _INFO_VERSIONS:
        value = info.get(name)
        if isinstance(value, (str, int)) and value and not str(value).startswith("W/"):
            return f"{name.lower()}={value}"
    return None


class CachedFile(WindowedReader):
    """An object that is read through the cache, or of which only the cache is read."""

    def __init__(
        self,
        source: _C.CacheSource,
        of: Optional[CachedObject] = None,
        begin: int = 0,
        buffer_nbytes: int = 16 << 20,
    ) -> None:
        super().__init__()
        self._source, self._of = source, of
        self.name = self._name = source.name
        self._position, self._buffer_nbytes = begin, buffer_nbytes

    @property
    def bytes_read(self) -> int:
        """Bytes that came from the disk, or to it."""
        return self._source.bytes_read

    def _tensorizer_source(self) -> _C.RangeSource:
        return self._source

    def _limit(self) -> Optional[int]:
        return self._source.size()

    def _fetch_some(self, offset: int, into: memoryview) -> int:
        return self._source.read_up_to(offset, into)

    def _fetch_all(self, offset: int, into: memoryview) -> None:
        self._source.readinto_parallel(offset, into)

    def close(self) -> None:
        if not self.closed:
            if self._of is None:
                self._source.release()
            else:
                self._of.closed(self._source)
            self._window = memoryview(b"")
        super().close()
