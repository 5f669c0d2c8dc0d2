"""The golden files of tests/vectors/golden as test parameters; the README there explains the manifest."""

from __future__ import annotations

import functools
import gzip
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

from tensorizer import DecryptionParams

FOLDER = Path(__file__).parents[1] / "vectors" / "golden"
sys.path.insert(0, str(FOLDER))
import expected  # noqa: E402

MANIFEST = expected.load_manifest(FOLDER)
Golden = dict[str, Any]
KINDS = {"parameter": 0, "buffer": 1, "state_dict": 2}


def select(*, refused: Optional[bool] = None, encrypted: Optional[bool] = None) -> list[Golden]:
    """Manifest entries, without the files that have a dtype which the running torch lacks."""
    chosen = []
    for golden in MANIFEST["files"]:
        if refused is not None and refused != ("errors" in golden):
            continue
        if encrypted is not None and encrypted != (golden["encryption"] is not None):
            continue
        if all(hasattr(torch, tensor["dtype"]) for tensor in golden["tensors"]):
            chosen.append(golden)
    return chosen


def name_of(golden: Golden) -> str:
    return str(golden["name"])


def each(goldens: Iterable[Golden]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns a check that takes ``golden`` and fixtures into one test of all files, which names those that fail."""
    chosen = list(goldens)

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def test(**fixtures: Any) -> None:
            failed = []
            for golden in chosen:
                try:
                    check(golden=golden, **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    failed.append(f"{golden['name']}: {type(error).__name__}: {error}")
            assert not failed, "\n".join([f"{len(failed)} of {len(chosen)} golden files fail", *failed])

        assert chosen
        signature = inspect.signature(check)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name != "golden"]
        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return test

    return decorate


def keys(golden: Golden) -> dict[str, DecryptionParams]:
    """The keyword argument with which a deserializer can open the file."""
    given = secret(golden)
    if given is None:
        return {}
    make = DecryptionParams.from_key if "key" in given else DecryptionParams.from_string
    return {"encryption": make(next(iter(given.values())))}


def lacks_hashes(golden: Golden) -> bool:
    """Whether a tensor with data has no digest, as in our own file with all kinds of digests."""
    return golden["name"] == "c-hashes"


@functools.cache
def _read(file: str, sha256: str) -> bytes:
    data = gzip.decompress((FOLDER / file).read_bytes())
    assert hashlib.sha256(data).hexdigest() == sha256, f"{file} does not match the manifest"
    return data


def read(golden: Golden) -> bytes:
    """The decompressed content of the file."""
    return _read(golden["file"], golden["sha256"])


def distinct(goldens: list[Golden]) -> list[Golden]:
    """Drops files with the same bytes as another one, since most releases wrote the same bytes for the same case."""
    return list({golden["sha256"]: golden for golden in reversed(goldens)}.values())[::-1]


_contents: dict[str, bytes] = {}


def content(tensor: dict[str, Any]) -> bytes:
    """The bytes that a manifest tensor must have."""
    if tensor["sha256"] not in _contents:
        _contents[tensor["sha256"]] = _compute_content(tensor)
    return _contents[tensor["sha256"]]


def _compute_content(tensor: dict[str, Any]) -> bytes:
    data = expected.content_bytes(MANIFEST["seed"], tensor["content"], tensor["nbytes"])
    assert hashlib.sha256(data).hexdigest() == tensor["sha256"]
    return data


def secret(golden: Golden) -> Optional[dict[str, bytes]]:
    """The secret for the file: ``key`` or ``passphrase``; ``None`` for a plain file."""
    encryption = golden["encryption"]
    if encryption is None:
        return None
    if encryption["kind"] != "passphrase":
        return {"key": bytes.fromhex(encryption["key"])}
    if encryption.get("passphrase") is not None:
        return {"passphrase": encryption["passphrase"].encode("utf-8")}
    return {"passphrase": bytes.fromhex(encryption["passphrase_bytes"])}
