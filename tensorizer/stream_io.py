"""Opening files wherever they are: :func:`open_stream`, and the stream classes behind it.

boto3 and fsspec are imported when you first use a URI that needs them.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import sys
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, Callable, Optional, Union, cast

from tensorizer._io import sources
from tensorizer._io.call_options import CallOptions, StreamOptions
from tensorizer._io.http import CURLStreamFile
from tensorizer._io.http_options import CAInfo
from tensorizer._io.http_options import HTTPOptions as HTTPOptions
from tensorizer._io.s3 import objects
from tensorizer._io.s3.access import DEFAULTS, ConfigPath, ParsedCredentials, infer_credentials
from tensorizer._io.s3.client import enforce_scheme
from tensorizer._io.uri import LOCAL_SCHEMES as LOCAL_SCHEMES
from tensorizer._io.uri import path_of_file_uri as path_of_file_uri

if TYPE_CHECKING:
    from tensorizer._io.node_cache import CacheOptions as CacheOptions
    from tensorizer._io.redis import RedisStreamFile as RedisStreamFile
    from tensorizer._io.redis import _parse_redis_uri as _parse_redis_uri

__all__ = ["open_stream", "CURLStreamFile", "RedisStreamFile", "CAInfo"]  # noqa: RUF022 - as callers know it

logger = logging.getLogger(__name__)

# -- names that callers of the published package use -------------------------------------------------------------------

# Programs may assign these three: every call looks them up. The endpoints apply if nothing else names an endpoint.
default_s3_read_endpoint = DEFAULTS.read_endpoint
default_s3_write_endpoint = DEFAULTS.write_endpoint
_s3_default_config_paths = DEFAULTS.config_paths

_ASSIGNABLE = {
    "default_s3_read_endpoint": "read_endpoint",
    "default_s3_write_endpoint": "write_endpoint",
    "_s3_default_config_paths": "config_paths",
}

s3_download = objects.s3_download
s3_upload = objects.s3_upload
_s3_download_url = objects.s3_download_url
_enforce_scheme = enforce_scheme


def _infer_credentials(
    s3_access_key_id: Optional[str], s3_secret_access_key: Optional[str], s3_config_path: Optional[ConfigPath] = None
) -> ParsedCredentials:
    """Keys from the arguments; if one is missing, from a configuration file of s3cmd."""
    return infer_credentials(s3_access_key_id, s3_secret_access_key, s3_config_path, _s3_default_config_paths)


class _Module(types.ModuleType):
    """Passes values that programs assign to this module on to the code below."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ASSIGNABLE:
            setattr(DEFAULTS, _ASSIGNABLE[name], value)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Module


# The module from which each of these names is imported on first use.
_ORIGINS = {
    "CacheOptions": "tensorizer._io.node_cache",
    "RedisStreamFile": "tensorizer._io.redis",
    "_parse_redis_uri": "tensorizer._io.redis",
}


def __getattr__(name: str) -> Any:
    if name == "curl_path":  # path of the curl program, which is no longer used
        return shutil.which("curl")
    if name not in _ORIGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ORIGINS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_ORIGINS]


# -- opening -----------------------------------------------------------------------------------------------------------


def open_stream(
    path_uri: Union[str, os.PathLike[str]],
    mode: str = "rb",
    s3_access_key_id: Optional[str] = None,
    s3_secret_access_key: Optional[str] = None,
    s3_endpoint: Optional[str] = None,
    s3_config_path: Optional[Union[str, bytes, os.PathLike[Any]]] = None,
    buffer_size: Optional[int] = None,
    force_http: Optional[bool] = None,
    *,
    begin: Optional[int] = None,
    end: Optional[int] = None,
    s3_region_name: Optional[str] = None,
    s3_signature_version: Optional[str] = None,
    certificate_handling: Optional[CAInfo] = None,
    s3_session_token: Optional[str] = None,
    s3_profile: Optional[str] = None,
    s3_client_factory: Optional[Callable[..., Any]] = None,
    http_options: Optional[HTTPOptions] = None,
    s3_extra_args: Optional[Mapping[str, Mapping[str, Any]]] = None,
    memory_budget: Optional[int] = None,
    cache: Union[bool, str, os.PathLike[str], CacheOptions, None] = None,
) -> Union[CURLStreamFile, RedisStreamFile, BinaryIO]:
    """Opens a local path or a URI as a binary stream.

    A ``PathLike`` is always a local path, and raises if it begins like a URI; ``~`` at the beginning of a path is the
    home folder. A ``str`` with ``://`` is a URI. Its scheme, in upper or lower case, decides:

    - ``http``, ``https``: :class:`CURLStreamFile`, mode ``rb`` only;
    - ``s3``: reading (``rb``) returns a :class:`CURLStreamFile`. Writing (``wb``, ``wb+``) returns a
      stream whose content becomes the object when you close it. It is a temporary file that is uploaded then. If you
      pass the new stream to a :class:`~tensorizer.TensorSerializer`, it uploads in parts while it writes instead;
    - ``redis``, ``rediss``: ``RedisStreamFile``, mode ``rb`` only;
    - ``file``, ``local``: the local path in it;
    - every other scheme (``gs``, ``az``, ``hf``, ``memory``, ...) goes to the optional package ``fsspec``, and so do
      its chains of schemes (``simplecache::gs``).

    A kind of stream ignores arguments that it does not use, so you can pass the same arguments for all kinds.

    Args:
        path_uri: The path or URI.
        mode: As for :func:`open`, with a ``b``; letters in any order. For local paths, missing parent folders are
            created in the modes with ``w``, ``a`` or ``x``.
        s3_access_key_id: With ``s3_secret_access_key``, the credentials; both ``""`` for anonymous access.
        s3_secret_access_key: See ``s3_access_key_id``.
        s3_endpoint: Host of the object store, with or without scheme.
        s3_config_path: A configuration file of s3cmd; ``None`` for ``~/.s3cfg``.
        buffer_size: For local files as ``buffering`` of :func:`open` (0 for none); for remote ones, an upper bound in
            bytes of what is read ahead.
        force_http: Plain HTTP for S3.
        begin: First byte, or first position for local files and Redis.
        end: Position after the last byte; only for reads of HTTP and S3.
        s3_region_name: Region that requests are signed for.
        s3_signature_version: ``"s3v4"`` (default) or ``"s3"`` for version 2.
        certificate_handling: Which server certificates are trusted (HTTPS, S3 reads, rediss).
        s3_session_token: Token that belongs to temporary credentials.
        s3_profile: Profile of the AWS configuration files.
        s3_client_factory: A function without arguments that returns the boto3 client; it must be picklable.
        http_options: Timeouts, retries, connections and the rest of HTTP and S3 transfers.
        s3_extra_args: ``{"get": {...}, "put": {...}}``: parameters by boto3's names that are signed and sent with the
            requests of reads (``VersionId``, ``RequestPayer``, ``SSECustomerKey``, ...) and writes (``StorageClass``,
            ``IfNoneMatch``, ``SSECustomerKey``, ``Metadata``, ...). Each goes with the requests that it belongs to.
        memory_budget: Most bytes of parts in memory while a serializer writes to S3. ``None`` allows two parts more
            than there are connections (8 unless ``http_options`` says otherwise). A part has 16 MiB for objects up to 4
            GiB and grows to 64 MiB.
        cache: A folder of this machine, or :class:`CacheOptions`: it keeps what is read of remote objects. ``None``
            uses the environment variable ``TENSORIZER_CACHE``, ``False`` no cache (docs/node-cache.md).

    Returns:
        A binary stream and context manager. What you write to a remote stream is stored when you close it. If you never
        do, it is stored when it is collected, with a ``ResourceWarning`` and a line in the log, because nobody can tell
        then whether it is whole: only ``with`` and ``close()`` protect an object from half of its content.

    Raises:
        ValueError: The mode does not fit (S3 objects cannot be appended to), the range is empty or negative, no
            installed package knows the scheme, or a URI lost a slash (``Path("s3://…")``).
        TypeError: ``path_uri`` is neither a ``str`` nor a ``PathLike`` of one.
        OSError: It cannot be opened. The error is a :class:`~tensorizer.StreamError`, and also a ``FileNotFoundError``
            or ``PermissionError`` if that is the reason.

    Examples:
        >>> from tensorizer.stream_io import open_stream
        >>> with open_stream("https://models.example/model.tensors") as stream:
        ...     print(stream.read(5))
        b'|TZR|'
    """
    options = StreamOptions(
        s3_access_key_id=s3_access_key_id,
        s3_secret_access_key=s3_secret_access_key,
        s3_endpoint=s3_endpoint,
        s3_config_path=s3_config_path,
        buffer_size=buffer_size,
        force_http=force_http,
        begin=begin,
        end=end,
        s3_region_name=s3_region_name,
        s3_signature_version=s3_signature_version,
        certificate_handling=certificate_handling,
        s3_session_token=s3_session_token,
        s3_profile=s3_profile,
        s3_client_factory=s3_client_factory,
        http_options=http_options,
        s3_extra_args=s3_extra_args,
        memory_budget=memory_budget,
        cache=cache,
    )
    return cast(BinaryIO, sources.open_stream(path_uri, mode, CallOptions(stream=options)))
