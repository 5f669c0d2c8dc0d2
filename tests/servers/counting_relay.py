"""A relay on loopback that passes bytes on and counts the HTTP requests among them."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

from . import Server

__all__ = ["CountingRelay"]

_REQUEST = re.compile(rb"^(GET|HEAD|PUT|POST|DELETE) \S+ HTTP/1\.1\r$", re.MULTILINE)


class CountingRelay(Server):
    """Passes all bytes on to ``target_port``.

    Attributes:
        port: The port on which it listens.
        requests: The methods of the requests, in order; bodies must not look like requests.
    """

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.requests: list[str] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            for pair in ((client, server, True), (server, client, False)):
                self._run(self._pass_on, *pair)

    def _pass_on(self, source: socket.socket, target: socket.socket, count: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if count:  # clients send each of their small requests at once
                    self.requests += [match[1].decode() for match in _REQUEST.finditer(piece)]
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _run(self, function: object, *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)  # type: ignore[arg-type]
        thread.start()
        self._threads.append(thread)

    def start(self) -> None:
        self._run(self._accept)

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(10)
