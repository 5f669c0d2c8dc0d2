"""A ``.tensors`` file that is written by a single call, so that it appears whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Optional

from tensorizer import _C
from tensorizer._crypto.keys import check_encryption, encryption_key
from tensorizer._io.sinks import open_sink

__all__ = ["written_in_one_call"]


@contextlib.contextmanager
def written_in_one_call(
    target: Any,
    records: Sequence[tuple[Any, ...]],
    ties: Sequence[tuple[Any, ...]] = (),
    *,
    hashes: Collection[str],
    encryption: Any = None,
    metadata: Optional[Mapping[str, str]] = None,
    max_workers: int = 0,
    fsync: bool = True,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> Iterator[_C.SaveSession]:
    """The session to which the block hands the payloads of `records`, in order.

    The file is there when the block ends; after an exception what was under its name before stays.

    Args:
        target: A path, URI, descriptor or open binary file object.
        records: What is written, as ``SaveSession.begin_call`` takes it.
        ties: Aliases, likewise.
        hashes: ``"crc32"``, ``"sha256"``; encrypted files hold no CRC-32.
        encryption: ``EncryptionParams``, or ``None``.
        metadata: Texts for the annex.
        max_workers: Threads, 0 for as many as help.
        fsync: Whether the bytes are on the device before the file takes its name.
        stream_options: Keywords for opening a URI.

    Raises:
        OSError: The target cannot be written.
    """
    check_encryption(encryption)
    key, derivation = encryption_key(encryption)
    opened = open_sink(target, fsync, stream_options)
    try:
        session = _C.SaveSession(
            opened.sink,
            opened.start,
            crc32="crc32" in hashes and key is None,
            sha256="sha256" in hashes,
            max_workers=max_workers,
            key=key,
            derivation=derivation,
            metadata=list((metadata or {}).items()),
        )
        try:
            session.begin_call(list(records), False, list(ties))
            yield session
            session.finish_call()
            session.finish()
        except BaseException:
            with contextlib.suppress(Exception):  # the exception that is on its way tells more
                session.abandon()
            raise
    except BaseException:
        with contextlib.suppress(Exception):
            opened.discard()
        raise
    opened.close()
