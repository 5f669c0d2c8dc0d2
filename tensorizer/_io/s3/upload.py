"""The control side of a multipart upload. The bytes are moved by ``_C.MultipartSink``, which calls the methods here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Optional

from tensorizer import _C
from tensorizer._io.s3.access import S3Access, S3Location, explain
from tensorizer.errors import StreamError, StreamNotFoundError

if TYPE_CHECKING:
    from tensorizer._io.options import CAInfo, HTTPOptions

__all__ = ["S3Upload", "open_multipart_sink"]

logger = logging.getLogger("tensorizer.s3")

DEFAULT_UPLOADS = 8
MIN_PART_NBYTES = 16 << 20
MAX_PART_NBYTES = 64 << 20
URL_SECONDS = 6 * 3600  # each try of each part gets a fresh URL; this bounds one request


class S3Upload:
    """One object on its way. Called from upload threads, by several at once for :meth:`part_url`."""

    def __init__(self, access: S3Access, location: S3Location) -> None:
        self._client = access.client
        self._target = {"Bucket": location.bucket, "Key": location.key}
        self._upload_id: Optional[str] = None
        self.name = access.describe(location)

    def create(self) -> None:
        """Begins the upload."""
        self._upload_id = self._call("begin", self._client.create_multipart_upload, **self._target)["UploadId"]

    def part_url(self, number: int) -> str:
        """A URL that one part is sent to, good for a while."""
        return self._presign("upload_part", PartNumber=number, UploadId=self._upload_id)

    def object_url(self) -> str:
        """A URL that the whole object is sent to, in place of an upload in parts."""
        return self._presign("put_object")

    def complete(self, etags: list[str]) -> None:
        """Makes the object of its parts.

        Raises:
            StreamError: The store refused, or did not answer.
        """
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        whole = {"UploadId": self._upload_id, "MultipartUpload": {"Parts": parts}}
        try:
            self._call("complete", self._client.complete_multipart_upload, **self._target, **whole)
        except StreamError as error:
            # A repeated request whose first answer was lost finds no upload any more, and the object in its place.
            if _code(error.__cause__) != "NoSuchUpload" or not self._is_complete(len(etags)):
                raise

    def _is_complete(self, parts: int) -> bool:
        try:
            etag = str(self._client.head_object(**self._target)["ETag"])
        except Exception:
            return False
        return etag.strip('"').endswith(f"-{parts}")

    def abort(self) -> None:
        """Ends the upload and frees its parts. Does not raise: something else has failed already."""
        try:
            self._client.abort_multipart_upload(**self._target, UploadId=self._upload_id)
        except Exception as error:
            if _code(error) != "NoSuchUpload":
                logger.warning("%s", explain(error, "abort the upload of", self.name))

    def _presign(self, method: str, **params: Any) -> str:
        url: str = self._client.generate_presigned_url(method, Params={**self._target, **params}, ExpiresIn=URL_SECONDS)
        return url

    def _call(self, operation: str, method: Any, **params: Any) -> Any:
        from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

        try:
            return method(**params)
        except (ClientError, ConnectionError, HTTPClientError) as error:  # missing credentials stay what they are
            raise _translated(error, f"{operation} the upload of", self.name) from error


def _code(error: Any) -> str:
    """The S3 error code of a botocore error; empty where there is none."""
    return str((getattr(error, "response", None) or {}).get("Error", {}).get("Code", ""))


def _translated(error: Any, operation: str, name: str) -> StreamError:
    status = (getattr(error, "response", None) or {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
    kind = StreamNotFoundError if status == 404 else StreamError
    result = kind(explain(error, operation, name))
    result.source = name
    return result


def open_multipart_sink(
    access: S3Access,
    location: S3Location,
    http_options: HTTPOptions,
    certificate_handling: Optional[CAInfo],
    memory_budget: Optional[int],
) -> _C.MultipartSink:
    """A sink whose object appears when it is finished; given up at the latest when the interpreter ends."""
    if memory_budget is not None and memory_budget < 1:
        raise ValueError(f"memory_budget: wanted a number of bytes above 0, found {memory_budget}")
    upload = S3Upload(access, location)
    return _C.MultipartSink(
        upload,
        upload.name,
        http_options._native(None, certificate_handling),
        uploads=min(http_options.connections or DEFAULT_UPLOADS, http_options.max_connections),
        budget_nbytes=memory_budget or 0,
        min_part_nbytes=MIN_PART_NBYTES,
        max_part_nbytes=MAX_PART_NBYTES,
    )
