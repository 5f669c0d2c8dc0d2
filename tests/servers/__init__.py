"""Servers that tests start on loopback and stop again, well-behaved and otherwise."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Iterator
from typing import TypeVar

__all__ = ["Server", "missing_servers", "needs", "serving"]

_Server = TypeVar("_Server", bound="Server")


class Server:
    """Starts on entering, and stops on leaving or if the start fails."""

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self: _Server) -> _Server:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


@contextlib.contextmanager
def serving(*servers: socketserver.BaseServer) -> Iterator[None]:
    """A block in which servers answer, each on its own thread; they are closed at its end."""
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server, thread in zip(servers, threads):
            server.shutdown()
            server.server_close()
            thread.join(30)


def needs(name: str) -> str:
    """The reason for skipping a test, which conftest.py sums up; ``name`` is a server of the list below."""
    return f"needs {name}, which is not installed"


def missing_servers() -> list[str]:
    """The servers that are not installed. Tests that need them are skipped."""
    from servers import nginx
    from servers.redis_server import redis_is_installed
    from servers.s3_server import s3_is_installed

    found = {"nginx": nginx.PROGRAM is not None, "Redis": redis_is_installed(), "OpenStack Swift": s3_is_installed()}
    return [name for name, is_there in found.items() if not is_there]
