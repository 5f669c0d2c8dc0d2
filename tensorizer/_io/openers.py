"""The table from the scheme of a URI to the function that opens it. Packages are imported when a URI needs them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, Optional, cast

from tensorizer._io.call_options import CallOptions
from tensorizer._io.uri import check_is_path, expanded, path_of_file_uri, scheme_of
from tensorizer._system import checks
from tensorizer._system.config import env_text
from tensorizer._system.redaction import shown_uri
from tensorizer.errors import stream_errors

if TYPE_CHECKING:
    from tensorizer._io.node_cache import Cache

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
    checks.binary_mode(mode, ("rb",), scheme_of(uri))
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
    checks.binary_mode(mode, ("rb",), scheme_of(uri))
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
    checks.binary_mode(mode, _S3_MODES, "s3")
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
