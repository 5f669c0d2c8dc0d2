"""The functions and commands over the hub, an object store and other file systems."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from servers.counting_relay import CountingRelay
from servers.hub_server import HubServer
from torch_versions import reads_pickles

import tensorizer
from tensorizer._system.redaction import shown_location
from tensorizer.integrations._hf.folders import LoadOptions, open_folder
from tensorizer.torch import load_file, load_model, safe_open, save_file

STATE = {
    "embed.weight": torch.arange(1200.0).reshape(30, 40).half(),
    "layers.0.weight": torch.arange(4096.0).reshape(64, 64),
    "layers.1.weight": -torch.arange(4096.0).reshape(64, 64),
}
STATE["lm_head.weight"] = STATE["embed.weight"]


@pytest.fixture
def folder(tmp_path):
    """One model: one file of each format, and shards."""
    save_file(STATE, tmp_path / "one.safetensors")
    save_file(STATE, tmp_path / "one.tensors")
    save_file(STATE, tmp_path / "shards" / "model.safetensors", max_shard_size="20KB")
    return tmp_path


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def assert_is_all(found):
    assert set(found) == set(STATE)
    assert all(found[name].equal(tensor) for name, tensor in STATE.items())
    assert found["lm_head.weight"] is found["embed.weight"]


def test_every_function_works_over_a_file_system_of_fsspec(folder):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    try:
        for name, content in contents(folder).items():
            memory.pipe(f"/m/{name}", content)
        for source in ("one.safetensors", "one.tensors", "shards/", "shards", "shards/model.safetensors.index.json"):
            uri = f"memory://m/{source}"
            assert_is_all(load_file(uri))
            assert len(tensorizer.inspect(uri).tensors) == 3
            assert tensorizer.verify(uri)
            assert tensorizer.diff(uri, folder / "one.tensors")
            with safe_open(uri) as file:
                assert file.get_slice("layers.1.weight")[2:4].equal(STATE["layers.1.weight"][2:4])
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in "ab")})
        report = load_model(model, "memory://m/one.tensors", strict=False)
        assert set(report.unexpected) == {"embed.weight", "lm_head.weight"}
        assert model["layers"][1].weight.equal(STATE["layers.1.weight"])

        save_file(STATE, "memory://out/m.safetensors")
        assert memory.cat("/out/m.safetensors") == (folder / "one.safetensors").read_bytes()
        tensorizer.convert("memory://m/shards/", "memory://out/m.tensors")
        assert_is_all(load_file("memory://out/m.tensors", verify=True))
        tensorizer.convert(folder / "one.tensors", "memory://out/shards/", format="safetensors", max_shard_size="20KB")
        assert_is_all(load_file("memory://out/shards/"))
        with pytest.raises(FileNotFoundError):
            load_file("memory://m/nothing/")
    finally:
        memory.store.clear()


HUB_PROGRAM = """
import json, sys
import tensorizer
from tensorizer._system.redaction import shown_location
from tensorizer.cli.main import main
from tensorizer.integrations._hf.folders import LoadOptions, open_folder
from tensorizer.torch import load_file, safe_open
out, digest = sys.argv[1:]
found = {}
for source in ("one.safetensors", "one.tensors", "shards/model.safetensors.index.json"):
    uri = f"hf://org/model-1.5/{source}"
    tensors = load_file(uri)
    found[source] = {name: float(tensor.double().sum()) for name, tensor in tensors.items()}
    assert tensors["lm_head.weight"] is tensors["embed.weight"]
    assert len(tensorizer.inspect(uri).tensors) == 3
with safe_open("hf://org/model-1.5@main/one.safetensors") as file:
    assert list(file.get_slice("layers.0.weight")[3:5].shape) == [2, 64]
assert len(load_file("hf://org/model-1.5/shards/")) == len(load_file("hf://org/model-1.5/shards")) == 4
assert len(load_file("hf://org/model-1.5")) == len(load_file("hf://models/org/model-1.5/")) == 1  # model.safetensors
tensorizer.convert("hf://org/model-1.5/shards/", out)
for hub_digest, status in (("one.safetensors", 0), ("one.tensors", 0)):
    assert main(["verify", "--hub", f"hf://org/model-1.5/{hub_digest}"]) == status
assert main(["inspect", "hf://org/model-1.5/absent.safetensors"]) == 3
print(json.dumps(found))
"""


@reads_pickles
def test_every_function_works_over_the_hub(folder):
    pytest.importorskip("huggingface_hub")
    save_file({"only": torch.ones(3)}, folder / "model.safetensors")
    files = contents(folder)
    with HubServer("org/model-1.5", files) as hub:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(folder / "home"),
            "HF_TOKEN": "hf_secret",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }
        digest = hashlib.sha256(files["one.safetensors"]).hexdigest()
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", HUB_PROGRAM, str(folder / "converted.tensors"), digest],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    wanted = {name: float(tensor.double().sum()) for name, tensor in STATE.items()}
    found = json.loads(result.stdout.splitlines()[-1])
    assert list(found.values()) == [wanted] * 3
    assert_is_all(load_file(folder / "converted.tensors", verify=True))
    assert hub.tokens == {"Bearer hf_secret"}
    assert "hf_secret" not in result.stdout + result.stderr


def test_inspect_of_thirty_thousand_tensors_in_a_bucket_costs_two_requests(tmp_path, monkeypatch, s3_server):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    shared = torch.zeros(1)
    count = 30_000
    header = {f"layers.{i}.weight": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(count)}
    text = json.dumps(header).encode()
    (tmp_path / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(count))
    with tensorizer.TensorSerializer(tmp_path / "m.tensors", hashes=()) as serializer:
        serializer.write_state_dict({f"layers.{i}.weight": shared[:0] for i in range(count)})
    client = s3_server.client()
    client.create_bucket(Bucket="remote")
    for name in ("m.safetensors", "m.tensors"):
        client.upload_file(str(tmp_path / name), "remote", name)
    with CountingRelay(s3_server.port) as relay:
        options = {**s3_server.arguments, "s3_endpoint": f"http://127.0.0.1:{relay.port}"}
        for name in ("m.safetensors", "m.tensors"):
            relay.requests.clear()
            info = tensorizer.inspect(f"s3://remote/{name}", stream_options=options)
            assert len(info.tensors) == count
            assert relay.requests == ["GET", "GET"], name


def test_places_of_models_are_called_by_their_address_without_its_secrets():
    secret = "".join(["s3", "cr3t"])
    uri = f"http://user:{secret}@127.0.0.1:1/folder?sig={secret}"
    with open_folder(uri, LoadOptions()) as remote:
        assert remote.label == "http://127.0.0.1:1/folder"
    assert shown_location(uri) == "http://127.0.0.1:1/folder"
    for source in (f"hf://user:{secret}@org", f"file:///nowhere?{secret}"):
        place = open_folder(source, LoadOptions(local_files_only=True))
        with pytest.raises((OSError, ValueError)) as caught:
            place.__enter__()
        assert secret not in str(caught.value)
