"""Every golden file through the public API, in every way of loading: the manifest's tensors, or the right refusal."""

from __future__ import annotations

import contextlib
import io

import golden_files
import pytest
import samples
import torch

import tensorizer
from tensorizer import TensorDeserializer, TensorType, errors

ALL = golden_files.select(refused=False)
LOADED = golden_files.distinct(ALL)
REFUSED = golden_files.select(refused=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("golden")


def unpack(golden, folder):
    path = folder / f"{golden['name']}.tensors"
    if not path.exists():
        path.write_bytes(golden_files.read(golden))
    return path


def open_golden(golden, source, **options):
    options["allow_missing_hashes"] = golden_files.lacks_hashes(golden)
    return TensorDeserializer(source, device="cpu", **golden_files.keys(golden), **options)


def positioned(golden, source):
    source.seek(golden.get("start", 0))
    return source


def place(golden, folder):
    """The path of the file, or the open file where it begins later."""
    path = unpack(golden, folder)
    return positioned(golden, path.open("rb")) if golden.get("start") else path


def path_of(name):
    return [name] if isinstance(name, str) else list(name)


def check_tensor(tensor, found):
    assert isinstance(found, torch.nn.Parameter)
    assert found.dtype == getattr(torch, tensor["dtype"])
    assert list(found.shape) == tensor["shape"]
    assert found.device.type == "cpu"
    assert found.is_contiguous()
    assert found.requires_grad == (found.is_floating_point() or found.is_complex())
    assert samples.raw(found) == golden_files.content(tensor)
    assert found.untyped_storage().nbytes() == tensor["nbytes"]
    assert found.storage_offset() == 0


def check(golden, deserializer):
    with deserializer:
        read = list(deserializer.read_tensors())
        assert [path_of(name) for _, _, name, _ in read] == [tensor["path"] for tensor in golden["tensors"]]
        for (module_idx, kind, _, found), tensor in zip(read, golden["tensors"]):
            assert module_idx == tensor["module_idx"]
            assert kind is TensorType(golden_files.KINDS[tensor["kind"]])
            check_tensor(tensor, found)
        assert deserializer.total_tensor_bytes == sum(tensor["nbytes"] for tensor in golden["tensors"])


WAYS = {
    "eager": {},
    "eager, one reader": {"num_readers": 1},
    "eager, three readers": {"num_readers": 3},
    "lazy": {"lazy_load": True},
    "verified": {"verify_hash": True},
    "lazy, verified": {"lazy_load": True, "verify_hash": True},
    "not verified": {"verify_hash": None, "plaid_mode": True, "plaid_mode_buffers": 3},
}


@contextlib.contextmanager
def naming(way):
    """Puts the way of loading in front of what went wrong with it."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{way}: {type(error).__name__}: {error}") from error


@golden_files.each(ALL)
def test_a_golden_file_holds_what_the_manifest_says(golden, folder):
    check(golden, open_golden(golden, place(golden, folder), verify_hash=not golden.get("unverifiable")))


@golden_files.each(LOADED)
def test_a_golden_file_is_the_same_in_every_way_of_loading(golden, folder):
    for way, options in WAYS.items():
        if golden.get("unverifiable") and options.get("verify_hash"):
            continue
        with naming(way):
            check(golden, open_golden(golden, place(golden, folder), **options))


@golden_files.each(LOADED)
def test_a_golden_file_loads_from_memory_and_from_open_files(golden, folder):
    path = unpack(golden, folder)
    check(golden, open_golden(golden, positioned(golden, io.BytesIO(golden_files.read(golden)))))
    check(golden, open_golden(golden, positioned(golden, path.open("rb")), num_readers=2))
    check(golden, open_golden(golden, positioned(golden, path.open("rb", buffering=0)), lazy_load=True))


@golden_files.each(g for g in LOADED if not g["encryption"])
def test_a_golden_file_loads_as_a_mapping_of_the_file(golden, folder):
    check(golden, open_golden(golden, place(golden, folder), mmap=True))


@golden_files.each(LOADED)
def test_tensors_of_a_golden_file_come_out_in_any_order(golden, folder):
    with open_golden(golden, place(golden, folder), lazy_load=True) as deserializer:
        for tensor in reversed(golden["tensors"]):
            found = deserializer
            for component in tensor["path"]:
                found = found[component]
            check_tensor(tensor, found)


@golden_files.each(g for g in LOADED if golden_files.secret(g))
def test_a_passphrase_file_opens_with_the_derived_key_too(golden, folder):
    key = golden["encryption"]["key"]
    if key is None:
        assert golden["name"] == "c-v3-two-salts"
        return
    params = tensorizer.DecryptionParams.from_key(bytes.fromhex(key))
    check(golden, TensorDeserializer(unpack(golden, folder), device="cpu", encryption=params))


def read_everything(golden, source, **options):
    with open_golden(golden, source, **options) as deserializer:
        return list(deserializer.read_tensors())


def error_classes(golden):
    named = {
        "CryptographyError": errors.CryptographyError,
        "HashMismatchError": errors.HashMismatchError,
        "Exception": Exception,
        "TypeError": TypeError,
        "ValueError": ValueError,
    }
    return tuple(named[name] for name in golden["errors"])


def assert_refused(golden, source, **options):
    with pytest.raises(Exception) as caught:
        read_everything(golden, source, **options)
    assert isinstance(caught.value, error_classes(golden)), repr(caught.value)
    assert isinstance(caught.value, (errors.TensorizerError, OSError)), repr(caught.value)
    assert str(caught.value)


@golden_files.each(REFUSED)
def test_a_golden_file_that_must_be_refused_is_refused_in_every_way(golden, folder, leaves_no_descriptors):
    path = unpack(golden, folder)
    for way, options in WAYS.items():
        with naming(way):
            if golden.get("only_verifying") and not options.get("verify_hash"):
                assert len(read_everything(golden, path, **options)) > 0
            else:
                assert_refused(golden, path, **options)
    verify = {"verify_hash": True} if golden.get("only_verifying") else {}
    assert_refused(golden, io.BytesIO(golden_files.read(golden)), **verify)
    if not golden["encryption"]:
        assert_refused(golden, path, mmap=True, **verify)
