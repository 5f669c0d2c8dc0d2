"""A proxy to which clients connect over TLS, and which opens tunnels to loopback."""

from __future__ import annotations

import contextlib
import selectors
import socket
import socketserver
import ssl
from collections.abc import Iterator

from . import serving


def _copy(one: ssl.SSLSocket, other: socket.socket) -> None:
    """Copies bytes both ways until one side ends."""
    peers = {one: other, other: one}
    with selectors.DefaultSelector() as selector:
        for side in peers:
            selector.register(side, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                side = key.fileobj
                data = side.recv(65536)
                while one is side and one.pending():
                    data += one.recv(one.pending())
                if not data:
                    return
                peers[side].sendall(data)


class _Tunnel(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError), self.server.context.wrap_socket(self.request, server_side=True) as client:
            head = b""
            while b"\r\n\r\n" not in head:
                piece = client.recv(4096)
                if not piece:
                    return
                head += piece
            method, target = head.split()[:2]
            if method != b"CONNECT":
                client.sendall(b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n")
                return
            host, _, port = target.decode().rpartition(":")
            with socket.create_connection((host, int(port)), timeout=30) as server:
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                _copy(client, server)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    context: ssl.SSLContext


@contextlib.contextmanager
def tls_proxy(context: ssl.SSLContext) -> Iterator[str]:
    """A block in which a proxy runs; gives its ``https://`` address."""
    server = _Server(("127.0.0.1", 0), _Tunnel)
    server.context = context
    with serving(server):
        yield f"https://127.0.0.1:{server.server_address[1]}"
