"""A server with the part of PostgreSQL's protocol that a client needs to connect over TLS and to disconnect."""

from __future__ import annotations

import contextlib
import socketserver
import ssl
import struct
from collections.abc import Iterator

from . import serving

_SSL_REQUEST = struct.pack("!II", 8, 80877103)
_PARAMETERS = {
    "server_version": "15.0",
    "server_encoding": "UTF8",
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "integer_datetimes": "on",
    "standard_conforming_strings": "on",
}


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", 4 + len(body)) + body


class _Session(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            if self.request.recv(8, 0x100) != _SSL_REQUEST:  # MSG_WAITALL
                return
            self.request.sendall(b"S")
            with self.server.context.wrap_socket(self.request, server_side=True) as client:
                client.recv(65536)  # the user and the database
                answer = _message(b"R", struct.pack("!I", 0))
                for name, value in _PARAMETERS.items():
                    answer += _message(b"S", f"{name}\0{value}\0".encode())
                client.sendall(answer + _message(b"Z", b"I"))
                while client.recv(65536):
                    pass


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    context: ssl.SSLContext


@contextlib.contextmanager
def postgres_over_tls(context: ssl.SSLContext) -> Iterator[int]:
    """A block in which a server runs; gives its port on 127.0.0.1."""
    server = _Server(("127.0.0.1", 0), _Session)
    server.context = context
    with serving(server):
        yield server.server_address[1]
