"""Signed files: what a signature vouches for, who has signed, and what keeps or drops signatures."""

from __future__ import annotations

import io
import logging
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference_auth as auth
import reference_format as fmt
import torch
from authentic_files import (
    ANEW,
    KEY,
    OPEN,
    OTHER,
    PUBLIC,
    SIGNED_ANNEX,
    SIGNER,
    K,
    W,
    encrypted,
    ids,
    metadata_changed,
    opened,
    plain,
    records_exchanged,
    renamed,
    signed,
    values,
    vector,
    ways,
)
from command_line import run
from samples import assert_same, same, state_dict_bytes, tensor, write_state_dict
from servers.file_server import serve_folder
from servers.s3_recorder import S3Recorder

import tensorizer
from tensorizer import (
    AuthenticationError,
    CryptographyError,
    FormatError,
    HashMismatchError,
    SigningKey,
    StreamExistsError,
    TensorDeserializer,
    TensorSerializer,
    torch_compat,
)


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


def beside(folder, data, signature=None):
    """A file, and what lies beside it as its signature."""
    path = folder / "m.tensors"
    path.write_bytes(data)
    if signature is not None:
        Path(f"{path}.sig").write_bytes(signature)
    return path


def test_a_crc_alone_does_not_bind_data_to_a_signature(tmp_path):
    data = state_dict_bytes(values(), hashes="crc32")
    with pytest.raises(ValueError, match=r"without a SHA-256.*'a'"):
        tensorizer.sign(beside(tmp_path, data), SIGNER, check=False)
    with pytest.raises(ValueError, match="sha256"):
        TensorSerializer(tmp_path / "m", signing_key=SIGNER, hashes="crc32")
    assert not (tmp_path / "m").exists()
    forged = auth.signature_file(data, K)  # of a signer who is careless
    with pytest.raises(AuthenticationError, match="without a SHA-256"):
        opened(beside(tmp_path, data, forged), public_key=SIGNER.public_key)


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
    with opened(beside(tmp_path, plain(), right), public_key=key) as file:
        assert file.authenticated == "signature"
    other = auth.signature_file(state_dict_bytes({**values(), "q": torch.ones(1)}), K)
    same_count = auth.signature_file(renamed(plain(), {b"d": b"z"}), K)
    for wrong in (other, same_count):
        with pytest.raises(AuthenticationError, match="does not match"):
            opened(beside(tmp_path, plain(), wrong), public_key=key)
    for damaged in (right[:-1], right + b"\0", right[:40] + b"\xff" + right[41:], b"", b"TZRANNX1"):
        with pytest.raises(FormatError):
            opened(beside(tmp_path, plain(), damaged), public_key=key)
    flipped = bytearray(right)
    flipped[-10] ^= 1
    flipped[-4:] = struct.pack("<I", fmt.zlib.crc32(bytes(flipped[:-4])))
    with pytest.raises(AuthenticationError, match="does not match"):
        opened(beside(tmp_path, plain(), bytes(flipped)), public_key=key)


def test_a_signature_of_a_file_with_an_equal_index_is_refused_at_the_records(tmp_path):
    other = state_dict_bytes({**values(), "b": tensor((6, 4), seed=50)}, ties="once", metadata={"k": "v"})
    path = beside(tmp_path, plain(), auth.signature_file(other, K))
    with (
        opened(path, public_key=SIGNER.public_key, lazy_load=True) as file,
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
    assert report["signers"] == (PUBLIC, str(OTHER.public_key))
    again = tensorizer.sign(path, SIGNER)
    assert sorted(again["signers"]) == sorted(report["signers"])
    third = SigningKey.generate().public_key
    for keys in (SIGNER.public_key, OTHER.public_key, [third, OTHER.public_key], (third, SIGNER.public_key)):
        for place in (path, str(path), os.fsencode(path)):
            with TensorDeserializer(place, device="cpu", public_key=keys) as file:
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


def other_weights() -> bytes:
    """Names, shapes and sizes are those of :func:`plain`."""
    changed = {name: value + 1 for name, value in values().items()}
    return state_dict_bytes({**changed, "g": changed["a"]}, ties="once", metadata={"k": "v"})


@pytest.mark.parametrize("check", [True, False])
def test_a_signature_of_other_weights_of_the_same_names_and_shapes_is_of_another_content(tmp_path, check):
    path, place = tmp_path / "m.tensors", tmp_path / "m.tensors.sig"
    path.write_bytes(plain())
    tensorizer.sign(path, SIGNER)
    tensorizer.sign(path, OTHER)
    before = place.read_bytes()
    path.write_bytes(other_weights())
    assert len(path.read_bytes()) == len(plain())
    third = SigningKey.generate()
    with pytest.raises(StreamExistsError, match="no signature of this file"):
        tensorizer.sign(path, third, check=check)
    assert place.read_bytes() == before
    report = tensorizer.sign(path, third, check=check, force=True)
    assert report["signers"] == (str(third.public_key),)  # the others are void
    assert PUBLIC.encode() not in place.read_bytes().hex().encode()
    with opened(path, public_key=third.public_key) as file:
        assert file.authenticated == "signature"
    with pytest.raises(AuthenticationError, match="other keys"):
        opened(path, public_key=SIGNER.public_key)


def test_void_signatures_of_the_same_content_are_dropped_and_never_listed(tmp_path):
    path, place = tmp_path / "m.tensors", tmp_path / "m.tensors.sig"
    path.write_bytes(plain())
    tensorizer.sign(path, SIGNER)
    tensorizer.sign(path, OTHER)
    content = bytearray(place.read_bytes())
    at = content.index(bytes(SIGNER.public_key)) + 32
    content[at] ^= 1  # the signature, not what it signs
    content[-4:] = struct.pack("<I", zlib.crc32(content[:-4]))
    place.write_bytes(content)
    third = SigningKey.generate()
    report = tensorizer.sign(path, third)  # that of OTHER is right: no force is needed
    assert report["signers"] == (str(OTHER.public_key), str(third.public_key))
    assert bytes(SIGNER.public_key) not in place.read_bytes()
    for key in (OTHER, third):
        with opened(path, public_key=key.public_key) as file:
            assert file.authenticated == "signature"
    content = bytearray(auth.signature_file(plain(), K))
    content[-5] ^= 1
    content[-4:] = struct.pack("<I", zlib.crc32(content[:-4]))
    place.write_bytes(content)  # the only one is void
    with pytest.raises(StreamExistsError):
        tensorizer.sign(path, third)
    assert tensorizer.sign(path, third, force=True)["signers"] == (str(third.public_key),)


def test_signatures_of_encrypted_files_and_of_files_with_an_annex_are_kept_only_for_the_same_content(tmp_path):
    for number, make in enumerate((encrypted, signed)):
        path = tmp_path / f"{number}.tensors"
        path.write_bytes(make())
        tensorizer.sign(path, SIGNER)
        assert tensorizer.sign(path, OTHER)["signers"] == (PUBLIC, str(OTHER.public_key))
    encrypted_path = tmp_path / "0.tensors"
    encrypted_path.write_bytes(encrypted())  # other nonces: other records
    with pytest.raises(StreamExistsError):
        tensorizer.sign(encrypted_path, OTHER)


def test_signing_checks_every_tensor_first(tmp_path):
    data = bytearray(plain())
    data[-20] ^= 1
    path = tmp_path / "m.tensors"
    path.write_bytes(bytes(data))
    with pytest.raises(HashMismatchError):
        tensorizer.sign(path, SIGNER)
    assert not (tmp_path / "m.tensors.sig").exists()
    assert not tensorizer.sign(path, SIGNER, check=False)["checked"]


def test_encrypted_files_are_signed_with_and_without_their_key(tmp_path):
    path = tmp_path / "m.tensors"
    path.write_bytes(encrypted())
    assert not tensorizer.sign(path, SIGNER)["checked"]
    assert tensorizer.sign(path, SIGNER, encryption=OPEN)["checked"]
    with opened(path, public_key=SIGNER.public_key, encryption=OPEN, lazy_load=True) as file:
        assert file.authenticated == "both"
        assert same(file.get_slice("f")[2], values()["f"][2])
    old = auth.as_before(encrypted(), K)
    path = beside(tmp_path, old, auth.signature_file(old, K))
    with opened(path, public_key=SIGNER.public_key, encryption=OPEN) as file:
        assert file.authenticated == "signature"


def test_an_open_file_has_no_place_for_a_signature(tmp_path):
    with pytest.raises(ValueError, match=r"expected a path or URI.*BytesIO"):
        tensorizer.sign(io.BytesIO(plain()), SIGNER)
    for source in (beside(tmp_path, plain()).as_uri(), str(tmp_path / "m.tensors")):
        tensorizer.sign(source, SIGNER)
        with opened(source, public_key=SIGNER.public_key) as file:
            assert file.authenticated == "signature"
        (tmp_path / "m.tensors.sig").unlink()


def test_a_signature_in_a_store_is_read_with_the_options_of_the_load(tmp_path):
    pytest.importorskip("boto3")
    with S3Recorder() as store:
        options, there = store.arguments, "s3://bucket/m.tensors"
        store.objects["/bucket/m.tensors"] = plain()
        tensorizer.sign(there, SIGNER, stream_options=options)
        assert set(store.objects) == {"/bucket/m.tensors", "/bucket/m.tensors.sig"}
        with opened(there, public_key=SIGNER.public_key, stream_options=options) as file:
            assert file.authenticated == "signature"


def test_the_signature_of_a_version_in_a_store_is_the_object_beside_it(tmp_path):
    pytest.importorskip("boto3")
    with S3Recorder() as store:
        store.objects["/bucket/m.tensors"] = plain()
        store.objects["/bucket/m.tensors.sig"] = auth.signature_file(plain(), K)
        uri, options = "s3://bucket/m.tensors?versionId=v2", store.arguments
        with opened(uri, public_key=SIGNER.public_key, stream_options=options) as file:
            assert file.authenticated == "signature"
        versions = {request.path: request.query.get("versionId") for request in store.of("GetObject")}
        assert versions == {"/bucket/m.tensors": "v2", "/bucket/m.tensors.sig": None}


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
    caplog.clear()
    with pytest.raises(StreamExistsError):
        tensorizer.convert(embedded, tmp_path / "out.tensors", force=False)
    tensorizer.convert(embedded, tmp_path / "never", dry_run=True)
    assert not caplog.records  # where no new file is
    encrypt = ("--generate-key", tmp_path / "key")
    result = run("encrypt", embedded, tmp_path / "encrypted.tensors", *encrypt)
    assert result.returncode == 0, result.stderr
    assert "sign it again" in caplog.records[-1].message


def test_other_files_of_a_folder_are_copied_without_the_signatures_of_its_models(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "model.tensors").write_bytes(plain())
    (folder / "config.json").write_text("{}")
    tensorizer.sign(folder / "model.tensors", SIGNER)
    report = tensorizer.convert(folder / "model.tensors", tmp_path / "b" / "model.tensors", all_files=True)
    assert [Path(name).name for name in report["copied"]] == ["config.json"]


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
    Path(f"{shards[0]}.sig").unlink()
    with pytest.raises(AuthenticationError, match="not signed"):
        opened(tmp_path, public_key=key)
