"""``tensorizer.torch`` and ``convert`` where programs written for ``safetensors`` expect that library's behaviour."""

from __future__ import annotations

import io
import json
import os
import struct

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors import SafetensorError
from safetensors.torch import load_file as reference_load
from safetensors.torch import save_file as reference_save

import tensorizer
from tensorizer import convert
from tensorizer.errors import FormatError
from tensorizer.torch import load, load_file, load_model, safe_open, save, save_file, save_model

STATE = {f"layers.{i}.{part}": torch.full((250,), float(i)) for i in range(6) for part in ("weight", "bias")}


def names_in(folder):
    return sorted(os.listdir(folder))


# --- what is removed -------------------------------------------------------------------------------------------------


def test_load_model_gives_lazy_parameters_the_shape_of_the_file(tmp_path):
    model = torch.nn.Linear(3, 4)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    for assign in ("auto", True, False):
        target = torch.nn.LazyLinear(4)
        assert load_model(target, tmp_path / "m.safetensors", assign=assign).ok
        assert torch.equal(target(torch.ones(2, 3)), model(torch.ones(2, 3)))


def test_a_save_of_one_named_file_removes_no_other(tmp_path):
    model = torch.nn.Linear(3, 3)
    save_file(STATE, tmp_path / "model.safetensors", max_shard_size=4000)
    before = names_in(tmp_path)
    assert len(before) > 2
    save_file(STATE, tmp_path / "model.safetensors")
    save_model(model, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors.index.json", tmp_path / "model.safetensors", force=True)
    assert names_in(tmp_path) == sorted([*before, "model.safetensors"])


def test_a_conversion_keeps_the_shards_that_it_reads(tmp_path):
    save_file(STATE, tmp_path / "model.safetensors", max_shard_size=4000)
    before = names_in(tmp_path)
    convert(tmp_path, tmp_path / "model.safetensors")
    assert names_in(tmp_path) == sorted([*before, "model.safetensors"])
    (tmp_path / "model.safetensors").unlink()
    convert(tmp_path, tmp_path / "model.safetensors", max_shard_size=9000, force=True)
    assert set(before) <= set(names_in(tmp_path))


def test_a_sharded_save_replaces_the_other_form_of_its_name_once_it_is_whole(tmp_path):
    save_file(STATE, tmp_path / "model.safetensors")
    save_file(STATE, tmp_path / "other.safetensors")
    save_file(STATE, tmp_path / "model.safetensors", max_shard_size=4000)
    assert "model.safetensors" not in names_in(tmp_path)
    assert "other.safetensors" in names_in(tmp_path)
    save_file(STATE, tmp_path / "model.safetensors", max_shard_size="1GB")
    assert names_in(tmp_path) == ["model.safetensors", "other.safetensors"]


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_the_other_form_of_a_model_at_a_uri_is_replaced_too(tmp_path, scheme):
    folder = tmp_path.as_uri() if scheme == "file" else f"memory://{tmp_path.name}"
    newer = {name: tensor + 1 for name, tensor in STATE.items()}
    (tmp_path / "elsewhere").mkdir()
    source = tmp_path / "elsewhere" / "source.tensors"
    save_file(STATE, source)
    for shard_sizes in (("1GB", 4000), (4000, "1GB")):
        for state, size in zip((STATE, newer), shard_sizes):
            save_file(state, f"{folder}/model.tensors", max_shard_size=size)
        for prefix in (folder, f"{folder}/"):
            with tensorizer.TensorDeserializer(prefix, device="cpu") as found:
                assert all(torch.equal(tensor, found[name]) for name, tensor in newer.items())
        for force in (False, True):
            with pytest.raises(FileExistsError, match="exists"):
                convert(source, f"{folder}/model.tensors", max_shard_size=shard_sizes[0], force=force)


def test_what_a_conversion_reads_at_a_uri_stays(tmp_path):
    store, prefix = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    save_file(STATE, f"{prefix}/model.tensors", max_shard_size=4000)
    convert(f"{prefix}/", f"{prefix}/model.tensors", max_shard_size="1GB")
    assert store.exists(f"/{tmp_path.name}/model.tensors.index.json")
    named = f"memory://user:secret@{tmp_path.name}/one.tensors"  # messages show it without the password
    save_file(STATE, named)
    convert(named, named, max_shard_size=4000, dtype=torch.bfloat16)
    assert set(load_file(named)) == set(STATE)


class WithoutRmFile(MemoryFileSystem):
    """As some file systems of fsspec are."""

    protocol = "norm"
    store, pseudo_dirs, removes = {}, [""], True

    def rm_file(self, path):
        raise NotImplementedError

    def rm(self, path, recursive=False, maxdepth=None):
        if not self.removes:
            raise NotImplementedError
        del self.store[self._strip_protocol(path)]

    def mv(self, source, target, **_):
        self.store[self._strip_protocol(target)] = self.store.pop(self._strip_protocol(source))

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("norm://"))


def test_a_store_without_rm_file_is_asked_for_rm(monkeypatch):
    fsspec.register_implementation("norm", WithoutRmFile, clobber=True)
    save_file(STATE, "norm://model.tensors")
    save_file(STATE, "norm://model.tensors", max_shard_size=4000)
    with pytest.raises(FileNotFoundError):
        load_file("norm://model.tensors")
    monkeypatch.setattr(WithoutRmFile, "removes", False)
    with pytest.raises(OSError, match="removes no files"):
        save_file(STATE, "norm://model.tensors", max_shard_size="1GB")


def test_a_target_that_nobody_can_write_to_is_not_asked_for_other_forms():
    for target in ("https://host.invalid/m.tensors", "redis://host.invalid/m"):
        with pytest.raises(ValueError, match=r"mode|redis"):
            save_file(STATE, target, max_shard_size="1GB")


def test_readers_refuse_to_guess_between_two_forms_of_one_model(tmp_path):
    save_file(STATE, tmp_path / "model.safetensors", max_shard_size=4000)
    save_file(STATE, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"both model\.safetensors\.index\.json and model\.safetensors,"):
        load_file(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(STATE)
    assert set(load_file(tmp_path / "model.safetensors.index.json")) == set(STATE)


# --- names and formats -----------------------------------------------------------------------------------------------


def test_the_file_may_be_named_by_keyword(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(STATE, filename=path)
    assert set(load_file(filename=path)) == set(STATE)
    with safe_open(filename=path, framework="pt", device="cpu") as file:
        assert set(file.keys()) == set(STATE)
    model = torch.nn.Linear(3, 3)
    save_model(model, filename=path)
    missing, unexpected = load_model(model, filename=path)
    assert (missing, unexpected) == ([], [])


def test_only_a_name_that_ends_in_tensors_is_another_format(tmp_path):
    for name in ("weights", "model.safetensors.tmp", "model.bin", "model.tensors.tmp"):
        save_file(STATE, tmp_path / name)
        assert set(reference_load(tmp_path / name)) == set(STATE), name
        save_model(torch.nn.Linear(2, 2), tmp_path / name)
        assert set(reference_load(tmp_path / name)) == {"weight", "bias"}, name
    memory = io.BytesIO()
    save_file(STATE, memory)
    assert memory.getvalue() == save(STATE)
    save_file(STATE, tmp_path / "model.tensors")
    assert (tmp_path / "model.tensors").read_bytes().startswith(b"|TZR|")
    save_file(STATE, tmp_path / "weights", format="tensors")
    assert (tmp_path / "weights").read_bytes().startswith(b"|TZR|")


def test_objects_of_the_caller_stay_open(tmp_path):
    for format in ("safetensors", "tensors"):
        memory = io.BytesIO()
        save_file(STATE, memory, format=format)
        assert not memory.closed
        memory.seek(0)
        assert set(load_file(memory)) == set(STATE)
        memory.seek(0)
        with safe_open(memory) as file:
            assert torch.equal(file.get_tensor("layers.1.weight"), STATE["layers.1.weight"])
        assert not memory.closed
        with (tmp_path / "file").open("wb+") as file:
            save_file(STATE, file, format=format)
            file.seek(0)
            assert set(load_file(file)) == set(STATE)
            assert not file.closed
        with pytest.raises(FormatError):
            load_file(broken := io.BytesIO(b"no tensors at all"))
        assert not broken.closed
    assert set(load(save(STATE))) == set(STATE)


def test_shards_are_cut_in_the_order_of_the_state_dict(tmp_path):
    save_file(STATE, tmp_path / "model.safetensors", max_shard_size=4000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for i in range(6):
        assert index[f"layers.{i}.weight"] == index[f"layers.{i}.bias"]
    assert index["layers.0.weight"] == index["layers.1.weight"] != index["layers.2.weight"]
    for shard in set(index.values()):
        again = tmp_path / "again"
        reference_save(reference_load(tmp_path / shard), again, {"format": "pt"})
        assert again.read_bytes() == (tmp_path / shard).read_bytes(), "each as the reference writes it"


def test_backends_are_those_of_the_library(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(STATE, path)
    for backend in ("mmap", "pread", None):
        assert torch.equal(load_file(path, backend=backend)["layers.3.bias"], STATE["layers.3.bias"])
        with safe_open(path, "pt", backend=backend) as file:
            assert torch.equal(file.get_tensor("layers.3.bias"), STATE["layers.3.bias"])
    assert is_mapped(load_file(path, backend="mmap")["layers.3.bias"], path)
    assert not is_mapped(load_file(path, backend="pread")["layers.3.bias"], path)
    model = torch.nn.Linear(3, 3)
    save_model(model, path)
    load_model(model, path, backend="mmap")
    for call in (load_file, safe_open):
        with pytest.raises(SafetensorError, match='backend "io_uring" is invalid'):
            call(path, backend="io_uring")
        with pytest.raises(ValueError, match="expected one of"):
            call(path, backend="io_uring")


def test_the_backend_mmap_maps_what_mmap_none_maps(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(STATE, path)
    name = "layers.3.bias"
    assert STATE[name].dtype == torch.float32
    devices = ["cpu", {"": "cpu"}, lambda name: "cpu"]
    for options in ({"dtype": torch.float32}, *({"device": device} for device in devices)):
        assert is_mapped(load_file(path, mmap=None, **options)[name], path), options
        assert is_mapped(load_file(path, backend="mmap", **options)[name], path), options
    with open(path, "rb") as file:
        assert is_mapped(load_file(file, backend="mmap")[name], path)
    assert not is_mapped(load_file(path, backend="mmap", dtype=torch.float16)[name], path)
    with open(path, "rb") as file:
        memory = io.BytesIO(file.read())
    assert torch.equal(load_file(memory, backend="mmap")[name], STATE[name]), "what cannot be mapped is read"


def is_mapped(tensor, path):
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return line.rstrip().endswith(str(path))
    return False


def test_a_number_of_a_device_is_no_cpu(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(STATE, path)
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    for device in (0, "cuda:0"):
        with pytest.raises(RuntimeError, match="'cuda:0' was asked for, but CUDA is not available"):
            load_file(path, device=device)


# --- dtypes ----------------------------------------------------------------------------------------------------------


def raw_file(path, entries):
    header, data = {}, b""
    for name, (dtype, shape, payload) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(payload)]}
        data += payload
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_dtype_that_torch_lacks_has_its_name_and_an_error_that_names_the_tensor(tmp_path):
    path = tmp_path / "f6.safetensors"
    raw_file(path, {"other": ("F32", [1], b"\0" * 4), "odd": ("F6_E2M3", [4], b"\1" * 3)})
    with safe_open(path) as file:
        assert file.get_slice("odd").get_dtype() == "F6_E2M3"
        assert file.get_slice("odd").get_shape() == [4]
        assert file.get_tensor("other").tolist() == [0.0]
        for read in (
            lambda: file.get_tensor("odd"),
            lambda: file.get_slice("odd")[1:],
            lambda: file.get_slice("odd").dtype,
        ):
            with pytest.raises(FormatError, match=r"tensor 'odd'.*F6_E2M3"):
                read()
    with pytest.raises(FormatError, match=r"'odd'.*F6_E2M3"):
        convert(path, tmp_path / "f6.tensors")
    assert not (tmp_path / "f6.tensors").exists()


def test_every_dtype_goes_to_the_other_format_and_back_byte_for_byte(tmp_path):
    names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 uint16 uint32 uint64 "
    names += "float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz float4_e2m1fn_x2"
    tensors = {}
    for name in names.split():
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        shapes = ((0,), (0, 3), (2, 3)) if "float4" in name else ()  # two elements share a byte
        for shape in shapes or ((), (0,), (0, 3), (3, 0), (1,), (2, 3)):
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            data = torch.arange(nbytes, dtype=torch.uint8) % 2
            tensors[f"{name}{list(shape)}"] = data.view(dtype).reshape(shape)
    first, middle, back = (tmp_path / name for name in ("first.safetensors", "middle.tensors", "back.safetensors"))
    for name, tensor in tensors.items():
        for path in (first, middle, back):
            path.unlink(missing_ok=True)
        try:
            reference_save({name: tensor}, first)
        except (KeyError, ValueError, SafetensorError, RuntimeError):
            save_file({name: tensor}, first)
        convert(first, middle)
        convert(middle, back)
        assert back.read_bytes() == first.read_bytes(), name
        (loaded,) = load_file(middle).values()
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape), name


# --- shards ----------------------------------------------------------------------------------------------------------


def test_entries_of_shards_are_numbered_through_and_read_in_any_order(tmp_path):
    save_file(STATE, tmp_path / "model.safetensors", max_shard_size=4000)
    with tensorizer.TensorDeserializer(tmp_path, device="cpu", lazy_load=True) as file:
        entries = file.entries()
        assert entries[3].shape == (250,)
        assert file.get_slices({}) == {}
        wanted = [entries[i].name for i in (5, 0, 3)]
        for name, tensor in file.get_slices(dict.fromkeys(wanted, ...)).items():
            assert torch.equal(tensor, STATE[name])
            assert torch.equal(file[name], STATE[name])
