"""Storing a file in Redis, for ``TensorDeserializer.to_redis``.

The order of writing makes an export that was interrupted harmless and resumable. The key with the file's header goes
first away and comes last, so that readers see a whole file or none. A record's header key is stored together with or
after its payload, so that a record which has one needs no second look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Optional, Union

from tensorizer import _C
from tensorizer._io.certificates import trust_for
from tensorizer._system import checks

if TYPE_CHECKING:
    import redis

__all__ = ["export_to_redis"]

# Values above this are stored as several (the server's default limit is 512 MiB), each sent in pieces of the second.
MAX_VALUE_NBYTES = 512 << 20
SPLIT_NBYTES = 256 << 20
PIECE_NBYTES = 16 << 20
PIPELINED = 512

# Connection settings of redis-py that change how bytes reach the server and that the compiled writer does not know.
UNKNOWN_TO_WRITER = (
    "redis_connect_func",
    "ssl_ca_data",
    "ssl_ciphers",
    "ssl_min_version",
    "ssl_ocsp_context",
    "ssl_ocsp_expected_cert",
    "ssl_password",
    "ssl_validate_ocsp",
    "ssl_validate_ocsp_stapled",
)


def export_to_redis(
    source: _C.RangeSource,
    header: bytes,
    records: Iterable[tuple[bytes, int, int, int]],
    client: redis.Redis,
    key_prefix: str,
    force: bool = False,
) -> None:
    """Stores the header and the given records of a file under ``key_prefix``.

    Memory stays bounded by a few MiB per connection, and no byte of the source is read twice.

    Args:
        source: The file.
        header: Its bytes from 0 to the end of the index.
        records: (stored name, header offset, payload offset, payload bytes) of each record to store, in file order.
        client: A ``redis.Redis`` or an object with its methods. Only its connection settings are used where they are
            plain ones (TCP, TLS or a Unix socket); any other client is called itself.
        key_prefix: First part of every key; may hold any character.
        force: Store records that are there already, too.

    Raises:
        StreamError: The server refused or broke off; run the export again to resume it. A client that is called itself
            raises its own errors.
    """
    writer = _writer_for(client)
    prefix = checks.text("key_prefix", key_prefix).encode("utf-8")
    header_key = prefix + b":header:0"
    todo = [
        (b"%s:%s:" % (prefix, name), header_offset, data_offset, data_nbytes)
        for name, header_offset, data_offset, data_nbytes in records
    ]
    if not force and todo:
        stored = writer.exist([b"%s%d" % (stem, offset) for stem, offset, _, _ in todo])
        todo = [record for record, found in zip(todo, stored) if not found]
    if todo:
        writer.remove(header_key)
        writer.write(source, todo)
    writer.put(header_key, header)


def _writer_for(client: Any) -> Union[_C.RedisWriter, _ClientWriter]:
    settings = _writer_settings(client)
    return _ClientWriter(client) if settings is None else _C.RedisWriter(settings, MAX_VALUE_NBYTES, SPLIT_NBYTES)


def _writer_settings(client: Any) -> Optional[dict[str, Any]]:
    """Settings for ``_C.RedisWriter``, or ``None`` where the client is not a plain ``redis.Redis``."""
    import redis

    if type(client) not in (redis.Redis, redis.StrictRedis):
        return None
    pool = client.connection_pool
    kwargs: Mapping[str, Any] = pool.connection_kwargs
    kinds = (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection)
    if pool.connection_class not in kinds or any(kwargs.get(name) for name in UNKNOWN_TO_WRITER):
        return None
    settings: dict[str, Any] = {"database": int(kwargs.get("db") or 0), **_login(kwargs)}
    if pool.connection_class is redis.UnixDomainSocketConnection:
        return {**settings, "unix_path": kwargs["path"]}
    settings["host"] = kwargs.get("host") or "localhost"
    settings["port"] = int(kwargs.get("port") or 6379)
    if pool.connection_class is redis.SSLConnection:
        settings.update(_tls(kwargs))
    return settings


def _login(kwargs: Mapping[str, Any]) -> dict[str, str]:
    provider = kwargs.get("credential_provider")
    if provider is not None:
        credentials = tuple(provider.get_credentials())
        user, password = credentials if len(credentials) == 2 else (None, *credentials)
    else:
        user, password = kwargs.get("username"), kwargs.get("password")
    return {"user": _as_text("user", user), "password": _as_text("password", password)}


def _as_text(what: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (bytes, bytearray)):  # as redis-py takes it
        try:
            value = bytes(value).decode()
        except UnicodeDecodeError:
            raise ValueError(f"the {what} of the Redis client: wanted text or UTF-8, found other bytes") from None
    return checks.text(f"the {what} of the Redis client", value if isinstance(value, str) else str(value))


def _tls(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    requirement = kwargs.get("ssl_cert_reqs", "required")
    verify = requirement not in ("none", None, 0)
    file, path = kwargs.get("ssl_ca_certs") or "", kwargs.get("ssl_ca_path") or ""
    if verify and not file and not path:  # as reads over TLS, and everything else
        trust = trust_for(None)
        file, path = trust.file, trust.path
    return {
        "tls": True,
        "ca_file": file,
        "ca_path": path,
        "certificate_file": kwargs.get("ssl_certfile") or "",
        "key_file": kwargs.get("ssl_keyfile") or "",
        "verify_certificate": verify,
        "verify_host": verify and bool(kwargs.get("ssl_check_hostname", True)),
    }


class _ClientWriter:
    """The same export through the methods of a client object: clusters, sentinels, subclasses, test doubles."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def exist(self, keys: list[bytes]) -> list[bool]:
        found: list[bool] = []
        for first in range(0, len(keys), PIPELINED):
            pipeline = self._client.pipeline(transaction=False)
            for key in keys[first : first + PIPELINED]:
                pipeline.exists(key)
            found.extend(bool(n) for n in pipeline.execute())
        return found

    def remove(self, key: bytes) -> None:
        self._client.delete(key)

    def put(self, key: bytes, value: bytes) -> None:
        self._client.set(key, value)

    def write(self, source: _C.RangeSource, records: list[tuple[bytes, int, int, int]]) -> None:
        for stem, header_offset, data_offset, data_nbytes in records:
            self._client.delete(b"%s%d" % (stem, header_offset))
            first_nbytes = min(PIECE_NBYTES, _value_nbytes(data_nbytes), data_nbytes)
            both = source.read(header_offset, data_offset - header_offset + first_nbytes)
            header, piece = both[: data_offset - header_offset], both[data_offset - header_offset :]
            self._write_payload(source, stem, data_offset, data_nbytes, piece)
            self._client.set(b"%s%d" % (stem, header_offset), header)

    def _write_payload(self, source: _C.RangeSource, stem: bytes, start: int, nbytes: int, piece: bytes) -> None:
        value_nbytes = _value_nbytes(nbytes)
        at = 0
        while at < nbytes:
            value_start = at // value_nbytes * value_nbytes
            key = b"%s%d" % (stem, start + value_start)
            if at == value_start:
                self._client.set(key, piece)
            else:
                self._client.append(key, piece)
            at += len(piece)
            value_end = min(nbytes, (at // value_nbytes + 1) * value_nbytes)
            piece = source.read(start + at, min(PIECE_NBYTES, value_end - at)) if at < nbytes else b""


def _value_nbytes(payload_nbytes: int) -> int:
    """Size of the values that a payload is divided into."""
    return SPLIT_NBYTES if payload_nbytes > MAX_VALUE_NBYTES else MAX_VALUE_NBYTES
