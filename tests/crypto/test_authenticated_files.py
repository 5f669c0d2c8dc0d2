"""Encrypted files: what their key vouches for, to the byte, and that nothing else is loaded."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import reference_auth as auth
import reference_format as fmt
import torch
from authentic_files import (
    AT_OPENING,
    AT_THE_RECORD,
    KEY,
    OPEN,
    SIGNED_ANNEX,
    SIGNER,
    K,
    W,
    encrypted,
    entry_nbytes,
    ids,
    opened,
    other_chunk_size,
    patched,
    values,
    vector,
    ways,
)
from samples import same, state_dict_bytes

import tensorizer
from tensorizer import AuthenticationError, CryptographyError, DecryptionParams, EncryptionParams, FormatError


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
    assert Path(report["signature"]).read_bytes() == SIGNED_ANNEX
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


def test_files_without_key_and_signature_have_nothing_of_this():
    for options in ({}, {"metadata": {"k": "v"}}, {"ties": "twice"}):
        kinds = {kind for kind, _, _ in fmt.read_file(state_dict_bytes(values(), **options)).annex}
        assert not kinds & {auth.RECORDS, auth.TAG, auth.SIGNATURES}
    assert hashlib.sha256(vector()).hexdigest() == "1dff45bb4a0b542f78e44335550153ed27e7534ba84c335cb5915208b7198a47"


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
        with pytest.raises(AuthenticationError, match="it belongs to an authenticated file"):
            opened(data, encryption=OPEN, verify_hash=True)
    sealed = auth.without(encrypted(), auth.TAG)
    with (
        opened(sealed, encryption=OPEN, lazy_load=True) as file,
        pytest.raises(AuthenticationError, match="belongs to an authenticated file"),
    ):
        file.metadata  # noqa: B018


def emptied(data: bytes) -> bytes:
    """`b` becomes a tensor that was written without data, in index and header."""

    def change(record: fmt.Record, out: bytearray, at: int) -> None:
        end = at + entry_nbytes(record.entry)
        out[end - 8 : end] = bytes(8)
        out[record.entry.data_offset - 8 : record.entry.data_offset] = bytes(8)

    return patched(no_data(data), "b", change)


def test_a_tensor_that_lost_its_data_with_the_tag_is_refused_when_the_file_is_opened(tmp_path):
    before = emptied(auth.as_before(encrypted(), K))
    with opened(before, encryption=OPEN, lazy_load=True) as file:  # as a file of an earlier release may be
        assert same(file["b"], torch.zeros(6, 4))
    for i, data in enumerate(cut(emptied(encrypted()))):
        with pytest.raises(AuthenticationError, match="it belongs to an authenticated file"):
            opened(data, encryption=OPEN, lazy_load=True)
        folder = tmp_path / str(i)
        folder.mkdir()
        with ways(folder, data) as found:
            for _, read in found:
                with pytest.raises(AuthenticationError):
                    read(encryption=OPEN)


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
