"""An HTTP server that misbehaves exactly as a test tells it to.

Every request takes the next :class:`Reply` of ``server.script``, or ``server.default`` once the script is used up, so
a test reads as the sequence of events on the network. The server uses plain sockets and threads: no library repairs a
wrong length or a broken body. All its threads end with :meth:`FaultyServer.close`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Optional, Union

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_REASONS = {200: "OK", 206: "Partial Content", 302: "Found", 404: "Not Found", 412: "Precondition Failed",
            416: "Range Not Satisfiable", 503: "Service Unavailable"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reply:
    """The answer to one request; without arguments, a correct one.

    Attributes:
        status: Send this status and an empty body instead of the content.
        headers: Send these headers, which replace the right ones of the same name; ``None`` leaves one out.
        body: Send this instead of the requested bytes.
        drop: End the connection without an answer.
        reset: End it with a TCP reset, after ``cut_after`` bytes if that is given.
        delay: Wait so many seconds before the answer.
        cut_after: End the connection after so many bytes of the body.
        stall_after: Send nothing more after so many bytes of the body, and keep the connection.
        trickle: Send the bytes of the body one by one, with so many seconds between them.
        surplus: Send these bytes behind the body.
        ignore_range: Answer 200 with everything.
        chunked: Send the body in chunks, without a length.
        no_length: Send no length; the end of the connection ends the body.
        raw: Send exactly this and end the connection.
        http10: Speak HTTP/1.0.
        close: End the connection after the response.
    """

    status: Optional[int] = None
    headers: Mapping[str, Optional[str]] = dataclasses.field(default_factory=dict)
    body: Optional[bytes] = None
    drop: bool = False
    reset: bool = False
    delay: float = 0
    cut_after: Optional[int] = None
    stall_after: Optional[int] = None
    trickle: float = 0
    surplus: bytes = b""
    ignore_range: bool = False
    chunked: bool = False
    no_length: bool = False
    raw: Optional[bytes] = None
    http10: bool = False
    close: bool = False


GOOD = Reply()


@dataclasses.dataclass(frozen=True)
class Request:
    """A request of a client, with header names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    connection: int  # number of its connection, from 0

    @property
    def range(self) -> Optional[tuple[int, Optional[int]]]:
        """The first and the last requested byte."""
        match = _RANGE.fullmatch(self.headers.get("range", ""))
        return (int(match[1]), int(match[2]) if match[2] else None) if match else None


class _ConnectionOver(Exception):
    pass


class FaultyServer:
    """Serves one object, ``content``, under every path, and stores the bodies of PUT requests. A context manager.

    Args:
        content: The object. A test may replace it between requests.
        script: Replies to the first requests; callables get the :class:`Request`.
        default: The reply to every further request.
        etag: ETag of the object; ``None`` sends none. ``"auto"`` derives it from the content.
        last_modified: Last-Modified header of the object; ``None`` sends none.
        tls: A server-side context for HTTPS.
        port: The port to listen on; 0 takes a free one.

    Attributes:
        cut_handshakes: So many of the next TLS handshakes end after the client's first message.
        resumed: For each TLS connection, whether it resumed an earlier session.
    """

    def __init__(
        self,
        content: bytes = b"",
        script: Iterable[Union[Reply, Callable[[Request], Reply]]] = (),
        default: Union[Reply, Callable[[Request], Reply]] = GOOD,
        *,
        etag: Optional[str] = "auto",
        last_modified: Optional[str] = None,
        tls: Optional[ssl.SSLContext] = None,
        port: int = 0,
    ) -> None:
        self.content = content
        self.script = deque(script)
        self.default = default
        self.etag = etag
        self.last_modified = last_modified
        self.requests: list[Request] = []
        self.uploads: dict[str, bytes] = {}
        self.connections_seen = 0
        self.cut_handshakes = 0
        self.resumed: list[bool] = []
        self._tagged: tuple[Optional[bytes], str] = None, ""  # a content, and its ETag
        self._tls = tls
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)

    @property
    def url(self) -> str:
        """The object's URL, without a query."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}/some/object.tensors"

    def __enter__(self) -> FaultyServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every connection and waits for every thread."""
        self._ending.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)
            assert not thread.is_alive(), "a thread of the test server hangs"

    def open_connections(self) -> int:
        """The number of connections that neither side has ended."""
        with self._lock:
            return len(self._open)

    # -- connections -------------------------------------------------------------------------------------------------

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ending.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                number, self.connections_seen = self.connections_seen, self.connections_seen + 1
            self._start(self._serve, connection, number)

    def _serve(self, connection: socket.socket, number: int) -> None:
        with self._lock:
            self._open.add(connection)
        stream = connection
        try:
            if self._tls:
                self._cut_handshake(connection)
                stream = self._tls.wrap_socket(connection, server_side=True)
                self.resumed.append(bool(stream.session_reused))
                with self._lock:
                    self._open.discard(connection)
                    self._open.add(stream)
            with stream.makefile("rb") as reader:
                while not self._ending.is_set():
                    request = self._read_request(stream, reader, number)
                    if request is None:
                        break
                    self._answer(stream, request)
        except (_ConnectionOver, OSError, ssl.SSLError):
            pass
        finally:
            with self._lock:
                self._open.discard(connection)
                self._open.discard(stream)
            stream.close()

    def _cut_handshake(self, connection: socket.socket) -> None:
        with self._lock:
            if self.cut_handshakes == 0:
                return
            self.cut_handshakes -= 1
        connection.recv(4096)
        raise _ConnectionOver

    def _read_request(self, stream: socket.socket, reader: object, number: int) -> Optional[Request]:
        line = reader.readline(65537).decode("latin1").split()
        if len(line) != 3:
            return None
        headers = {}
        while True:
            name, separator, value = reader.readline(65537).decode("latin1").partition(":")
            if not separator:
                break
            headers[name.strip().lower()] = value.strip()
        if headers.get("expect", "").lower() == "100-continue":
            stream.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = reader.read(int(headers.get("content-length", 0)))
        request = Request(line[0], line[1], headers, body, number)
        self.requests.append(request)
        return request

    # -- answers -----------------------------------------------------------------------------------------------------

    def _answer(self, stream: socket.socket, request: Request) -> None:
        with self._lock:
            reply = self.script.popleft() if self.script else self.default
        if callable(reply):
            reply = reply(request)
        if reply.delay:
            self._ending.wait(reply.delay)
        if reply.reset and reply.cut_after is None:
            self._reset(stream)
        if reply.drop:
            raise _ConnectionOver
        if reply.raw is not None:
            stream.sendall(reply.raw)
            raise _ConnectionOver
        status, headers, body = self._response(request, reply)
        version = "HTTP/1.0" if reply.http10 else "HTTP/1.1"
        head = [f"{version} {status} {_REASONS.get(status, 'Something')}"]
        head += [f"{name}: {value}" for name, value in headers.items() if value is not None]
        stream.sendall("\r\n".join(head).encode("latin1") + b"\r\n\r\n")
        if request.method != "HEAD":
            self._send_body(stream, reply, body)
        if reply.close or reply.http10 or reply.no_length or reply.surplus:
            raise _ConnectionOver

    def _response(self, request: Request, reply: Reply) -> tuple[int, dict[str, Optional[str]], bytes]:
        content = self.content
        headers: dict[str, Optional[str]] = {}
        etag = self._tag_of(content) if self.etag == "auto" else self.etag
        if etag is not None:
            headers["etag"] = etag
        if self.last_modified is not None:
            headers["last-modified"] = self.last_modified
        status, body = self._content(request, reply, content, headers, etag)
        if request.method == "PUT" and reply.status is None:
            self.uploads[request.target] = request.body
            status, body = 200, b""
            headers["etag"] = f'"{hashlib.md5(request.body).hexdigest()}"'
        if reply.body is not None:
            body = reply.body
        if reply.chunked:
            headers["transfer-encoding"] = "chunked"
        elif not reply.no_length:
            headers["content-length"] = str(len(body))
        headers.update({name.lower(): value for name, value in reply.headers.items()})
        return status, headers, body

    def _tag_of(self, content: bytes) -> str:
        tagged, tag = self._tagged
        if tagged is not content:  # large contents would cost more than all else
            tag = f'"{hashlib.md5(content).hexdigest()}"'
            self._tagged = content, tag
        return tag

    def _content(
        self, request: Request, reply: Reply, content: bytes, headers: dict[str, Optional[str]], etag: Optional[str]
    ) -> tuple[int, bytes]:
        if reply.status is not None:
            return reply.status, b""
        wanted = request.headers.get("if-match")
        if wanted is not None and wanted != etag:
            return 412, b""
        if reply.ignore_range or request.range is None:
            return 200, content
        headers["accept-ranges"] = "bytes"
        first, last = request.range
        if first >= len(content):
            headers["content-range"] = f"bytes */{len(content)}"
            return 416, b""
        last = len(content) - 1 if last is None else min(last, len(content) - 1)
        headers["content-range"] = f"bytes {first}-{last}/{len(content)}"
        return 206, content[first : last + 1]

    def _send_body(self, stream: socket.socket, reply: Reply, body: bytes) -> None:
        sent = body[: reply.cut_after] if reply.cut_after is not None else body
        if reply.stall_after is not None:
            sent = sent[: reply.stall_after]
        if reply.chunked:
            for start in range(0, len(sent), 7000):
                piece = sent[start : start + 7000]
                self._send(stream, b"%x\r\n%b\r\n" % (len(piece), piece), 0)
        else:
            self._send(stream, sent, reply.trickle)
        if reply.stall_after is not None:
            self._ending.wait(60)
            raise _ConnectionOver
        if reply.cut_after is not None:
            if reply.reset:
                self._reset(stream)
            raise _ConnectionOver
        if reply.chunked:
            stream.sendall(b"0\r\n\r\n")
        stream.sendall(reply.surplus)

    def _send(self, stream: socket.socket, data: bytes, trickle: float) -> None:
        if not trickle:
            stream.sendall(data)
            return
        for i in range(len(data)):
            if self._ending.wait(trickle):
                raise _ConnectionOver
            stream.sendall(data[i : i + 1])

    def _reset(self, stream: socket.socket) -> None:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        raise _ConnectionOver
