"""The oracle for authenticity: tags, marks and signatures by other libraries, and files that are altered on purpose.

It uses no code of the package: BLAKE2b comes from hashlib, Ed25519 from the ``cryptography`` package, and the cipher
from libsodium through ``reference_crypto``.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from typing import Optional

import pytest
import reference_crypto as crypto
import reference_format as fmt

METADATA, TIES, SEALED, DIGEST, RECORDS, TAG, SIGNATURES = 1, 2, 3, 4, 5, 6, 7
Sections = list[tuple[int, int, bytes]]


def subkey(key: bytes, number: int) -> bytes:
    """libsodium's crypto_kdf_derive_from_key. Subkey 1 makes tags, 2 marks nonces, 3 is for markers of checkpoints."""
    person, salt = b"TZRAUTH1".ljust(16, b"\0"), struct.pack("<QQ", number, 0)
    return hashlib.blake2b(b"", digest_size=32, key=key, salt=salt, person=person).digest()


def tag_of(digest: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(b"TZRAUTH1" + digest, digest_size=32, key=subkey(key, 1)).digest()


def marked(drawn: bytes, key: bytes) -> bytes:
    """A marked nonce, from its first 16 bytes."""
    return drawn[:16] + hashlib.blake2b(drawn[:16], digest_size=32, key=subkey(key, 2)).digest()[:8]


def verify_signature(public_key: bytes, signature: bytes, message: bytes) -> None:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)


def sign(seed: bytes, message: bytes) -> bytes:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(seed).sign(message)


# --- files ---------------------------------------------------------------------------------------------------------


def entries_of(data: bytes) -> bytes:
    file = fmt.read_file(data)
    return data[fmt.PROLOGUE_NBYTES : fmt.PROLOGUE_NBYTES + file.index_nbytes - len(file.index_slack)]


def digest_of(data: bytes, sections: Optional[Sections] = None) -> bytes:
    """Computes the index digest, with `sections` instead of those in the file."""
    before: Sections = []
    for section in fmt.read_file(data).annex if sections is None else sections:
        if section[0] == DIGEST:
            break
        before.append(section)
    return fmt.index_digest(data[: fmt.PROLOGUE_NBYTES], entries_of(data), before)


def record_digests(data: bytes) -> bytes:
    return b"".join(hashlib.sha256(record.header.raw).digest() for record in fmt.read_file(data).records)


def with_annex(data: bytes, sections: Sequence[tuple[int, int, bytes]]) -> bytes:
    """The same file with another annex, or without one."""
    file = fmt.read_file(data)
    at = fmt.PROLOGUE_NBYTES + file.index_nbytes - len(file.index_slack)
    annex = fmt.encode_annex(sections) if sections else b""
    assert len(annex) <= len(file.index_slack), "no room"
    return data[:at] + annex.ljust(len(file.index_slack), b"\0") + data[at + len(file.index_slack) :]


def without(data: bytes, *kinds: int) -> bytes:
    """The same file without some sections. Nothing else is adjusted."""
    return with_annex(data, [section for section in fmt.read_file(data).annex if section[0] not in kinds])


def digests_anew(data: bytes) -> bytes:
    """Computes sections 5 and 4 again, which needs no key. Tags and signatures stay the same."""
    sections: Sections = []
    for kind, flags, body in fmt.read_file(data).annex:
        if kind == RECORDS:
            body = record_digests(data)
        elif kind == DIGEST:
            body = digest_of(data, sections)
        sections.append((kind, flags, body))
    return with_annex(data, sections)


def signature_file(data: bytes, seed: bytes) -> bytes:
    """The content of the signature file beside a file."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    file = fmt.read_file(data)
    annex = fmt.encode_annex(file.annex) if file.annex else b""
    records = (RECORDS, 0, record_digests(data))
    covered = data[5:41] + data[57 : fmt.PROLOGUE_NBYTES] + entries_of(data) + annex + fmt.encode_section(*records)
    digest = hashlib.sha256(covered).digest()
    key = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return fmt.encode_annex([records, (DIGEST, 0, digest), (SIGNATURES, 0, key + sign(seed, b"TZRSIGN1" + digest))])


def rehashed(data: bytes, change: Callable[[fmt.Record], Optional[bytes]]) -> bytes:
    """A plain file in which `change` replaces payloads, with matching digests."""
    out = bytearray(data)
    for record in fmt.read_file(data).records:
        payload = change(record)
        if payload is None:
            continue
        assert len(payload) == len(record.payload)
        at, header = record.entry.data_offset, record.header
        out[at : at + len(payload)] = payload
        for (kind, value), begin in zip(header.hashes, header.hash_values_at):
            place = record.entry.offset + begin
            out[place : place + len(value)] = fmt.digest(kind, header.hash_input() + payload)
    return bytes(out)


def as_before(data: bytes, key: bytes) -> bytes:
    """An encrypted file as earlier releases wrote it: nonces without marks, and no tag or signature of the index."""
    out = bytearray(data)
    for record in fmt.read_file(data).records:
        crypt = _sealed_anew(record.header.crypt_info, record.payload, key)
        if crypt is None:
            continue
        begin = record.entry.offset + record.header.crypt_begin + 8
        info, payload = crypt
        out[begin : begin + len(info)] = info
        out[record.entry.data_offset : record.entry.data_offset + len(payload)] = payload
    sections: Sections = []
    for kind, flags, body in fmt.read_file(bytes(out)).annex:
        if kind == SEALED:
            (nbytes,) = struct.unpack_from("<Q", body)
            anew = _sealed_anew(body[8 : 8 + nbytes], body[8 + nbytes :], key)
            assert anew is not None
            body = body[:8] + anew[0] + anew[1]
        if kind in (METADATA, TIES, SEALED):
            sections.append((kind, flags, body))
    if sections:
        sections.append((DIGEST, 0, digest_of(bytes(out), sections)))
    return with_annex(bytes(out), sections)


def _sealed_anew(info: bytes, payload: bytes, key: bytes) -> Optional[tuple[bytes, bytes]]:
    """A crypt_info block and its ciphertext, with another nonce."""
    _, ciphers = crypto.parse_crypt_info(info)
    if not ciphers:
        return None
    (cipher,) = ciphers
    nonce = bytearray(os.urandom(24))
    nonce[7] &= 0x7F
    size = cipher.chunk_nbytes or max(1, len(payload))
    if len(cipher.macs) == 1:
        size = max(1, len(payload))
    pieces = crypto.split(payload, size)
    sealed, macs = b"", []
    for i, (piece, mac) in enumerate(zip(pieces, cipher.macs)):
        plain = crypto.open_box(piece, mac, crypto.nonce_of_chunk(cipher.nonce, i), key)
        box, mac = crypto.seal_box(plain, crypto.nonce_of_chunk(bytes(nonce), i), key)
        sealed += box
        macs.append(mac)
    at = info.index(cipher.nonce)
    out = bytearray(info)
    out[at : at + 24] = nonce
    for old, mac in zip(cipher.macs, macs):
        place = info.index(old, at)
        out[place : place + 16] = mac
    return bytes(out), sealed
