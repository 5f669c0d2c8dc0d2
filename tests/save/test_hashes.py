"""Digests: what is written, what is verified, and that no flipped payload byte gets past a verifying load."""

from __future__ import annotations

import io
import os

import pytest
import reference_format as fmt
import samples
import torch
from samples import assert_same, load, state_dict_bytes, tensor

from tensorizer import TensorDeserializer, errors, serialization

VALUES = {
    "a": tensor((5, 3), seed=1),
    "b": tensor((3 << 20,), torch.uint8),
    "c": tensor((), torch.bfloat16),
    "e": torch.empty((0, 3)),
}
CHOICES = {
    "crc32": ("crc32",),
    "sha256": ("sha256",),
    ("crc32",): ("crc32",),
    ("sha256",): ("sha256",),
    ("crc32", "sha256"): ("crc32", "sha256"),
    ("sha256", "crc32"): ("crc32", "sha256"),  # the order of the file is fixed
    (): (),
    None: (),
}
KINDS = {"crc32": 0, "sha256": 1}


@pytest.mark.parametrize("choice", CHOICES, ids=repr)
def test_the_chosen_digests_are_written_and_no_others(choice):
    data = state_dict_bytes(VALUES, hashes=choice)
    assert (state_dict_bytes(VALUES) == data) == (len(CHOICES[choice]) == 2)  # both are the default
    file = fmt.read_file(data)
    for record in file.records:
        assert [kind for kind, _ in record.header.hashes] == [KINDS[name] for name in CHOICES[choice]]
        assert record.hashes_hold()
    assert fmt.rewrite(file) == data
    assert_same(load(io.BytesIO(data), verify_hash=True, allow_missing_hashes=not CHOICES[choice]), VALUES)


def flip(data: bytes, at: int) -> io.BytesIO:
    changed = bytearray(data)
    changed[at] ^= 0x10
    return io.BytesIO(changed)


@pytest.mark.parametrize("choice", ["crc32", "sha256", ("crc32", "sha256")], ids=repr)
def test_any_flipped_payload_byte_is_found_when_asked_and_only_then(choice):
    data = state_dict_bytes({"x": tensor((40,), seed=1), "y": tensor((20,), torch.uint8)}, hashes=choice)
    for record in fmt.read_file(data).records:
        for at in range(record.entry.data_offset, record.entry.data_offset + len(record.payload)):
            with pytest.raises(errors.HashMismatchError):
                load(flip(data, at), verify_hash=True)
    assert not samples.same(load(flip(data, at))["y"], tensor((20,), torch.uint8))


@pytest.mark.parametrize("num_readers", [1, 4])
def test_a_flipped_byte_anywhere_in_a_large_tensor_is_found(tmp_path, num_readers):
    nbytes = 40 << 20
    path = samples.write_state_dict(tmp_path / "f", {"x": torch.zeros(nbytes, dtype=torch.uint8), "y": tensor()})
    x, _ = fmt.read_file(path.read_bytes()).records
    assert list(load(path, verify_hash=True, num_readers=num_readers)) == ["x", "y"]
    with path.open("rb+", buffering=0) as stream:
        for at in (0, 1, (8 << 20) - 1, 8 << 20, nbytes // 2 + 12345, nbytes - 1):
            os.pwrite(stream.fileno(), b"\1", x.entry.data_offset + at)
            with pytest.raises(errors.HashMismatchError, match="x"):
                load(path, verify_hash=True, num_readers=num_readers)
            os.pwrite(stream.fileno(), b"\0", x.entry.data_offset + at)


def test_the_error_names_tensor_kind_wanted_and_found():
    data = state_dict_bytes({"some.name": tensor((4,))}, hashes="crc32")
    (record,) = fmt.read_file(data).records
    with pytest.raises(errors.HashMismatchError) as caught:
        load(flip(data, record.entry.data_offset), verify_hash=True)
    text = str(caught.value).lower()
    assert text.count("some.name") == 1
    assert "crc32" in text
    stored = record.header.hashes[0][1]
    assert stored.hex() in text or stored[::-1].hex() in text
    assert errors.HashMismatchError is serialization.HashMismatchError


def test_a_mismatch_comes_from_the_constructor_or_at_the_first_access():
    data = state_dict_bytes({"x": tensor((4,), seed=1), "y": tensor((4,), seed=2)})
    _, y = fmt.read_file(data).records
    source = flip(data, y.entry.data_offset)
    with pytest.raises(errors.HashMismatchError):
        TensorDeserializer(source, device="cpu", verify_hash=True)
    assert source.closed
    source = flip(data, y.entry.data_offset)
    with TensorDeserializer(source, device="cpu", verify_hash=True, lazy_load=True) as deserializer:
        assert samples.same(deserializer["x"], tensor((4,), seed=1))
        for _ in range(2):  # and the wrong tensor is not cached
            with pytest.raises(errors.HashMismatchError):
                deserializer["y"]


READS = {
    "tensors": lambda deserializer, asked: len(list(deserializer.read_tensors(verify_hash=asked))),
    "arrays": lambda deserializer, asked: len(list(deserializer.read_numpy_arrays(verify_hash=asked))),
    "module": lambda deserializer, asked: deserializer.load_into_module(torch.nn.Linear(2, 2), verify_hash=asked),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    ("constructor", "asked", "fails"),
    [(False, True, True), (True, False, False), (True, None, True), (False, None, False)],
)
def test_reads_may_override_the_constructors_choice(read, constructor, asked, fails):
    data = samples.write_module(samples.KeptBytesIO(), torch.nn.Linear(2, 2)).getvalue()
    source = flip(data, fmt.read_file(data).records[1].entry.data_offset)
    with TensorDeserializer(source, device="cpu", lazy_load=True, verify_hash=constructor) as deserializer:
        if fails:
            with pytest.raises(errors.HashMismatchError):
                READS[read](deserializer, asked)
        else:
            assert READS[read](deserializer, asked) == 2


@pytest.mark.parametrize("value_nbytes", [0, 1, 3, 5, 31, 33])
@pytest.mark.parametrize("kind", [0, 1])
def test_a_digest_of_the_wrong_length_is_a_mismatch_and_never_a_match(kind, value_nbytes):
    payload = b"abcd"
    fields = (0).to_bytes(2, "little") + b"\2\1\0a\3<f4\1\1\0\0\0"
    block = bytes([1, kind, value_nbytes]) + bytes(value_nbytes)
    header = fields + len(block).to_bytes(2, "little") + block + (4).to_bytes(8, "little")
    header = (len(header) + 8).to_bytes(8, "little") + header
    at = fmt.PROLOGUE_NBYTES + 100
    entry = fmt.encode_entry(fmt.Tensor(("a",), "<f4", (1,), payload), at, at + len(header))
    data = fmt.encode_prologue(1, 0, 4, 1, 100) + entry.ljust(100, b"\0") + header + payload + bytes(8)
    assert samples.raw(load(io.BytesIO(data))["a"]) == payload
    with pytest.raises((errors.HashMismatchError, errors.FormatError)):
        load(io.BytesIO(data), verify_hash=True)


def test_every_byte_that_a_digest_covers_is_covered():
    """Names, shapes, padding, everything in a record: flipped bytes are found, or make no difference."""
    data = fmt.write_file(
        [fmt.Tensor(("name",), "<f4", (2, 3), samples.stream(24, 1), padding=40)], index_nbytes=None, gap=16
    )
    (record,) = fmt.read_file(data).records
    wanted = {"name": tensor((2, 3))}
    wanted["name"].view(torch.uint8).copy_(torch.frombuffer(bytearray(record.payload), dtype=torch.uint8).view(2, 12))
    for at in range(record.entry.offset, record.entry.data_offset + 24):
        with pytest.raises((errors.TensorizerError, OSError)):
            load(flip(data, at), verify_hash=True)
    assert_same(load(io.BytesIO(data), verify_hash=True), wanted)


@pytest.mark.parametrize("hashes", [(), ("sha256",), ("crc32",), ("sha256", "crc32"), ("crc32", "crc32")], ids=repr)
def test_files_with_other_digests_than_usual_verify(hashes):
    data = fmt.write_file([fmt.Tensor(("a",), "<f4", (2,), b"abcdefgh", hashes=hashes)])
    found = load(io.BytesIO(data), verify_hash=True, allow_missing_hashes=not hashes)
    assert samples.raw(found["a"]) == b"abcdefgh"
    at = fmt.read_file(data).records[0].entry.data_offset
    if hashes:
        with pytest.raises(errors.HashMismatchError):
            load(flip(data, at), verify_hash=True)
