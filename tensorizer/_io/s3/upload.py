"""The control side of a multipart upload. The bytes are moved by ``_C.MultipartSink``, which calls the methods here."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from tensorizer import _C
from tensorizer._io.http_options import HTTPOptions, most_connections
from tensorizer._io.s3.access import S3Access, S3Location, S3Options, params_of, presign
from tensorizer._io.s3.client import explain, s3_code, translated
from tensorizer._system import locks
from tensorizer.errors import StreamError

logger = logging.getLogger("tensorizer.s3")

DEFAULT_UPLOADS = 8
MIN_PART_NBYTES = 16 << 20
MAX_PART_NBYTES = 64 << 20
ABORT_SECONDS = 5
URL_SECONDS = 6 * 3600  # each try of each part gets a fresh URL; this bounds one request

# How stores say that they know nothing of checksums. Others say what they like, so every refusal is worth a try without
# them, except those with these statuses and codes, which are about something else.
_UNSUPPORTED = frozenset({"NotImplemented", "InvalidArgument", "InvalidRequest", "MalformedXML", "NotSupported"})
_OTHER_STATUSES = frozenset({404, 407, 408, 409, 412, 429})
_OTHER_CODES = frozenset({"BadDigest", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "RequestTimeTooSkewed"})
_without_checksums: set[str] = set()  # hosts that said so


class S3Upload:
    """One object on its way. Called from upload threads, by several at once for :meth:`request` and :meth:`adapt`.

    Each part goes with its CRC-32, signed, so that a store that knows checksums refuses parts that were altered on the
    way. If a store refuses one with a checksum, the request is tried without. A store that takes it then, or answers
    that it knows none, gets none from then on, unless the user's AWS settings insist.
    """

    def __init__(self, access: S3Access, location: S3Location, extra: Mapping[str, Any]) -> None:
        self._client = access.client
        self._host = access.host
        self._target = location.params
        self._extra = extra
        self._upload_id: Optional[str] = None
        self._insists = access.checksums == "when_supported"
        self._adds_checksums = access.checksums != "when_required" and (
            self._insists or self._host not in _without_checksums
        )
        self._lock = threading.Lock()
        locks.makers[self] = threading.Lock
        self._checksums: dict[int, str] = {}  # of the parts that were sent with one
        self._refusal: Optional[str] = None  # of one that was refused with one
        self._store_compares = False  # the upload as a whole has checksums
        self.name = access.describe(location)

    def create(self) -> None:
        """Begins the upload."""
        try:
            answer = self._create()
        except StreamError as error:
            if not self._gives_checksums_up(error.status or 0, s3_code(error.__cause__)):
                raise
            answer = self._create_without(error)
        self._upload_id = answer["UploadId"]
        self._store_compares = bool(answer.get("ChecksumAlgorithm"))

    def _create_without(self, refusal: StreamError) -> Any:
        try:
            answer = self._create()
        except StreamError as error:
            error.args = (f"{error}; with checksums (CRC-32) it was refused as well: {_reason_of(refusal)}",)
            raise
        self._note_that_none_are_taken()
        return answer

    def _create(self) -> Any:
        params = {"ChecksumAlgorithm": "CRC32"} if self._adds_checksums else {}
        return self._call("begin", "create_multipart_upload", **params)

    def request(self, number: int, crc32: int) -> tuple[str, list[tuple[str, str]]]:
        """URL and headers of the next try to send part ``number``, or, for 0, the whole object."""
        method = "upload_part" if number else "put_object"
        params = self._params(method)
        if number:
            params.update(PartNumber=number, UploadId=self._upload_id)
        with self._lock:
            self._checksums.pop(number, None)
            if self._adds_checksums:
                self._checksums[number] = params["ChecksumCRC32"] = base64.b64encode(crc32.to_bytes(4, "big")).decode()
        with self._translated("continue"):
            signed = presign(self._client, method, params, URL_SECONDS)
        return signed.url, list(signed.headers.items())

    def adapt(self, number: int, status: int, reason: str) -> bool:
        """Whether another try of a part that was refused may do better: without its checksum.

        Raises:
            StreamError: That was the other try.
        """
        found = re.search(r"\[(\w+)\]", reason)
        code = found.group(1) if found else ""
        with self._lock:
            was_sent, refusal = number in self._checksums, self._refusal
        if was_sent and self._gives_checksums_up(status, code):
            with self._lock:
                self._refusal = reason
            if code in _UNSUPPORTED or status == 501:
                self._note_that_none_are_taken()
            return True
        if was_sent or refusal is None:
            return False
        error = StreamError(
            f"Failed to write {self.name}: {reason}; with a checksum (CRC-32) it was refused as well: {refusal}"
        )
        error.source, error.status = self.name, status
        raise error

    def _gives_checksums_up(self, status: int, code: str) -> bool:
        """Whether a refusal is worth a try without checksums, which later requests of this upload then do without."""
        may_be_meant = (400 <= status < 500 and status not in _OTHER_STATUSES) or status == 501
        with self._lock:
            if self._insists or not may_be_meant or code in _OTHER_CODES:
                return False
            self._adds_checksums = False
            return True

    def _note_that_none_are_taken(self) -> None:
        """Has later uploads to the store do without checksums."""
        with self._lock:
            if self._host not in _without_checksums:
                _without_checksums.add(self._host)
                logger.info("%s takes no checksums with its parts", self.name)

    def complete(self, etags: list[str]) -> None:
        """Makes the object of its parts.

        Raises:
            StreamError: The store refused, or did not answer.
        """
        parts = [self._part(number, etag) for number, etag in enumerate(etags, 1)]
        whole = {"UploadId": self._upload_id, "MultipartUpload": {"Parts": parts}}
        try:
            self._call("complete", "complete_multipart_upload", **whole)
        except StreamError as error:
            # A repeated request whose first answer was lost finds no upload any more, and the object in its place.
            if s3_code(error.__cause__) != "NoSuchUpload" or not self._is_complete(etags):
                raise
        if self._refusal is not None:  # the store has taken those parts since
            self._note_that_none_are_taken()

    def _part(self, number: int, etag: str) -> dict[str, Any]:
        part = {"PartNumber": number, "ETag": etag}
        checksum = self._checksums.get(number)
        return {**part, "ChecksumCRC32": checksum} if checksum and self._store_compares else part

    def _is_complete(self, etags: list[str]) -> bool:
        """Whether the object has the ETag that follows from those of the parts; an older one may have as many parts."""
        try:
            digests = b"".join(bytes.fromhex(etag.strip('"')) for etag in etags)
            etag = str(self._client.head_object(**self._params("head_object", without_conditions=True))["ETag"])
        except Exception:
            return False
        return etag.strip('"') == f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"

    def abort(self) -> None:
        """Ends the upload and frees its parts. Does not raise: something else has failed already.

        A store that does not answer is waited for a few seconds only, because a user who pressed Ctrl-C waits, too.
        """
        request = threading.Thread(target=self._abort, name="tensorizer-abort", daemon=True)
        try:
            request.start()
        except RuntimeError:  # the interpreter ends
            self._abort()
            return
        request.join(ABORT_SECONDS)
        if request.is_alive():
            logger.warning("%s: the store does not answer, parts of the upload may stay", self.name)

    def _abort(self) -> None:
        try:
            self._client.abort_multipart_upload(**self._params("abort_multipart_upload"), UploadId=self._upload_id)
        except Exception as error:
            if s3_code(error) != "NoSuchUpload":
                logger.warning("%s", explain(error, "abort the upload of", self.name))

    def _params(self, method: str, without_conditions: bool = False) -> dict[str, Any]:
        """The object, and those of the caller's own parameters that belong to the method."""
        extra = params_of(self._client, method, self._extra)
        return {**self._target, **{n: v for n, v in extra.items() if not (without_conditions and n.startswith("If"))}}

    def _call(self, operation: str, method: str, **params: Any) -> Any:
        with self._translated(operation):
            return getattr(self._client, method)(**self._params(method), **params)

    @contextlib.contextmanager
    def _translated(self, operation: str) -> Iterator[None]:
        """Raises errors of botocore as the package's own."""
        from botocore.exceptions import ClientError, ConnectionError, HTTPClientError, NoCredentialsError
        from botocore.parsers import ResponseParserError

        failures = ClientError, ConnectionError, HTTPClientError, NoCredentialsError, ResponseParserError, StreamError
        try:
            yield
        except failures as error:
            raise translated(error, f"{operation} the upload of", self.name) from error


def _reason_of(error: StreamError) -> str:
    """Status and code of a refusal."""
    code = s3_code(error.__cause__)
    return f"status {error.status}" + (f" [{code}]" if code else "")


def open_multipart_sink(access: S3Access, location: S3Location, options: S3Options) -> _C.MultipartSink:
    """A sink whose object appears when it is finished; given up at the latest when the interpreter ends.

    Without ``options.memory_budget`` the parts that wait or are on their way take as many part sizes as there are
    uploads at the same time, and two.
    """
    upload = S3Upload(access, location, options.extra("put"))
    http = options.http_options or HTTPOptions()
    return _C.MultipartSink(
        upload,
        upload.name,
        http._native(None, access.trust_of_parts, secure=access.is_secure),
        uploads=min(http.connections or DEFAULT_UPLOADS, most_connections()),
        budget_nbytes=options.memory_budget or 0,
        min_part_nbytes=MIN_PART_NBYTES,
        max_part_nbytes=MAX_PART_NBYTES,
    )
