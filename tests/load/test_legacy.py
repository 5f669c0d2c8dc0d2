"""The names of releases before 1.0: they work, and say what to use instead."""

from __future__ import annotations

import inspect
import json

import pytest
import torch

import tensorizer
from tensorizer import legacy

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Net(torch.nn.Module):
    def __init__(self, config=None):
        super().__init__()
        width = 3 if config is None else config["width"]
        self.linear = torch.nn.Linear(width, width)
        self.register_buffer("table", torch.arange(width), persistent=False)


class Config(dict):
    @classmethod
    def from_dict(cls, values):
        return cls(values)

    def to_dict(self):
        return dict(self)


def assert_same(model, net):
    assert torch.equal(model.linear.weight, net.linear.weight)
    assert torch.equal(model.linear.bias, net.linear.bias)
    assert model.table.tolist() == net.table.tolist()
    assert not model.training


def test_the_signatures_are_the_published_ones():
    assert list(inspect.signature(legacy.serialize_model).parameters) == [
        "model",
        "config",
        "model_directory",
        "model_prefix",
    ]
    assert list(inspect.signature(legacy.load_model).parameters) == [
        "path_uri",
        "modelclass",
        "configclass",
        "model_prefix",
        "device",
        "dtype",
    ]


def test_both_are_found_on_the_package_and_warn_at_the_caller(tmp_path):
    net = Net()
    with pytest.warns(DeprecationWarning, match="huggingface.save_pretrained") as caught:
        tensorizer.serialize_model(model=net, config=None, model_directory=str(tmp_path))
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"huggingface\.from_pretrained") as caught:
        model = tensorizer.load_model(path_uri=str(tmp_path), modelclass=Net, device="cpu")
    assert caught[0].filename == __file__
    assert [file.name for file in tmp_path.iterdir()] == ["model.tensors"]
    assert_same(model, net)


def test_a_module_is_for_the_function_of_another_module(tmp_path):
    with pytest.raises(TypeError, match=r"tensorizer\.torch\.load_model"):
        tensorizer.load_model(Net(), tmp_path / "model.tensors")


@pytest.mark.parametrize("configclass", [Config, None])
def test_a_configuration_is_written_and_read(tmp_path, configclass):
    net = Net({"width": 5})
    tensorizer.serialize_model(net, Config(width=5), tmp_path, "encoder")
    assert json.loads((tmp_path / "encoder-config.json").read_text()) == {"width": 5}
    model = tensorizer.load_model(tmp_path, Net, configclass, "encoder", "cpu", torch.float16)
    assert model.linear.weight.dtype == torch.float16
    assert torch.equal(model.linear.weight, net.linear.weight.half())


def test_the_default_device_is_the_usual_one(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tensorizer.serialize_model(Net(), None, tmp_path)
    assert tensorizer.load_model(str(tmp_path), Net).linear.weight.device.type == "cpu"


def test_a_configuration_of_an_unknown_kind_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="config"):
        tensorizer.serialize_model(Net(), 5, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_files_and_missing_tensors_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="model"):
        tensorizer.load_model(tmp_path, Net, device="cpu")
    tensorizer.serialize_model(Net(), None, tmp_path)
    with pytest.raises(FileNotFoundError, match="config"):
        tensorizer.load_model(tmp_path, Net, Config, device="cpu")

    class Wider(Net):
        def __init__(self, config=None):
            super().__init__(config)
            self.extra = torch.nn.Linear(2, 2)

    with pytest.raises(ValueError, match=r"extra\.weight"):
        tensorizer.load_model(tmp_path, Wider, device="cpu")


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b"5", b"\xff", b"[" * 100_000], ids=["cut", "list", "5", "bytes", "deep"]
)
def test_a_configuration_that_is_no_object_of_json_is_named(tmp_path, text):
    tensorizer.serialize_model(Net(), None, tmp_path)
    (tmp_path / "model-config.json").write_bytes(text)
    for configclass in (Config, None):
        with pytest.raises(ValueError, match=r"model-config\.json"):
            tensorizer.load_model(tmp_path, Net, configclass, device="cpu")
