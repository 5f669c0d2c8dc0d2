"""Files kept in Redis: read as a stream, and stored there for ``TensorDeserializer.to_redis``.

A file is stored as strings whose keys end in the position of their first byte (docs/format.md, section 8).
``_C.RedisSource`` reads them. What is stored goes through the ``redis`` client of the caller.

The order of writing makes an export that was interrupted harmless and resumable. The key with the file's header goes
first away and comes last, so that readers see a whole file or none. A record's header key is stored together with or
after its payload, so that a record which has one needs no second look.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional
from urllib.parse import unquote

from tensorizer import _C
from tensorizer._io.http_options import check_certificates, trust_for
from tensorizer._io.uri import split_uri
from tensorizer._io.window import WindowedReader
from tensorizer._system import config
from tensorizer._system.config import env_int

if TYPE_CHECKING:
    import redis

    from tensorizer._io.http_options import CAInfo

DEFAULT_PORT = 6379
DEFAULT_CONNECTIONS = 4
# More than that are so many.
MAX_CONNECTIONS = 1024
MAX_RETRIES = 1000
# Small reads are served from a window of up to this size, so that parsing a header is not one round trip per field.
WINDOW_NBYTES = 1 << 20
MAX_DATABASE = 2**31 - 1

# Values above the first are stored as several of the second; the server's default limit is 512 MiB.
MAX_VALUE_NBYTES = 512 << 20
SPLIT_NBYTES = 256 << 20
# What is read and sent at once: bytes, and records.
PIECE_NBYTES = 16 << 20
PIPELINED = 512

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

    Everything behind the first slash is the key prefix, as it stands, digits, further slashes, ``?`` and ``#``
    included; only ``?db=`` at the end names the database. User and password are percent-decoded.

    Raises:
        TypeError: No ``str``.
        ValueError: The scheme, port, database or prefix is missing or malformed, or a login is no part of the host. The
            message holds no password.
    """
    parts = split_uri(config.text("Redis URI", uri))
    if parts.scheme not in ("redis", "rediss"):
        raise ValueError(f"not a Redis URI: expected redis:// or rediss://, got {parts.scheme or 'no scheme'}://")
    login, _, place = parts.authority.rpartition("@")
    user, _, password = login.partition(":")
    found = _PLACE.fullmatch(place)
    if found is None or re.search("[?#]", parts.authority):
        raise ValueError("not a Redis URI: expected redis://[user:password@]host[:port]/prefix, logins escaped")
    host = (found["address"] or found["name"]).lower() or "localhost"
    port = int(found["port"] or 0)
    if port > 65535 or (found["port"] and not port):
        raise ValueError(f"Redis URI for host {host}: the port is no number from 1 to 65535")
    if not parts.path:
        raise ValueError(f"Redis URI for host {host}: expected the prefix of keys behind the host, got none")
    if re.search(r"[?&](username|password)=", f"{parts.path}?{parts.query}"):  # as other libraries take them
        raise ValueError(f"Redis URI for host {host}: expected user and password in front of the host, got some behind")
    return RedisAddress(
        host=host,
        port=port or DEFAULT_PORT,
        prefix=parts.path,
        user=unquote(user),
        password=unquote(password),
        database=_database(parts.query, host),
        tls=parts.scheme == "rediss",
    )


def _database(query: str, host: str) -> int:
    if not query:
        return 0
    text = query.removeprefix("db=")
    if not (text.isascii() and text.isdigit() and int(text) <= MAX_DATABASE):
        raise ValueError(f"Redis URI for host {host}: ?db= wants a database number, got {text!r}")
    return int(text)


def _parse_redis_uri(uri: str) -> tuple[str, int, str]:
    """Host, port and key prefix of a URI."""
    address = parse_redis_address(uri)
    return address.host, address.port, address.prefix


def _connections(wanted: Optional[int]) -> int:
    limit = env_int("TENSORIZER_MAX_CONNECTIONS", 1)
    count = DEFAULT_CONNECTIONS if wanted is None else min(config.integer("connections", wanted, 1), MAX_CONNECTIONS)
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

    Examples:
        >>> import redis
        >>> from tensorizer.stream_io import RedisStreamFile
        >>> client = redis.Redis("localhost", 6379)
        >>> with TensorDeserializer("model.tensors", device="cpu", lazy_load=True) as tensors:
        ...     tensors.to_redis(client, "model:")
        >>> with RedisStreamFile("redis://localhost:6379/model:") as stream:
        ...     print(stream.read(5))
        b'|TZR|'
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
        address = parse_redis_address(uri)
        check_certificates(certificate_handling)
        start = 0 if begin is None else config.integer("begin", begin, wanted="a position >= 0")
        buffer_nbytes = config.buffer_size(buffer_size, 0)
        settings = {
            **{name: value for name, value in address._asdict().items() if name != "prefix"},
            "connections": _connections(connections),
            "connect_timeout": config.seconds("connect_timeout", connect_timeout, above_zero=True),
            "stall_timeout": config.seconds("stall_timeout", stall_timeout, above_zero=True),
            "retries": None if retries is None else min(config.integer("retries", retries), MAX_RETRIES),
            "retry_seconds": config.seconds("retry_seconds", retry_seconds),
            **(_tls_settings(certificate_handling) if address.tls else {}),
        }
        if buffer_nbytes > 0:
            settings["receive_buffer_nbytes"] = min(buffer_nbytes, 2**30)
        self.response_latencies: list[float] = []
        self._is_lent = False  # to a load, which reads behind this stream
        self._position, self._buffer_nbytes = start, WINDOW_NBYTES
        started = time.perf_counter()
        self._source = _C.RedisSource(settings, address.prefix)
        self.setup_latency = time.perf_counter() - started
        self._name = self._source.name
        self._size: int = self._source.end

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
        return max(self._bytes_read, self._source.bytes_read) if self._is_lent else self._bytes_read

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

    def close(self) -> None:
        """Ends the connections: idle ones now, those of a load that reads from this source after their read."""
        if not self.closed and hasattr(self, "_source"):  # a constructor that failed is closed, too
            self._source.close_connections()
            self._window = memoryview(b"")
        super().close()


# --- storing a file --------------------------------------------------------------------------------------------------


class _Record(NamedTuple):
    """One record to store; positions in the file."""

    stem: bytes  # of its keys, which end in a position
    header: int
    data: int
    nbytes: int  # of its payload

    @property
    def end(self) -> int:
        return self.data + self.nbytes

    @property
    def header_key(self) -> bytes:
        return self.key(self.header)

    def key(self, position: int) -> bytes:
        return b"%s%d" % (self.stem, position)


def export_to_redis(
    source: _C.RangeSource,
    header: bytes,
    records: Iterable[tuple[bytes, int, int, int]],
    client: redis.Redis,
    key_prefix: str,
    force: bool = False,
) -> None:
    """Stores the header and the given records of a file under ``key_prefix``, with commands of the client.

    At most 16 MiB of the file and one record header are in memory at a time, and no byte of the source is read twice.

    Args:
        source: The file.
        header: Its bytes from 0 to the end of the index.
        records: (stored name, header offset, payload offset, payload bytes) of each record to store, in file order.
        client: A ``redis.Redis`` or an object with its methods.
        key_prefix: First part of every key; may hold any character.
        force: Store records that are there already, too.

    Raises:
        ValueError: The prefix is empty.
        Exception: Whatever the client raises if the server refuses or breaks off; run the export again to resume it.
    """
    prefix = config.text("key_prefix", key_prefix).encode("utf-8")
    if not prefix:
        raise ValueError("key_prefix: expected some text, got none; no URI would name the file")
    header_key = prefix + b":header:0"
    todo = [_Record(b"%s:%s:" % (prefix, name), *place) for name, *place in records]
    if not force:
        todo = list(_missing(client, todo))
    if todo:
        client.delete(header_key)
    for batch in _batches(todo):
        if batch[0].end - batch[0].header > PIECE_NBYTES:
            _store_large(client, source, batch[0])
        else:
            _store_small(client, source, batch)
    client.set(header_key, header)


def _missing(client: redis.Redis, records: Sequence[_Record]) -> Iterator[_Record]:
    for first in range(0, len(records), PIPELINED):
        some = records[first : first + PIPELINED]
        pipeline = client.pipeline(transaction=False)
        for record in some:
            pipeline.exists(record.header_key)
        yield from (record for record, found in zip(some, pipeline.execute()) if not found)


def _batches(records: Iterable[_Record]) -> Iterator[list[_Record]]:
    """Adjacent records of at most 16 MiB together, or one larger record."""
    batch: list[_Record] = []
    for record in records:
        if batch and (
            record.header != batch[-1].end or record.end - batch[0].header > PIECE_NBYTES or len(batch) == PIPELINED
        ):
            yield batch
            batch = []
        batch.append(record)
    if batch:
        yield batch


def _store_small(client: redis.Redis, source: _C.RangeSource, batch: Sequence[_Record]) -> None:
    """Stores adjacent records. A header never stands beside a payload that is not its own."""
    begin = batch[0].header
    data = memoryview(source.read(begin, batch[-1].end - begin))
    payloads, headers = client.pipeline(transaction=False), client.pipeline(transaction=False)
    for record in batch:
        payloads.delete(record.header_key)
        if record.nbytes > 0:
            payloads.set(record.key(record.data), data[record.data - begin : record.end - begin])
        headers.set(record.header_key, data[record.header - begin : record.data - begin])
    payloads.execute()
    headers.execute()


def _store_large(client: redis.Redis, source: _C.RangeSource, record: _Record) -> None:
    """Stores one record in pieces: commands that the client may send twice after a broken connection."""
    client.delete(record.header_key)
    value_nbytes = SPLIT_NBYTES if record.nbytes > MAX_VALUE_NBYTES else MAX_VALUE_NBYTES
    header = source.read(record.header, record.data - record.header)
    for at in range(record.data, record.end, value_nbytes):
        key, end = record.key(at), min(record.end, at + value_nbytes)
        client.delete(key)
        client.setrange(key, end - at - 1, b"\0")  # a value that grows piece by piece takes three times as long
        for place in range(at, end, PIECE_NBYTES):
            piece = source.read(place, min(PIECE_NBYTES, end - place))
            client.setrange(key, place - at, memoryview(piece))
    client.set(record.header_key, header)
