"""A small object store on loopback that records its requests and checks their signatures as botocore computes them.

It has features that the real store of ``s3_server.py`` lacks: checksums, sessions, versions, errors on demand.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ssl
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Optional
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from . import Server, serving

__all__ = ["RecordedRequest", "S3Recorder"]

NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
OWN_QUERY = ("X-Amz-Signature",)


class RecordedRequest(NamedTuple):
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def operation(self) -> str:
        """The call of the S3 interface."""
        if "session" in self.query:
            return "CreateSession"
        if "uploads" in self.query:
            return "CreateMultipartUpload"
        if "uploadId" in self.query:
            names = {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}
            return names[self.method]
        if "list-type" in self.query:
            return "ListObjectsV2"
        return {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}[self.method]


class S3Recorder(Server):
    """Answers and keeps every request. It also works as a proxy, because it ignores the hosts in requests.

    Args:
        tls: A server-side context for HTTPS.

    Attributes:
        requests: The requests, in order.
        objects: Content of the objects, by path.
        open_uploads: Parts of unfinished uploads, by id.
        whole_etags: ETags of objects that were uploaded in parts, by path.
        refuse: Maps an operation to the status and code with which its requests with a checksum are answered.
        refuse_all: The same for all requests of the operation.
        fail_once: The same for the next request of the operation.
        lose_answer_once: Operations whose next request is executed, but answered with status 500.
        knows_conditions: Whether conditional writes are supported; if not, they are answered with status 501.
        echoes_checksums: Whether the answer to a new upload announces that parts are compared.
        hold_parts: The first answer to a part waits until so many parts are on their way (30 s at most).
        most_parts: The highest number of parts that were on their way at the same time.
        hold_reads: The same as `hold_parts`, for reads of ``.tensors`` objects.
        most_reads: The same as `most_parts`, for reads of ``.tensors`` objects.
        bad_signatures: Paths of presigned requests whose signature differs from botocore's.
    """

    access_key, secret_key = "AKIDRECORDER", "recorder/secret"
    session_key, session_secret, session_token = "AKIDSESSION", "session/secret", "session-token"

    def __init__(self, tls: Optional[ssl.SSLContext] = None) -> None:
        self.requests: list[RecordedRequest] = []
        self.objects: dict[str, bytes] = {}
        self.open_uploads: dict[str, dict[int, bytes]] = {}
        self.whole_etags: dict[str, str] = {}
        self._tagged: dict[str, tuple[bytes, str]] = {}  # objects in one part, and their ETags
        self.refuse: dict[str, tuple[int, str]] = {}
        self.refuse_all: dict[str, tuple[int, str]] = {}
        self.fail_once: dict[str, tuple[int, str]] = {}
        self.lose_answer_once: set[str] = set()
        self.knows_conditions = True
        self.echoes_checksums = True
        self.hold_parts = 0
        self.most_parts = self._running = 0
        self.hold_reads = self.most_reads = self._reading = 0
        self.bad_signatures: list[str] = []
        self._changed = threading.Condition()
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                recorder._handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *args: Any) -> None:
                pass  # clients that give up

        self._server = Server(("127.0.0.1", 0), Handler)
        self._served = contextlib.ExitStack()
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords for ``open_stream`` and friends."""
        return {
            "s3_access_key_id": self.access_key,
            "s3_secret_access_key": self.secret_key,
            "s3_endpoint": self.endpoint,
            "force_http": self.endpoint.startswith("http:"),
        }

    def of(self, operation: str) -> list[RecordedRequest]:
        """All requests of one operation."""
        return [request for request in self.requests if request.operation == operation]

    # -- answers -----------------------------------------------------------------------------------------------------

    def _handle(self, handler: Any) -> None:
        parts = urlsplit(handler.path)
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        request = RecordedRequest(
            handler.command,
            unquote(parts.path),
            dict(parse_qsl(parts.query, keep_blank_values=True)),
            {name.lower(): value for name, value in handler.headers.items()},
            body,
        )
        with self._changed:
            self.requests.append(request)
        if "X-Amz-Signature" in request.query and not self._is_signed(request, handler.path):
            self.bad_signatures.append(request.path)
        status, fields, answer = self._answer(request)
        handler.send_response(status)
        for name, value in fields.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        if request.method != "HEAD":
            handler.wfile.write(answer)

    def _answer(self, request: RecordedRequest) -> tuple[int, dict[str, str], bytes]:
        name = request.operation
        with_checksum = any(field.startswith(("x-amz-checksum-", "x-amz-sdk-checksum")) for field in request.headers)
        if name in self.fail_once:
            return self._error(*self.fail_once.pop(name))
        if name in self.refuse_all:
            return self._error(*self.refuse_all[name])
        if with_checksum and name in self.refuse:
            return self._error(*self.refuse[name])
        given = request.headers.get("x-amz-checksum-crc32")
        if given is not None and given != base64.b64encode(zlib.crc32(request.body).to_bytes(4, "big")).decode():
            return self._error(400, "BadDigest")
        refusal = self._unmet_condition(request) if request.method in ("PUT", "POST") else None
        if refusal is not None:
            return self._error(*refusal)
        answer = getattr(self, f"_{name}")(request)
        if name in self.lose_answer_once:
            self.lose_answer_once.remove(name)
            return self._error(500, "InternalError")
        return answer

    def _unmet_condition(self, request: RecordedRequest) -> Optional[tuple[int, str]]:
        wanted, new_only = request.headers.get("if-match"), request.headers.get("if-none-match")
        if wanted is None and new_only is None:
            return None
        if not self.knows_conditions:
            return 501, "NotImplemented"
        with self._changed:
            found = self.objects.get(request.path)
        if new_only is not None:
            return None if found is None else (412, "PreconditionFailed")
        if found is None:
            return 404, "NoSuchKey"
        return None if wanted == self._etag_of(request.path) else (412, "PreconditionFailed")

    def _error(self, status: int, code: str) -> tuple[int, dict[str, str], bytes]:
        return status, {}, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()

    def _CreateSession(self, request: RecordedRequest) -> tuple[int, dict[str, str], bytes]:
        secret = (
            f"<CreateSessionResult {NAMESPACE}><Credentials><AccessKeyId>{self.session_key}</AccessKeyId>"
            f"<SecretAccessKey>{self.session_secret}</SecretAccessKey><SessionToken>{self.session_token}</SessionToken>"
            "<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"
        )
        return 200, {}, secret.encode()

    def _CreateMultipartUpload(self, request: RecordedRequest) -> tuple[int, dict[str, str], bytes]:
        with self._changed:
            number = f"upload{len(self.requests)}"
            self.open_uploads[number] = {}
        algorithm = request.headers.get("x-amz-checksum-algorithm")
        fields = {"x-amz-checksum-algorithm": algorithm} if algorithm and self.echoes_checksums else {}
        result = f"<InitiateMultipartUploadResult {NAMESPACE}><UploadId>{number}</UploadId>"
        return 200, fields, (result + "</InitiateMultipartUploadResult>").encode()

    def _UploadPart(self, request: RecordedRequest) -> tuple[int, dict[str, str], bytes]:
        with self._changed:
            self._running += 1
            self.most_parts = max(self.most_parts, self._running)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most_parts >= self.hold_parts, timeout=30)
            self._running -= 1
            upload = self.open_uploads.get(request.query["uploadId"])
            if upload is None:
                return self._error(404, "NoSuchUpload")
            upload[int(request.query["partNumber"])] = request.body
        return 200, {"ETag": self._etag(request.body)}, b""

    def _CompleteMultipartUpload(self, request: RecordedRequest) -> tuple[int, dict[str, str], bytes]:
        upload = self.open_uploads.pop(request.query["uploadId"], None)
        if upload is None:
            return self._error(404, "NoSuchUpload")
        parts = [upload[number] for number in sorted(upload)]
        digests = b"".join(hashlib.md5(part, usedforsecurity=False).digest() for part in parts)
        self.objects[request.path] = b"".join(parts)
        self.whole_etags[request.path] = etag = self._etag(digests, f"-{len(parts)}")
        result = f"<CompleteMultipartUploadResult {NAMESPACE}><ETag>{etag}</ETag>"
        return 200, {}, (result + "</CompleteMultipartUploadResult>").encode()

    def _AbortMultipartUpload(self, request: RecordedRequest) -> tuple[int, dict[str, str], bytes]:
        self.open_uploads.pop(request.query["uploadId"], None)
        return 204, {}, b""

    def _PutObject(self, request: RecordedRequest) -> tuple[int, dict[str, str], bytes]:
        with self._changed:
            self.whole_etags.pop(request.path, None)
            self.objects[request.path] = request.body
        return 200, {"ETag": self._etag(request.body)}, b""

    def _DeleteObject(self, request: RecordedRequest) -> tuple[int, dict[str, str], bytes]:
        with self._changed:
            self.objects.pop(request.path, None)
        return 204, {}, b""

    def _ListObjectsV2(self, request: RecordedRequest) -> tuple[int, dict[str, str], bytes]:
        begin = f"{request.path.rstrip('/')}/"
        with self._changed:
            keys = [path[len(begin) :] for path in sorted(self.objects) if path.startswith(begin)]
        prefix = request.query["prefix"]
        keys = [key for key in keys if key.startswith(prefix) and "/" not in key[len(prefix) :]]
        text = "".join(f"<Contents><Key>{escape(key)}</Key><Size>1</Size></Contents>" for key in keys)
        listed = f"<ListBucketResult {NAMESPACE}><IsTruncated>false</IsTruncated>{text}</ListBucketResult>"
        return 200, {}, listed.encode()

    def _HeadObject(self, request: RecordedRequest) -> tuple[int, dict[str, str], bytes]:
        etag = self.whole_etags.get(request.path)
        return (200, {"ETag": etag}, b"") if etag else (404, {}, b"")

    def _GetObject(self, request: RecordedRequest) -> tuple[int, dict[str, str], bytes]:
        if request.path.endswith(".tensors"):
            with self._changed:
                self._reading += 1
                self.most_reads = max(self.most_reads, self._reading)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.most_reads >= self.hold_reads, timeout=30)
                self._reading -= 1
        data = self.objects.get(request.path)
        if data is None:
            return self._error(404, "NoSuchKey")
        fields = {"ETag": self._etag_of(request.path)}
        if request.headers.get("if-none-match") == fields["ETag"]:
            return 304, fields, b""
        asked = request.headers.get("range")
        if asked is None:
            return 200, fields, data
        first, _, last = asked.partition("=")[2].partition("-")
        end = min(int(last) + 1 if last else len(data), len(data))
        fields["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
        return 206, fields, data[int(first) : end]

    def _etag_of(self, path: str) -> str:
        if path in self.whole_etags:
            return self.whole_etags[path]
        data = self.objects[path]
        tagged, etag = self._tagged.get(path, (None, ""))
        if tagged is not data:
            etag = self._etag(data)
            self._tagged[path] = data, etag
        return etag

    def _etag(self, data: bytes, ending: str = "") -> str:
        return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}{ending}"'

    # -- signatures --------------------------------------------------------------------------------------------------

    def _is_signed(self, request: RecordedRequest, target: str) -> bool:
        """Whether the signature in the URL is the one that botocore computes for these headers."""
        from botocore.auth import S3SigV4QueryAuth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        access_key, _, region, service, _ = request.query["X-Amz-Credential"].split("/")
        secret = {self.access_key: self.secret_key, self.session_key: self.session_secret}.get(access_key, "")
        auth = S3SigV4QueryAuth(Credentials(access_key, secret), service, region)
        base, _, query = target.partition("?")
        kept = "&".join(field for field in query.split("&") if field.partition("=")[0] not in OWN_QUERY)
        signed = request.query["X-Amz-SignedHeaders"].split(";")
        if any(name not in request.headers for name in signed):
            return False
        again = AWSRequest(
            request.method, f"{self.endpoint}{base}?{kept}", headers={name: request.headers[name] for name in signed}
        )
        again.context["timestamp"] = request.query["X-Amz-Date"]
        text = auth.string_to_sign(again, auth.canonical_request(again))
        return bool(auth.signature(text, again) == request.query["X-Amz-Signature"])

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._served.enter_context(serving(self._server))

    def stop(self) -> None:
        self._served.close()
