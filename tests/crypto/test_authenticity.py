"""Authenticated files: what their key or a signature vouches for, and that nothing else is loaded."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import reference_auth as auth
import reference_format as fmt
import torch
from samples import assert_same, same, state_dict_bytes, tensor, write_state_dict
from servers.file_server import serve_folder

import tensorizer
from tensorizer import (
    AuthenticationError,
    CryptographyError,
    DecryptionParams,
    EncryptionParams,
    FormatError,
    HashMismatchError,
    PublicKey,
    SigningKey,
    TensorDeserializer,
    TensorSerializer,
    torch_compat,
)

K = bytes(range(32))
KEY, OPEN = EncryptionParams(K), DecryptionParams.from_key(K)
SIGNER = SigningKey.from_bytes(K)
OTHER = SigningKey.from_bytes(bytes(32))
PUBLIC = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"

SIGNED_ANNEX = bytes.fromhex(
    "545a52414e4e5831b2000000"
    "050020000000fa15805cac6ebea817ae3655d4676edcfd3892137bb26c6a2eaca22039ec61de"
    "040020000000bdf4a00a6a2de6482343c8716811300fa30081a8fdfabf217588c44b259e283f"
    "07006000000003a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    "fd6dfa482fe80d3cc228257564c00c093ea418a8979dec248128b9b76a494fb5"
    "a8a0ef2c901c1cbe0ff7ec3e6a2aa0fbb8817c58f117e2773b8afa4344c1a20c67725b1e"
)
W = {"w": torch.tensor([1.0, -2.5])}


def values() -> dict[str, torch.Tensor]:
    """Four of one shape, a scalar and one of several cipher chunks; `g` is `a` under another name."""
    made = {name: tensor((6, 4), seed=i) for i, name in enumerate("abcd")}
    made["e"] = tensor((), torch.float64, seed=9)
    made["f"] = tensor((1100, 1000), seed=10)
    made["g"] = made["a"]
    return made


def encrypted(**options: Any) -> bytes:
    return state_dict_bytes(values(), encryption=KEY, ties="once", metadata={"k": "v"}, **options)


def signed(**options: Any) -> bytes:
    return state_dict_bytes(values(), signing_key=SIGNER, ties="once", metadata={"k": "v"}, **options)


def plain(**options: Any) -> bytes:
    return state_dict_bytes(values(), ties="once", metadata={"k": "v"}, **options)


def opened(data: Any, **options: Any) -> TensorDeserializer:
    return TensorDeserializer(io.BytesIO(data) if isinstance(data, bytes) else data, device="cpu", **options)


# --- the vectors of docs/format.md 12.5 (row 1) -----------------------------------------------------------------------


def vector(**options: Any) -> bytes:
    return state_dict_bytes(W, **options)


def authenticated_vector() -> bytes:
    """The file of the vector, from the field values that the specification names."""
    nonce = auth.marked(bytes(range(0x40, 0x50)), K)
    assert nonce.hex() == "404142434445464748494a4b4c4d4e4f65c297a3d9e11250"
    cipher, block = auth.crypto.encrypt(W["w"].numpy().tobytes(), K, nonce)
    tensor_ = fmt.Tensor(("w",), "<f4", (2,), cipher, hashes=("sha256",))
    bare = len(fmt.encode_header(tensor_, 0, block))
    header = bytearray(fmt.encode_header(tensor_, 192 - bare, block))
    read = fmt.read_header(bytes(header), 0, False, True)
    at = read.hash_values_at[0]
    header[at : at + 32] = hashlib.sha256(read.hash_input() + W["w"].numpy().tobytes()).digest()
    index = fmt.encode_entry(tensor_, 4096, 4288)
    prologue = fmt.encode_prologue(3, 0, 8, 1, 4096 - 73)
    records = (auth.RECORDS, 0, hashlib.sha256(bytes(header)).digest())
    digest = fmt.index_digest(prologue, index, [records])
    tag = (auth.TAG, 0, b"\x01\x00" + auth.tag_of(digest, K))
    annex = fmt.encode_annex([records, (auth.DIGEST, 0, digest), tag])
    return prologue + (index + annex).ljust(4096 - 73, b"\0") + bytes(header) + cipher + bytes(8)


def test_the_vectors_come_out_to_the_byte_and_load():
    data = vector(signing_key=SIGNER)
    assert data[110:304] == SIGNED_ANNEX
    assert len(data) == 4240
    assert hashlib.sha256(data).hexdigest() == "6b54b2217ba68b08ef29c7f664bda40f09973fca221c07725b5977091cac636d"
    assert hashlib.sha256(SIGNED_ANNEX).hexdigest() == (
        "7b2b7e062b97806a8e9fcf7d845b855b56b658aa4a3a8d40f7fa8117b2eea9b4"
    )
    with opened(data, public_key=SIGNER.public_key) as file:
        assert file.authenticated == "signature"
        assert same(file["w"], W["w"])
        assert file.index_digest == "bdf4a00a6a2de6482343c8716811300fa30081a8fdfabf217588c44b259e283f"
    data = authenticated_vector()
    assert hashlib.sha256(data).hexdigest() == "1d5417bc2fae16384ec328c97f9aee917f7a6df6e34c0ebc7b491953d43968fc"
    with opened(data, encryption=OPEN, verify_hash=True) as file:
        assert file.authenticated == "key"
        assert same(file["w"], W["w"])
        assert file.index_digest == "8c3ef184e7ed19147f4fd777aef9cc5215f1f60c7d4c282f731c73883f7a735c"


def test_a_detached_signature_of_a_file_without_annex_is_the_embedded_one(tmp_path):
    path = tmp_path / "w.tensors"
    path.write_bytes(vector())
    report = tensorizer.sign(path, SIGNER)
    assert Path(report.signature).read_bytes() == SIGNED_ANNEX
    assert path.read_bytes() == vector()
    with opened(path, public_key=SIGNER.public_key) as file:
        assert file.authenticated == "signature"


@pytest.mark.parametrize("secret", [KEY, EncryptionParams.from_string("open sesame", 1, 8192)], ids=["key", "phrase"])
def test_what_is_written_is_what_the_oracle_makes_of_it(secret):
    data = state_dict_bytes(values(), encryption=secret, metadata={"k": "v"})
    file = fmt.read_file(data)
    sections = {kind: body for kind, _, body in file.annex}
    assert list(sections) == [auth.TIES, auth.SEALED, auth.RECORDS, auth.DIGEST, auth.TAG]
    assert sections[auth.RECORDS] == auth.record_digests(data)
    assert sections[auth.DIGEST] == auth.digest_of(data)
    derivation = b""
    if secret.derivation is not None:
        ops, mem, salt = secret.derivation
        derivation = struct.pack("<QHHQQiH", 42, 1, 1, ops, mem, 2, 16) + salt
    tag = auth.tag_of(auth.digest_of(data), secret.key)
    assert sections[auth.TAG] == bytes([1, 1 if derivation else 0]) + derivation + tag
    nonces = []
    for record in file.records:
        _, (cipher,) = auth.crypto.parse_crypt_info(record.header.crypt_info)
        nonces.append(cipher.nonce)
    (nbytes,) = struct.unpack_from("<Q", sections[auth.SEALED])
    nonces.append(auth.crypto.parse_crypt_info(sections[auth.SEALED][8 : 8 + nbytes])[1][0].nonce)
    assert all(nonce == auth.marked(nonce, secret.key) and nonce[7] < 0x80 for nonce in nonces)
    assert len({nonce[8:16] for nonce in nonces}) == len(nonces) == len(file.records) + 1


def test_the_index_grows_by_32_bytes_per_tensor_and_100_or_150():
    entries = {f"t{i}": torch.ones(1) for i in range(5)}
    for secret, extra in ((KEY, 100), (EncryptionParams.from_string("open sesame", 1, 8192), 150)):
        (annex,) = (fmt.encode_annex(fmt.read_file(state_dict_bytes(entries, encryption=secret)).annex),)
        assert len(annex) == 32 * 5 + extra


# --- attacks (row 4) --------------------------------------------------------------------------------------------------


def names_exchanged(data: bytes) -> bytes:
    """`b` and `c` change names, in the index and in their headers."""
    return renamed(data, {b"b": b"c", b"c": b"b"})


def renamed(data: bytes, names: dict[bytes, bytes]) -> bytes:
    out = bytearray(data)
    at = fmt.PROLOGUE_NBYTES
    for record in fmt.read_file(data).records:
        new = names.get(record.entry.name, record.entry.name)
        out[at + 2 : at + 2 + len(new)] = new
        at += entry_nbytes(record.entry)
        place = record.entry.offset + 13
        out[place : place + len(new)] = new
    return bytes(out)


def entry_nbytes(entry: fmt.Entry) -> int:
    return 29 + len(entry.name) + len(entry.dtype.encode()) + 4 * len(entry.shape)


def patched(data: bytes, name: str, change: Callable[[fmt.Record, bytearray, int], None]) -> bytes:
    """change(record, bytes of the file, position of its index entry)."""
    out = bytearray(data)
    at = fmt.PROLOGUE_NBYTES
    for record in fmt.read_file(data).records:
        if record.path == (name,):
            change(record, out, at)
        at += entry_nbytes(record.entry)
    return bytes(out)


def reshaped(data: bytes) -> bytes:
    def change(record: fmt.Record, out: bytearray, at: int) -> None:
        shape = struct.pack("<II", 4, 6)
        dims = at + 2 + 1 + 1 + 1 + 3 + 1
        out[dims : dims + 8] = shape
        dims = record.entry.offset + 13 + 1 + 1 + 3 + 1
        out[dims : dims + 8] = shape

    return patched(data, "b", change)


def retyped(data: bytes) -> bytes:
    def change(record: fmt.Record, out: bytearray, at: int) -> None:
        out[at + 5 : at + 8] = b"<i4"
        out[record.entry.offset + 15 : record.entry.offset + 18] = b"<i4"

    return patched(data, "b", change)


def reindexed(data: bytes, entries: list[bytes], records: Optional[bytes] = None) -> bytes:
    """The same file with other entries in its index, and the annex behind them."""
    file = fmt.read_file(data)
    annex = fmt.encode_annex([(k, f, records if k == auth.RECORDS and records else b) for k, f, b in file.annex])
    index = b"".join(entries) + annex
    out = bytearray(data)
    out[57:65] = struct.pack("<Q", len(entries))
    out[73 : 73 + file.index_nbytes] = index.ljust(file.index_nbytes, b"\0")
    return bytes(out)


def entries_in(data: bytes) -> list[bytes]:
    found, at = [], fmt.PROLOGUE_NBYTES
    for record in fmt.read_file(data).records:
        found.append(data[at : at + entry_nbytes(record.entry)])
        at += len(found[-1])
    return found


def dropped(data: bytes) -> bytes:
    """Without `d`."""
    digests = auth.crypto.split(auth.record_digests(data), 32)
    keep = [i for i in range(len(digests)) if i != 3]
    return reindexed(data, [entries_in(data)[i] for i in keep], b"".join(digests[i] for i in keep))


def repeated(data: bytes) -> bytes:
    """`a` once more, under the name `h`, behind the last record."""
    record = fmt.read_file(data).records[0]
    header = bytearray(record.header.raw)
    header[13:14] = b"h"
    begin = len(data) - 8
    entry = bytearray(entries_in(data)[0])
    entry[2:3] = b"h"
    entry[-24:-8] = struct.pack("<QQ", begin, begin + len(header))
    digests = auth.record_digests(data) + hashlib.sha256(bytes(header)).digest()
    return reindexed(data[:-8] + bytes(header) + record.payload + bytes(8), [*entries_in(data), bytes(entry)], digests)


def records_exchanged(data: bytes) -> bytes:
    """Headers and payloads of `b` and `c` change places, with the names put right; the index is not touched."""
    out = bytearray(data)
    b, c = fmt.read_file(data).records[1:3]
    for to, other in ((b, c), (c, b)):
        header = bytearray(other.header.raw)
        header[13:14] = to.entry.name
        assert len(header) == to.entry.data_offset - to.entry.offset
        out[to.entry.offset : to.entry.data_offset + len(to.payload)] = header + other.payload
    return bytes(out)


def tie_changed(data: bytes) -> bytes:
    ties = b'{"g":"b"}'
    return auth.with_annex(data, [(k, f, ties if k == auth.TIES else body) for k, f, body in fmt.read_file(data).annex])


def metadata_changed(data: bytes) -> bytes:
    return auth.with_annex(
        data,
        [(k, f, b'{"k":"w"}' if k == auth.METADATA else body) for k, f, body in fmt.read_file(data).annex],
    )


def version_changed(data: bytes) -> bytes:
    encrypted = fmt.read_file(data).has_crypt_info
    return data[:5] + struct.pack("<I", 4) + bytes([1 if encrypted else 0]) + data[10:]


def from_another_file(data: bytes) -> bytes:
    """Record `b` of another file under the same key."""
    options: dict[str, Any] = {"encryption": KEY} if fmt.read_file(data).has_crypt_info else {}
    other = state_dict_bytes({**values(), "b": tensor((6, 4), seed=77)}, ties="once", metadata={"k": "v"}, **options)
    out = bytearray(data)
    to, source = fmt.read_file(data).records[1], fmt.read_file(other).records[1]
    assert len(to.header.raw) == len(source.header.raw)
    out[to.entry.offset : to.entry.data_offset + len(to.payload)] = source.header.raw + source.payload
    return bytes(out)


def other_chunk_size(data: bytes) -> bytes:
    def change(record: fmt.Record, out: bytearray, at: int) -> None:
        place = record.entry.offset + record.header.crypt_begin + 8 + 2 + 8 + 2
        assert struct.unpack_from("<Q", out, place) == (2 << 20,)
        struct.pack_into("<Q", out, place, 1 << 20)

    return patched(data, "b", change)


AT_OPENING = [
    names_exchanged,
    lambda data: renamed(data, {b"d": b"z"}),
    reshaped,
    retyped,
    dropped,
    repeated,
    tie_changed,
    version_changed,
]
AT_THE_RECORD = [records_exchanged, from_another_file]
ANEW = [records_exchanged, from_another_file, *AT_OPENING]  # with sections 5 and 4 made anew


def ids(functions: list) -> list[str]:
    return [function.__name__.replace("<lambda>", "renamed") for function in functions]


@contextlib.contextmanager
def ways(tmp_path: Path, data: bytes, signature: Optional[bytes] = None):
    """Ways to read `b`: whole, lazy, a slice, many slices; from memory, a file, a mapping and over HTTP."""
    path = tmp_path / "m.tensors"
    path.write_bytes(data)
    if signature is not None:
        (tmp_path / "m.tensors.sig").write_bytes(signature)

    def lazy(source: Any, read: Callable[[TensorDeserializer], Any], **options: Any) -> Any:
        with TensorDeserializer(source, device="cpu", lazy_load=True, **options) as file:
            return read(file)

    with serve_folder(tmp_path) as address:
        url = f"{address}/m.tensors"
        found: list[tuple[str, Callable[..., Any]]] = []
        for place, source in (("file", path), ("http", url)):
            found += [
                (f"whole {place}", lambda s=source, **o: dict(TensorDeserializer(s, device="cpu", **o))["b"]),
                (f"lazy {place}", lambda s=source, **o: lazy(s, lambda f: f["b"], **o)),
                (f"slice {place}", lambda s=source, **o: lazy(s, lambda f: f.get_slice("b")[1:3], **o)),
                (f"slices {place}", lambda s=source, **o: lazy(s, lambda f: f.get_slices({"b": 2})["b"], **o)),
                (f"load_file {place}", lambda s=source, **o: tensorizer.load_file(s, **o)["b"]),
                (
                    f"fills {place}",
                    lambda s=source, **o: lazy(s, lambda f: f.get_slices({"b": ...}, {"b": torch.empty(6, 4)}), **o),
                ),
            ]
        yield found


@pytest.mark.parametrize("attack", AT_OPENING, ids=ids(AT_OPENING))
def test_an_altered_index_of_an_encrypted_file_is_refused_when_it_is_opened(attack, tmp_path):
    for data in (attack(encrypted()), auth.digests_anew(attack(encrypted()))):
        with pytest.raises(AuthenticationError, match="the index does not match its authentication code") as caught:
            opened(data, encryption=OPEN, lazy_load=True)
        assert caught.value.source == "<BytesIO>"
    with ways(tmp_path, data) as found:
        for _, read in found:
            with pytest.raises(AuthenticationError):
                read(encryption=OPEN)


@pytest.mark.parametrize("attack", AT_THE_RECORD, ids=ids(AT_THE_RECORD))
def test_an_exchanged_record_is_refused_when_it_is_read_and_others_are_not(attack, tmp_path):
    data = attack(encrypted())
    with ways(tmp_path, data) as found:
        for name, read in found:
            with pytest.raises(AuthenticationError, match="its record is not the one") as caught:
                read(encryption=OPEN)
            assert "tensor 'b'" in str(caught.value), name
    with opened(data, encryption=OPEN, lazy_load=True) as file:
        assert same(file["f"], values()["f"])
        assert same(file.get_slice("f")[3:5], values()["f"][3:5])
    with pytest.raises(AuthenticationError):
        opened(auth.digests_anew(data), encryption=OPEN, lazy_load=True)


def no_data(data: bytes) -> bytes:
    """`b` loses its cipher chunks: its header is that of a tensor without data, with padding for the rest."""

    def change(record: fmt.Record, out: bytearray, at: int) -> None:
        begin = record.entry.offset + record.header.crypt_begin
        end = record.entry.offset + record.header.crypt_end
        out[begin : begin + 10] = struct.pack("<QH", 2, 0)
        out[begin + 10 : end] = bytes(end - begin - 10)

    return patched(data, "b", change)


@pytest.mark.parametrize("attack", [other_chunk_size, no_data])
def test_an_altered_header_is_refused_before_its_fields_are_used(attack):
    with (
        opened(attack(encrypted()), encryption=OPEN, lazy_load=True) as file,
        pytest.raises(AuthenticationError, match="its record is not the one"),
    ):
        file["b"]


def test_another_derivation_in_a_record_is_refused_before_a_key_is_derived():
    secret = EncryptionParams.from_string("open sesame", 1, 8192)

    def change(record: fmt.Record, out: bytearray, at: int) -> None:
        place = record.entry.offset + record.header.crypt_begin + 8 + 14
        struct.pack_into("<QQ", out, place, 2**32, 1 << 40)

    data = patched(state_dict_bytes(values(), encryption=secret), "b", change)
    with (
        opened(data, encryption=DecryptionParams.from_string("open sesame"), lazy_load=True) as file,
        pytest.raises(AuthenticationError, match="its record is not the one"),
    ):
        file["b"]


def cut(data: bytes) -> list[bytes]:
    """What may be left of an annex from which its tag was taken."""
    return [
        auth.with_annex(data, []),
        auth.without(data, auth.TAG),
        auth.without(data, auth.TAG, auth.RECORDS),
        auth.without(data, auth.TAG, auth.RECORDS, auth.DIGEST),
    ]


def test_a_file_whose_tag_was_removed_is_refused_without_any_policy(tmp_path):  # row 5
    for i, data in enumerate(cut(encrypted())):
        folder = tmp_path / str(i)
        folder.mkdir()
        with ways(folder, data) as found:
            for name, read in found:
                with pytest.raises(AuthenticationError, match="it belongs to an authenticated file"):
                    read(encryption=OPEN)
                assert name
    sealed = auth.without(encrypted(), auth.TAG)
    with (
        opened(sealed, encryption=OPEN, lazy_load=True) as file,
        pytest.raises(AuthenticationError, match="belongs to an authenticated file"),
    ):
        file.metadata  # noqa: B018


def test_a_record_that_moves_to_an_older_file_under_the_key_is_refused():
    old = bytearray(auth.as_before(encrypted(), K))
    to, source = fmt.read_file(bytes(old)).records[1], fmt.read_file(encrypted()).records[1]
    old[to.entry.offset : to.entry.data_offset + len(to.payload)] = source.header.raw + source.payload
    with opened(bytes(old), encryption=OPEN, lazy_load=True) as file:
        assert same(file["c"], values()["c"])
        with pytest.raises(AuthenticationError, match="belongs to an authenticated file"):
            file["b"]


def test_a_stored_digest_that_is_wrong_is_an_error_although_the_tag_is_right():
    data = encrypted()
    wrong = [(k, f, bytes(32) if k == auth.DIGEST else body) for k, f, body in fmt.read_file(data).annex]
    with pytest.raises(AuthenticationError, match="does not match its digest"):
        opened(auth.with_annex(data, wrong), encryption=OPEN, lazy_load=True)


def test_any_byte_of_index_annex_and_headers_that_is_used_is_covered():
    data = state_dict_bytes({"x": torch.arange(4.0), "y": torch.ones(2)}, encryption=KEY)
    file = fmt.read_file(data)
    annex = len(fmt.encode_annex(file.annex))
    end = fmt.PROLOGUE_NBYTES + file.index_nbytes - len(file.index_slack) + annex
    places = [*range(5, 41), *range(57, 65), *range(73, end)]
    for record in file.records:
        places += range(record.entry.offset, record.entry.data_offset + len(record.payload))
    for at in places:
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises((CryptographyError, FormatError, OSError)):
            dict(opened(bytes(changed), encryption=OPEN))


# --- policy (rows 3, 16) ----------------------------------------------------------------------------------------------


def test_a_file_of_an_earlier_release_loads_and_the_log_says_what_is_missing(caplog):
    data = auth.as_before(encrypted(), K)
    with caplog.at_level(logging.INFO, "tensorizer.serialization"), opened(data, encryption=OPEN) as file:
        assert file.authenticated is None
        assert same(file["a"], values()["a"])
    assert sum("earlier release" in record.message for record in caplog.records) == 1
    with pytest.raises(AuthenticationError, match="tensorizer rekey"):
        opened(data, encryption=OPEN, require_authenticated=True)


REQUIRED = {
    "plain": (plain, {}, "nothing was given"),
    "signed, without its key": (signed, {}, "nothing was given"),
    "encrypted before": (lambda: auth.as_before(encrypted(), K), {"encryption": OPEN}, "earlier release"),
    "safetensors": (lambda: tensorizer.save(values(), format="safetensors"), {}, "safetensors"),
}


@pytest.mark.parametrize("kind", REQUIRED)
def test_what_has_to_be_authenticated_and_is_not_is_refused_everywhere(kind, tmp_path, monkeypatch):
    make, options, why = REQUIRED[kind]
    path = tmp_path / "m.tensors"
    path.write_bytes(make())
    doors: list[Callable[..., Any]] = [
        lambda **o: TensorDeserializer(path, device="cpu", **o),
        lambda **o: tensorizer.load_file(path, **o),
        lambda **o: tensorizer.safe_open(path, **o),
        lambda **o: tensorizer.verify(path, **o),
        lambda **o: tensorizer.torch.load_model(torch.nn.Linear(1, 1), path, strict=False, **o),
    ]
    for door in doors:
        with pytest.raises(AuthenticationError, match=why):
            door(require_authenticated=True, **options)
        monkeypatch.setenv("TENSORIZER_REQUIRE_AUTHENTICATED", "1")
        with pytest.raises(AuthenticationError, match=why):
            door(**options)
        door(require_authenticated=False, **options)
        monkeypatch.setenv("TENSORIZER_REQUIRE_AUTHENTICATED", "0")
        door(**options)
        monkeypatch.delenv("TENSORIZER_REQUIRE_AUTHENTICATED")


def test_a_variable_that_is_neither_0_nor_1_is_an_error(monkeypatch):
    monkeypatch.setenv("TENSORIZER_REQUIRE_AUTHENTICATED", "yes")
    with pytest.raises(ValueError, match="TENSORIZER_REQUIRE_AUTHENTICATED"):
        opened(plain())


def test_what_is_authenticated_satisfies_the_requirement():
    with opened(encrypted(), encryption=OPEN, require_authenticated=True) as file:
        assert file.authenticated == "key"
    with opened(signed(), public_key=SIGNER.public_key, require_authenticated=True) as file:
        assert file.authenticated == "signature"
    both = encrypted(signing_key=SIGNER)
    with opened(both, public_key=SIGNER.public_key, encryption=OPEN, require_authenticated=True) as file:
        assert file.authenticated == "both"
        assert same(file["a"], values()["a"])


def test_listing_without_a_key_checks_nothing():
    data = encrypted(signing_key=SIGNER)
    info = tensorizer.inspect(io.BytesIO(names_exchanged(data)))
    assert info.has_tag
    assert info.signers == (PUBLIC,)
    with opened(plain()) as file:
        assert file.authenticated is None
        assert file.index_digest == auth.digest_of(plain()).hex()


# --- keys (rows 10, 15, 19) -------------------------------------------------------------------------------------------


def test_a_passphrase_file_opens_with_the_passphrase_and_with_its_key():
    secret = EncryptionParams.from_string("open sesame", 1, 8192)
    data = state_dict_bytes(values(), encryption=secret)
    for params in (DecryptionParams.from_string("open sesame"), DecryptionParams.from_key(secret.key)):
        with opened(data, encryption=params) as file:
            assert file.authenticated == "key"
            assert same(file["a"], values()["a"])
    limited = DecryptionParams.from_string("open sesame", max_derivations=1)
    assert opened(data, encryption=limited).authenticated == "key"
    with pytest.raises(CryptographyError):
        opened(data, encryption=DecryptionParams.from_string("open barley"))


def test_a_provider_is_asked_once_and_when_the_file_is_opened():
    asked = []

    def provide() -> bytes:
        asked.append(1)
        return K

    with opened(encrypted(), encryption=DecryptionParams.from_provider(provide), lazy_load=True) as file:
        assert len(asked) == 1
        file["a"]
    assert len(asked) == 1


def openssl(*arguments: Any) -> None:
    result = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"openssl: {result.stderr!r:.200}")


def test_keys_of_openssl_and_hex_keys_work_and_others_do_not(tmp_path):
    private, public = tmp_path / "k.pem", tmp_path / "k.pub"
    openssl("genpkey", "-algorithm", "ed25519", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    key, shown = SigningKey.from_file(private), PublicKey.from_file(public)
    assert key.public_key == shown
    assert hash(shown) == hash(key.public_key)
    assert len(bytes(shown)) == 32
    (tmp_path / "seed.hex").write_text(K.hex().upper() + "\n")
    (tmp_path / "public.hex").write_text(f" {PUBLIC}\n")
    assert str(SigningKey.from_file(tmp_path / "seed.hex").public_key) == PUBLIC
    assert str(PublicKey.from_file(tmp_path / "public.hex")) == PUBLIC == str(SIGNER.public_key)
    other = tmp_path / "p256.pem"
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", other)
    openssl("pkey", "-in", other, "-pubout", "-out", tmp_path / "p256.pub")
    locked = tmp_path / "locked.pem"
    openssl("pkey", "-in", private, "-aes256", "-passout", "pass:secret", "-out", locked)
    (tmp_path / "nothing").write_text("")
    (tmp_path / "zz").write_text("zz" * 32)
    for name in ("p256.pem", "locked.pem", "k.pub", "nothing", "zz"):
        with pytest.raises(ValueError, match="Ed25519"):
            SigningKey.from_file(tmp_path / name)
    for name in ("p256.pub", "k.pem", "nothing", "zz"):
        with pytest.raises(ValueError, match="key"):
            PublicKey.from_file(tmp_path / name)


def test_keys_that_are_none_are_refused():
    for bad in (bytes(32), bytes([1]) + bytes(31), b"\xff" * 32, b"short"):
        with pytest.raises(ValueError, match="public key"):
            PublicKey.from_bytes(bad)
    with pytest.raises(ValueError, match="32 bytes"):
        SigningKey.from_bytes(b"short")
    for wrong in ("text", 7):
        with pytest.raises(TypeError):
            SigningKey.from_bytes(wrong)
        with pytest.raises(TypeError):
            PublicKey.from_bytes(wrong)
    with pytest.raises(TypeError):
        opened(signed(), public_key=7)
    with pytest.raises(ValueError, match="empty"):
        opened(signed(), public_key=[])
    with pytest.raises(ValueError, match="without the public_key"):
        opened(signed(), signature=b"")


def test_saved_keys_are_for_their_owner_alone_and_replace_nothing(tmp_path):
    key, path = SigningKey.generate(), tmp_path / "release.pem"
    key.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert SigningKey.from_file(path).public_key == key.public_key
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        SIGNER.save(path)
    assert path.read_bytes() == before
    key.public_key.save(tmp_path / "release.pub")
    assert PublicKey.from_file(tmp_path / "release.pub") == key.public_key
    openssl("pkey", "-in", path, "-noout")
    openssl("pkey", "-pubin", "-in", tmp_path / "release.pub", "-noout")


def test_private_keys_appear_nowhere(tmp_path, caplog):
    seed = bytes(range(100, 132))
    key = SigningKey.from_bytes(seed)
    shown = [repr(key), str(key), repr(vars(type(key)))]
    with pytest.raises(TypeError) as caught:
        pickle.dumps(key)
    shown.append(str(caught.value))
    with caplog.at_level(logging.DEBUG):
        serializer = TensorSerializer(tmp_path / "m.tensors", signing_key=key)
        serializer.write_state_dict(W)
        with pytest.raises(TypeError) as caught:
            pickle.dumps(serializer)
        shown += [str(caught.value), repr(serializer)]
        serializer.close()
        with pytest.raises(AuthenticationError) as caught:
            opened(tmp_path / "m.tensors", public_key=OTHER.public_key)
        shown.append(str(caught.value))
    bad = tmp_path / "bad.pem"
    bad.write_text(seed.hex() + "00")
    with pytest.raises(ValueError, match="key file") as caught:
        SigningKey.from_file(bad)
    shown += [str(caught.value), *(record.getMessage() for record in caplog.records)]
    assert not [text for text in shown if seed.hex() in text or repr(seed) in text]
    assert pickle.loads(pickle.dumps(key.public_key)) == key.public_key


# --- signatures (rows 6 to 9, 11 to 14) -------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", [*ANEW, metadata_changed], ids=ids([*ANEW, metadata_changed]))
@pytest.mark.parametrize("where", ["embedded", "detached"])
def test_whatever_is_changed_in_a_signed_plain_file_is_refused(where, attack, tmp_path):  # rows 4, 8, 14
    data = signed() if where == "embedded" else plain()
    signature = None if where == "embedded" else auth.signature_file(data, K)
    changed = attack(data)
    for altered in (changed, auth.digests_anew(changed)):
        with ways(tmp_path, altered, signature) as found:
            for name, read in found:
                with pytest.raises(AuthenticationError):
                    read(public_key=SIGNER.public_key)
                assert name


@pytest.mark.parametrize("where", ["embedded", "detached"])
def test_data_with_digests_made_anew_are_refused(where, tmp_path):  # row 8
    data = signed() if where == "embedded" else plain()
    signature = None if where == "embedded" else auth.signature_file(data, K)
    changed = auth.rehashed(data, lambda r: bytes(len(r.payload)) if r.path == ("b",) else None)
    assert same(opened(changed, verify_hash=True)["b"], torch.zeros(6, 4))
    with ways(tmp_path, changed, signature) as found:
        for _, read in found:
            with pytest.raises(AuthenticationError, match=r"tensor 'b'.*its record is not the one"):
                read(public_key=SIGNER.public_key)
    if where == "embedded":
        with pytest.raises(AuthenticationError):
            opened(auth.digests_anew(changed), public_key=SIGNER.public_key)


def only(wanted: str) -> Callable[[Any], bool]:
    return lambda name: name == wanted


def test_a_flipped_byte_is_found_in_its_tensor_alone(tmp_path):  # row 7
    data = bytearray(signed())
    record = fmt.read_file(bytes(data)).records[0]
    data[record.entry.data_offset + 5] ^= 1
    path = tmp_path / "m.tensors"
    path.write_bytes(bytes(data))
    for options in ({}, {"mmap": True}):
        with TensorDeserializer(path, device="cpu", lazy_load=True, public_key=SIGNER.public_key, **options) as file:
            for name in "bcdef":
                assert same(file[name], values()[name])
            for read in (
                lambda file=file: file["a"],
                lambda file=file: file.get_slice("a")[0],
                lambda file=file: file.get_slices({"a": slice(3, 4)}),
                lambda file=file: list(file.read_tensors(only("a"), verify_hash=False)),
            ):
                with pytest.raises(HashMismatchError):
                    read()


def test_a_slice_of_a_signed_file_is_right(tmp_path):
    data = signed()
    with opened(data, public_key=SIGNER.public_key, lazy_load=True) as file:
        wanted = values()["f"]
        assert same(file.get_slice("f")[3:5, 7], wanted[3:5, 7])
        out = torch.empty(2, 1000)
        file.get_slices({"f": slice(4, 6)}, {"f": out})
        assert same(out, wanted[4:6])
    with opened(data, public_key=SIGNER.public_key) as file:  # closed by now
        assert same(file.get_slice("f")[3:5, 7], wanted[3:5, 7])


def test_a_crc_alone_does_not_bind_data_to_a_signature(tmp_path):
    data = state_dict_bytes(values(), hashes="crc32")
    with pytest.raises(ValueError, match=r"no SHA-256.*'a'"):
        tensorizer.sign(io.BytesIO(data), SIGNER, signature=tmp_path / "s", check=False)
    with pytest.raises(ValueError, match="sha256"):
        TensorSerializer(tmp_path / "m", signing_key=SIGNER, hashes="crc32")
    assert not (tmp_path / "m").exists()
    forged = auth.signature_file(data, K)  # of a signer who is careless
    with pytest.raises(AuthenticationError, match="without a SHA-256"):
        opened(data, public_key=SIGNER.public_key, signature=forged)


def test_signatures_that_are_wrong_missing_or_damaged_are_told_apart(tmp_path):  # row 9
    path = tmp_path / "m.tensors"
    path.write_bytes(plain())
    key = SIGNER.public_key
    with pytest.raises(AuthenticationError, match=r"not signed.*m\.tensors\.sig"):
        opened(path, public_key=key)
    with pytest.raises(AuthenticationError, match="not signed"):
        opened(plain(), public_key=key)
    with pytest.raises(AuthenticationError, match=f"signed by other keys: {PUBLIC}"):
        opened(signed(), public_key=OTHER.public_key)
    tensorizer.sign(path, OTHER)
    with pytest.raises(AuthenticationError, match=f"signed by other keys: {OTHER.public_key}"):
        opened(path, public_key=key)
    right = auth.signature_file(plain(), K)
    with opened(path, public_key=key, signature=right) as file:
        assert file.authenticated == "signature"
    other = auth.signature_file(state_dict_bytes({**values(), "q": torch.ones(1)}), K)
    same_count = auth.signature_file(renamed(plain(), {b"d": b"z"}), K)
    for wrong in (other, same_count):
        with pytest.raises(AuthenticationError, match="does not match"):
            opened(path, public_key=key, signature=wrong)
    for damaged in (right[:-1], right + b"\0", right[:40] + b"\xff" + right[41:], b"", b"TZRANNX1"):
        with pytest.raises(FormatError):
            opened(path, public_key=key, signature=damaged)
    flipped = bytearray(right)
    flipped[-10] ^= 1
    flipped[-4:] = struct.pack("<I", fmt.zlib.crc32(bytes(flipped[:-4])))
    with pytest.raises(AuthenticationError, match="does not match"):
        opened(path, public_key=key, signature=bytes(flipped))
    with pytest.raises(FileNotFoundError):
        opened(path, public_key=key, signature=tmp_path / "nowhere")


def test_a_signature_of_a_file_with_an_equal_index_is_refused_at_the_records(tmp_path):
    other = state_dict_bytes({**values(), "b": tensor((6, 4), seed=50)}, ties="once", metadata={"k": "v"})
    with (
        opened(plain(), public_key=SIGNER.public_key, signature=auth.signature_file(other, K), lazy_load=True) as file,
        pytest.raises(AuthenticationError, match="its record is not the one"),
    ):
        file["b"]


def test_lazy_loads_over_http_read_the_head_the_signature_and_the_record(tmp_path):  # row 6
    for where in ("embedded", "detached"):
        folder = tmp_path / where
        folder.mkdir()
        (folder / "m.tensors").write_bytes(signed() if where == "embedded" else plain())
        if where == "detached":
            tensorizer.sign(folder / "m.tensors", SIGNER)
        with serve_folder(folder) as address:
            source = f"{address}/m.tensors"
            key = SIGNER.public_key
            with TensorDeserializer(source, device="cpu", lazy_load=True, public_key=key) as file:
                assert same(file["b"], values()["b"])
                assert file.total_bytes_read < 2 << 20
            asked = f"{source}?token=1"
            with TensorDeserializer(asked, device="cpu", lazy_load=True, public_key=key) as file:
                assert file.authenticated == "signature"


def test_our_signatures_are_those_of_another_library_over_40_bytes(tmp_path):  # row 11
    data = signed()
    (body,) = (body for kind, _, body in fmt.read_file(data).annex if kind == auth.SIGNATURES)
    auth.verify_signature(body[:32], body[32:], b"TZRSIGN1" + auth.digest_of(data))
    path = tmp_path / "m.tensors"
    path.write_bytes(plain())
    tensorizer.sign(path, SIGNER)
    assert (tmp_path / "m.tensors.sig").read_bytes() == auth.signature_file(plain(), K)


def test_either_of_two_signers_suffices(tmp_path):  # row 12
    path = tmp_path / "m.tensors"
    path.write_bytes(plain())
    tensorizer.sign(path, SIGNER)
    report = tensorizer.sign(path, OTHER)
    assert report.signers == (PUBLIC, str(OTHER.public_key))
    again = tensorizer.sign(path, SIGNER)
    assert sorted(again.signers) == sorted(report.signers)
    third = SigningKey.generate().public_key
    for keys in (SIGNER.public_key, OTHER.public_key, [third, OTHER.public_key], (third, SIGNER.public_key)):
        with opened(path, public_key=keys) as file:
            assert file.authenticated == "signature"
    with pytest.raises(AuthenticationError, match="other keys"):
        opened(path, public_key=third)


def test_embedded_signatures_by_others_leave_room_for_one_beside(tmp_path):
    path = tmp_path / "m.tensors"
    path.write_bytes(signed())
    tensorizer.sign(path, OTHER)
    for key in (SIGNER.public_key, OTHER.public_key):
        with opened(path, public_key=key) as file:
            assert file.authenticated == "signature"
            assert same(file["a"], values()["a"])


def test_hashes_cannot_be_left_out_where_a_signature_rests_on_them():  # row 13
    with pytest.raises(ValueError, match="verify_hash=False"):
        opened(signed(), public_key=SIGNER.public_key, verify_hash=False)
    data = encrypted(signing_key=SIGNER)
    with opened(data, public_key=SIGNER.public_key, encryption=OPEN, verify_hash=False) as file:
        assert file.authenticated == "both"


def test_safetensors_files_have_no_signatures_of_ours(tmp_path):
    path = tmp_path / "m.safetensors"
    tensorizer.save_file(W, path)
    with pytest.raises(ValueError, match="safetensors"):
        opened(path, public_key=SIGNER.public_key)
    with pytest.raises(ValueError, match="safetensors"):
        tensorizer.sign(path, SIGNER)


def test_a_signature_of_another_content_is_replaced_by_force_alone(tmp_path):
    path = tmp_path / "m.tensors"
    path.write_bytes(plain())
    tensorizer.sign(path, SIGNER)
    path.write_bytes(auth.digests_anew(renamed(plain(), {b"d": b"z"})))
    with pytest.raises(FileExistsError):
        tensorizer.sign(path, SIGNER, check=False)
    tensorizer.sign(path, SIGNER, check=False, force=True)
    assert opened(path, public_key=SIGNER.public_key, filter_func=lambda name: False).authenticated == "signature"


def test_signing_checks_every_tensor_first(tmp_path):
    data = bytearray(plain())
    data[-20] ^= 1
    path = tmp_path / "m.tensors"
    path.write_bytes(bytes(data))
    with pytest.raises(HashMismatchError):
        tensorizer.sign(path, SIGNER)
    assert not (tmp_path / "m.tensors.sig").exists()
    assert not tensorizer.sign(path, SIGNER, check=False).checked


def test_encrypted_files_are_signed_with_and_without_their_key(tmp_path):
    path = tmp_path / "m.tensors"
    path.write_bytes(encrypted())
    assert not tensorizer.sign(path, SIGNER).checked
    assert tensorizer.sign(path, SIGNER, encryption=OPEN).checked
    with opened(path, public_key=SIGNER.public_key, encryption=OPEN, lazy_load=True) as file:
        assert file.authenticated == "both"
        assert same(file.get_slice("f")[2], values()["f"][2])
    old = auth.as_before(encrypted(), K)
    with opened(old, public_key=SIGNER.public_key, encryption=OPEN, signature=auth.signature_file(old, K)) as file:
        assert file.authenticated == "signature"


def test_where_a_signature_goes_has_to_be_said_for_what_is_no_local_path(tmp_path):
    with pytest.raises(ValueError, match="signature"):
        tensorizer.sign(io.BytesIO(plain()), SIGNER)
    target = tmp_path / "elsewhere.sig"
    tensorizer.sign(io.BytesIO(plain()), SIGNER, signature=target)
    for signature in (target, str(target), target.read_bytes(), target.as_uri()):
        with opened(plain(), public_key=SIGNER.public_key, signature=signature) as file:
            assert file.authenticated == "signature"


def test_a_key_service_signs_the_40_bytes_and_its_errors_arrive(tmp_path):
    asked = []

    def sign(message: bytes) -> bytes:
        asked.append(message)
        return auth.sign(K, message)

    key = SigningKey.from_provider(sign, SIGNER.public_key)
    data = vector(signing_key=key)
    assert data[110:304] == SIGNED_ANNEX
    assert set(asked) == {b"TZRSIGN1" + auth.digest_of(data)}

    def fails(message: bytes) -> bytes:
        raise RuntimeError("the service is away")

    path = tmp_path / "m.tensors"
    with pytest.raises(RuntimeError, match="the service is away"):
        write_state_dict(path, W, signing_key=SigningKey.from_provider(fails, SIGNER.public_key))
    assert not path.exists()
    with pytest.raises(CryptographyError, match="does not fit its public key"):
        write_state_dict(path, W, signing_key=SigningKey.from_provider(lambda m: bytes(64), SIGNER.public_key))
    for answer in (b"short", "text"):
        with pytest.raises((ValueError, TypeError), match="sign"):
            write_state_dict(path, W, signing_key=SigningKey.from_provider(lambda m, a=answer: a, SIGNER.public_key))


@pytest.mark.parametrize("options", [{"encryption": KEY}, {"signing_key": SIGNER}], ids=["encrypted", "signed"])
def test_files_that_grow_are_authentic_after_every_call(options, tmp_path):
    reading: dict[str, Any] = {"encryption": OPEN} if "encryption" in options else {"public_key": SIGNER.public_key}
    path = tmp_path / "m.tensors"
    serializer = TensorSerializer(path, **options)
    wanted = {}
    for call in range(4):
        part = {f"{call}.{i}": tensor((5, i + 1), seed=call) for i in range(1 + 300 * call)}
        serializer.write_state_dict(part)
        wanted.update(part)
        with opened(path, require_authenticated=True, **reading) as file:
            assert_same(dict(file.tree()), wanted)
    for i in range(20):
        wanted[f"one.{i}"] = tensor((3,), seed=i)
        serializer.write_tensor(0, f"one.{i}", tensorizer.TensorType.STATE_DICT, wanted[f"one.{i}"])
    serializer.close()
    data = path.read_bytes()
    assert_same(dict(opened(path, require_authenticated=True, **reading).tree()), wanted)
    sections = {kind: body for kind, _, body in fmt.read_file(data).annex}
    assert sections[auth.RECORDS] == auth.record_digests(data)
    assert sections[auth.DIGEST] == auth.digest_of(data)


def test_sidecars_of_torch_save_are_authenticated(tmp_path):
    path = tmp_path / "m.pt"
    with torch_compat.tensorizer_saving(encryption=KEY):
        torch.save(W, path)
    sidecar = path.with_suffix(".pt.tensors")
    if not sidecar.exists():
        (sidecar,) = tmp_path.glob("*.tensors*")
    with torch_compat.tensorizer_loading(encryption=OPEN, require_authenticated=True):
        assert same(torch.load(path)["w"], W["w"])
    sidecar.write_bytes(auth.without(sidecar.read_bytes(), auth.TAG))
    with torch_compat.tensorizer_loading(encryption=OPEN), pytest.raises(AuthenticationError):
        torch.load(path)


def test_what_writes_a_file_anew_warns_that_signatures_are_gone(tmp_path, caplog):
    embedded, beside = tmp_path / "embedded.tensors", tmp_path / "beside.tensors"
    embedded.write_bytes(signed())
    beside.write_bytes(plain())
    tensorizer.sign(beside, SIGNER)
    for source in (embedded, beside):
        for target in ("out.tensors", "out.safetensors"):
            caplog.clear()
            with caplog.at_level(logging.WARNING, "tensorizer.serialization"):
                tensorizer.convert(source, tmp_path / target, public_key=SIGNER.public_key)
            assert [record.levelname for record in caplog.records if "signatures" in record.message] == ["WARNING"]
    assert not tensorizer.inspect(tmp_path / "out.tensors").signers
    with pytest.raises(AuthenticationError, match="other keys"):
        tensorizer.convert(embedded, tmp_path / "never", public_key=OTHER.public_key)
    assert not (tmp_path / "never").exists()
    encrypt = ("--generate-key", tmp_path / "key")
    result = command("encrypt", embedded, tmp_path / "encrypted.tensors", *encrypt)
    assert result.returncode == 0, result.stderr
    assert "sign that anew" in result.stderr


def test_cp_takes_the_signature_along(tmp_path):
    source, target = tmp_path / "m.tensors", tmp_path / "copy.tensors"
    source.write_bytes(plain())
    tensorizer.sign(source, SIGNER)
    result = command("cp", source, target)
    assert result.returncode == 0, result.stderr
    assert opened(target, public_key=SIGNER.public_key).authenticated == "signature"
    target.unlink()
    assert command("cp", source, target).returncode == 6  # a signature is there already
    assert not target.exists()
    assert command("cp", "--force", source, target).returncode == 0
    (tmp_path / "m.tensors.sig").unlink()
    assert command("cp", source, tmp_path / "bare.tensors").returncode == 0
    assert not (tmp_path / "bare.tensors.sig").exists()


def test_other_files_of_a_folder_are_copied_without_the_signatures_of_its_models(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "model.tensors").write_bytes(plain())
    (folder / "config.json").write_text("{}")
    tensorizer.sign(folder / "model.tensors", SIGNER)
    report = tensorizer.convert(folder / "model.tensors", tmp_path / "b" / "model.tensors", all_files=True)
    assert [Path(name).name for name in report.copied] == ["config.json"]


def test_files_in_redis_are_authentic_too(tmp_path):
    pytest.importorskip("redis")
    from servers import needs
    from servers.redis_server import RedisServer, redis_is_installed

    if not redis_is_installed():
        pytest.skip(needs("Redis"))
    import redis

    with RedisServer() as server:
        client = redis.Redis(port=server.port)
        for name, data in (("right", encrypted(signing_key=SIGNER)), ("wrong", records_exchanged(encrypted()))):
            with opened(data, encryption=OPEN, lazy_load=True) as file:
                file.to_redis(client, name)
        source = f"redis://127.0.0.1:{server.port}"
        key = SIGNER.public_key
        with TensorDeserializer(f"{source}/right", device="cpu", encryption=OPEN, public_key=key) as file:
            assert file.authenticated == "both"
            assert same(file["a"], values()["a"])
        with TensorDeserializer(f"{source}/wrong", device="cpu", encryption=OPEN, lazy_load=True) as file:
            assert same(file["a"], values()["a"])
            with pytest.raises(AuthenticationError, match="its record is not the one"):
                file["b"]
        client.close()


def test_the_shards_of_a_model_are_each_checked(tmp_path):
    from tensorizer import save_file

    save_file(values(), tmp_path / "model.tensors", max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.tensors"))
    assert len(shards) > 1
    for shard in shards:
        tensorizer.sign(shard, SIGNER)
    key = SIGNER.public_key
    with opened(tmp_path, public_key=key, require_authenticated=True) as file:
        assert file.authenticated == "signature"
        assert file.index_digest is None
        assert same(file["f"], values()["f"])
    with opened(tmp_path, public_key=key, lazy_load=True) as file:
        assert same(file.get_slice("a")[1], values()["a"][1])
    with pytest.raises(ValueError, match="shards"):
        opened(tmp_path, public_key=key, signature=b"")
    Path(f"{shards[0]}.sig").unlink()
    with pytest.raises(AuthenticationError, match="not signed"):
        opened(tmp_path, public_key=key)


# --- nothing changes without a key (row 20) ---------------------------------------------------------------------------


def test_files_without_key_and_signature_have_nothing_of_this():
    for options in ({}, {"metadata": {"k": "v"}}, {"ties": "twice"}):
        kinds = {kind for kind, _, _ in fmt.read_file(state_dict_bytes(values(), **options)).annex}
        assert not kinds & {auth.RECORDS, auth.TAG, auth.SIGNATURES}
    assert hashlib.sha256(vector()).hexdigest() == "1dff45bb4a0b542f78e44335550153ed27e7534ba84c335cb5915208b7198a47"


# --- the command line (row 18) ----------------------------------------------------------------------------------------


def command(*arguments: Any, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tensorizer", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_command_line_makes_keys_signs_and_verifies(tmp_path):
    key = tmp_path / "release.pem"
    made = command("sign", "--generate-key", key)
    assert made.returncode == 0, made.stderr
    assert key.stat().st_mode & 0o777 == 0o600
    public = tmp_path / "release.pem.pub"
    assert str(PublicKey.from_file(public)) in made.stdout
    assert command("sign", "--generate-key", key).returncode == 6
    path = tmp_path / "m.tensors"
    path.write_bytes(plain())
    result = command("sign", path, "--key", key)
    assert (result.returncode, result.stderr) == (0, ""), result
    assert (tmp_path / "m.tensors.sig").exists()
    result = command("verify", path, "--public-key", public, "--json")
    assert result.returncode == 0, result.stderr
    (report,) = json.loads(result.stdout)["files"]
    assert report["authenticated"] == "signature"
    assert report["signers"] == [str(PublicKey.from_file(public))]
    other = tmp_path / "other"
    OTHER.public_key.save(other)
    wrong = command("verify", path, "--public-key", other)
    assert wrong.returncode == 5
    assert "signed by other keys" in wrong.stderr
    path.write_bytes(renamed(plain(), {b"d": b"z"}))
    assert command("verify", path, "--public-key", public).returncode == 5
    assert command("sign", path, "--key", key, "--no-check").returncode == 6
    assert command("sign", path, "--key", key, "--no-check", "--force").returncode == 0
    assert command("verify", path, TENSORIZER_REQUIRE_AUTHENTICATED="1").returncode == 5


def test_the_command_line_shows_signers_as_not_checked(tmp_path):
    path = tmp_path / "m.tensors"
    path.write_bytes(encrypted(signing_key=SIGNER))
    shown = command("inspect", path)
    assert shown.returncode == 0
    assert PUBLIC in shown.stdout
    assert "not checked" in shown.stdout
    (report,) = json.loads(command("inspect", path, "--json").stdout)["files"]
    assert report["signers"] == [PUBLIC]
