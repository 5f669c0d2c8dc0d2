"""What other public code relies on: calls as they stand there, on models of our own."""

from __future__ import annotations

import functools
import io
import zipfile
from pathlib import Path

import pytest
import torch

from tensorizer import TensorDeserializer, TensorSerializer, stream_io, utils


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 2)
        self.register_buffer("cache", torch.randn(3), persistent=False)
        self.register_buffer("mean", torch.randn(3))


def assert_same(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


# --- Xinference ----------------------------------------------------------------------------------------------------


def test_xinference_writes_and_reads_with_partial_streams(tmp_path):
    read_stream = functools.partial(stream_io.open_stream, mode="rb")
    write_stream = functools.partial(stream_io.open_stream, mode="wb+")
    net, folder = Net(), f"{tmp_path}/new/folders"

    with write_stream(f"{folder}/model-config.json") as stream:
        stream.write(b'{"a": 1}')
    with write_stream(f"{folder}/tokenizer.zip") as stream, zipfile.ZipFile(stream, mode="w") as archive:
        archive.writestr("vocab.txt", "a b c")
    with write_stream(f"{folder}/model.tensors") as stream:
        serializer = TensorSerializer(stream)
        serializer.write_module(net, include_non_persistent_buffers=False)
        serializer.close()

    with read_stream(f"{folder}/model-config.json") as stream:
        assert stream.read() == b'{"a": 1}'
    with read_stream(f"{folder}/tokenizer.zip") as stream:
        assert zipfile.ZipFile(io.BytesIO(stream.read())).read("vocab.txt") == b"a b c"
    model = utils.no_init_or_tensor(Net)
    before = utils.get_mem_usage()
    with read_stream(f"{folder}/model.tensors") as stream:
        deserializer = TensorDeserializer(stream, device=torch.device("cpu"), dtype=None, plaid_mode=False)
        deserializer.load_into_module(model)
        rate = utils.convert_bytes(deserializer.total_bytes_read / 0.5)
    assert rate != utils.convert_bytes(0)
    assert before.startswith("CPU")
    assert_same(model, net)


# --- Replicate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plaid_mode", [True, False])
def test_replicate_templates(tmp_path, plaid_mode, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the device is implicit there
    net, path = Net(), str(tmp_path / "tensorized")
    serializer = TensorSerializer(path)
    serializer.write_module(net)
    serializer.close()
    model = utils.no_init_or_tensor(lambda: Net())
    deserializer = TensorDeserializer(path, plaid_mode=plaid_mode)
    deserializer.load_into_module(model)
    assert_same(model, net)
    assert torch.equal(model.cache, net.cache)


# --- research code -------------------------------------------------------------------------------------------------


def test_lazy_load_from_a_path_object_into_a_meta_model(tmp_path):
    net, path = Net(), Path(tmp_path) / "model.tensors"
    serializer = TensorSerializer(path)
    serializer.write_module(net)
    serializer.close()
    with torch.device("meta"):
        model = Net()
    deserializer = TensorDeserializer(path, device="cpu", dtype=torch.float16, lazy_load=True)
    deserializer.load_into_module(model)
    deserializer.close()
    assert all(tensor.dtype == torch.float16 and not tensor.is_meta for tensor in model.state_dict().values())
    assert torch.equal(model.first.weight, net.first.weight.half())


# --- the ExLlamaV2 fork --------------------------------------------------------------------------------------------


def test_a_state_dict_through_a_partial_stream(tmp_path):
    write_stream = functools.partial(stream_io.open_stream, mode="wb+")
    state = {"model.layers.0.q_weight": torch.randint(0, 9, (3, 3), dtype=torch.int32), "scale": torch.ones(2).half()}
    with write_stream(str(tmp_path / "model.tensors")) as stream:
        TensorSerializer(stream).write_state_dict(state)
    loaded = TensorDeserializer(str(tmp_path / "model.tensors"), device="cpu", dtype=torch.float16)
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {
        "model.layers.0.q_weight": torch.int32,
        "scale": torch.float16,
    }


# --- benchmark scripts ---------------------------------------------------------------------------------------------


def test_benchmark_scripts(tmp_path):
    path = str(tmp_path / "model.tensors")
    TensorSerializer(path).write_module(Net())
    size = Path(path).stat().st_size
    buffer, total = bytearray(1000), 0
    stream = stream_io.open_stream(path)
    try:
        while True:
            count = stream.readinto(buffer)
            if count == 0:
                break
            total += count
    except OSError:
        pass
    assert total == size
    assert getattr(stream, "response_headers", {}) == {}
    stream.close()
    tensors = dict(TensorDeserializer(stream_io.open_stream(path), device="cpu"))
    assert set(tensors) == {".cache", ".mean", "first.weight", "first.bias", "second.weight", "second.bias"}


# --- plain training loops ------------------------------------------------------------------------------------------


def test_optimizer_states_as_nested_state_dicts(tmp_path):
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    tensors = {
        str(index): {name: torch.as_tensor(value) for name, value in slots.items()} for index, slots in state.items()
    }
    with TensorSerializer(tmp_path / "checkpoint.tensors") as serializer:
        serializer.write_state_dict({"model": net.state_dict(), "optimizer": tensors})
    tree = TensorDeserializer(tmp_path / "checkpoint.tensors", device="cpu").tree()
    restored = torch.nn.Linear(3, 3)
    restored.load_state_dict(tree["model"])
    assert_same(restored, net)
    loaded = {int(index): slots for index, slots in tree["optimizer"].items()}
    assert all(torch.equal(loaded[i][name], torch.as_tensor(value)) for i in state for name, value in state[i].items())
