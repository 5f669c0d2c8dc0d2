"""Extra state of modules, and what write calls leave out: named, or stored so that no earlier reader is disturbed."""

from __future__ import annotations

import base64
import io
import json
import tracemalloc
import warnings

import pytest
import samples
import torch
from test_load_into_module import module_bytes, open_bytes
from torch import nn

from tensorizer import DecryptionParams, EncryptionParams, FormatError, LoadError, TensorDeserializer, TensorSerializer
from tensorizer._format import extra_state
from tensorizer.torch import save_file

pytestmark = pytest.mark.usefixtures("eager_and_lazy")


class Keeper(nn.Module):
    """A linear layer with extra state."""

    def __init__(self, state=None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state) -> None:
        self.state = state


STATES = {
    "a tensor": samples.tensor((3, 2)),
    "a scalar": torch.tensor(7),
    "bfloat16": samples.tensor((5,), torch.bfloat16),
    "float8": samples.tensor((5,), torch.float8_e4m3fn),
    "empty": torch.empty((0, 3)),
    "not contiguous": samples.tensor((4, 6)).t(),
    "nested": {"amax": samples.tensor((4,)), "deep": {"scale": samples.tensor(()), "none": {}}},
    "no tensors": {},
}


def with_state(state, **options) -> bytes:
    return module_bytes(nn.ModuleList([Keeper(), Keeper(state)]), include_extra_state=True, **options)


@pytest.mark.parametrize("name", STATES)
def test_extra_state_that_is_tensors_comes_back(name):
    target = nn.ModuleList([Keeper("before"), Keeper("before")])
    with open_bytes(with_state(STATES[name])) as deserializer:
        count = deserializer.load_into_module(target)
    assert count == 4
    assert target[0].state == "before"
    samples.assert_same(target[1].state, STATES[name])
    assert deserializer.report.missing == ("0._extra_state",)


@pytest.mark.parametrize("format", ["tensors", "safetensors"])
def test_extra_state_among_the_tensors_of_a_state_dict_comes_back(format, tmp_path):
    source = nn.ModuleList([Keeper(torch.ones(2)), Keeper(torch.zeros(3))])
    save_file(source.state_dict(), tmp_path / "m", format=format)
    with TensorDeserializer(tmp_path / "m", device="cpu") as deserializer:
        target = nn.ModuleList([Keeper(), Keeper(torch.ones(3)), nn.BatchNorm1d(1, affine=False)])
        count = deserializer.load_into_module(target)
    missing = tuple(f"2.{name}" for name in target[2].state_dict())
    assert (count, deserializer.report.missing, deserializer.report.unexpected) == (4, missing, ())
    for keeper, original in zip(target, source):
        samples.assert_same(keeper.state, original.state)
        assert type(keeper.state) is torch.Tensor
        samples.assert_same(keeper.linear.weight, original.linear.weight)


def test_loads_of_one_file_share_no_extra_state():
    one, two = Keeper(), Keeper()
    data = module_bytes(Keeper(torch.ones(2)), include_extra_state=True)
    with open_bytes(data, lazy_load=True) as deserializer:
        deserializer.load_into_module(one)
        deserializer.load_into_module(two)
    one.state.add_(1)
    assert two.state.tolist() == [1, 1]


def test_extra_state_of_an_encrypted_file_is_encrypted_and_comes_back():
    secret = torch.frombuffer(bytearray(b"a secret of the module" * 3), dtype=torch.uint8)
    model = Keeper({"key": secret})
    stream = samples.KeptBytesIO()
    samples.write_module(stream, model, options={"encryption": EncryptionParams(b"k" * 32)}, include_extra_state=True)
    assert base64.b64encode(b"a secret of the module")[:20] not in stream.getvalue()
    target = Keeper()
    with open_bytes(stream.getvalue(), encryption=DecryptionParams.from_key(b"k" * 32)) as deserializer:
        deserializer.load_into_module(target)
    samples.assert_same(target.state, model.state)


@pytest.mark.parametrize("state", [b"bytes", 3, [torch.ones(1)], {"a": {"b": "text"}}, {1: torch.ones(1)}], ids=repr)
def test_extra_state_of_another_kind_is_refused_by_name_before_anything_is_touched(state, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with TensorSerializer(path) as serializer:
        with pytest.raises(TypeError, match=r"1\._extra_state"):
            serializer.write_module(nn.ModuleList([Keeper(), Keeper(state)]), include_extra_state=True)
        assert path.read_bytes() == b"old"
        serializer.write_module(Keeper(torch.ones(1)), include_extra_state=True)
    with TensorDeserializer(path, device="cpu") as deserializer:
        assert deserializer.load_into_module(Keeper(), strict=True) == 2


def test_several_calls_keep_the_extra_state_of_each_and_one_that_fails_leaves_none_behind(tmp_path):
    def named(name, value):
        module = nn.Module()
        module.add_module(name, Keeper(torch.full((2,), value)))
        return module

    path = tmp_path / "f"
    with TensorSerializer(path) as serializer:
        serializer.write_module(named("one", 1.0), include_extra_state=True)
        serializer.write_module(named("two", 2.0), include_extra_state=True)
        with pytest.raises(ValueError, match="linear"):
            serializer.write_module(named("one", 3.0), include_extra_state=True)
        serializer.write_tensor(0, "more", 2, torch.ones(1))
    target = nn.Module()
    target.one, target.two = Keeper(), Keeper()
    with TensorDeserializer(path, device="cpu", filter_func=lambda name: name != "more") as deserializer:
        assert deserializer.load_into_module(target, strict=True) == 4
    assert (target.one.state.tolist(), target.two.state.tolist()) == ([1, 1], [2, 2])


def test_strict_loads_want_extra_state_where_the_module_takes_it_and_nowhere_else():
    data = with_state(torch.ones(1))
    with open_bytes(data) as deserializer, pytest.raises(LoadError) as caught:
        deserializer.load_into_module(nn.ModuleList([Keeper(), Keeper()]), strict=True)
    assert 'Missing key(s) in state_dict: "0._extra_state"' in str(caught.value)
    plain = nn.ModuleList([Keeper(), nn.Module()])
    plain[1].linear = nn.Linear(3, 3)
    with open_bytes(data) as deserializer:
        deserializer.load_into_module(plain)
        assert deserializer.report.unexpected == ("1._extra_state",)


def test_a_filter_leaves_extra_state_out():
    target = Keeper("before")
    with open_bytes(module_bytes(Keeper(torch.ones(1)), include_extra_state=True)) as deserializer:
        deserializer.load_into_module(target, lambda name: "linear" in name, strict=True)
        assert deserializer.report.missing == ()
    assert target.state == "before"


def test_damaged_text_is_a_format_error():
    good = json.loads(extra_state.to_text(extra_state.pack({"a": torch.ones(2)})))
    bad = [[], {"a": 1}, {"a": {}}, {"a": {"t": ["<f4", [3], good["a"]["t"][2]]}}, {"a": {"t": ["x", [2], "AAAA"]}}]
    bad += [{"a": {"t": ["<f4", [-2], "AAAA"]}}, {"a": {"t": ["<f4", [2], "?"]}}, {"a": {"d": [1]}}]
    for damaged in [*map(json.dumps, bad), "{", '{"a":{"t":["<f4",[1e400],""]}}', '{"a":' + '{"d":{"a":' * 5000]:
        with pytest.raises(FormatError):
            extra_state.unpack(damaged)


def test_damaged_extra_state_costs_no_more_than_its_text_and_the_error_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "m.tensors"
    data = base64.b64encode(bytes(8)).decode()
    shapes = [
        ["x", 10**9],
        [10**4000] * 2000,
        [1] * 256 + [2],
        [0, 2**63],
        [0, 2**62, 2**62],
        [-1, -2],
        [True, 2],
        [2.0],
    ]
    bad = [["<f4", shape, data] for shape in [*shapes, "ab", {"2": 1}, None, 2]]
    bad += [[dtype, [2], data] for dtype in ("i4,(", "Vxx,(\0torch.float32", "VV\0torch.float32")]
    for tensor in bad:
        text = json.dumps({"0": {"t": tensor}})
        monkeypatch.setattr(extra_state, "to_text", lambda nodes, text=text: text)
        path.write_bytes(with_state(None))
        tracemalloc.start()
        with (
            TensorDeserializer(path, device="cpu") as deserializer,
            pytest.raises(
                FormatError, match=r"m\.tensors: (the extra state in the file is damaged|stored dtype)"
            ) as bad,
        ):
            deserializer.load_into_module(nn.ModuleList([Keeper(), Keeper()]))
        assert bad.value.source == str(path)
        assert tracemalloc.get_traced_memory()[1] < (16 << 20) + 4 * len(text)
        tracemalloc.stop()


# --- what is left out -----------------------------------------------------------------------------------------------


def test_extra_state_that_is_left_out_is_named_in_one_warning():
    model = nn.ModuleList([Keeper(b"x"), Keeper(b"y"), nn.Linear(1, 1)])
    with (
        TensorSerializer(io.BytesIO()) as serializer,
        pytest.warns(UserWarning, match="include_extra_state=True") as caught,
    ):
        serializer.write_module(model)
    (warning,) = caught
    assert "0._extra_state, 1._extra_state" in str(warning.message)
    assert warning.filename == __file__


class Packed(nn.Linear):
    """Saves more than its tensors, as quantized layers do."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.ones(1)
        destination[f"{prefix}kind"] = torch.int8


def test_what_classes_save_beside_their_tensors_is_named_when_it_is_left_out_and_missing_in_strict_loads(tmp_path):
    model, path = nn.Sequential(nn.Linear(1, 1), Packed(1, 1)), tmp_path / "m.tensors"
    with TensorSerializer(path) as serializer, pytest.warns(UserWarning, match=r"not stored: .*1\.scale, 1\.kind"):
        serializer.write_module(model)
    with TensorDeserializer(path, device="cpu") as deserializer:
        deserializer.load_into_module(model)
        assert deserializer.report.missing == ("1.scale", "1.kind")
    with (
        TensorDeserializer(path, device="cpu") as deserializer,
        pytest.raises(LoadError, match=r'Missing key.*"1\.scale", "1\.kind"'),
    ):
        deserializer.load_into_module(model, strict=True)


def test_nothing_is_said_where_nothing_is_left_out():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module_bytes(samples.net())
        with_state(torch.ones(1))
        samples.state_dict_bytes({"a": {"b": [torch.ones(1)]}})
