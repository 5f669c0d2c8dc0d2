"""Object stores that speak S3: opening objects for reading and writing, listing and deleting them.

boto3 decides (credentials, region, signatures, beginning and end of uploads), libcurl moves the bytes: reads are ranged
GETs of presigned URLs that are renewed before they expire, writes are PUTs of parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO, Optional, Union, cast

from tensorizer._io.call_options import CallOptions
from tensorizer._io.http import CURLStreamFile
from tensorizer._io.http_options import CAInfo
from tensorizer._io.s3.access import (
    READ_ENDPOINT,
    WRITE_ENDPOINT,
    S3Access,
    S3Location,
    S3Options,
    SignedRead,
    check_names,
    explicit_access,
    named_endpoint,
    parse_s3_uri,
    store_of,
)
from tensorizer._io.s3.client import NO_CREDENTIALS, s3_code, translated
from tensorizer._io.upload_on_close import UploadOnClose
from tensorizer._io.uri import split_uri
from tensorizer.errors import StreamError

if TYPE_CHECKING:
    from tensorizer import _C
    from tensorizer._io.node_cache import Cache, CachedObject

# -- reading ---------------------------------------------------------------------------------------------------------


def s3_download_url(
    path_uri: str,
    s3_access_key_id: Optional[str],
    s3_secret_access_key: Optional[str],
    s3_endpoint: Optional[str] = READ_ENDPOINT,
    s3_region_name: Optional[str] = None,
    s3_signature_version: Optional[str] = None,
) -> str:
    """A presigned URL of an object, good for 24 to 48 hours; plain where there are no credentials."""
    location = parse_s3_uri(path_uri)
    keys = s3_access_key_id, s3_secret_access_key
    access = explicit_access(location, *keys, s3_endpoint, s3_region_name, s3_signature_version, write=False)
    return access.signed(location, {}).url


def s3_download(
    path_uri: str,
    s3_access_key_id: Optional[str],
    s3_secret_access_key: Optional[str],
    s3_endpoint: Optional[str] = READ_ENDPOINT,
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
    location = parse_s3_uri(path_uri)
    keys = s3_access_key_id, s3_secret_access_key
    access = explicit_access(
        location, *keys, s3_endpoint, s3_region_name, s3_signature_version, certificate_handling, write=False
    )
    return _open_signed(access, location, S3Options(), access.signed(location, {}), begin, end, buffer_size)


def _open_signed(
    access: S3Access,
    location: S3Location,
    options: S3Options,
    first: SignedRead,
    begin: Optional[int],
    end: Optional[int],
    buffer_size: Optional[int],
    cached: Optional[CachedObject] = None,
) -> CURLStreamFile:
    settings = access.reads_with(first.headers) if first.headers else access.reads
    try:
        return CURLStreamFile._opened(
            first.url,
            settings,
            begin=begin,
            end=end,
            buffer_size=buffer_size,
            url_provider=lambda: access.signed(location, options.extra("get")).url,  # with the same headers
            url_lifetime=first.seconds,
            display_name=first.name,
            cached=cached,
        )
    except StreamError as error:  # of a request without a signature, which the caller did not ask for
        if access.source == "anonymous" and options.access_key_id != "" and error.status in (400, 401, 403):
            error.args = (f"{error}; {NO_CREDENTIALS}",)
        raise


def open_read(uri: str, call: CallOptions, cache: Optional[Cache] = None) -> Union[CURLStreamFile, BinaryIO]:
    """Opens an object for reading, as :func:`tensorizer.stream_io.open_stream` says.

    Raises:
        ValueError: Not an S3 URI, a bad range, plain HTTP that the caller did not ask for, unknown ``s3_extra_args``.
        botocore.exceptions.BotoCoreError: Half of the credentials, an unknown profile, an empty key.
        OSError: It cannot be opened.
    """
    location = parse_s3_uri(uri)
    cached = None if cache is None else _cached(cache, location, S3Options.of(call.stream))
    if cached is not None and cached.cache.offline:
        return cast(BinaryIO, cached.open_offline())
    options, access = store_of(location, call, write=False)
    stream, extra = call.stream, options.extra("get")
    if extra:
        check_names(access.client, "get", extra)
    first = access.signed(location, extra)
    return _open_signed(access, location, options, first, stream.begin, stream.end, stream.buffer_size, cached)


def _cached(cache: Cache, location: S3Location, options: S3Options) -> Optional[CachedObject]:
    """The object in the cache; ``None`` where it is not to be kept."""
    from tensorizer._io.node_cache import CachedObject

    # Without credentials: offline, nothing is asked for them.
    endpoint = named_endpoint(options)
    host = "default" if endpoint is None else split_uri(endpoint).authority.rpartition("@")[2].lower()
    version = f"?versionId={location.version}" if location.version else ""
    found = CachedObject(cache, f"s3://{host}/{location.bucket}/{location.key}{version}", location.version)
    if any(name.startswith("SSECustomer") for name in options.extra("get")):
        found.leave("the store keeps it encrypted with a key of the caller")
        return None
    if options.extra("get").get("VersionId") not in (None, location.version):
        found.leave("s3_extra_args name a version; name it in the URI")
        return None
    return found


# -- writing ---------------------------------------------------------------------------------------------------------


def s3_upload(
    path: str,
    target_uri: str,
    s3_access_key_id: Optional[str],
    s3_secret_access_key: Optional[str],
    s3_endpoint: Optional[str] = WRITE_ENDPOINT,
    s3_region_name: Optional[str] = None,
    s3_signature_version: Optional[str] = None,
) -> None:
    """Uploads a local file with exactly these credentials to exactly this endpoint.

    Raises:
        ValueError: Not an S3 URI.
        Exception: What boto3 raises.
    """
    location = _parse_target(target_uri)
    keys = s3_access_key_id, s3_secret_access_key
    access = explicit_access(location, *keys, s3_endpoint, s3_region_name, s3_signature_version, write=True)
    _upload_file(access, path, location, {}, with_threads=True)


def _parse_target(uri: str) -> S3Location:
    location = parse_s3_uri(uri)
    if location.version is not None:
        raise ValueError(f"{location}: a version of an object cannot be written, it is the store that numbers them")
    return location


def _upload_file(
    access: S3Access, path: str, location: S3Location, extra: Mapping[str, Any], with_threads: bool
) -> None:
    from boto3.s3.transfer import TransferConfig
    from botocore.exceptions import NoCredentialsError

    config = TransferConfig(use_threads=with_threads)
    try:
        access.client.upload_file(path, location.bucket, location.key, ExtraArgs=dict(extra), Config=config)
    except (NoCredentialsError, StreamError) as error:
        raise translated(error, "write", access.describe(location)) from error


def open_write(uri: str, call: CallOptions) -> BinaryIO:
    """A stream whose content becomes the object when it is closed; see :class:`UploadOnClose`.

    It begins empty. Credentials are used at the upload, not before. What is written by hand goes to a
    temporary file, which boto3 uploads; a serializer writes the parts of an upload instead, without a file.

    Raises:
        ValueError: Not an S3 URI, one of a version, plain HTTP without permission, unknown ``s3_extra_args``.
        botocore.exceptions.BotoCoreError: Half of the credentials, an unknown profile.
    """
    location = _parse_target(uri)
    options, access = store_of(location, call, write=True)
    extra = options.extra("put")
    if extra:  # without any, the client is made at the upload
        check_names(access.client, "put", extra)

    import boto3.s3.transfer  # noqa: F401 - now: at the end of the interpreter its imports fail

    def upload(path: str, with_threads: bool) -> None:
        _upload_file(access, path, location, extra, with_threads)

    def open_sink() -> _C.MultipartSink:
        from tensorizer._io.s3.upload import open_multipart_sink

        return open_multipart_sink(access, location, options)

    return cast(BinaryIO, UploadOnClose(upload, str(location), open_sink))


# -- listing and deleting --------------------------------------------------------------------------------------------

# Requests at the same time. One request for many objects is not known to every store.
_DELETIONS = 8


class S3Prefix:
    """A prefix, as if it were a folder: objects further down are not part of it.

    Raises:
        ValueError: Not an S3 URI.
    """

    def __init__(self, uri: str, call: CallOptions) -> None:
        location = parse_s3_uri(uri + "/_")  # URIs name objects; a slash at the end is part of their names
        self._bucket = location.bucket
        self._prefix = location.key[:-1]
        _, self._access = store_of(location, call, write=True)
        self._name = self._access.describe(location)

    def names(self) -> list[str]:
        """The names behind the prefix.

        Raises:
            OSError: The store refused, or did not answer.
        """
        pages = self._access.client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix, Delimiter="/"
        )
        begin = len(self._prefix)
        found: list[str] = self._ask(
            "list", lambda: [item["Key"][begin:] for page in pages for item in page.get("Contents", ())]
        )
        return found

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects; those that are gone already are no error. Raises as :meth:`names`."""
        if not names:
            return
        client = self._access.client  # made here: making clients is not safe from threads, using them is

        def delete(name: str) -> None:
            try:
                client.delete_object(Bucket=self._bucket, Key=self._prefix + name)
            except Exception as error:
                if s3_code(error) not in ("404", "NoSuchKey"):
                    raise

        with ThreadPoolExecutor(min(_DELETIONS, len(names)), "tensorizer-delete") as threads:
            list(threads.map(lambda name: self._ask("delete", lambda: delete(name)), names))

    def _ask(self, operation: str, request: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        try:
            return request()
        except (BotoCoreError, ClientError, ResponseParserError, StreamError) as error:
            raise translated(error, operation, self._name) from error
