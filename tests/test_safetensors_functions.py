"""The functions of ``tensorizer.torch``, held against those of ``safetensors.torch``."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings

import pytest
import samples
import torch

import tensorizer
from tensorizer.errors import UnsupportedContentError
from tensorizer.torch import load, load_file, load_model, safe_open, save, save_file, save_model

theirs = pytest.importorskip("safetensors.torch")
FORMATS = ("m.tensors", "m.safetensors")

NAMES = """
    float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 uint16 uint32 uint64
    float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz
"""
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(found, wanted):
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert tensor.numel() == 0 or bits(found[name]).equal(bits(tensor)), name


def all_dtypes():
    state = {f"{str(dtype)[6:]}": samples.tensor((3, 5), dtype, number) for number, dtype in enumerate(DTYPES)}
    return {**state, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), 'zz/ü\n"': torch.ones(1)}


def test_what_is_saved_is_what_the_reference_writes_and_loads(tmp_path):
    state = all_dtypes()
    for metadata in (None, {"format": "pt"}, {}):
        save_file(state, tmp_path / "ours.safetensors", metadata)
        theirs.save_file(state, tmp_path / "theirs.safetensors", metadata)
        assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
        assert save(state, metadata) == (tmp_path / "ours.safetensors").read_bytes()
    assert_same(theirs.load_file(tmp_path / "ours.safetensors"), state)


def test_both_formats_give_a_plain_dict_on_the_cpu(tmp_path):
    state = all_dtypes()
    for name in FORMATS:
        save_file(state, tmp_path / name)
        found = load_file(tmp_path / name)
        assert type(found) is dict
        assert_same(found, state)
        for tensor in found.values():
            assert type(tensor) is torch.Tensor
            assert not tensor.requires_grad
            assert tensor.device.type == "cpu"
        assert_same(load((tmp_path / name).read_bytes()), state)
        with open(tmp_path / name, "rb") as file:
            assert_same(load_file(file), state)


def test_the_content_tells_the_format_not_the_extension(tmp_path):
    state = {"a": torch.arange(4.0)}
    save_file(state, tmp_path / "a.safetensors", format="tensors")
    save_file(state, tmp_path / "a.tensors", format="safetensors")
    for name in ("a.safetensors", "a.tensors"):
        assert_same(load_file(tmp_path / name), state)
    assert (tmp_path / "a.safetensors").read_bytes().startswith(b"|TZR|")


def test_filter_and_dtype_apply(tmp_path):
    for name in FORMATS:
        save_file({"a": torch.ones(3), "b": torch.ones(3, dtype=torch.int64)}, tmp_path / name)
        assert list(load_file(tmp_path / name, filter_func=lambda n: n == "a")) == ["a"]
        found = load_file(tmp_path / name, dtype=torch.float16)
        assert [found[n].dtype for n in ("a", "b")] == [torch.float16, torch.int64]


def test_a_filter_may_take_an_alias_alone_or_leave_both_names_out(tmp_path):
    shared = torch.arange(4.0)
    for name in FORMATS:
        save_file({"a": shared, "b": shared, "c": torch.ones(1)}, tmp_path / name)
        assert_same(load_file(tmp_path / name, filter_func=lambda n: n == "b"), {"b": shared})
        assert_same(load_file(tmp_path / name, filter_func=lambda n: n == "c"), {"c": torch.ones(1)})


def test_verification_of_what_holds_no_digests_is_refused(tmp_path):
    for name in FORMATS:
        save_file({"a": torch.ones(3)}, tmp_path / name)
    load_file(tmp_path / "m.tensors", verify=True)
    with pytest.raises(tensorizer.MissingHashError):
        load_file(tmp_path / "m.safetensors", verify=True)


def test_shared_tensors_are_stored_once_and_shared_again(tmp_path):
    shared = samples.tensor((1000, 10), torch.float32, 1)
    state = {"b": shared, "a": shared, "c": torch.ones(2)}
    for name in FORMATS:
        save_file(state, tmp_path / name)
        assert (tmp_path / name).stat().st_size < 2 * shared.nbytes
        found = load_file(tmp_path / name)
        assert_same(found, state)
        assert found["a"] is found["b"]
        with pytest.raises(tensorizer.UnsupportedContentError, match="b"):
            save_file(state, tmp_path / "error", ties="error", format="safetensors")
        save_file(state, tmp_path / name, ties="twice")
        assert_same(load_file(tmp_path / name), state)
    assert not (tmp_path / "error").exists()


def test_views_and_strided_tensors_are_stored_as_they_look(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    state = {"row": base[1], "column": base[:, 2], "t": base.t(), "lone": torch.arange(10.0)[3:5]}
    for name in FORMATS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save_file(state, tmp_path / name)
        (warning,) = caught
        for part in ("'row'", "'column'", "'t'"):
            assert part in str(warning.message)
        assert "'lone'" not in str(warning.message)
        assert_same(load_file(tmp_path / name), state)


def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path):
    cases = [
        [torch.ones(1)],
        {"a": 3},
        {1: torch.ones(1)},
        {"a": torch.ones(2).to_sparse()},
        {"a": torch.ones(1, device="meta")},
        {"__metadata__": torch.ones(1)},
        {"a": torch.ones(1, dtype=torch.complex128)},
    ]
    for tensors in cases:
        with pytest.raises(ValueError):
            save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="key"):
        save_file({"a": torch.ones(1)}, tmp_path / "m.safetensors", metadata={"key": 3})
    assert list(tmp_path.iterdir()) == []


def test_safe_open_reads_what_is_asked_for(tmp_path):
    big = samples.tensor((1000, 1024), torch.float32, 1)
    state = {"b": big, "a": torch.arange(6).reshape(2, 3)}
    for name in FORMATS:
        save_file(state, tmp_path / name, {"k": "v"})
        with safe_open(tmp_path / name, framework="pt", device="cpu") as file:
            assert file.keys() == ["a", "b"]
            assert set(file.offset_keys()) == {"a", "b"}
            assert file.metadata() == {"k": "v"}
            assert bits(file.get_tensor("b")).equal(bits(big))
            part = file.get_slice("b")
            assert (part.get_shape(), part.get_dtype()) == ([1000, 1024], "F32")
            assert part.is_floating_point()
            for index in (slice(3, 7), 5, -1, (slice(0, 9, 2), slice(1, 3)), (2, 4), ..., [7, 3], None, slice(5, 2)):
                assert bits(part[index]).equal(bits(big[index])), index
            with pytest.raises(KeyError):
                file.get_slice("missing")
            with pytest.raises(IndexError):
                part[1000]
            with pytest.raises(ValueError, match="step"):
                part[::-1]


def test_a_slice_reads_only_its_rows(tmp_path):
    save_file({"b": torch.ones(1000, 1024)}, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors") as file:
        before = file._file.total_bytes_read
        file.get_slice("b")[10:20]
        assert file._file.total_bytes_read - before == 10 * 4096


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def test_models_with_ties_come_back_on_meta_and_in_place(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    for name in FORMATS:
        save_model(model, tmp_path / name)
        real = Tied()
        parameters = dict(real.named_parameters())
        report = load_model(real, tmp_path / name)
        assert report.ok
        missing, unexpected = report
        assert (missing, unexpected) == ([], [])
        assert dict(real.named_parameters()) == parameters
        with torch.device("meta"):
            empty = Tied()
        load_model(empty, tmp_path / name)
        for loaded in (real, empty):
            assert loaded.head.weight is loaded.embed.weight
            assert_same(loaded.state_dict(), model.state_dict())
    other = Tied()
    assert theirs.load_model(other, tmp_path / "m.safetensors") == (set(), [])
    assert other.embed.weight.equal(model.embed.weight)


def test_what_does_not_fit_is_told_before_anything_changes(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    for name in FORMATS:
        save_file({"0.weight": torch.ones(5, 4), "extra": torch.ones(1), "0.bias": torch.ones(3)}, tmp_path / name)
        before = {n: t.clone() for n, t in model.state_dict().items()}
        with pytest.raises(tensorizer.LoadError) as caught:
            load_model(model, tmp_path / name)
        with pytest.raises(RuntimeError) as torchs:
            model.load_state_dict(load_file(tmp_path / name))
        text = str(caught.value)
        for line in str(torchs.value).splitlines()[1:]:
            assert line.strip() in text, line
        assert caught.value.report.missing == ("1.weight", "1.bias")
        assert_same(model.state_dict() if not torchs else {**model.state_dict(), "0.bias": before["0.bias"]}, before)
        model.load_state_dict(before)
        with pytest.raises(tensorizer.LoadError):
            load_model(model, tmp_path / name, strict=False)
        report = load_model(model, tmp_path / name, strict=False, ignore_mismatched_sizes=True)
        assert [row.name for row in report.mismatched] == ["0.weight"]
        assert report.unexpected == ("extra",)
        assert model[0].bias.equal(torch.ones(3))
        model.load_state_dict(before)


class Counting(io.BytesIO):
    """A file that knows how much was read of it."""

    nbytes = 0

    def readinto(self, buffer):
        count = super().readinto(buffer)
        self.nbytes += count
        return count


def test_no_payload_is_read_for_what_does_not_fit(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(512, 512, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    good = {"a.weight": torch.ones(512, 512), "b.weight": torch.ones(2, 2)}
    wrong = (
        {"a.weight": good["a.weight"]},
        {**good, "c": torch.ones(1)},
        {**good, "b.weight": torch.ones(3, 3)},
        {**good, "b.weight": torch.ones(2, 2, dtype=torch.int64)},
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for state in wrong:
        for format in ("tensors", "safetensors"):
            file = Counting(save(state, format=format))
            with pytest.raises(tensorizer.LoadError):
                load_model(model, file)
            assert file.nbytes < 512 * 512 * 4
            assert_same(model.state_dict(), before)


def test_tied_names_with_different_contents_are_conflicting(tmp_path):
    model = Tied()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    state["head.weight"] += 1
    for name in FORMATS:
        save_file(state, tmp_path / name)
        before = model.embed.weight.clone()
        with pytest.raises(tensorizer.LoadError, match=r"(embed|head)\.weight"):
            load_model(model, tmp_path / name)
        assert model.embed.weight.equal(before)
        report = load_model(model, tmp_path / name, strict=False)
        assert report.conflicting
        model.embed.weight.data.copy_(before)


def test_assign_replaces_and_false_copies(tmp_path):
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).half()
    save_model(source, tmp_path / "m.safetensors")
    weight = target.weight
    load_model(target, tmp_path / "m.safetensors")
    assert target.weight is weight
    assert target.weight.dtype == torch.float16
    load_model(target, tmp_path / "m.safetensors", assign=True)
    assert target.weight is not weight
    assert target.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="assign"):
        load_model(target, tmp_path / "m.safetensors", assign="never")


def test_load_model_of_the_package_tells_models_from_paths(tmp_path):
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save_model(source, tmp_path / "m.safetensors")
    assert tensorizer.load_model(target, tmp_path / "m.safetensors").ok
    assert target.weight.equal(source.weight)


def test_modules_with_hooks_of_their_own_get_a_state_dict(tmp_path):
    class Renames(torch.nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *args):
            if prefix + "old" in state_dict:
                state_dict[prefix + "weight"] = state_dict.pop(prefix + "old")
            super()._load_from_state_dict(state_dict, prefix, *args)

    model = torch.nn.Sequential(Renames(2, 2))
    save_file({"0.old": torch.full((2, 2), 3.0), "0.bias": torch.zeros(2)}, tmp_path / "m.safetensors")
    assert load_model(model, tmp_path / "m.safetensors").ok
    assert model[0].weight.equal(torch.full((2, 2), 3.0))


def test_a_script_beside_the_modules_of_the_package_gets_the_real_torch(tmp_path):
    """``tensorizer/torch.py`` must not stand in for torch, wherever a script is run from."""
    folder = str(tensorizer.__path__[0])
    program = "import tensorizer.torch, torch; print(torch.nn.__name__, tensorizer.torch.load_file.__module__)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert result.stdout.split() == ["torch.nn", "tensorizer.torch"], result.stderr
    assert folder


def test_bytes_are_loaded_from_memory():
    assert_same(load(save({"a": torch.arange(3)})), {"a": torch.arange(3)})
    assert_same(load(io.BytesIO(save({"a": torch.arange(3)}, format="tensors")).getvalue()), {"a": torch.arange(3)})


@pytest.mark.filterwarnings("ignore:tensors that share parts of their memory")
def test_views_that_conjugate_or_negate_are_no_ties_of_their_base(tmp_path):
    base = torch.randn(3, dtype=torch.complex64)
    tensors = {"a": base, "b": base.conj(), "c": base.imag, "d": base.conj().imag}
    for name in ("v.safetensors", "v.tensors"):
        tensorizer.torch.save_file(tensors, tmp_path / name)
        loaded = tensorizer.torch.load_file(tmp_path / name)
        assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items()), name


def test_an_empty_state_dict_leaves_a_tensors_file_as_it_was(tmp_path):
    target = tmp_path / "t.tensors"
    tensorizer.torch.save_file({"good": torch.ones(3)}, target)
    with pytest.raises(UnsupportedContentError, match="at least one tensor"):
        tensorizer.torch.save_file({}, target)
    assert list(tensorizer.torch.load_file(target)) == ["good"]


def test_ties_of_a_file_are_stored_twice_when_asked_for_or_needed(tmp_path):
    tensor = torch.randn(5)
    tensorizer.torch.save_file({"l.a": tensor, "l.b": tensor, "model.head": tensor}, tmp_path / "once.tensors")
    tensorizer.convert(tmp_path / "once.tensors", tmp_path / "twice.tensors", ties="twice")
    tensorizer.convert(tmp_path / "once.tensors", tmp_path / "other.safetensors")
    for name in ("twice.tensors", "other.safetensors"):
        loaded = tensorizer.torch.load_file(tmp_path / name)
        assert sorted(loaded) == ["l.a", "l.b", "model.head"]
        assert all(torch.equal(found, tensor) for found in loaded.values()), name
