"""Files kept in Redis, read as a stream.

A file is stored as strings whose keys end in the position of their first byte (docs/format.md, section 8). The bytes
are moved by ``_C.RedisSource``; here are the URI and the stream object. ``redis_export.py`` is the other direction.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Optional
from urllib.parse import parse_qs, unquote

from tensorizer import _C
from tensorizer._io.certificates import check_certificates, trust_for
from tensorizer._io.uri import split_uri
from tensorizer._io.window import WindowedReader
from tensorizer._system import checks
from tensorizer._system.config import env_int
from tensorizer._system.redaction import hidden

if TYPE_CHECKING:
    from tensorizer._io.certificates import CAInfo

__all__ = ["RedisAddress", "RedisStreamFile", "parse_redis_address"]

DEFAULT_PORT = 6379
DEFAULT_CONNECTIONS = 4
# More than that are so many.
MAX_CONNECTIONS = 1024
MAX_RETRIES = 1000
# Small reads are served from a window of up to this size, so that parsing a header is not one round trip per field.
WINDOW_NBYTES = 1 << 20
MAX_DATABASE = 2**31 - 1
_PLACE = re.compile(r"(?:\[(?P<address>[^\[\]\s]*)\]|(?P<name>[^\[\]:\s]*))(?::(?P<port>[0-9]{0,9}))?")


class RedisAddress(NamedTuple):
    """What a ``redis://`` or ``rediss://`` URI says. The password shows in no ``repr``."""

    host: str
    port: int
    prefix: str
    user: str
    password: str
    database: int
    tls: bool

    def __repr__(self) -> str:
        scheme = "rediss" if self.tls else "redis"
        return f"RedisAddress({scheme}://{self.host}:{self.port}/{self.prefix}?db={self.database})"


def parse_redis_address(uri: str) -> RedisAddress:
    """Takes ``redis[s]://[user:password@]host[:port]/prefix[?db=N]`` apart.

    Everything between the first slash and a ``?`` or ``#`` is the key prefix, digits and further slashes included, and
    is taken as it is; so the database has to be named in the query. User and password are percent-decoded.

    Raises:
        TypeError: No ``str``.
        ValueError: The scheme, port, database or prefix is missing or malformed. The message holds no password.
    """
    parts = split_uri(checks.text("Redis URI", uri))
    if parts.scheme not in ("redis", "rediss"):
        raise ValueError(f"not a Redis URI: wanted redis:// or rediss://, found {parts.scheme or 'no scheme'}://")
    login, _, place = parts.authority.rpartition("@")
    user, _, password = login.partition(":")
    found = _PLACE.fullmatch(place)
    if found is None:
        raise ValueError("not a Redis URI: wanted redis://[user:password@]host[:port]/prefix")
    host = (found["address"] or found["name"]).lower() or "localhost"
    port = int(found["port"] or 0)
    if port > 65535 or (found["port"] and not port):
        raise ValueError(f"Redis URI for host {host}: the port is no number from 1 to 65535")
    return RedisAddress(
        host=host,
        port=port or DEFAULT_PORT,
        prefix=parts.path.lstrip("/"),
        user=unquote(user),
        password=unquote(password),
        database=_database(parts.query, host),
        tls=parts.scheme == "rediss",
    )


def _database(query: str, host: str) -> int:
    values = parse_qs(query, keep_blank_values=True).get("db")
    if not values:
        return 0
    text = values[-1]
    if not (text.isascii() and text.isdigit() and int(text) <= MAX_DATABASE):
        raise ValueError(f"Redis URI for host {host}: ?db= wants a database number, found {text!r}")
    return int(text)


def _parse_redis_uri(uri: str) -> tuple[str, int, str]:
    """Host, port and key prefix of a URI."""
    address = parse_redis_address(uri)
    return address.host, address.port, address.prefix


def _connections(wanted: Optional[int]) -> int:
    limit = env_int("TENSORIZER_MAX_CONNECTIONS", 1)
    count = DEFAULT_CONNECTIONS if wanted is None else min(checks.integer("connections", wanted, 1), MAX_CONNECTIONS)
    return count if limit is None else min(count, limit)


def _tls_settings(certificate_handling: Optional[CAInfo]) -> dict[str, Any]:
    trust = trust_for(certificate_handling)
    return {"ca_file": trust.file, "ca_path": trust.path, "verify_certificate": trust.verify}


class RedisStreamFile(WindowedReader):
    """A file stored in Redis, as a read-only seekable binary stream.

    The keys are listed when the object is made; the bytes are fetched by pipelined requests over connections that it
    opens as needed. :class:`~tensorizer.TensorDeserializer` reads straight from the underlying source.

    Args:
        uri: ``redis://[user:password@]host[:port]/prefix[?db=N]``; ``rediss://`` for TLS. See
            :func:`parse_redis_address`.
        begin: Position the stream starts at, in bytes; default 0.
        end: Accepted and ignored: the file ends where its last key ends.
        buffer_size: Receive buffer of each connection in bytes; default: the kernel's own sizing.
        certificate_handling: Which certificates are trusted for ``rediss://``; default: the system's.
        connections: Most connections at the same time; default 4. ``TENSORIZER_MAX_CONNECTIONS`` is an upper bound.
        connect_timeout: Seconds for connecting, TLS and login.
        stall_timeout: Seconds without a byte after which a connection counts as broken.
        retries: Further tries of a read after a connection broke, which resumes at the byte where it stopped; ``None``
            bounds them only by time.
        retry_seconds: How long a read is retried without progress, also while the server loads its data. If the server
            has never answered, the read fails after ten seconds.

    Attributes:
        setup_latency: Seconds that connecting and listing the keys took.
        response_latencies: Seconds of each fetch.
        bytes_read: Bytes delivered to the caller; once a load reads from this stream, those that came from the server.
        bytes_skipped: Bytes that forward seeks passed over.
        read_operations: Number of reads.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Not a Redis URI, a number out of range, or a key below the prefix does not end in a position.
        StreamNotFoundError: No key begins with the prefix.
        StreamError: The server cannot be reached, refuses the login, or fails; an ``OSError``.
    """

    def __init__(
        self,
        uri: str,
        *,
        begin: Optional[int] = None,
        end: Optional[int] = None,
        buffer_size: Optional[int] = None,
        certificate_handling: Optional[CAInfo] = None,
        connections: Optional[int] = None,
        connect_timeout: float = 10.0,
        stall_timeout: float = 30.0,
        retries: Optional[int] = None,
        retry_seconds: float = 120.0,
    ) -> None:
        super().__init__()
        self._closed = True  # until the constructor is through
        address = parse_redis_address(uri)
        check_certificates(certificate_handling)
        start = 0 if begin is None else checks.integer("begin", begin, wanted="a position >= 0")
        buffer_nbytes = (
            0
            if buffer_size is None
            else checks.integer("buffer_size", buffer_size, -(1 << 63), wanted="a number of bytes")
        )
        settings = {
            "host": address.host,
            "port": address.port,
            "user": address.user,
            "password": hidden(address.password),
            "database": address.database,
            "tls": address.tls,
            "connections": _connections(connections),
            "connect_timeout": checks.seconds("connect_timeout", connect_timeout, above_zero=True),
            "stall_timeout": checks.seconds("stall_timeout", stall_timeout, above_zero=True),
            "retries": None if retries is None else min(checks.integer("retries", retries), MAX_RETRIES),
            "retry_seconds": checks.seconds("retry_seconds", retry_seconds),
            **(_tls_settings(certificate_handling) if address.tls else {}),
        }
        if buffer_nbytes > 0:
            settings["receive_buffer_nbytes"] = min(buffer_nbytes, 2**30)
        self.response_latencies: list[float] = []
        self._delivered = 0
        self._is_lent = False  # to a load, which reads behind this stream
        self._start_at(start, WINDOW_NBYTES)
        started = time.perf_counter()
        self._source = _C.RedisSource(settings, address.prefix)
        self.setup_latency = time.perf_counter() - started
        self._name = self._source.name
        self._size: int = self._source.end
        self._closed = False

    def __repr__(self) -> str:
        if not hasattr(self, "_source"):
            return "<RedisStreamFile (not open)>"
        return f"<RedisStreamFile {self._source.name} at {self._position}>"

    def _tensorizer_source(self) -> _C.RangeSource:
        """The source behind the stream, for reads that need no Python."""
        self._check_open()
        self._is_lent = True
        return self._source

    @property
    def bytes_read(self) -> int:
        return max(self._delivered, self._source.bytes_read) if self._is_lent else self._delivered

    def fileno(self) -> int:
        """``-1``: there is no file descriptor."""
        return -1

    def _limit(self) -> Optional[int]:
        return self._size

    def _fetch_some(self, offset: int, into: memoryview) -> int:
        started = time.perf_counter()
        self._source.readinto(offset, into)
        self.response_latencies.append(time.perf_counter() - started)
        return len(into)

    def _read_ahead(self, offset: int, nbytes: int) -> int:
        # Up to a hole; at one the source says where it is.
        return max(1, min(nbytes, self._source.contiguous_end(offset) - offset))

    def _read_rest(self) -> bytes:
        data = super()._read_rest()
        self._count(len(data))
        return data

    def _count(self, nbytes: int) -> None:
        self._delivered += nbytes
        self.read_operations += 1

    def close(self) -> None:
        """Ends the connections: idle ones now, those of a load that reads from this source after their read."""
        if not self._closed:
            self._source.close_connections()
        self._closed = True
        self._drop_window()
        super().close()

    @property
    def closed(self) -> bool:
        return self._closed
