"""Opening files wherever they are: :func:`open_stream`, and the stream classes behind it.

What needs boto3, redis or fsspec has a module of its own, which is imported when it is first used.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import re
import shutil
import sys
import urllib.request
from typing import TYPE_CHECKING, Any, BinaryIO, Callable, Optional, Union, cast

from tensorizer._crypto.key_material import hidden
from tensorizer._io.http import CURLStreamFile
from tensorizer._io.options import CAInfo
from tensorizer._io.options import HTTPOptions as HTTPOptions

if TYPE_CHECKING:
    from tensorizer._io.redis import RedisStreamFile

__all__ = ["open_stream", "CURLStreamFile", "RedisStreamFile", "CAInfo"]  # noqa: RUF022 - as callers know it

logger = logging.getLogger(__name__)

# Used where nothing else names an endpoint; looked up at call time, so that programs may set their own.
default_s3_read_endpoint = "accel-object.ord1.coreweave.com"
default_s3_write_endpoint = "object.ord1.coreweave.com"

_s3_default_config_paths: tuple[str, ...] = tuple(
    os.path.expanduser(path)
    for path in ((r"~\.s3cfg", r"~\AppData\Roaming\s3cmd.ini") if sys.platform == "win32" else ("~/.s3cfg",))
)

# Names that other modules define and callers import from here.
_ELSEWHERE = {
    "RedisStreamFile": "tensorizer._io.redis",
    "_parse_redis_uri": "tensorizer._io.redis",
    "s3_upload": "tensorizer._io.s3.objects",
    "s3_download": "tensorizer._io.s3.objects",
    "_s3_download_url": "tensorizer._io.s3.objects",
    "_infer_credentials": "tensorizer._io.s3.objects",
    "_enforce_scheme": "tensorizer._io.s3.objects",
}

# URIs that name paths; the second is fsspec's word.
LOCAL_SCHEMES = ("file", "local")

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_S3_MODES = {frozenset(mode) for mode in ("rb", "wb", "wb+", "ab", "ab+")}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    if name == "curl_path":  # the curl program, which nothing here needs any more
        return shutil.which("curl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
) -> Union[CURLStreamFile, RedisStreamFile, BinaryIO]:
    """Opens a local path or a URI as a binary stream.

    A ``PathLike`` is always a local path. A ``str`` with ``://`` is a URI; its scheme decides, in any case:

    - ``http``, ``https``: :class:`CURLStreamFile`, mode ``rb`` only;
    - ``s3``: reading (``rb``) gives a :class:`CURLStreamFile`, writing (``wb``, ``wb+``, ``ab``, ``ab+``) a temporary
      file that is uploaded when it is closed;
    - ``redis``, ``rediss``: ``RedisStreamFile``, mode ``rb`` only;
    - ``file``, ``local``: the local path in it;
    - every other scheme (``gs``, ``az``, ``hf``, ``memory``, ...) goes to the optional package ``fsspec``.

    Arguments that the kind of stream has no use for are ignored, so that callers can pass the same ones always.

    Args:
        path_uri: Where.
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
        end: One past the last byte; for HTTP and S3 reads only.
        s3_region_name: Region that requests are signed for.
        s3_signature_version: ``"s3v4"`` (default) or ``"s3"`` for version 2.
        certificate_handling: Which server certificates are trusted (HTTPS, S3 reads, rediss).
        s3_session_token: Token that belongs to temporary credentials.
        s3_profile: Profile of the AWS configuration files.
        s3_client_factory: Makes the boto3 client instead of this package; picklable, for use in worker processes.
        http_options: Timeouts, retries, connections and the rest of HTTP and S3 transfers.

    Returns:
        A binary stream and context manager.

    Raises:
        ValueError: The mode does not fit, the range is empty or negative, or no installed package knows the scheme.
        TypeError: ``path_uri`` is no ``str`` or ``PathLike`` of one.
        OSError: It cannot be opened (``FileNotFoundError``, ``PermissionError``, :class:`StreamError`, ...).
    """
    if not isinstance(path_uri, (str, os.PathLike)):
        raise TypeError(f"path_uri: wanted str or os.PathLike, found {type(path_uri).__name__}")
    scheme = _scheme_of(path_uri) if isinstance(path_uri, str) else None
    if scheme is None:
        return _open_local(os.fspath(path_uri), mode, buffer_size, begin)
    uri = cast(str, path_uri)
    if scheme in LOCAL_SCHEMES:
        return _open_local(path_of_file_uri(uri), mode, buffer_size, begin)
    if scheme in ("http", "https"):
        _require_mode(mode, {frozenset("rb")}, scheme)
        return CURLStreamFile(
            uri,
            begin=begin,
            end=end,
            buffer_size=buffer_size,
            certificate_handling=certificate_handling,
            http_options=http_options,
        )
    if scheme in ("redis", "rediss"):
        _require_mode(mode, {frozenset("rb")}, scheme)
        from tensorizer._io.redis import RedisStreamFile

        return RedisStreamFile(
            uri, begin=begin, end=end, buffer_size=buffer_size, certificate_handling=certificate_handling
        )
    if scheme == "s3":
        _require_mode(mode, _S3_MODES, scheme)
        from tensorizer._io.s3 import objects

        s3_secret_access_key, s3_session_token = hidden(s3_secret_access_key), hidden(s3_session_token)
        settings: dict[str, Any] = {
            "s3_access_key_id": s3_access_key_id,
            "s3_secret_access_key": s3_secret_access_key,
            "s3_endpoint": s3_endpoint,
            "s3_config_path": s3_config_path,
            "force_http": force_http,
            "s3_region_name": s3_region_name,
            "s3_signature_version": s3_signature_version,
            "s3_session_token": s3_session_token,
            "s3_profile": s3_profile,
            "s3_client_factory": s3_client_factory,
            "certificate_handling": certificate_handling,
            "http_options": http_options,
        }
        if "r" in mode:
            return objects.open_read(uri, begin=begin, end=end, buffer_size=buffer_size, **settings)
        return objects.open_write(uri, mode, **settings)
    from tensorizer._io import fsspec

    return fsspec.open(uri, mode, buffer_size=buffer_size, begin=begin, end=end)


def _scheme_of(text: str) -> Optional[str]:
    """The scheme in front of ``://`` in lower case; ``None`` for text that is a path."""
    scheme, separator, _ = text.partition("://")
    return scheme.lower() if separator and _SCHEME.fullmatch(scheme) else None


def path_of_file_uri(uri: str) -> str:
    """The local path in ``file:///path``; ``ValueError`` where it names another host."""
    rest = uri.split("://", 1)[1]
    host, slash, path = rest.partition("/")
    if host.lower() not in ("", "localhost"):
        raise ValueError(f"a file URI names a whole path of this computer: wanted file:///path, found host {host!r}")
    return urllib.request.url2pathname(slash + path)


def _require_mode(mode: str, allowed: set[frozenset[str]], scheme: str) -> None:
    if frozenset(mode) not in allowed or len(set(mode)) != len(mode):
        names = ", ".join(sorted("".join(sorted(m, key="rwab+".index)) for m in allowed))
        raise ValueError(f"mode for {scheme}:// must be one of {names}, found {mode!r}")


def _open_local(path: Any, mode: str, buffer_size: Optional[int], begin: Optional[int]) -> BinaryIO:
    if not isinstance(path, str):
        raise TypeError(f"path_uri: wanted a path of type str, found {type(path).__name__}")
    if "b" not in mode:
        raise ValueError(f"mode must be binary, with a b; found {mode!r}")
    if any(letter in mode for letter in "wax"):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    buffering = io.DEFAULT_BUFFER_SIZE if buffer_size is None else buffer_size
    file = cast(BinaryIO, open(path, mode, buffering=buffering))  # noqa: SIM115 - the caller's to close
    try:
        file.seek(begin or 0)
    except BaseException:
        file.close()
        raise
    return file
