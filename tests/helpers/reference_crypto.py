"""The oracle for encryption: crypt_info blocks, key derivation and the cipher, which calls libsodium through ctypes.

It is as naive as ``reference_format``: every chunk is one call, nothing is cached, and no code of the package is used.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import struct
from typing import Optional

from reference_format import BadFile, Cursor, File, Record

ARGON2ID = 2
WRITER_CHUNK_NBYTES = 2 << 20


def _load_sodium() -> Optional[ctypes.CDLL]:
    for name in (ctypes.util.find_library("sodium"), "libsodium.so.23", "libsodium.so.26"):
        if name is None:
            continue
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if library.sodium_init() >= 0:
            return library
    return None


_sodium = _load_sodium()
available = _sodium is not None


class BadCrypto(BadFile):
    """Wrong key, altered bytes, or a block that cannot be used."""


@dataclasses.dataclass
class Derivation:
    """Chunk type 1."""

    opslimit: int
    memlimit: int
    algorithm: int
    salt: bytes


@dataclasses.dataclass
class Cipher:
    """Chunk type 2, or type 3 with ``chunk_nbytes`` None."""

    chunk_nbytes: Optional[int]
    nonce: bytes
    macs: list[bytes]


def parse_crypt_info(block: bytes) -> tuple[list[Derivation], list[Cipher]]:
    """The chunks of a block without its length prefix."""
    derivations, ciphers = [], []
    cursor = Cursor(block)
    for _ in range(cursor.number("H", "number of chunks")):
        chunk = Cursor(cursor.take(cursor.number("Q", "chunk length"), "chunk"))
        kind = chunk.number("H", "chunk type")
        if kind == 1:
            if chunk.number("H", "derivation method") != 1:
                raise BadCrypto("derivation method")
            opslimit, memlimit = chunk.number("Q", "opslimit"), chunk.number("Q", "memlimit")
            algorithm = chunk.number("i", "algorithm")
            derivations.append(Derivation(opslimit, memlimit, algorithm, chunk.take(chunk.number("H", "salt"), "salt")))
        elif kind == 2:
            chunk_nbytes = chunk.number("Q", "chunk size")
            if chunk_nbytes < 1024 or chunk_nbytes % 64:
                raise BadCrypto(f"chunk size {chunk_nbytes}")
            nonce = chunk.take(24, "nonce")
            ciphers.append(Cipher(chunk_nbytes, nonce, split(chunk.take(16 * chunk.number("Q", "MACs"), "MACs"), 16)))
        elif kind == 3:
            ciphers.append(Cipher(None, chunk.take(24, "nonce"), [chunk.take(16, "MAC")]))
        else:
            raise BadCrypto(f"chunk type {kind}")
    if (derivations or ciphers) and len(ciphers) != 1:
        raise BadCrypto(f"{len(ciphers)} cipher chunks")
    return derivations, ciphers


def split(data: bytes, nbytes: int) -> list[bytes]:
    return [data[at : at + nbytes] for at in range(0, len(data), nbytes)]


def derive_key(passphrase: bytes, derivation: Derivation) -> bytes:
    if derivation.algorithm != ARGON2ID or len(derivation.salt) != 16:
        raise BadCrypto("derivation parameters")
    key = ctypes.create_string_buffer(32)
    status = _sodium.crypto_pwhash(
        key,
        ctypes.c_ulonglong(32),
        passphrase,
        ctypes.c_ulonglong(len(passphrase)),
        derivation.salt,
        ctypes.c_ulonglong(derivation.opslimit),
        ctypes.c_size_t(derivation.memlimit),
        ctypes.c_int(derivation.algorithm),
    )
    if status != 0:
        raise BadCrypto("key derivation failed")
    return key.raw


def nonce_of_chunk(nonce: bytes, index: int) -> bytes:
    return ((int.from_bytes(nonce, "little") + index) % (1 << 192)).to_bytes(24, "little")


def open_box(ciphertext: bytes, mac: bytes, nonce: bytes, key: bytes) -> bytes:
    message = ctypes.create_string_buffer(max(1, len(ciphertext)))
    nbytes = ctypes.c_ulonglong(len(ciphertext))
    if _sodium.crypto_secretbox_open_detached(message, ciphertext, mac, nbytes, nonce, key) != 0:
        raise BadCrypto("MAC")
    return message.raw[: len(ciphertext)]


def seal_box(message: bytes, nonce: bytes, key: bytes) -> tuple[bytes, bytes]:
    """Ciphertext and MAC."""
    ciphertext, mac = ctypes.create_string_buffer(max(1, len(message))), ctypes.create_string_buffer(16)
    _sodium.crypto_secretbox_detached(ciphertext, mac, message, ctypes.c_ulonglong(len(message)), nonce, key)
    return ciphertext.raw[: len(message)], mac.raw


def plaintext(record: Record, *, key: Optional[bytes] = None, passphrase: Optional[bytes] = None) -> bytes:
    """The decrypted payload of one record."""
    derivations, ciphers = parse_crypt_info(record.header.crypt_info)
    if not record.payload:
        return b""
    if not ciphers:
        raise BadCrypto("plain payload in an encrypted file")
    if key is None:
        if passphrase is None or len(derivations) != 1:
            raise BadCrypto(f"{len(derivations)} derivation chunks for a passphrase")
        key = derive_key(passphrase, derivations[0])
    (cipher,) = ciphers
    if len(cipher.macs) == 1 or cipher.chunk_nbytes is None:
        pieces = [record.payload]
    else:
        pieces = split(record.payload, cipher.chunk_nbytes)
    if len(pieces) != len(cipher.macs):
        raise BadCrypto(f"{len(cipher.macs)} MACs for {len(pieces)} chunks")
    return b"".join(
        open_box(piece, mac, nonce_of_chunk(cipher.nonce, index), key)
        for index, (piece, mac) in enumerate(zip(pieces, cipher.macs))
    )


def encrypt(
    data: bytes,
    key: bytes,
    nonce: bytes,
    chunk_nbytes: int = WRITER_CHUNK_NBYTES,
    derivation: Optional[Derivation] = None,
) -> tuple[bytes, bytes]:
    """Ciphertext of ``data`` and the crypt_info block (without prefix) that belongs to it."""
    if not data:
        return b"", struct.pack("<H", 0)
    chunks = []
    if derivation is not None:
        body = struct.pack("<HQQiH", 1, derivation.opslimit, derivation.memlimit, derivation.algorithm, 16)
        chunks.append(struct.pack("<H", 1) + body + derivation.salt)
    sealed = [
        seal_box(piece, nonce_of_chunk(nonce, index), key) for index, piece in enumerate(split(data, chunk_nbytes))
    ]
    macs = b"".join(mac for _, mac in sealed)
    chunks.append(struct.pack("<HQ", 2, chunk_nbytes) + nonce + struct.pack("<Q", len(sealed)) + macs)
    block = struct.pack("<H", len(chunks)) + b"".join(struct.pack("<Q", len(chunk)) + chunk for chunk in chunks)
    return b"".join(ciphertext for ciphertext, _ in sealed), block


def hashes_hold(file: File, record: Record, **secret: bytes) -> bool:
    """Whether the stored digests of a record match, in any file."""
    return record.hashes_hold(plaintext(record, **secret) if file.has_crypt_info else None)
