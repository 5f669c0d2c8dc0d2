"""Encrypted files end to end: what is written, what opens, and that nothing altered or wrongly keyed ever does."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import reference_auth as auth
import reference_crypto as crypto
import reference_format as fmt
import torch
from conftest import SAMPLED_RELEASES
from samples import ALL_DTYPES, KeptBytesIO, assert_same, load, net, raw, same, state_dict_bytes, tensor, write_module

from tensorizer import (
    _C,
    AuthenticationError,
    CryptographyError,
    DecryptionParams,
    EncryptionParams,
    TensorDeserializer,
    TensorSerializer,
    errors,
)

KEY = bytes(range(32))
CHUNK = 2 << 20
EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 8192, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 77]


def exact(key: bytes = KEY) -> tuple[EncryptionParams, DecryptionParams]:
    return EncryptionParams(key), DecryptionParams.from_key(key)


def passphrase(text: str = "open sesame") -> tuple[EncryptionParams, DecryptionParams]:
    return EncryptionParams.from_string(text, 1, 8192), DecryptionParams.from_string(text)


def drawn() -> tuple[EncryptionParams, DecryptionParams]:
    params = EncryptionParams.random()
    return params, DecryptionParams.from_key(params.key)


def provided() -> tuple[EncryptionParams, DecryptionParams]:
    return EncryptionParams.from_provider(lambda: KEY), DecryptionParams.from_provider(lambda: KEY)


KINDS = {"exact": exact, "passphrase": passphrase, "random": drawn, "provider": provided}


@pytest.fixture(params=KINDS)
def keys(request: pytest.FixtureRequest) -> tuple[EncryptionParams, DecryptionParams]:
    return KINDS[request.param]()


def small_values() -> dict[str, torch.Tensor]:
    return {
        "a": tensor((40, 3), seed=1),
        "b": tensor((5,), torch.bfloat16, seed=2),
        "empty": torch.empty((0, 7)),
        "one": tensor((1,), torch.uint8, seed=3),
        "scalar": tensor((), torch.float64, seed=4),
    }


def big_values() -> dict[str, torch.Tensor]:
    """Three chunks and a bit, twice, with the same contents and shape."""
    value = tensor((3 * CHUNK + 77,), torch.uint8, seed=5)
    return {"x": value, "y": value.clone(), "z": tensor((9,), seed=6)}


# --- what is written -------------------------------------------------------------------------------------------


def test_an_independent_reader_decrypts_what_is_written(keys):
    encryption, decryption = keys
    values = {str(n): tensor((n,), torch.uint8, seed=n) for n in EDGES}
    file = fmt.read_file(state_dict_bytes(values, encryption=encryption))
    secret = {"passphrase": decryption.source} if decryption.source else {"key": decryption.key}
    assert file.has_crypt_info
    for record in file.records:
        (name,) = record.entry.path
        assert crypto.plaintext(record, **secret) == raw(values[name])
        assert crypto.hashes_hold(file, record, **secret)
        assert [kind for kind, _ in record.header.hashes] == [1]  # SHA-256
        if len(record.payload) >= 8:
            assert record.payload != raw(values[name])


def test_a_tensor_without_data_carries_the_empty_block_and_others_what_the_key_needs():
    for encryption, derivations in ((exact()[0], 0), (passphrase()[0], 1)):
        for record in fmt.read_file(state_dict_bytes(small_values(), encryption=encryption)).records:
            found, ciphers = crypto.parse_crypt_info(record.header.crypt_info)
            has_data = record.entry.path != ("empty",)
            assert len(ciphers) == has_data
            assert len(found) == (derivations if has_data else 0)
            if found:
                assert (found[0].opslimit, found[0].memlimit, found[0].salt) == encryption.derivation


def test_every_tensor_and_every_file_has_its_own_nonce():
    value = tensor((100,), seed=1)
    nonces, ciphertexts = set(), set()
    for _ in range(3):
        data = state_dict_bytes({f"t{i}": value for i in range(20)}, encryption=exact()[0])
        for record in fmt.read_file(data).records:
            _, (cipher,) = crypto.parse_crypt_info(record.header.crypt_info)
            nonces.add(cipher.nonce)
            ciphertexts.add(bytes(record.payload))
    assert len(nonces) == len(ciphertexts) == 60


def test_saving_leaves_the_callers_memory_alone_also_where_it_is_read_only():
    array = np.arange(3 * CHUNK // 8 + 5)
    array.flags.writeable = False
    value = tensor((CHUNK + 9,), torch.uint8)
    before = raw(value)
    stream = KeptBytesIO()
    with TensorSerializer(stream, encryption=exact()[0]) as serializer:
        serializer.write_tensor(0, "array", 2, array)
        serializer.write_tensor(0, "tensor", 2, value)
    assert raw(value) == before
    found = load(io.BytesIO(stream.getvalue()), encryption=exact()[1])
    assert torch.equal(found["array"], torch.from_numpy(array.copy()))
    assert same(found["tensor"], value)


# --- what opens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"lazy_load": True}, {"num_readers": 3}, {"verify_hash": True}], ids=repr)
def test_every_kind_of_key_opens_its_file_in_every_way(keys, options, tmp_path):
    encryption, decryption = keys
    values = {**small_values(), **big_values()}
    path = tmp_path / "f.tensors"
    with TensorSerializer(path, encryption=encryption) as serializer:
        serializer.write_state_dict(values)
    assert_same(load(path, encryption=decryption, **options), values)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_survives_with_and_without_elements(dtype):
    values = {"v": tensor((3, 8), dtype), "none": torch.empty((0, 2), dtype=dtype)}
    data = state_dict_bytes(values, encryption=exact()[0])
    assert_same(load(io.BytesIO(data), encryption=exact()[1], verify_hash=True), values)


@pytest.mark.usefixtures("eager_and_lazy")
def test_a_module_with_meta_tensors_comes_back():
    model = net(1)
    stream = KeptBytesIO()
    write_module(stream, model, options={"encryption": exact()[0]})
    twin = net(2)
    with TensorDeserializer(io.BytesIO(stream.getvalue()), device="cpu", encryption=exact()[1]) as source:
        source.load_into_module(twin)
    assert_same(dict(twin.state_dict()), dict(model.state_dict()))
    meta = {"m": torch.empty((2, 3), device="meta"), "n": torch.empty((4,), dtype=torch.bfloat16, device="meta")}
    found = load(io.BytesIO(state_dict_bytes(meta, encryption=exact()[0])), encryption=exact()[1])
    assert all(torch.equal(found[name], torch.zeros(value.shape, dtype=value.dtype)) for name, value in meta.items())


def test_a_filter_decrypts_what_it_selects_and_nothing_else():
    values = big_values()
    data = bytearray(state_dict_bytes(values, encryption=exact()[0]))
    for record in fmt.read_file(bytes(data)).records:
        if record.entry.path == ("x",):
            data[record.entry.data_offset] ^= 1
    found = load(io.BytesIO(data), encryption=exact()[1], filter_func=lambda name: name != "x")
    assert_same(found, {name: values[name] for name in "yz"})


def test_a_passphrase_file_opens_with_its_derived_key():
    encryption, _ = passphrase()
    data = state_dict_bytes(small_values(), encryption=encryption)
    found = load(io.BytesIO(data), encryption=DecryptionParams.from_key(encryption.key))
    assert_same(found, small_values())


def test_a_provider_is_asked_once_for_many_files():
    calls = []
    decryption = DecryptionParams.from_provider(lambda: calls.append(1) or KEY)
    data = state_dict_bytes(small_values(), encryption=exact()[0])
    for _ in range(3):
        assert_same(load(io.BytesIO(data), encryption=decryption), small_values())
    assert calls == [1]


def test_every_kernel_opens_what_every_kernel_wrote():
    best, values = _C.active_kernel(), big_values()
    try:
        for writer in _C.available_kernels():
            assert _C.select_kernel(writer)
            data = state_dict_bytes(values, encryption=exact()[0])
            for reader in _C.available_kernels():
                assert _C.select_kernel(reader)
                assert_same(load(io.BytesIO(data), encryption=exact()[1]), values)
    finally:
        _C.select_kernel(best)


# --- what does not ---------------------------------------------------------------------------------------------


def refused(data: bytes, decryption: DecryptionParams | None, match: str, **options: object) -> None:
    with pytest.raises(CryptographyError, match=match) as caught:
        load(io.BytesIO(data), encryption=decryption, **options)
    text = str(caught.value) + repr(caught.value)
    assert KEY.hex() not in text
    assert "sesame" not in text


@pytest.mark.parametrize("options", [{}, {"lazy_load": True}, {"num_readers": 2}], ids=repr)
def test_a_wrong_key_is_found_when_the_file_is_opened(options):
    for secret, wrong in ((exact(), exact(bytes(32))), (passphrase(), passphrase("open barley"))):
        data = state_dict_bytes({"weight": tensor((10,))}, encryption=secret[0])
        refused(data, wrong[1], "the index does not match its authentication code: wrong key", **options)


@pytest.mark.parametrize("options", [{}, {"lazy_load": True}, {"num_readers": 2}], ids=repr)
def test_a_wrong_key_of_an_earlier_file_names_tensor_and_chunk(options):
    data = auth.as_before(state_dict_bytes({"weight": tensor((10,))}, encryption=exact()[0]), KEY)
    refused(data, exact(bytes(32))[1], "(?s)weight.*chunk 1|chunk 1.*weight", **options)
    secret = passphrase()
    data = auth.as_before(state_dict_bytes({"weight": tensor((10,))}, encryption=secret[0]), secret[0].key)
    refused(data, passphrase("open barley")[1], "weight", **options)


def test_the_wrong_kind_of_secret_is_refused():
    refused(state_dict_bytes(small_values(), encryption=exact()[0]), passphrase()[1], "passphrase")


def test_an_encrypted_file_needs_a_key_and_a_plain_one_refuses_it():
    refused(state_dict_bytes(small_values(), encryption=exact()[0]), None, "encrypted")
    refused(state_dict_bytes(small_values()), exact()[1], "not encrypted")
    with pytest.raises(ValueError, match="neither"):
        load(io.BytesIO(state_dict_bytes(small_values())), encryption=DecryptionParams())


def test_any_changed_byte_of_ciphertext_or_crypt_block_is_an_error_and_never_a_tensor():
    values = {"t": tensor((20,), seed=1)}
    data = state_dict_bytes(values, encryption=exact()[0])
    (record,) = fmt.read_file(data).records
    block = data.index(record.header.crypt_info) - 8
    places = [*range(block, block + 8 + len(record.header.crypt_info))]
    places += range(record.entry.data_offset, record.entry.data_offset + len(record.payload))
    for at in places:
        for mask in (0x01, 0x80):
            changed = bytearray(data)
            changed[at] ^= mask
            try:
                found = load(io.BytesIO(changed), encryption=exact()[1])
            except (CryptographyError, errors.FormatError):
                continue
            # What the format lets pass changes nothing that is used: a block length that takes in some of the padding
            # behind it, a chunk size that still covers all in one chunk.
            assert block <= at < block + 8 or block + 20 <= at < block + 28, at
            assert same(found["t"], values["t"]), at


def file_with_chunks_of(chunk_nbytes: int, values: dict[str, torch.Tensor], damage: bool = False) -> bytes:
    """As no released writer makes it: chunks that end where no unit of a load does."""
    at, index, records = fmt.PROLOGUE_NBYTES + fmt.RESERVED_INDEX_NBYTES, b"", b""
    for number, (name, value) in enumerate(values.items()):
        plain = fmt.Tensor((name,), "|u1", tuple(value.shape), raw(value), hashes=("sha256",))
        sealed, block = crypto.encrypt(plain.payload, KEY, bytes([number]) * 24, chunk_nbytes=chunk_nbytes)
        header = fmt.encode_header(plain, crypt_info=block)
        index += fmt.encode_entry(plain, at + len(records), at + len(records) + len(header))
        records += header + sealed
    if damage:
        records = records[:-40] + bytes([records[-40] ^ 1]) + records[-39:]
    nbytes = sum(len(raw(value)) for value in values.values())
    prologue = fmt.encode_prologue(3, 0, nbytes, len(values), fmt.RESERVED_INDEX_NBYTES)
    return prologue + index.ljust(fmt.RESERVED_INDEX_NBYTES, b"\0") + records + bytes(8)


@pytest.mark.parametrize("chunk_nbytes", [192_000, CHUNK - 64, 3 * CHUNK, 16 * CHUNK])
def test_chunks_that_straddle_what_is_read_at_once_are_opened(chunk_nbytes, tmp_path):
    values = {
        name: tensor((size,), torch.uint8, seed=size)
        for name, size in {"a": 5 * CHUNK + 7, "b": 100, "c": CHUNK + 5, "d": 4 * CHUNK, "e": 500_000}.items()
    }
    path = tmp_path / "odd.tensors"
    path.write_bytes(file_with_chunks_of(chunk_nbytes, values))
    for verify_hash in (False, True):
        assert_same(load(path, encryption=exact()[1], verify_hash=verify_hash), values)
        stream = io.BytesIO(path.read_bytes())
        assert_same(load(stream, encryption=exact()[1], verify_hash=verify_hash), values)
    with TensorDeserializer(path, device="cpu", encryption=exact()[1], lazy_load=True) as found:
        part = found.get_slice("a")[CHUNK - 10 : 4 * CHUNK + 3]
        assert torch.equal(part, values["a"][CHUNK - 10 : 4 * CHUNK + 3])
    with pytest.raises(CryptographyError, match="tensor 'e'"):
        load(io.BytesIO(file_with_chunks_of(chunk_nbytes, values, damage=True)), encryption=exact()[1])


@pytest.mark.parametrize("chunk", range(4))
@pytest.mark.parametrize("options", [{}, {"lazy_load": True}, {"num_readers": 3}], ids=repr)
def test_a_changed_byte_in_any_chunk_is_found(chunk, options, tmp_path):
    data = bytearray(state_dict_bytes(big_values(), encryption=exact()[0]))
    record = fmt.read_file(bytes(data)).records[1]
    data[record.entry.data_offset + chunk * CHUNK + 76] ^= 4
    refused(bytes(data), exact()[1], rf"(?s)y.*chunk {chunk + 1} of 4|chunk {chunk + 1} of 4.*y", **options)
    path = tmp_path / "f.tensors"
    path.write_bytes(data)
    with pytest.raises(CryptographyError, match=f"chunk {chunk + 1} of 4"):
        load(path, encryption=exact()[1], **options)


def test_chunks_exchanged_within_a_tensor_between_tensors_or_between_files_are_refused():
    data = state_dict_bytes(big_values(), encryption=exact()[0])
    other = state_dict_bytes(big_values(), encryption=exact()[0])
    x, y = (record.entry.data_offset for record in fmt.read_file(data).records[:2])

    def exchanged(at: int, chunk: bytes) -> bytes:
        return data[:at] + chunk + data[at + len(chunk) :]

    refused(exchanged(x, data[x + CHUNK : x + 2 * CHUNK]), exact()[1], "chunk 1")
    refused(exchanged(x + CHUNK, data[y + CHUNK : y + 2 * CHUNK]), exact()[1], "chunk 2")
    refused(exchanged(x, other[x : x + CHUNK]), exact()[1], "chunk 1")


def test_a_crypt_block_from_another_tensor_is_refused():
    data = bytearray(auth.as_before(state_dict_bytes(big_values(), encryption=exact()[0]), KEY))
    x, y = (record.header.crypt_info for record in fmt.read_file(bytes(data)).records[:2])
    assert len(x) == len(y)
    at = data.index(x)
    data[at : at + len(x)] = y
    refused(bytes(data), exact()[1], "chunk [1-4] of 4")


def test_a_truncated_file_is_an_error_of_ours():
    data = state_dict_bytes(big_values(), encryption=exact()[0])
    last = fmt.read_file(data).records[-1].entry.data_offset
    for nbytes in (last + 3, last - 5, last - CHUNK, len(data) // 2):
        with pytest.raises((errors.TruncatedError, errors.FormatError)):
            load(io.BytesIO(data[:nbytes]), encryption=exact()[1])


def test_a_failed_load_leaves_the_module_as_it_was():
    model = torch.nn.Linear(700, 900)
    stream = KeptBytesIO()
    write_module(stream, model, options={"encryption": exact()[0]})
    data = bytearray(stream.getvalue())
    bias = next(r for r in fmt.read_file(bytes(data)).records if r.entry.path == (".bias",))
    data[bias.entry.data_offset] ^= 1
    twin = torch.nn.Linear(700, 900)
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    with (
        TensorDeserializer(io.BytesIO(data), device="cpu", lazy_load=True, encryption=exact()[1]) as source,
        pytest.raises(CryptographyError, match="bias"),
    ):
        source.load_into_module(twin)
    assert_same(dict(twin.state_dict()), before)


def hostile(opslimit: int, memlimit: int, tensors: int = 1, one_salt: bool = True) -> bytes:
    """A passphrase file, as of earlier releases, whose records ask for these parameters."""
    encryption = EncryptionParams.from_string("open sesame", 1, 8192, bytes(16))
    values = {f"t{i}": tensor((4,), seed=i) for i in range(tensors)}
    data = bytearray(auth.as_before(state_dict_bytes(values, encryption=encryption), encryption.key))
    for i, record in enumerate(fmt.read_file(bytes(data)).records):
        # Inside the block: count 2, chunk length 8, type 2, method 2, then the limits, the algorithm, the salt.
        at = data.index(record.header.crypt_info) + 14
        data[at : at + 16] = struct.pack("<QQ", opslimit, memlimit)
        if not one_salt:
            data[at + 22 : at + 24] = struct.pack("<H", i + 1)
    return bytes(data)


def test_hostile_derivation_parameters_are_refused_not_executed():
    refused(hostile(1, 4398046510080), passphrase()[1], "memlimit 4398046510080 is above the limit")
    refused(hostile(4294967295, 8192), passphrase()[1], "opslimit 4294967295 is above the limit")
    refused(hostile(2, 8192), DecryptionParams.from_string("open sesame", max_opslimit=1), "above the limit of 1")
    for bad in (hostile(0, 8192), hostile(1, 8191), hostile(2**64 - 1, 8192), hostile(1, 2**64 - 1)):
        refused(bad, passphrase()[1], "limit must be between")


@pytest.mark.parametrize("nbytes", [0, 1, 15])
def test_a_salt_that_a_file_makes_shorter_is_refused_as_the_files_fault(nbytes):
    data = bytearray(hostile(1, 8192))
    (record,) = fmt.read_file(bytes(data)).records
    at = data.index(record.header.crypt_info) + 14 + 8 + 8 + 4
    assert data[at : at + 2] == struct.pack("<H", 16)
    data[at : at + 2] = struct.pack("<H", nbytes)
    refused(bytes(data), passphrase()[1], "salt must be 16 bytes")


def test_more_different_derivations_than_allowed_are_refused():
    data = hostile(1, 8192, tensors=20, one_salt=False)
    # Tensors are opened as they are read: the first one with a salt that was changed may be found before the limit.
    refused(data, passphrase()[1], "more than the 16 derived keys|authentication")
    # With a higher limit all are derived, and the first tensor with a salt that was changed does not open.
    refused(data, DecryptionParams.from_string("open sesame", max_derivations=20), "authentication|chunk 1")


# --- interchange -----------------------------------------------------------------------------------------------

READ = """
import hashlib, json, sys, warnings
warnings.simplefilter("ignore")
from tensorizer import TensorDeserializer, DecryptionParams
found = {}


def digest(value):
    return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()


for name, kind, secret in json.loads(sys.argv[2]):
    secret = bytes.fromhex(secret)
    params = DecryptionParams.from_string(secret) if kind == "passphrase" else DecryptionParams.from_key(secret)
    with TensorDeserializer(f"{sys.argv[1]}/{name}", device="cpu", encryption=params, verify_hash=True) as source:
        found[name] = {key: digest(value) for key, value in source.items()}
print(json.dumps(found))
"""

WRITE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from tensorizer import TensorSerializer, EncryptionParams
made = []
values = {
    "bytes": (torch.arange(3 * (2 << 20) + 77) % 251).to(torch.uint8),
    "floats": torch.arange(1000.0),
    "half": torch.arange(7).to(torch.bfloat16),
    "scalar": torch.tensor(5),
}
for name, kind, params in (
    ("exact", "key", EncryptionParams(bytes(range(32)))),
    ("random", "key", EncryptionParams.random()),
    ("passphrase", "passphrase", EncryptionParams.from_string("open sesame", 1, 8192)),
):
    serializer = TensorSerializer(f"{sys.argv[1]}/{name}", encryption=params)
    serializer.write_state_dict(values)
    serializer.close()
    made.append((name, kind, (b"open sesame" if kind == "passphrase" else params.key).hex(), params.key.hex()))
print(json.dumps(made))
"""


def run_release(python: Path, program: str, *args: str):
    result = subprocess.run(
        [str(python), "-I", "-c", program, *args], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("release", SAMPLED_RELEASES)
def test_what_we_encrypt_is_decrypted_by_the_releases(release, reference_python, tmp_path):
    python = reference_python(release)
    values = {name: value for name, value in {**small_values(), **big_values()}.items() if name not in ("b", "empty")}
    wanted, jobs = {name: hashlib.sha256(raw(value)).hexdigest() for name, value in values.items()}, []
    for kind, make in KINDS.items():
        encryption, decryption = make()
        with TensorSerializer(tmp_path / kind, encryption=encryption) as serializer:
            serializer.write_state_dict(values)
        jobs.append((kind, kind, (decryption.source or encryption.key).hex()))
    found = run_release(python, READ, str(tmp_path), json.dumps(jobs))
    assert found == dict.fromkeys(KINDS, wanted)


@pytest.mark.parametrize("release", SAMPLED_RELEASES)
def test_what_the_releases_encrypt_is_decrypted_here(release, reference_python, tmp_path):
    wanted = {
        "bytes": (torch.arange(3 * CHUNK + 77) % 251).to(torch.uint8),
        "floats": torch.arange(1000.0),
        "half": torch.arange(7).to(torch.bfloat16),
        "scalar": torch.tensor(5),
    }
    for name, kind, secret, key in run_release(reference_python(release), WRITE, str(tmp_path)):
        ways = [DecryptionParams.from_key(bytes.fromhex(key))]
        if kind == "passphrase":
            ways.append(DecryptionParams.from_string(bytes.fromhex(secret)))
        for decryption in ways:
            assert_same(load(tmp_path / name, encryption=decryption, verify_hash=True), wanted)
            with pytest.raises(AuthenticationError, match="tensorizer encrypt --in-key-file"):
                load(tmp_path / name, encryption=decryption, require_authenticated=True)
        with pytest.raises(CryptographyError):
            load(tmp_path / name, encryption=DecryptionParams.from_key(bytes(32)))
