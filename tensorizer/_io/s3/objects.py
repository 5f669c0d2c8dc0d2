"""Object stores that speak S3: opening objects for reading and writing.

boto3 decides (credentials, region, signatures, beginning and end of uploads), libcurl moves the bytes: reads are ranged
GETs of presigned URLs that are renewed before they expire, writes are PUTs of parts. The functions that
:mod:`tensorizer.stream_io` re-exports are looked up there at call time, so that programs may replace them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, Optional, cast

from tensorizer import stream_io
from tensorizer._crypto.key_material import hidden
from tensorizer._io.http import CURLStreamFile
from tensorizer._io.options import CAInfo, HTTPOptions
from tensorizer._io.s3.access import (
    PathArgument,
    S3Access,
    S3Settings,
    access_at,
    enforce_scheme,
    infer_credentials,
    parse_s3_uri,
    resolve,
)
from tensorizer._io.upload_on_close import UploadOnClose

if TYPE_CHECKING:
    from tensorizer import _C

__all__ = ["open_read", "open_sink", "open_write", "s3_download", "s3_upload"]

# By these names callers know them.
_infer_credentials = infer_credentials
_enforce_scheme = enforce_scheme

_DAY = 86400
# Presigned URLs are replaced this long before they expire.
_RENEW_SECONDS = 3600.0
# Signatures of credentials that change are worth no more than the credentials.
_CHANGING_SECONDS = 300.0


def _url_seconds() -> int:
    """Until the end of the next day: equal requests of one day get URLs that expire together, which caches like."""
    now = int(time.time())
    return (now // _DAY + 2) * _DAY - now


def _presigned(access: S3Access, uri: str) -> str:
    location = parse_s3_uri(uri)
    url: str = access.client.generate_presigned_url(
        "get_object", Params={"Bucket": location.bucket, "Key": location.key}, ExpiresIn=_url_seconds()
    )
    return cast(str, hidden(url))


def _read_url(access: S3Access, uri: str) -> str:
    replaced = stream_io._s3_download_url
    if replaced is not _s3_download_url:
        return cast(str, replaced(uri, *access.arguments))
    return _presigned(access, uri)


def _explicit_access(
    access_key_id: Optional[str],
    secret_access_key: Optional[str],
    endpoint: Optional[str],
    region_name: Optional[str],
    signature_version: Optional[str],
    anonymous: bool,
) -> S3Access:
    """For the functions that look into no configuration file: arguments, else the AWS chain, at the given endpoint."""
    settings = S3Settings(
        access_key_id=access_key_id,
        secret_access_key=secret_access_key,
        region_name=region_name,
        signature_version=signature_version,
    )
    if endpoint and "://" not in endpoint:
        endpoint = "https://" + endpoint
    return access_at(settings, endpoint or None, anonymous)


# -- reading -----------------------------------------------------------------------------------------------------------


def _s3_download_url(
    path_uri: str,
    s3_access_key_id: Optional[str],
    s3_secret_access_key: Optional[str],
    s3_endpoint: Optional[str] = stream_io.default_s3_read_endpoint,
    s3_region_name: Optional[str] = None,
    s3_signature_version: Optional[str] = None,
) -> str:
    """A presigned URL of an object, good for 24 to 48 hours; plain where there are no credentials."""
    parse_s3_uri(path_uri)
    access = _explicit_access(
        s3_access_key_id, s3_secret_access_key, s3_endpoint, s3_region_name, s3_signature_version, anonymous=True
    )
    return _presigned(access, path_uri)


def s3_download(
    path_uri: str,
    s3_access_key_id: Optional[str],
    s3_secret_access_key: Optional[str],
    s3_endpoint: Optional[str] = stream_io.default_s3_read_endpoint,
    s3_region_name: Optional[str] = None,
    s3_signature_version: Optional[str] = None,
    buffer_size: Optional[int] = None,
    begin: Optional[int] = None,
    end: Optional[int] = None,
    certificate_handling: Optional[CAInfo] = None,
) -> CURLStreamFile:
    """Opens an object with exactly these credentials at exactly this endpoint; no configuration file is read.

    Raises:
        ValueError: Not an S3 URI.
        OSError: It cannot be opened.
    """
    parse_s3_uri(path_uri)
    access = _explicit_access(
        s3_access_key_id, s3_secret_access_key, s3_endpoint, s3_region_name, s3_signature_version, anonymous=True
    )
    return _open_presigned(access, path_uri, begin, end, buffer_size, certificate_handling, None)


def _open_presigned(
    access: S3Access,
    uri: str,
    begin: Optional[int],
    end: Optional[int],
    buffer_size: Optional[int],
    certificate_handling: Optional[CAInfo],
    http_options: Optional[HTTPOptions],
) -> CURLStreamFile:
    lifetime = _CHANGING_SECONDS if access.refreshes else max(60.0, _url_seconds() - _RENEW_SECONDS)
    return CURLStreamFile(
        _read_url(access, uri),
        begin=begin,
        end=end,
        buffer_size=buffer_size,
        certificate_handling=certificate_handling,
        http_options=http_options,
        url_provider=lambda: _read_url(access, uri),
        url_lifetime=lifetime,
        display_name=access.describe(parse_s3_uri(uri)),
    )


def _settings(
    s3_access_key_id: Optional[str] = None,
    s3_secret_access_key: Optional[str] = None,
    s3_endpoint: Optional[str] = None,
    s3_config_path: Optional[PathArgument] = None,
    force_http: Optional[bool] = None,
    s3_region_name: Optional[str] = None,
    s3_signature_version: Optional[str] = None,
    s3_session_token: Optional[str] = None,
    s3_profile: Optional[str] = None,
    s3_client_factory: Optional[Callable[..., Any]] = None,
) -> S3Settings:
    return S3Settings(
        s3_access_key_id,
        s3_secret_access_key,
        s3_endpoint,
        s3_config_path,
        force_http,
        s3_region_name,
        s3_signature_version,
        s3_session_token,
        s3_profile,
        s3_client_factory,
    )


def open_read(
    uri: str,
    *,
    begin: Optional[int] = None,
    end: Optional[int] = None,
    buffer_size: Optional[int] = None,
    certificate_handling: Optional[CAInfo] = None,
    http_options: Optional[HTTPOptions] = None,
    **settings: Any,
) -> CURLStreamFile:
    """Opens an object for reading; arguments as for :func:`tensorizer.stream_io.open_stream`.

    Raises:
        ValueError: Not an S3 URI, a bad range, plain HTTP that nobody asked for.
        botocore.exceptions.BotoCoreError: Half of the credentials, an unknown profile, an empty key.
        OSError: It cannot be opened.
    """
    parse_s3_uri(uri)
    access = resolve(_settings(**settings), stream_io.default_s3_read_endpoint, certificate_handling, anonymous=True)
    replaced = stream_io.s3_download
    if replaced is not s3_download:
        stream = replaced(uri, *access.arguments, buffer_size, begin, end, certificate_handling)
        return cast(CURLStreamFile, stream)
    return _open_presigned(access, uri, begin, end, buffer_size, certificate_handling, http_options)


# -- writing -----------------------------------------------------------------------------------------------------------


def s3_upload(
    path: str,
    target_uri: str,
    s3_access_key_id: Optional[str],
    s3_secret_access_key: Optional[str],
    s3_endpoint: Optional[str] = stream_io.default_s3_write_endpoint,
    s3_region_name: Optional[str] = None,
    s3_signature_version: Optional[str] = None,
) -> None:
    """Uploads a local file with exactly these credentials to exactly this endpoint.

    Raises:
        ValueError: Not an S3 URI.
        Exception: What boto3 raises.
    """
    parse_s3_uri(target_uri)
    access = _explicit_access(
        s3_access_key_id, s3_secret_access_key, s3_endpoint, s3_region_name, s3_signature_version, anonymous=False
    )
    _upload_file(access, path, target_uri, with_threads=True)


def _upload_file(access: S3Access, path: str, uri: str, with_threads: bool) -> None:
    from boto3.s3.transfer import TransferConfig

    location = parse_s3_uri(uri)
    access.client.upload_file(path, location.bucket, location.key, Config=TransferConfig(use_threads=with_threads))


def open_write(
    uri: str,
    mode: str = "wb",
    *,
    certificate_handling: Optional[CAInfo] = None,
    http_options: Optional[HTTPOptions] = None,
    **settings: Any,
) -> BinaryIO:
    """A temporary file that is uploaded when it is closed; see :class:`UploadOnClose`.

    Every mode begins with an empty file. Credentials are used at the upload, not before. ``certificate_handling`` and
    ``http_options`` are about reads; the upload follows boto3's own settings.

    Raises:
        ValueError: Not an S3 URI, plain HTTP that nobody asked for.
        botocore.exceptions.BotoCoreError: Half of the credentials, an unknown profile.
    """
    parse_s3_uri(uri)
    access = resolve(_settings(**settings), stream_io.default_s3_write_endpoint)

    def upload(path: str, with_threads: bool) -> None:
        replaced = stream_io.s3_upload
        if replaced is not s3_upload:
            replaced(path, uri, *access.arguments)
        else:
            _upload_file(access, path, uri, with_threads)

    return cast(BinaryIO, UploadOnClose(upload, uri))


def open_sink(
    uri: str,
    *,
    certificate_handling: Optional[CAInfo] = None,
    http_options: Optional[HTTPOptions] = None,
    memory_budget: Optional[int] = None,
    buffer_size: Optional[int] = None,
    begin: Optional[int] = None,
    end: Optional[int] = None,
    **settings: Any,
) -> _C.MultipartSink:
    """A sink for :class:`tensorizer.TensorSerializer`: a multipart upload without a temporary file.

    Args:
        uri: ``s3://bucket/key``.
        certificate_handling: Whom to trust.
        http_options: Timeouts, retries and connections of the transfers.
        memory_budget: Bytes of parts that wait or are on their way, at most; ``None`` for ten parts, of 16 MiB each
            for objects up to 4 GiB and growing to 64 MiB. The first part is kept besides.
        buffer_size: Ignored, as are ``begin`` and ``end``: they are about reads.
        begin: Ignored.
        end: Ignored.
        **settings: The S3 arguments of :func:`tensorizer.stream_io.open_stream`.

    Raises:
        ValueError: Not an S3 URI, plain HTTP that nobody asked for, a bad budget.
        botocore.exceptions.BotoCoreError: Half of the credentials, an unknown profile.
    """
    from tensorizer._io.s3.upload import open_multipart_sink

    location = parse_s3_uri(uri)
    access = resolve(_settings(**settings), stream_io.default_s3_write_endpoint, certificate_handling)
    return open_multipart_sink(access, location, http_options or HTTPOptions(), certificate_handling, memory_budget)
