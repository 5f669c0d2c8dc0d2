"""Checkpoint folders where commands and their functions take files: inspect, verify, diff, convert, encrypt, sign."""

from __future__ import annotations

import json

import pytest
import samples
import torch
from checkpoint_tools import MARKS, load, marker_in, save
from command_line import run
from servers.s3_recorder import S3Recorder

import tensorizer
from tensorizer import DecryptionParams, SigningKey
from tensorizer.errors import AuthenticationError, CryptographyError
from tensorizer.torch import load_file, save_file

pytestmark = MARKS

TENSORS = {
    "model.layer.weight": torch.arange(300.0 * 70).view(300, 70),
    "model.half": torch.ones(5, dtype=torch.bfloat16),
    "model.empty": torch.empty(0, 2),
}


def state(step=4):
    return {"model": {name[6:]: tensor for name, tensor in TENSORS.items()}, "step": step}


@pytest.fixture
def checkpoint(tmp_path):
    save(state(), tmp_path / "in")
    return tmp_path / "in"


def is_loaded(path, **arguments):
    found = {"model": {name: torch.zeros_like(tensor) for name, tensor in state()["model"].items()}, "step": 0}
    load(found, path, verify_hash=True, **arguments)
    assert found["step"] == 4
    assert all(samples.same(found["model"][name[6:]], tensor) for name, tensor in TENSORS.items())


def test_inspect_shows_the_tensors_of_a_checkpoint_and_its_values(checkpoint):
    info = tensorizer.inspect(checkpoint)
    found = {tensor.name: (tensor.dtype, tensor.shape, tensor.nbytes) for tensor in info.tensors}
    assert found == {n: (str(t.dtype)[6:], tuple(t.shape), t.nbytes) for n, t in TENSORS.items()}
    assert (info.format, info.encrypted, dict(info.metadata)) == ("checkpoint", False, {"step": "4"})
    assert info.file_nbytes == sum(file.stat().st_size for file in checkpoint.glob("r*.tensors"))
    assert {tensor.file for tensor in info.tensors} == {*info.files, None}
    assert b"checkpoint, 3 tensors" in run("inspect", checkpoint, "--long").stdout


def test_diff_compares_the_tensors_of_checkpoints_and_files_without_reading_what_digests_decide(checkpoint, tmp_path):
    save(state(), tmp_path / "again", hashes="sha256")
    save(state(), tmp_path / "third", hashes="sha256")
    save_file(TENSORS, tmp_path / "m.safetensors")
    assert tensorizer.diff(checkpoint, tmp_path / "m.safetensors").same == 3
    report = tensorizer.diff(tmp_path / "again", tmp_path / "third")
    assert report
    assert report.nbytes_read == 0
    other = {**state(), "more": torch.ones(1)}
    other["model"]["half"] = torch.zeros(5, dtype=torch.bfloat16)
    save(other, tmp_path / "other")
    report = tensorizer.diff(checkpoint, tmp_path / "other")
    assert report.added == ("more",)
    assert [(change.name, change.what, change.max_abs) for change in report.changed] == [("model.half", "data", 1.0)]
    assert run("diff", checkpoint, tmp_path / "other", "--filter", "model.layer*").returncode == 0


def test_convert_writes_a_checkpoint_as_dcp_to_files_does(checkpoint, tmp_path):
    report = tensorizer.convert(checkpoint, tmp_path / "m.safetensors")
    assert (report["tensors"], report["checked"]) == (3, True)
    tensorizer.distributed.dcp_to_files(checkpoint, tmp_path / "same.safetensors")
    found, same = load_file(tmp_path / "m.safetensors"), load_file(tmp_path / "same.safetensors")
    assert found.keys() == same.keys() == TENSORS.keys()
    assert all(samples.same(found[name], tensor) for name, tensor in TENSORS.items())
    for name in ("m.safetensors", "same.safetensors"):
        assert json.loads(tensorizer.inspect(tmp_path / name).metadata["checkpoint.values"]) == {"step": 4}
    options = ("--dtype", "bf16", "--max-shard-size", "30KB")
    assert run("convert", checkpoint, tmp_path / "m.tensors", *options).returncode == 0
    assert load_file(tmp_path / "m.tensors.index.json")["model.layer.weight"].dtype == torch.bfloat16


def test_encrypt_and_decrypt_keep_a_checkpoint_that_loads(checkpoint, tmp_path):
    key, locked, plain = tmp_path / "key", tmp_path / "locked", tmp_path / "plain"
    assert run("encrypt", checkpoint, locked, "--generate-key", key).returncode == 0
    unlock = DecryptionParams.from_key(key.read_bytes())
    is_loaded(locked, encryption=unlock)
    assert tensorizer.inspect(locked).encrypted
    head, body = marker_in(locked)
    assert "tag" in head
    assert [text for *_, text in (leaf[:3] for leaf in body["leaves"]) if text is not None] == []
    assert run("verify", locked).returncode == 5
    verified = run("verify", locked, "--key-file", key)
    assert verified.returncode == 0
    assert b"authenticated by its key" in verified.stdout
    with pytest.raises(CryptographyError, match="a key is needed"):
        tensorizer.verify(locked)
    assert run("encrypt", locked, tmp_path / "twice", "--key-file", key).returncode == 5
    assert run("decrypt", locked, plain, "--key-file", key).returncode == 0
    is_loaded(plain)
    assert tensorizer.diff(checkpoint, plain)
    assert tensorizer.diff(checkpoint, locked, encryption_b=unlock)


def test_encrypt_replaces_no_checkpoint_unasked_and_never_its_source(checkpoint, tmp_path):
    save(state(5), tmp_path / "out")
    (tmp_path / "key").write_bytes(bytes(range(32)))
    refused = run("encrypt", checkpoint, tmp_path / "out", "--key-file", tmp_path / "key")
    assert refused.returncode == 6
    assert b"--force replaces it" in refused.stderr
    refused = run("encrypt", checkpoint, checkpoint, "--key-file", tmp_path / "key", "--force")
    assert refused.returncode == 2
    assert b"expected another folder as the target" in refused.stderr
    is_loaded(checkpoint)
    assert run("encrypt", checkpoint, tmp_path / "out", "--key-file", tmp_path / "key", "--force").returncode == 0
    is_loaded(tmp_path / "out", encryption=DecryptionParams.from_key(bytes(range(32))))
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_damage_in_a_checkpoint_fails_its_encryption_and_leaves_no_marker(checkpoint, tmp_path):
    (file,) = checkpoint.glob("r*.tensors")
    data = bytearray(file.read_bytes())
    data[data.index(TENSORS["model.layer.weight"].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    (tmp_path / "key").write_bytes(bytes(range(32)))
    assert run("encrypt", checkpoint, tmp_path / "out", "--key-file", tmp_path / "key").returncode == 1
    assert not list((tmp_path / "out").glob(".metadata"))


def test_sign_signs_each_file_and_a_later_save_removes_the_signatures(tmp_path):
    folder, key = tmp_path / "in", SigningKey.generate()
    save(state(), folder, hashes="sha256")
    report = tensorizer.sign(folder, key)
    (file,) = folder.glob("r*.tensors")
    assert report["signature"] == (f"{file}.sig",)
    assert report["checked"]
    found = tensorizer.verify(folder, public_key=key.public_key)
    assert found
    assert found.signers == (str(key.public_key),)
    is_loaded(folder, public_key=key.public_key)
    with pytest.raises(AuthenticationError):
        tensorizer.verify(folder, public_key=SigningKey.generate().public_key)
    save(state(), folder)
    assert not list(folder.glob("*.sig"))


def test_verify_takes_a_filter_and_refuses_the_sum_of_one_file(checkpoint):
    assert tensorizer.verify(checkpoint, filter_func=lambda name: name == "model.half").verified == ("model.half",)
    with pytest.raises(ValueError, match="sha256: expected one file, got the checkpoint"):
        tensorizer.verify(checkpoint, sha256="0" * 64)


def test_all_of_them_take_a_checkpoint_in_a_store(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with S3Recorder() as store:
        options = {"stream_options": store.arguments}
        save(state(), "s3://bucket/in", hashes="sha256", **options)
        assert len(tensorizer.inspect("s3://bucket/in/", **options).tensors) == 3
        assert tensorizer.verify("s3://bucket/in", **options)
        assert tensorizer.convert("s3://bucket/in", tmp_path / "m.tensors", **options)["tensors"] == 3
        assert tensorizer.diff("s3://bucket/in", tmp_path / "m.tensors", **options)
        key = SigningKey.generate()
        tensorizer.sign("s3://bucket/in", key, **options)
        assert tensorizer.verify("s3://bucket/in", public_key=key.public_key, **options)


def test_markers_of_single_ranks_are_one_checkpoint(fresh_process, tmp_path):
    program = """
        import pathlib, sys, warnings
        warnings.simplefilter("ignore")
        import torch, torch.distributed.checkpoint as dcp
        import tensorizer, tensorizer.distributed as td
        from tensorizer.distributed._checkpoint.recrypt import recrypt
        folder = pathlib.Path(sys.argv[1])
        writer = td.TensorizerWriter(folder / "in")
        dcp.save({"w": torch.arange(6.0), "step": 3}, storage_writer=writer, no_dist=True)
        marker = folder / "in" / ".metadata"
        head, body = marker.read_bytes().split(b"\\n", 1)
        import hashlib, json
        head, body = json.loads(head), json.loads(body)
        body["rank"] = 0
        content = json.dumps(body).encode()
        head.update(nbytes=len(content), content_nbytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        (folder / "in" / "__0.metadata").write_bytes(json.dumps(head).encode() + b"\\n" + content)
        marker.unlink()
        key = tensorizer.EncryptionParams.random()
        recrypt(folder / "in", folder / "out", encryption=key)
        assert [path.name for path in (folder / "out").glob("*.metadata")] == ["__0.metadata"]
        report = tensorizer.verify(folder / "out", encryption=tensorizer.DecryptionParams.from_key(key.key))
        assert report and report.verified == ("w", "step"), report
    """
    result = fresh_process(program, tmp_path)
    assert result.returncode == 0, result.stderr
