"""Tensors that are made of others, as those of quantizing libraries, in distributed checkpoints."""

from __future__ import annotations

import dataclasses
import enum
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_tools import MARKS, cause_of, load, marker_in, save, write_marker
from samples import Scaled, Wrapper
from torch.distributed.checkpoint.api import CheckpointException

import tensorizer.distributed as td
from tensorizer import (
    DecryptionParams,
    EncryptionParams,
    FormatError,
    TensorDeserializer,
    UnsupportedContentError,
    diff,
    inspect,
)
from tensorizer.distributed._checkpoint.recrypt import recrypt

pytestmark = MARKS


class Mode(enum.Enum):
    FAST = 1
    SMALL = 2


@dataclasses.dataclass
class Settings:
    mode: Mode
    group: int
    kind: type = Scaled


CONTEXTS = {
    "none": None,
    "simple": [True, "rows", 2.5, (1, None), {"bits": 8}],
    "of torch": {"size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu")},
    "of objects": {"settings": Settings(Mode.SMALL, 32), "mode": Mode.FAST},
}


def scaled(rows: int, context=None, fill=None) -> Scaled:
    codes = torch.arange(rows * 3, dtype=torch.int8).view(rows, 3)
    scale = torch.arange(1.0, rows + 1)
    if fill is not None:
        codes, scale = torch.full_like(codes, fill), torch.full_like(scale, fill)
    return Scaled(codes, scale, context)


def state_of(context, fill=None):
    """A tensor, a parameter, one whose part is made of others too, and one whose memory is not contiguous."""
    wide = scaled(4, context, fill)
    wide.codes = wide.codes.t().contiguous().t()
    return {
        "w": scaled(4, context, fill),
        "parameter": torch.nn.Parameter(scaled(5, context, fill)),
        "nested": Scaled(scaled(2, "inner", fill), torch.full((2,), 5.0 if fill is None else float(fill)), context),
        "wide": wide,
        "layers": [scaled(1, context, fill), {"dense": torch.arange(3.0) if fill is None else torch.zeros(3)}],
        "w.codes": torch.arange(3) if fill is None else torch.zeros(3, dtype=torch.int64),
    }


def parts_of(state):
    """The plain tensors, in order."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list):
        return [part for value in state for part in parts_of(value)]
    return parts_of([state.codes, state.scale]) if isinstance(state, Scaled) else [state]


def assert_same(found, wanted):
    for one, other in zip(parts_of(found), parts_of(wanted)):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=list(CONTEXTS))
def test_tensors_that_are_made_of_others_are_stored_by_their_parts_and_filled_where_they_are(
    tmp_path, context, encrypted
):
    key = EncryptionParams.random() if encrypted else None
    decryption = key and DecryptionParams.from_key(key.key)
    state = state_of(context)
    save(state, tmp_path, encryption=key)
    (path,) = tmp_path.glob("*.tensors")
    with TensorDeserializer(path, device="cpu", encryption=decryption) as file:
        assert torch.equal(file["parameter.codes"], state["parameter"].codes)
        assert torch.equal(file["nested.codes.scale"], state["nested"].codes.scale)
        assert torch.equal(file["w.scale"], state["w"].scale)
    assert not encrypted or b"__torch" not in (tmp_path / ".metadata").read_bytes()
    assert not encrypted or b"SMALL" not in (tmp_path / ".metadata").read_bytes()

    target = state_of(context, fill=9)
    before = [part.data_ptr() for part in parts_of(target)]
    load(target, tmp_path, verify_hash=True, encryption=decryption)
    assert_same(target, state)
    assert [part.data_ptr() for part in parts_of(target)] == before

    report = td.verify(tmp_path, encryption=decryption)
    assert report.ok
    assert len(report.verified) >= len(parts_of(state))
    with pytest.warns(UserWarning, match="'w', 'parameter', 'nested', 'wide', 'layers.0'"):
        td.dcp_to_files(tmp_path, tmp_path / "one.tensors", decryption=decryption)
    with TensorDeserializer(tmp_path / "one.tensors", device="cpu") as file:
        assert len(file) == 2


class Undetachable(Scaled):
    """Of a class that knows no operation but its own."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(str(func))


def test_a_class_without_operations_is_stored_and_filled_too(tmp_path):
    state = {"w": Undetachable(torch.arange(6).view(2, 3), torch.ones(2))}
    save(state, tmp_path)
    target = {"w": Undetachable(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2))}
    load(target, tmp_path)
    assert_same(target, state)


def test_parts_are_inspected_compared_and_encrypted(tmp_path):
    save(state_of("c"), tmp_path / "in")
    key = EncryptionParams.random()
    unlock = DecryptionParams.from_key(key.key)
    recrypt(tmp_path / "in", tmp_path / "locked", encryption=key)
    target = state_of("c", 0)
    load(target, tmp_path / "locked", encryption=unlock, verify_hash=True)
    assert_same(target, state_of("c"))
    assert {"w.codes", "w.codes'", "w.scale", "nested.codes.scale"} <= {
        t.name for t in inspect(tmp_path / "locked").tensors
    }
    assert diff(tmp_path / "in", tmp_path / "locked", encryption_b=unlock)


def test_damaged_parts_are_named_by_a_verification(tmp_path):
    save(state_of(None), tmp_path)
    (path,) = tmp_path.glob("*.tensors")
    content = bytearray(path.read_bytes())
    content[content.index(bytes(range(15)))] ^= 1
    path.write_bytes(content)
    (error,) = [wrong.reason for wrong in td.verify(tmp_path).mismatched]
    assert "'parameter.codes'" in error


def test_a_tensor_of_another_class_or_another_context_is_refused_or_filled_by_its_class(tmp_path):
    save({"w": scaled(4, {"mode": Mode.FAST}), "simple": scaled(4, [1])}, tmp_path)
    for wrong in (torch.zeros(4, 3), Wrapper(torch.zeros(4, 3)), scaled(4, {"mode": Mode.SMALL}), scaled(4)):
        with pytest.raises(CheckpointException) as caught:
            load({"w": wrong}, tmp_path)
        assert isinstance(cause_of(caught.value), UnsupportedContentError)
        assert "tensor 'w': was saved" in str(cause_of(caught.value))
        assert "samples.Scaled" in str(cause_of(caught.value))
    target = {"simple": scaled(4, [2], fill=9)}
    load(target, tmp_path)
    assert_same(target, {"simple": scaled(4)})
    assert target["simple"].context == [2]


def test_a_context_that_cannot_be_expressed_is_refused_before_a_file_appears(tmp_path):
    for context in (object(), {"f": len}, [torch.ones(2)]):
        with pytest.raises(CheckpointException) as caught:
            save({"w": scaled(2, context)}, tmp_path)
        assert isinstance(cause_of(caught.value), UnsupportedContentError)
        assert "tensor 'w': what samples.Scaled says of itself" in str(cause_of(caught.value))
    assert not list(tmp_path.iterdir())


def test_a_tensor_without_memory_whose_class_does_not_say_how_is_refused_as_before(tmp_path, monkeypatch):
    monkeypatch.delattr(Scaled, "__tensor_flatten__")
    with pytest.raises(CheckpointException) as caught:
        save({"w": scaled(2)}, tmp_path)
    assert isinstance(cause_of(caught.value), NotImplementedError)
    assert "this Scaled has no memory" in str(cause_of(caught.value))


def test_markers_without_such_tensors_stay_of_the_version_that_earlier_releases_read(tmp_path):
    save({"w": torch.ones(2)}, tmp_path / "plain")
    save({"w": scaled(2)}, tmp_path / "parts")
    assert marker_in(tmp_path / "plain")[0]["version"] == 1
    assert "parts" not in marker_in(tmp_path / "plain")[1]
    assert marker_in(tmp_path / "parts")[0]["version"] == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.__setitem__(0, "other"),
        lambda row: row.__setitem__(1, [1, 0]),
        lambda row: row.__setitem__(1, "x"),
        lambda row: row.__setitem__(2, [5]),
        lambda row: row.__setitem__(2, ["{"]),
        lambda row: row.__setitem__(2, [json.dumps({"class": "samples.Scaled", "context": None, "tensors": 5})]),
        lambda row: row.__setitem__(2, [row[2][0].replace("[2,3]", "[2,-3]")]),
        lambda row: row.__setitem__(2, [None, 0, 99, 0, 8, None, None]),
        lambda row: row.__setitem__(3, []),
        lambda row: row[3][0].__setitem__(0, 5),
        lambda row: row[3][0].__setitem__(1, "object"),
        lambda row: row[3][0].__setitem__(1, "uint8"),
        lambda row: row[3][0].__setitem__(2, [-1]),
        lambda row: row[3][0].__setitem__(2, [99]),
        lambda row: row[3][0].__setitem__(3, -1),
        lambda row: row[3][0].__setitem__(4, 99),
        lambda row: row[3].reverse(),
    ],
)
def test_markers_with_parts_that_cannot_be_are_refused(tmp_path, change):
    save({"w": scaled(2)}, tmp_path)
    head, body = marker_in(tmp_path)
    change(body["parts"][0])
    write_marker(tmp_path, head, body)
    try:
        td.TensorizerReader(tmp_path).read_metadata()
    except FormatError:  # which torch makes others of
        return
    with pytest.raises(CheckpointException) as caught:
        load({"w": scaled(2, fill=9)}, tmp_path)
    assert isinstance(cause_of(caught.value), FormatError)


RESHARDED = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pathlib import Path
from rank_processes import run_ranks
from samples import Scaled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
import tensorizer.distributed as td

folder = Path(sys.argv[1])

def whole():
    return Scaled(torch.arange(12, dtype=torch.int8).view(4, 3), torch.arange(4.0), [1])

def part(rank, fill=None):
    codes, scale = whole().codes[2 * rank : 2 * rank + 2].clone(), whole().scale[2 * rank : 2 * rank + 2].clone()
    local = Scaled(codes if fill is None else codes.fill_(fill), scale if fill is None else scale.fill_(fill), [1])
    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(4, 3), stride=(3, 1))

def same(found, wanted):
    assert torch.equal(found.codes, wanted.codes), (found.codes, wanted.codes)
    assert torch.equal(found.scale, wanted.scale)

def of_two(rank):
    dcp.save({"w": part(rank)}, storage_writer=td.TensorizerWriter(folder / "two"))
    for name in ("two", "one"):
        state = {"w": part(rank, 9)}
        dcp.load(state, storage_reader=td.TensorizerReader(folder / name, verify_hash=True))
        same(state["w"]._local_tensor, part(rank)._local_tensor)

dcp.save({"w": whole()}, storage_writer=td.TensorizerWriter(folder / "one"), no_dist=True)
run_ranks(2, of_two)
state = {"w": Scaled(torch.zeros(4, 3, dtype=torch.int8), torch.zeros(4), [1])}
dcp.load(state, storage_reader=td.TensorizerReader(folder / "two"), no_dist=True)
same(state["w"], whole())
"""


def test_shards_that_are_made_of_others_load_on_another_number_of_ranks(fresh_process, tmp_path):
    result = fresh_process(RESHARDED, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


OPTIMIZERS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_low_bit_optimizer_of_torchao_goes_on_as_if_it_had_not_stopped(tmp_path, name):
    optimizers = pytest.importorskip("torchao.optim", reason="torchao is not installed")

    def made():
        torch.manual_seed(0)
        model = torch.nn.Linear(128, 64)
        return model, getattr(optimizers, name)(model.parameters(), lr=1e-2)

    def train(model, optimizer, seed):
        torch.manual_seed(seed)
        for _ in range(2):
            model(torch.randn(8, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = made()
    train(model, optimizer, 1)
    assert any(hasattr(v, "__tensor_flatten__") for s in optimizer.state.values() for v in s.values())
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    other, its = made()
    train(other, its, 2)
    state = {"model": other.state_dict(), "optimizer": its.state_dict()}
    load(state, tmp_path, verify_hash=True)
    other.load_state_dict(state["model"])
    its.load_state_dict(state["optimizer"])
    for one in ((model, optimizer), (other, its)):
        train(*one, 3)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_quantized_weights_of_torchao_come_back(tmp_path, name):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(128, 64)).to(torch.bfloat16).requires_grad_(False)
        quantization.quantize_(model, getattr(quantization, name)())
        return model

    model, other = made(1), made(2)
    save(model.state_dict(), tmp_path)
    state = other.state_dict()
    load(state, tmp_path, verify_hash=True)
    assert torch.equal(other[0].weight.dequantize(), model[0].weight.dequantize())
    dcp.load(state, checkpoint_id=tmp_path, storage_reader=td.TensorizerReader())
