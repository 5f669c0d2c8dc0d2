"""Tools for HTTP tests: short timeouts, content, and a check that no thread and no socket is left."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import time
from collections.abc import Iterator

from conftest import open_descriptors, tcp_sockets
from servers.http_faults import FaultyServer, Reply

from tensorizer import _C
from tensorizer.stream_io import CURLStreamFile, HTTPOptions


class TunedOptions(HTTPOptions):
    """Options that also change constants of the extension, under the names that ``_C.HttpOptions`` has for them."""

    def _native(self, *arguments: object, **keywords: object) -> _C.HttpOptions:
        native = super()._native(*arguments, **keywords)
        for name, value in self.constants.items():
            assert hasattr(native, name), name
            setattr(native, name, value)
        return native


def tuned(**changes: object) -> HTTPOptions:
    """Options with these fields and constants."""
    fields = {field.name for field in dataclasses.fields(HTTPOptions)}
    options = TunedOptions(**{name: value for name, value in changes.items() if name in fields})
    constants = {name: value for name, value in changes.items() if name not in fields}
    object.__setattr__(options, "constants", constants)
    return options


def quick(**changes: object) -> HTTPOptions:
    """Options with which failures show soon. A stall takes 10 s, because a busy machine may cause shorter ones; tests
    of stalls choose their own time."""
    settings: dict[str, object] = {
        "connect_timeout": 5.0,
        "stall_timeout": 10.0,
        "retries": 3,
        "retry_seconds": 30.0,
        "first_retry_delay": 0.01,
        "max_retry_delay": 0.05,
        "head_nbytes": 4096,
        "unit_nbytes": 64 << 10,
        "proxy": "",
    }
    return tuned(**{**settings, **changes})


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    """The same bytes for the same seed."""
    return random.Random(seed).randbytes(nbytes)


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def _sockets() -> set[str]:
    """The sockets of TCP."""
    return {target for _, target in open_descriptors()} & tcp_sockets()


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if threads or sockets that began inside are still there a little later."""
    gc.collect()  # an exception holds frames, and a source in one of them keeps its connections
    threads, sockets = _threads(), _sockets()
    yield
    deadline = time.monotonic() + 5
    while (_threads() - threads or _sockets() - sockets) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _threads() - threads, "threads are left"
    assert not _sockets() - sockets, "sockets are left"


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails if the block takes longer."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


# --- servers that misbehave -------------------------------------------------------------------------------------------

CONTENT = random_bytes(200_000)
HEAD = 4096
DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


def open_faulty(server: FaultyServer, **changes: object) -> _C.HttpSource:
    return _C.HttpSource.open(server.url, quick(**changes)._native())


def read_faulty(server: FaultyServer, **changes: object) -> bytes:
    with CURLStreamFile(server.url, http_options=quick(**changes)) as stream:
        return stream.read()


def raw(head: str, body: bytes = b"") -> Reply:
    return Reply(raw=head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
