"""Parts of tensors: the same as indexing the whole, from every kind of file and source, and no more bytes than that."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import reference_auth
import samples
import torch
from samples import same
from samples import write_state_dict as write

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer
from tensorizer._format.safetensors import safetensors_dtype
from tensorizer.errors import CryptographyError
from tensorizer.torch import save_file

KEY = b"k" * 32


INDICES = {
    0: [..., (), None, (None, ...), (..., None)],
    1: [
        *(3, -1, numpy.int64(2), torch.tensor(4), slice(None), slice(2, 9), slice(-5, None), slice(None, None, 3)),
        *(slice(8, 2), slice(0, 100, 7), [4, 0, 4], [-1], [], range(2, 5), torch.tensor([[1, 2], [3, 3]]), True, False),
        *((None, 3), (..., 2)),
    ],
    2: [
        *(0, -1, (1, 2), (slice(1, 4), slice(2, 5)), (slice(None), 1), (slice(None), slice(1, None, 2)), [5, 1, 2]),
        *((..., slice(0, 3)), (slice(None, None, 2), ...), ([1, 3], [0, 2]), (slice(1, 5), [2, 0]), (None, 2, None)),
        *(([4, 1], slice(0, 2)), ([0, 6], None), (2, [1, 1]), (slice(3, 3), 0), (slice(0, 7, 3), -1)),
        (torch.tensor([6, 6, 0]), 1),
    ],
    3: [
        *(1, (..., 0), (slice(None), 2), (slice(1, 3), slice(0, 2), slice(1, 4)), (0, ..., slice(None, None, 3))),
        *((slice(None), slice(None, None, 2), slice(2, 3)), ([2, 0], slice(None), [1, 3])),
        (slice(0, 2), [0, 2], None, 1),
    ],
}
SHAPES = {0: (), 1: (11,), 2: (7, 5), 3: (3, 4, 6)}


def cases(tensor):
    yield from INDICES[tensor.dim()]
    if tensor.dim() > 0 and tensor.dtype == torch.float32:
        mask = torch.arange(tensor.numel()).reshape(tensor.shape) % 3 == 1
        yield mask
        yield mask.reshape(tensor.shape[0], -1)[:, 0]
        yield mask[:1].repeat(tensor.shape[0], *[1] * (tensor.dim() - 1)) & False


def indexable(tensor):
    """The tensor, or one of integers where torch can neither index nor copy its dtype."""
    if tensor.dtype in samples.NUMPY_DTYPES:
        return tensor
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def test_a_slice_is_what_torch_takes_of_the_whole_for_all_dtypes_shapes_and_indices(tmp_path):
    tensors = {
        f"{dtype}{dim}": samples.tensor(shape, dtype, dim)
        for dtype in samples.ALL_DTYPES
        for dim, shape in SHAPES.items()
    }
    tensors["none"] = torch.empty(0, 5)
    tensors["zeros"] = torch.empty(4, 0, 2)
    files = [write(tmp_path / "plain.tensors", tensors)]
    files.append(write(tmp_path / "secret.tensors", tensors, encryption=EncryptionParams(KEY)))
    known = {name: tensor for name, tensor in tensors.items() if safetensors_dtype(tensor.dtype) is not None}
    known = {name: tensor for name, tensor in known.items() if tensor.dim() or not name.startswith("torch.float4")}
    save_file(known, tmp_path / "m.safetensors")
    files.append(tmp_path / "m.safetensors")
    for file in files:
        key = DecryptionParams.from_key(KEY) if file.name.startswith("secret") else None
        with TensorDeserializer(file, device="cpu", lazy_load=True, encryption=key) as d:
            assert len(d) == len(known if file.suffix == ".safetensors" else tensors)
            for name in d:
                part, tensor = d.get_slice(name), tensors[name]
                assert (part.shape, part.dtype, part.ndim) == (tensor.shape, tensor.dtype, tensor.dim())
                assert part.nbytes == tensor.numel() * tensor.element_size()
                assert part.get_shape() == list(tensor.shape)
                assert part.is_floating_point() == tensor.is_floating_point()
                assert same(part[...], tensor), (file, name)
                if name in ("none", "zeros"):
                    assert same(part[1:1], tensor[1:1])
                    assert same(part[:, None], tensor[:, None])
                    continue
                # all dtypes of a size take the same way
                for index in (
                    cases(tensor) if tensor.dtype in (torch.float32, torch.uint8) else INDICES[tensor.dim()][:6]
                ):
                    assert part[index].dtype == tensor.dtype
                    assert same(indexable(part[index]), indexable(tensor)[index]), (file, name, index)


def test_wrong_indices_are_the_errors_of_torch(tmp_path):
    tensor = samples.tensor((4, 5), torch.float32)
    write(tmp_path / "f", {"a": tensor, "s": torch.tensor(1.0)})
    with TensorDeserializer(tmp_path / "f", device="cpu", lazy_load=True) as d:
        part = d.get_slice("a")
        mask = torch.ones(3, dtype=torch.bool)
        wrong = [4, -5, (0, 5), (0, 0, 0), slice(None, None, -1), [9], [-5], mask, (slice(None), [7])]
        for index in wrong:
            with pytest.raises((IndexError, ValueError, TypeError)) as expected:
                tensor[index]
            with pytest.raises(type(expected.value)):
                part[index]
        for index in ("a", 1.5, [0.5]):
            with pytest.raises(IndexError):
                part[index]
        with pytest.raises(IndexError):
            d.get_slice("s")[0]
        with pytest.raises(KeyError):
            d.get_slice("b")
        with pytest.raises(KeyError):
            d.get_slices({"b": ...})
        with pytest.raises(ValueError, match="expected the shape"):
            d.get_slices({"a": slice(0, 2)}, out={"a": torch.empty(3, 5)})
        with pytest.raises(KeyError):
            d.get_slices({"a": slice(0, 2)}, out={})


def test_a_wrapper_without_memory_of_its_own_is_filled_by_its_own_copy(tmp_path):
    tensor = samples.tensor((300, 300))
    write(tmp_path / "f", {"a": tensor})
    wrapper = samples.Wrapper(torch.zeros(300, 300))
    with TensorDeserializer(tmp_path / "f", device="cpu", lazy_load=True) as d:
        d.get_slices({"a": ...}, out={"a": wrapper})
    assert samples.same(wrapper.inner, tensor)


def test_a_slice_reads_the_bytes_that_it_is_made_of(tmp_path):
    tensor = samples.tensor((1024, 2048), torch.float32)  # rows of 8 KiB
    plain = write(tmp_path / "plain", {"a": tensor})
    secret = write(tmp_path / "secret", {"a": tensor}, encryption=EncryptionParams(KEY))

    def nbytes_of(file, index, **options):
        with TensorDeserializer(file, device="cpu", lazy_load=True, **options) as d:
            before = d.total_bytes_read
            assert same(d.get_slice("a")[index], tensor[index])
            return d.total_bytes_read - before

    half = slice(512, 1024)
    assert nbytes_of(plain, half) == 512 * 8192
    assert nbytes_of(plain, (slice(None), slice(0, 1024))) == 1024 * 4096
    assert nbytes_of(plain, [900, 3, 4]) == 3 * 8192
    assert nbytes_of(plain, slice(0, 0)) == 0
    key = {"encryption": DecryptionParams.from_key(KEY)}
    header = 4096 + 16 * 1024
    assert nbytes_of(secret, slice(100, 600), **key) <= 500 * 8192 + 2 * (2 << 20) + header


def test_parts_of_encrypted_tensors_are_authenticated(tmp_path):
    tensor = samples.tensor((3 << 20,), torch.uint8)
    path = write(tmp_path / "f", {"a": tensor}, encryption=EncryptionParams(KEY))
    key = DecryptionParams.from_key(KEY)
    with TensorDeserializer(path, device="cpu", lazy_load=True, encryption=key) as d:
        offset = d.entries()[0].data_offset
    with path.open("r+b") as file:
        file.seek(offset + (2 << 20) + 5)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with TensorDeserializer(path, device="cpu", lazy_load=True, encryption=key) as d:
        assert same(d.get_slice("a")[100:5000], tensor[100:5000])  # of the chunk before
        out = torch.ones(10, dtype=torch.uint8)
        with pytest.raises(CryptographyError, match="authentication code"):
            d.get_slices({"a": slice((2 << 20) + 90, (2 << 20) + 100)}, out={"a": out})
        assert not same(out, tensor[(2 << 20) + 90 : (2 << 20) + 100])
    wrong = DecryptionParams.from_key(b"x" * 32)
    with pytest.raises(CryptographyError, match="wrong key"):
        TensorDeserializer(path, device="cpu", lazy_load=True, encryption=wrong)
    old = write(tmp_path / "old", {"a": tensor}, encryption=EncryptionParams(KEY))
    old.write_bytes(reference_auth.as_before(old.read_bytes(), KEY))
    with TensorDeserializer(old, device="cpu", lazy_load=True, encryption=key) as d:
        assert same(d.get_slice("a")[100:5000], tensor[100:5000])
    with TensorDeserializer(old, device="cpu", lazy_load=True, encryption=wrong) as d:
        part = d.get_slice("a")
        with pytest.raises(CryptographyError):
            part[0]


def test_a_part_is_never_called_verified(tmp_path):
    tensor = samples.tensor((6, 4), torch.float32)
    write(tmp_path / "f", {"a": tensor})
    with TensorDeserializer(tmp_path / "f", device="cpu", lazy_load=True, verify_hash=True) as d:
        for index in (slice(0, 5), 0, (..., slice(1, None)), [0, 1]):
            with pytest.raises(ValueError, match="part cannot be verified"):
                d.get_slice("a")[index]
            assert same(d.get_slices({"a": index}, verify_hash=False)["a"], tensor[index])
        assert same(d.get_slice("a")[:], tensor)
    with TensorDeserializer(tmp_path / "f", device="cpu", lazy_load=True) as d:
        with pytest.raises(ValueError, match="part cannot be verified"):
            d.get_slices({"a": slice(0, 3)}, verify_hash=True)
        assert same(d.get_slices({"a": ...}, verify_hash=True)["a"], tensor)


def test_parts_of_many_tensors_come_by_one_plan_to_the_places_that_are_named(tmp_path):
    tensors = {f"t{i}": samples.tensor((8, 6), torch.float32, i) for i in range(20)}
    write(tmp_path / "f", tensors)
    with TensorDeserializer(tmp_path / "f", device="cpu", lazy_load=True) as d:
        parts = {name: (slice(i % 4, 4 + i % 4), slice(0, 3)) for i, name in enumerate(reversed(tensors))}
        found = d.get_slices(parts)
        assert list(found) == list(parts)
        assert all(same(found[name], tensors[name][index]) for name, index in parts.items())
        out = {name: torch.empty(4, 3) for name in parts}
        out["t0"] = torch.empty(4, 3, dtype=torch.float64)  # converted
        out["t1"] = torch.empty(3, 4).t()  # not contiguous
        back = d.get_slices(parts, out=out)
        for name, index in parts.items():
            assert back[name] is out[name]
            assert same(out[name], tensors[name][index].to(out[name].dtype))
        overlapping = d.get_slices({"t3": (slice(None), slice(0, 4)), "t4": ...}, device="cpu")
        assert same(overlapping["t3"], tensors["t3"][:, :4])
    with TensorDeserializer(tmp_path / "f", device="cpu", dtype=torch.float16, lazy_load=True) as d:
        assert d.get_slice("t5").dtype == torch.float16
        assert d.get_slice("t5").get_dtype() == "F16"
        assert same(d.get_slice("t5")[2:], tensors["t5"].half()[2:])
    d = TensorDeserializer(tmp_path / "f", device="cpu")  # closed, loaded
    assert same(d.get_slice("t5")[2:], tensors["t5"][2:])
    assert {name: part.shape for name, part in d.slices().items()} == {n: t.shape for n, t in tensors.items()}


def test_slices_reach_tensors_in_shards_and_below_keys(tmp_path):
    write(tmp_path / "nested", {"a": {"b": torch.arange(6)}, "c": torch.arange(3)})
    with TensorDeserializer(tmp_path / "nested", device="cpu", lazy_load=True) as d:
        assert d.get_slice(("a", "b"))[2:].tolist() == [2, 3, 4, 5]
        assert set(d.slices()) == {("a", "b"), "c"}
    tensors = {f"t{i}": samples.tensor((5, 4), torch.float32, i) for i in range(6)}
    save_file(tensors, tmp_path / "model" / "model.safetensors", max_shard_size=250)
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    with TensorDeserializer(tmp_path / "model", device="cpu", lazy_load=True) as d:
        found = d.get_slices({name: slice(1, 3) for name in tensors})
        assert all(same(found[name], tensor[1:3]) for name, tensor in tensors.items())


def test_a_slice_keeps_its_file_open_until_somebody_closes_it(tmp_path):
    samples.write_state_dict(tmp_path / "f", {"a": torch.arange(6.0)})
    part = TensorDeserializer(tmp_path / "f", device="cpu", lazy_load=True).get_slice("a")
    parts = TensorDeserializer(tmp_path / "f", device="cpu", lazy_load=True).slices()
    gc.collect()
    assert part[2:4].tolist() == parts["a"][2:4].tolist() == [2, 3]
    with TensorDeserializer(tmp_path / "f", device="cpu", lazy_load=True) as file:
        part = file.get_slice("a")
    with pytest.raises(RuntimeError, match="the file is closed"):
        part[0]


def test_one_deserializer_gives_slices_to_several_threads(tmp_path):
    tensor = samples.tensor((64, 4096), torch.float32)
    write(tmp_path / "f", {"a": tensor})
    with TensorDeserializer(tmp_path / "f", device="cpu", lazy_load=True) as d:

        def read(begin):
            rows = [slice(i, i + 3) for i in range(begin, 64, 4)]
            return all(same(d.get_slice("a")[part, 100:3000], tensor[part, 100:3000]) for part in rows)

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(read, range(4)))


def test_get_slices_of_20000_tensors_come_by_one_plan(tmp_path):
    tensors = dict(enumerate(torch.arange(80_000, dtype=torch.int32).split(4)))
    write(tmp_path / "f", {f"t{i}": tensor for i, tensor in tensors.items()}, hashes="crc32", fsync=False)
    with TensorDeserializer(tmp_path / "f", device="cpu", lazy_load=True) as d:
        found = d.get_slices({f"t{i}": slice(1, 3) for i in tensors})
        assert len(found) == 20_000
        assert all(found[f"t{i}"].tolist() == [4 * i + 1, 4 * i + 2] for i in range(0, 20_000, 997))
