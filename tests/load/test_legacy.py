"""The names of releases before 1.0: they work, and say what to use instead."""

from __future__ import annotations

import inspect
import json
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from servers.file_server import serve_folder

import tensorizer
from tensorizer import FormatError, legacy

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
    with pytest.warns(DeprecationWarning, match="huggingface.serialize_model") as caught:
        tensorizer.serialize_model(model=net, config=None, model_directory=str(tmp_path))
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="huggingface.load_model") as caught:
        model = tensorizer.load_model(path_uri=str(tmp_path), modelclass=Net, device="cpu")
    assert caught[0].filename == __file__
    assert [file.name for file in tmp_path.iterdir()] == ["model.tensors"]
    assert_same(model, net)


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


@pytest.mark.parametrize("damage", ["empty", "cut", "a byte", "no zip"])
def test_a_zip_file_that_cannot_be_unpacked_is_named(tmp_path, damage):
    class Component:
        def save_pretrained(self, folder):
            Path(folder, "vocabulary.txt").write_text("a b c " * 100)

    legacy.serialize_pretrained(Component(), tmp_path, "tokenizer")
    path = tmp_path / "tokenizer.zip"
    content = bytearray(path.read_bytes())
    content[48] ^= 0xFF  # in the packed text
    path.write_bytes({"empty": b"", "cut": content[:-30], "a byte": content, "no zip": b"<html></html>"}[damage])
    with pytest.raises(FormatError, match=r"tokenizer\.zip"):
        legacy.load_pretrained(Component, tmp_path, "tokenizer")


def bomb(path, files, nbytes, kind=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", kind) as archive:
        for number in range(files):
            archive.writestr(f"{number}.txt", b"a" * nbytes)


@pytest.mark.parametrize(("files", "nbytes"), [(1, 40 << 20), (40, 1 << 20), (10_001, 1)])
@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_an_archive_that_unpacks_to_far_more_than_its_size_is_refused_before_a_byte_is(
    tmp_path, monkeypatch, files, nbytes, kind
):
    place = tmp_path / "unpacked"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    bomb(tmp_path / "tokenizer.zip", files, nbytes, kind)
    with serve_folder(tmp_path) as web:
        for folder in (tmp_path, web):
            with pytest.raises(FormatError, match=r"tokenizer\.zip: wanted an archive"):
                legacy.load_pretrained(None, folder, "tokenizer")
    assert list(place.iterdir()) == []


def test_an_archive_that_lies_about_its_sizes_unpacks_to_no_more_than_it_says(tmp_path):
    path = tmp_path / "tokenizer.zip"
    bomb(path, 1, 40 << 20)
    content = path.read_bytes()
    path.write_bytes(content.replace((40 << 20).to_bytes(4, "little"), (1000).to_bytes(4, "little")))
    with pytest.raises(FormatError, match=r"tokenizer\.zip"):
        legacy.load_pretrained(None, tmp_path, "tokenizer")


def test_a_tokenizer_of_many_equal_lines_is_unpacked(tmp_path):
    class Component:
        def save_pretrained(self, folder):
            Path(folder, "vocabulary.txt").write_text("a b c " * 100_000)

        @classmethod
        def from_pretrained(cls, folder):
            return Path(folder, "vocabulary.txt").read_text()

    legacy.serialize_pretrained(Component(), tmp_path, "tokenizer")
    assert len(legacy.load_pretrained(Component, tmp_path, "tokenizer")) == 600_000
