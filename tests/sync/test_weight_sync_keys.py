"""Runs whose files are encrypted or signed, and files that somebody has forged."""

from __future__ import annotations

import shutil

import pytest
import torch
from sync_tools import anchor, change, copy_of, delta, pointer_of, same, write_pointer

from tensorizer import DecryptionParams, EncryptionParams, SigningKey, TensorDeserializer
from tensorizer.errors import AuthenticationError, CryptographyError, VerificationError
from tensorizer.weight_sync import WeightFollower, WeightPublisher


def tensors() -> dict:
    torch.manual_seed(1)
    one = torch.randn(77)
    return {"a.weight": torch.randn(300, 50).bfloat16(), "b.bias": one, "tied": one}


@pytest.fixture(params=["key", "passphrase"])
def keys(request):
    if request.param == "key":
        encryption = EncryptionParams.random()
        return encryption, DecryptionParams.from_key(encryption.key)
    encryption = EncryptionParams.from_string("secret", opslimit=1, memlimit=8192)
    return encryption, DecryptionParams.from_string("secret")


def test_an_encrypted_run_is_followed_with_its_key(tmp_path, keys):
    encryption, decryption = keys
    model = tensors()
    with WeightPublisher(tmp_path, encryption=encryption, anchor_every=3) as publisher:
        publisher.publish(model, metadata={"step": "0"})
        follower = WeightFollower(tmp_path, None, encryption=decryption)
        for step in range(4):
            change(model["a.weight"])
            publisher.publish(model, metadata={"step": str(step)})
            follower.update()
            assert same(follower.tensors, model)
            assert follower.metadata == {"step": str(step)}
    assert b"weight_sync" not in (tmp_path / delta(4)).read_bytes()
    target = copy_of(model)
    assert WeightFollower(tmp_path, target, encryption=decryption).version == 4
    with pytest.raises(CryptographyError):
        WeightFollower(tmp_path, None)
    with pytest.raises(CryptographyError):
        WeightFollower(tmp_path, None, encryption=DecryptionParams.from_key(bytes(32)))


def test_a_signed_run_is_followed_by_who_knows_the_key(tmp_path):
    key, other = SigningKey.generate(), SigningKey.generate()
    model = tensors()
    with WeightPublisher(tmp_path, signing_key=key) as publisher:
        publisher.publish(model)
        follower = WeightFollower(tmp_path, None, public_key=key.public_key)
        change(model["a.weight"])
        publisher.publish(model)
        follower.update()
        assert same(follower.tensors, model)
    with TensorDeserializer(tmp_path / delta(1), device="cpu", public_key=key.public_key) as file:
        assert file.authenticated == "signature"
    with pytest.raises(AuthenticationError):
        WeightFollower(tmp_path, None, public_key=other.public_key)


@pytest.mark.parametrize("how", ["signed", "encrypted"])
def test_a_forged_delta_is_refused_also_where_the_pointer_names_it(tmp_path, how):
    key, encryption = SigningKey.generate(), EncryptionParams.random()
    writes = {"signing_key": key} if how == "signed" else {"encryption": encryption}
    reads = {"public_key": key.public_key}
    if how == "encrypted":
        reads = {"encryption": DecryptionParams.from_key(encryption.key)}
    model = tensors()
    with WeightPublisher(tmp_path / "own", **writes) as publisher:
        publisher.publish(model)
        follower = WeightFollower(tmp_path / "own", copy_of(model), **reads)
        before = copy_of(follower.tensors)
        # A run that the attacker publishes, with the names of this one.
        forging = {"encryption": EncryptionParams.random()}
        if how == "signed":
            forging = {"signing_key": SigningKey.generate()}
        with WeightPublisher(tmp_path / "forged", **forging) as forger:
            forger._own_run = pointer_of(tmp_path / "own")["run"]
            forger.publish(model)
            change(model["a.weight"])
            forger.publish(model)
        shutil.copy(tmp_path / "forged" / delta(1), tmp_path / "own" / delta(1))
        forged, pointer = pointer_of(tmp_path / "forged"), pointer_of(tmp_path / "own")
        for part in ("nbytes", "index_digest"):
            forged[part][anchor(0)] = pointer[part][anchor(0)]
        write_pointer(tmp_path / "own", forged)
        with pytest.raises((AuthenticationError, VerificationError)):
            follower.fetch()
        assert same(follower.tensors, before)


def test_an_unsigned_delta_of_a_signed_run_is_refused(tmp_path):
    key, model = SigningKey.generate(), tensors()
    with WeightPublisher(tmp_path, signing_key=key) as publisher:
        publisher.publish(model)
    follower = WeightFollower(tmp_path, None, public_key=key.public_key)
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(model)
        publisher.publish(model)
    with pytest.raises(AuthenticationError):
        follower.fetch()
    assert follower.version == 0
