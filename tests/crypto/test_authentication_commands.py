"""Signing and checking from the command line."""

from __future__ import annotations

import json

import pytest
import torch
from authentic_files import OTHER, PUBLIC, SIGNER, encrypted, plain, renamed
from command_line import run
from samples import state_dict_bytes
from servers.s3_recorder import S3Recorder

from tensorizer import PublicKey


def test_the_command_line_makes_keys_signs_and_verifies(tmp_path):
    key = tmp_path / "release.pem"
    made = run("sign", "--generate-key", key)
    assert made.returncode == 0, made.stderr
    assert key.stat().st_mode & 0o777 == 0o600
    public = tmp_path / "release.pem.pub"
    assert str(PublicKey.from_file(public)) in made.stdout.decode()
    assert run("sign", "--generate-key", key).returncode == 6
    path = tmp_path / "m.tensors"
    path.write_bytes(plain())
    result = run("sign", path, "--key", key)
    assert (result.returncode, result.stderr) == (0, b""), result
    assert (tmp_path / "m.tensors.sig").exists()
    result = run("verify", path, "--public-key", public, "--json")
    assert result.returncode == 0, result.stderr
    (report,) = json.loads(result.stdout)["files"]
    assert report["authenticated"] == "signature"
    assert report["signers"] == [str(PublicKey.from_file(public))]
    other = tmp_path / "other"
    OTHER.public_key.save(other)
    wrong = run("verify", path, "--public-key", other)
    assert wrong.returncode == 5
    assert b"signed by other keys" in wrong.stderr
    path.write_bytes(renamed(plain(), {b"d": b"z"}))
    assert run("verify", path, "--public-key", public).returncode == 5
    assert run("sign", path, "--key", key, "--no-check").returncode == 6
    assert run("sign", path, "--key", key, "--no-check", "--force").returncode == 0
    assert run("verify", path, TENSORIZER_REQUIRE_AUTHENTICATED="1").returncode == 5


def test_signing_other_weights_over_an_old_signature_exits_with_6_and_with_force_drops_it(tmp_path):
    path, key, other = tmp_path / "m.tensors", tmp_path / "key", tmp_path / "other"
    SIGNER.save(key)
    OTHER.save(other)
    path.write_bytes(state_dict_bytes({"w": torch.zeros(4)}))
    assert run("sign", path, "--key", key).returncode == 0
    path.write_bytes(state_dict_bytes({"w": torch.ones(4)}))
    assert run("sign", path, "--key", other).returncode == 6
    result = run("sign", path, "--key", other, "--force", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["files"][0]["signers"] == [str(OTHER.public_key)]


def test_a_signature_in_a_store_is_written_and_read_at_the_endpoint_that_was_named(tmp_path):
    pytest.importorskip("boto3")
    key, public = tmp_path / "key", tmp_path / "public"
    SIGNER.save(key)
    SIGNER.public_key.save(public)
    with S3Recorder() as store:
        store.objects["/bucket/m.tensors"] = plain()
        keys = {"AWS_ACCESS_KEY_ID": store.access_key, "AWS_SECRET_ACCESS_KEY": store.secret_key}
        uri, endpoint = "s3://bucket/m.tensors", ("--s3-endpoint", store.endpoint)
        for arguments in (("sign", uri, "--key", key), ("verify", uri, "--public-key", public)):
            result = run(*arguments, *endpoint, **keys)
            assert result.returncode == 0, result.stderr
        assert set(store.objects) == {"/bucket/m.tensors", "/bucket/m.tensors.sig"}


def test_the_command_line_shows_signers_as_not_checked(tmp_path):
    path = tmp_path / "m.tensors"
    path.write_bytes(encrypted(signing_key=SIGNER))
    shown = run("inspect", path)
    assert shown.returncode == 0
    assert PUBLIC in shown.stdout.decode()
    assert b"not checked" in shown.stdout
    (report,) = json.loads(run("inspect", path, "--json").stdout)["files"]
    assert report["signers"] == [PUBLIC]
