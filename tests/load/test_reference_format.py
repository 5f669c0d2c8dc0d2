"""The oracle itself: it makes the reference's files again, reads the golden files, refuses what must be refused."""

from __future__ import annotations

import hashlib
import struct
import zlib

import golden_files
import pytest
import reference_crypto as crypto
import reference_format as fmt

PLAIN = golden_files.select(refused=False, encrypted=False)
ENCRYPTED = golden_files.select(refused=False, encrypted=True)
# What the reference wrote and the oracle can predict to the last byte: not the hole of a meta scalar, whose digests
# cover memory that nobody knows.
PREDICTABLE = [g for g in PLAIN if g["written_by"] == "2.12.1" and not g.get("unverifiable")]

needs_sodium = pytest.mark.skipif(not crypto.available, reason="libsodium is not installed")


def as_written(golden):
    return [
        fmt.Tensor(
            path=tuple(tensor["path"]),
            dtype=tensor["stored_dtype"],
            shape=tuple(tensor["shape"]),
            data=None if tensor["meta"] else golden_files.content(tensor),
            kind=golden_files.KINDS[tensor["kind"]],
            module_idx=tensor["module_idx"],
        )
        for tensor in golden["tensors"]
    ]


def check_against_manifest(file, golden, plaintexts):
    assert (file.version, file.flags) == (golden["data_version"], golden["flags"])
    assert [list(record.path) for record in file.records] == [tensor["path"] for tensor in golden["tensors"]]
    for record, tensor, plaintext in zip(file.records, golden["tensors"], plaintexts):
        assert record.entry.kind == golden_files.KINDS[tensor["kind"]]
        assert record.header.module_idx == tensor["module_idx"]
        assert list(record.header.shape) == tensor["shape"]
        assert record.nbytes == tensor["nbytes"]
        found = plaintext[: record.nbytes] if plaintext else bytes(record.nbytes)
        assert found == golden_files.content(tensor)


@golden_files.each(PREDICTABLE)
def test_the_oracle_writes_the_bytes_that_the_reference_wrote_from_the_manifest_and_from_what_it_read(golden):
    data = golden_files.read(golden)
    assert fmt.write_file(as_written(golden)) == data
    assert fmt.rewrite(fmt.read_file(data)) == data


@golden_files.each(PLAIN)
def test_the_oracle_reads_every_plain_golden_file(golden):
    file = fmt.read_file(golden_files.read(golden), start=golden.get("start", 0))
    check_against_manifest(file, golden, [record.payload for record in file.records])
    if not golden.get("unverifiable"):
        assert all(record.hashes_hold() for record in file.records)


@needs_sodium
@golden_files.each(ENCRYPTED)
def test_the_oracle_decrypts_every_encrypted_golden_file(golden):
    file = fmt.read_file(golden_files.read(golden))
    secret = golden_files.secret(golden)
    check_against_manifest(file, golden, [crypto.plaintext(record, **secret) for record in file.records])
    assert all(crypto.hashes_hold(file, record, **secret) for record in file.records)


@needs_sodium
@golden_files.each(ENCRYPTED)
def test_the_derived_key_opens_what_the_passphrase_opens(golden):
    encryption = golden["encryption"]
    if encryption["kind"] != "passphrase" or encryption["key"] is None:
        assert encryption["key"] or golden["name"] == "c-v3-two-salts"
        return
    for record in fmt.read_file(golden_files.read(golden)).records:
        by_key = crypto.plaintext(record, key=bytes.fromhex(encryption["key"]))
        assert by_key == crypto.plaintext(record, **golden_files.secret(golden))


def refusal(golden):
    """Everything a loader does with a file it must refuse, oracle's way."""
    secret = golden_files.secret(golden)
    file = fmt.read_file(golden_files.read(golden))
    if file.has_crypt_info != (secret is not None):
        raise crypto.BadCrypto("key against file")
    for record in file.records:
        if not crypto.hashes_hold(file, record, **(secret or {})):
            raise fmt.BadFile("digest")


# The oracle leaves to others whether torch knows a dtype.
DTYPE_NAMES = {"r-dtype-unknown", "r-dtype-not-dtype"}


@needs_sodium
@golden_files.each(golden_files.select(refused=True))
def test_the_oracle_refuses_every_golden_file_that_must_be_refused(golden):
    if golden["name"] in DTYPE_NAMES:
        refusal(golden)
        return
    with pytest.raises(fmt.BadFile):
        refusal(golden)


def floats(*values):
    return struct.pack(f"<{len(values)}f", *values)


def test_the_minimal_file_of_the_format_document_is_reproduced():
    data = fmt.write_file([fmt.Tensor(("w",), "<f4", (2,), floats(1.0, -2.5))])
    assert len(data) == 262_307
    assert zlib.crc32(data) == 0x8326C638
    assert hashlib.sha256(data).hexdigest() == "3f4ea29cd461a95d2768b6697e4c3ec5d991c8f19fe4847596a846fa685fe86a"
    (record,) = fmt.read_file(data).records
    assert len(record.header.hash_input() + record.payload) == 82
    assert zlib.crc32(record.header.hash_input()) == 0xC74C3F99


def test_the_version_5_file_of_the_format_document_is_reproduced():
    tensors = [fmt.Tensor(("w",), "<f4", (2,), floats(1.0, -2.5)), fmt.Tensor(("z",), "|i1", (1 << 32, 0), b"")]
    data = fmt.write_file(tensors)
    assert hashlib.sha256(data).hexdigest() == "99adc9ec4fc86324db7a87501178971ad8aa68aaf092608b16523ab9dd4c3f7d"


@needs_sodium
def test_the_encrypted_file_of_the_format_document_is_reproduced():
    nonce, key = bytes(range(0x40, 0x58)), bytes(range(32))
    tensor = fmt.Tensor(("w",), "<f4", (2,), floats(1.0, -2.5), hashes=("sha256",))
    ciphertext, block = crypto.encrypt(tensor.payload, key, nonce)
    header = fmt.encode_header(tensor, crypt_info=block)
    at = fmt.PROLOGUE_NBYTES + fmt.RESERVED_INDEX_NBYTES
    entry = fmt.encode_entry(tensor, at, at + len(header))
    data = fmt.encode_prologue(3, 0, 8, 1, fmt.RESERVED_INDEX_NBYTES)
    data += entry.ljust(fmt.RESERVED_INDEX_NBYTES, b"\0") + header + ciphertext + bytes(8)
    assert hashlib.sha256(data).hexdigest() == "e7a3e9eaa0f19df7cba68745d14dfe28bc21ad451caee4a14c35954f65ea49af"
    (record,) = fmt.read_file(data).records
    assert crypto.plaintext(record, key=key) == tensor.payload


@needs_sodium
def test_the_chunk_vectors_of_the_format_document_are_reproduced():
    data = bytes(i % 251 for i in range(2500))
    nonce = b"\xff" + bytes(range(0x41, 0x58))
    ciphertext, block = crypto.encrypt(data, bytes(range(32)), nonce, chunk_nbytes=1024)
    assert hashlib.sha256(ciphertext).hexdigest() == "295096ee6d8a46c31c38007aa8064e4290617d1c01e4693a3c190ae634a99c79"
    _, (cipher,) = crypto.parse_crypt_info(block)
    assert [mac.hex() for mac in cipher.macs] == [
        "38eb4d10db375073f8badef69a24275c",
        "f271f93179e64ea0f8b3bddfbc713a16",
        "71ed8a65c202260c076d57c5a212ebad",
    ]
    assert crypto.nonce_of_chunk(b"\xff" * 24, 1) == bytes(24)


@needs_sodium
def test_the_key_derivation_vector_of_the_format_document_is_reproduced():
    key = crypto.derive_key(b"test", crypto.Derivation(1, 8192, crypto.ARGON2ID, bytes(16)))
    assert key.hex() == "185d9543e6945bb30c6ecb2d1ac58a388ddfe954c34cf395a4fa12f986897662"


@pytest.mark.parametrize(
    ("path", "stored"),
    [
        (("w",), b"w"),
        (("a.b",), b"a.b"),
        (("é😀",), "é😀".encode()),
        (("m", "l", 0, "w"), b'\x1e["m","l",0,"w"]'),
        ((3,), b"\x1e[3]"),
        (('k/"\\\n\x7f😀', 0), b'\x1e["k/\\"\\\\\\n\\u007f\\ud83d\\ude00",0]'),
        (("",), b'\x1e[""]'),
        (("\x1eabc",), b'\x1e["\\u001eabc"]'),
    ],
)
def test_names_are_spelled_as_the_format_document_says(path, stored):
    assert fmt.encode_name(path) == stored
    assert fmt.decode_name(stored) == path
