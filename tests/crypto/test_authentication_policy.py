"""What has to be authenticated, what counts as that, and what earlier releases wrote."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import reference_auth as auth
import torch
from authentic_files import OPEN, PUBLIC, SIGNER, K, encrypted, names_exchanged, opened, plain, signed, values
from samples import same

import tensorizer
from tensorizer import AuthenticationError, TensorDeserializer


def test_a_file_of_an_earlier_release_loads_and_the_log_says_what_is_missing(caplog):
    data = auth.as_before(encrypted(), K)
    with caplog.at_level(logging.INFO, "tensorizer.serialization"), opened(data, encryption=OPEN) as file:
        assert file.authenticated is None
        assert same(file["a"], values()["a"])
    assert sum("earlier release" in record.message for record in caplog.records) == 1
    with pytest.raises(AuthenticationError, match="tensorizer encrypt --in-key-file"):
        opened(data, encryption=OPEN, require_authenticated=True)


REQUIRED = {
    "plain": (plain, {}, "nothing was given"),
    "signed, without its key": (signed, {}, "nothing was given"),
    "encrypted before": (lambda: auth.as_before(encrypted(), K), {"encryption": OPEN}, "earlier release"),
    "safetensors": (lambda: tensorizer.save(values(), format="safetensors"), {}, "safetensors"),
}


@pytest.mark.parametrize("kind", REQUIRED)
def test_what_has_to_be_authenticated_and_is_not_is_refused_everywhere(kind, tmp_path, monkeypatch):
    make, options, why = REQUIRED[kind]
    path = tmp_path / "m.tensors"
    path.write_bytes(make())
    doors: list[Callable[..., Any]] = [
        lambda **o: TensorDeserializer(path, device="cpu", **o),
        lambda **o: tensorizer.load_file(path, **o),
        lambda **o: tensorizer.safe_open(path, **o),
        lambda **o: tensorizer.verify(path, **o),
        lambda **o: tensorizer.torch.load_model(torch.nn.Linear(1, 1), path, strict=False, **o),
    ]
    for door in doors:
        with pytest.raises(AuthenticationError, match=why):
            door(require_authenticated=True, **options)
        monkeypatch.setenv("TENSORIZER_REQUIRE_AUTHENTICATED", "1")
        with pytest.raises(AuthenticationError, match=why):
            door(**options)
        door(require_authenticated=False, **options)
        monkeypatch.setenv("TENSORIZER_REQUIRE_AUTHENTICATED", "0")
        door(**options)
        monkeypatch.delenv("TENSORIZER_REQUIRE_AUTHENTICATED")


def test_a_variable_that_is_neither_0_nor_1_is_an_error(monkeypatch):
    monkeypatch.setenv("TENSORIZER_REQUIRE_AUTHENTICATED", "yes")
    with pytest.raises(ValueError, match="TENSORIZER_REQUIRE_AUTHENTICATED"):
        opened(plain())


def test_what_is_authenticated_satisfies_the_requirement():
    with opened(encrypted(), encryption=OPEN, require_authenticated=True) as file:
        assert file.authenticated == "key"
    with opened(signed(), public_key=SIGNER.public_key, require_authenticated=True) as file:
        assert file.authenticated == "signature"
    both = encrypted(signing_key=SIGNER)
    with opened(both, public_key=SIGNER.public_key, encryption=OPEN, require_authenticated=True) as file:
        assert file.authenticated == "both"
        assert same(file["a"], values()["a"])


def test_listing_without_a_key_checks_nothing():
    data = encrypted(signing_key=SIGNER)
    info = tensorizer.inspect(io.BytesIO(names_exchanged(data)))
    assert info.has_tag
    assert info.signers == (PUBLIC,)
    with opened(plain()) as file:
        assert file.authenticated is None
        assert file.index_digest == auth.digest_of(plain()).hex()
