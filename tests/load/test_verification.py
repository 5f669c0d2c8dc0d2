"""Verification says the truth: what has no digest is not verified, and what was loaded before is compared as well."""

from __future__ import annotations

import io

import pytest
import reference_format as fmt
import samples
import torch
from samples import tensor

import tensorizer
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, errors
from tensorizer.errors import HashMismatchError, MissingHashError, VerificationError

VALUES = {"bare": tensor((5, 3), seed=1), "none": torch.empty((0, 3)), "zeros": torch.empty((3, 2), device="meta")}


def without_hashes(**options) -> bytes:
    return samples.state_dict_bytes(VALUES, hashes=None, **options)


def module_bytes(module, **options) -> bytes:
    return samples.write_module(samples.KeptBytesIO(), module, options=options).getvalue()


def open_bytes(data, **options):
    options.setdefault("device", "cpu")
    return TensorDeserializer(io.BytesIO(data), **options)


def flipped(data: bytes, name: str) -> bytes:
    changed = bytearray(data)
    changed[next(r.entry.data_offset for r in fmt.read_file(data).records if r.path == (name,))] ^= 0x10
    return bytes(changed)


# --- tensors without a digest ---------------------------------------------------------------------------------------


def test_both_failures_of_a_verification_have_one_parent_and_public_names():
    assert issubclass(HashMismatchError, VerificationError)
    assert issubclass(MissingHashError, VerificationError)
    assert issubclass(VerificationError, errors.TensorizerError)
    for name in ("VerificationError", "HashMismatchError", "MissingHashError"):
        assert getattr(tensorizer, name) is getattr(errors, name)


WAYS_TO_VERIFY = {
    "eager": lambda data, **o: open_bytes(data, verify_hash=True, **o),
    "lazy": lambda data, **o: open_bytes(data, verify_hash=True, lazy_load=True, **o)["bare"],
    "tree": lambda data, **o: open_bytes(data, verify_hash=True, lazy_load=True, **o).tree(),
    "cast": lambda data, **o: open_bytes(data, verify_hash=True, dtype=torch.float64, **o),
    "read_tensors": lambda data, **o: list(open_bytes(data, lazy_load=True, **o).read_tensors(verify_hash=True)),
    "streamed": lambda data, **o: list(
        open_bytes(data, lazy_load=True, **o).read_tensors(verify_hash=True, cache=False)
    ),
    "arrays": lambda data, **o: list(open_bytes(data, lazy_load=True, **o).read_numpy_arrays(verify_hash=True)),
    "arrays of cast": lambda data, **o: list(
        open_bytes(data, lazy_load=True, dtype=torch.float64, **o).read_numpy_arrays(verify_hash=True)
    ),
    "arrays after an eager load": lambda data, **o: list(open_bytes(data, **o).read_numpy_arrays(verify_hash=True)),
    "read_tensors after an eager load": lambda data, **o: list(open_bytes(data, **o).read_tensors(verify_hash=True)),
}


@pytest.mark.parametrize("way", WAYS_TO_VERIFY)
def test_a_tensor_with_data_and_without_a_digest_is_not_verified(way):
    with pytest.raises(MissingHashError) as caught:
        WAYS_TO_VERIFY[way](without_hashes())
    assert "'bare'" in str(caught.value)
    assert "allow_missing_hashes=True" in str(caught.value)
    assert "none" not in str(caught.value)
    assert "zeros" not in str(caught.value)
    WAYS_TO_VERIFY[way](without_hashes(), allow_missing_hashes=True)


def test_mapped_and_encrypted_tensors_without_a_digest_are_not_verified_either(tmp_path):
    path = samples.write_state_dict(tmp_path / "f", VALUES, hashes=None)
    sealed = samples.write_state_dict(tmp_path / "g", VALUES, hashes=None, encryption=EncryptionParams(b"k" * 32))
    key = {"encryption": DecryptionParams.from_key(b"k" * 32)}
    for source, options in ((path, {"mmap": True}), (sealed, key)):
        with pytest.raises(MissingHashError, match="'bare'"):
            samples.load(source, verify_hash=True, **options)
        loaded = samples.load(source, verify_hash=True, allow_missing_hashes=True, **options)
        assert samples.same(loaded["bare"], VALUES["bare"])


def test_load_into_module_takes_nothing_without_a_digest_as_verified():
    model, target = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    before = samples.raw(target.weight)
    data = module_bytes(model, hashes=())
    for lazy in (False, True):
        with open_bytes(data, lazy_load=lazy) as deserializer, pytest.raises(MissingHashError, match="weight"):
            deserializer.load_into_module(target, verify_hash=True)
        assert samples.raw(target.weight) == before
    with open_bytes(data, lazy_load=True, allow_missing_hashes=True) as deserializer:
        deserializer.load_into_module(target, verify_hash=True)
    assert samples.same(target.weight, model.weight)


def test_verify_module_reports_false_for_what_nothing_vouches_for():
    model = torch.nn.Linear(3, 3)
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("zeros", torch.zeros(4, device="meta"))
    for options in ({}, {"allow_missing_hashes": True}):
        deserializer = open_bytes(module_bytes(model, hashes=()), **options)
        target = torch.nn.Linear(3, 3)
        deserializer.load_into_module(target)
        intact, results = deserializer.verify_module(target)
        assert intact is False
        assert dict(results) == {".weight": False, ".bias": False, ".empty": True, ".zeros": True}


def test_one_digest_that_was_stripped_is_named_among_many():
    tensors = [
        fmt.Tensor((f"t{i}",), "<f4", (2,), b"abcdefgh", hashes=() if i == 7 else ("crc32", "sha256")) for i in range(9)
    ]
    with pytest.raises(MissingHashError) as caught:
        samples.load(io.BytesIO(fmt.write_file(tensors)), verify_hash=True)
    assert "'t7'" in str(caught.value)
    assert "'t6'" not in str(caught.value)


# --- tensors that were loaded before --------------------------------------------------------------------------------


def loaded_before(data, lazy):
    """A deserializer whose tensors were all read without being verified: closed, or lazy and open."""
    deserializer = open_bytes(data, lazy_load=lazy)
    deserializer.tree()
    return deserializer


VERIFIED_READS = {
    "load_into_module": lambda deserializer, target: deserializer.load_into_module(target, verify_hash=True),
    "read_tensors": lambda deserializer, _: len(list(deserializer.read_tensors(verify_hash=True))),
    "streamed": lambda deserializer, _: len(list(deserializer.read_tensors(verify_hash=True, cache=False))),
    "arrays": lambda deserializer, _: len(list(deserializer.read_numpy_arrays(verify_hash=True))),
}


@pytest.mark.parametrize("lazy", [False, True], ids=["eager, closed", "lazy, open"])
@pytest.mark.parametrize("read", VERIFIED_READS)
def test_damage_that_was_loaded_before_is_found_when_verification_is_asked_for(read, lazy):
    model, target = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    data = module_bytes(model)
    untouched = samples.raw(target.weight)
    with pytest.raises(HashMismatchError) as caught:
        VERIFIED_READS[read](loaded_before(flipped(data, ".bias"), lazy), target)
    assert ".bias" in str(caught.value)
    assert ".weight" not in str(caught.value)
    assert samples.raw(target.weight) == untouched
    assert VERIFIED_READS[read](loaded_before(data, lazy), target) == 2  # what is whole passes
    assert samples.same(target.weight, model.weight) == (read == "load_into_module")


def test_a_verifying_object_never_gives_out_what_an_unverified_read_left_behind():
    target = torch.nn.Linear(3, 3)
    with open_bytes(flipped(module_bytes(target), ".bias"), lazy_load=True, verify_hash=True) as deserializer:
        list(deserializer.read_tensors(verify_hash=False))
        with pytest.raises(HashMismatchError, match="bias"):
            deserializer.load_into_module(target)
    data = flipped(samples.state_dict_bytes({"x": tensor((4,), seed=1), "y": tensor((4,), seed=2)}), "y")
    with open_bytes(data, lazy_load=True, verify_hash=True) as deserializer:
        list(deserializer.read_tensors(verify_hash=False))
        assert samples.same(deserializer["x"], tensor((4,), seed=1))
        for attempt in (lambda: deserializer["y"], deserializer.tree):
            with pytest.raises(HashMismatchError, match="'y'"):
                attempt()


def test_tensors_that_changed_in_memory_are_no_longer_what_the_file_vouches_for():
    deserializer = open_bytes(samples.state_dict_bytes({"x": tensor((4,))}), verify_hash=True)
    with torch.no_grad():
        deserializer["x"].view(torch.int32)[0] ^= 1
    with pytest.raises(HashMismatchError, match="'x'"):
        list(deserializer.read_tensors(verify_hash=True))


def test_converted_tensors_are_read_again_and_compared():
    data = module_bytes(torch.nn.Linear(3, 3))
    for stored, change in ((data, 0), (flipped(data, ".bias"), 0), (data, 1)):
        with open_bytes(stored, lazy_load=True, dtype=torch.float16) as deserializer:
            deserializer.tree()
            with torch.no_grad():
                deserializer[".bias"].add_(change)
            if stored is data and not change:
                assert deserializer.load_into_module(torch.nn.Linear(3, 3), verify_hash=True) == 2
            else:
                with pytest.raises(HashMismatchError, match="bias"):
                    deserializer.load_into_module(torch.nn.Linear(3, 3), verify_hash=True)


def test_converted_tensors_of_a_closed_file_cannot_be_verified_and_are_not():
    deserializer = open_bytes(module_bytes(torch.nn.Linear(3, 3)), dtype=torch.float16)
    target = torch.nn.Linear(3, 3)
    before = samples.raw(target.weight)
    for attempt in (
        lambda: deserializer.load_into_module(target, verify_hash=True),
        lambda: list(deserializer.read_tensors(verify_hash=True)),
    ):
        with pytest.raises(ValueError, match="weight") as caught:
            attempt()
        assert "closed" in str(caught.value)
    assert samples.raw(target.weight) == before


def test_converted_tensors_of_a_closed_file_that_were_verified_when_they_were_read_may_be_asked_for_so_again():
    data = module_bytes(torch.nn.Linear(3, 3))
    for dtype in (torch.float16, torch.float64):
        for asked in ({"verify_hash": True}, {}):
            deserializer = open_bytes(data, verify_hash=True, dtype=dtype)
            target = torch.nn.Linear(3, 3)
            assert len(list(deserializer.read_tensors(**asked))) == 2
            assert deserializer.load_into_module(target, **asked) == 2
            assert target.weight.dtype == dtype
    with pytest.raises(HashMismatchError):
        open_bytes(flipped(data, ".bias"), verify_hash=True, dtype=torch.float16)
