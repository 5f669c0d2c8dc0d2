"""State dicts in ``.pt`` and ``.bin`` files, read by torch without running what is in them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Optional

import torch

from tensorizer.errors import FormatError, UnsupportedContentError

__all__ = ["is_pickled", "read_pickled"]

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
# Where training scripts keep the state dict of a checkpoint, in the order in which they are tried.
_USUAL_KEYS = ("state_dict", "model_state_dict", "model", "module")
_SAFE_TORCH = (2, 6)  # before, weights_only=True could be got around (CVE-2025-32434)


def is_pickled(source: Any) -> bool:
    """Whether a local path holds what ``torch.save`` writes: a zip file, or a pickle in the old form."""
    if not isinstance(source, (str, os.PathLike)) or (isinstance(source, str) and "://" in source):
        return False
    try:
        with open(source, "rb") as file:
            head = file.read(4)
    except OSError:
        return False
    return head == _ZIP or head[:1] == _PICKLE


def read_pickled(
    path: Any, key: Optional[str] = None, skip_non_tensors: bool = False
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a pickled state dict.

    Args:
        path: A local file.
        key: Where the state dict is, in dots: ``"model.ema"``. ``None``: the whole file, or the first of the places
            where training scripts keep it.
        skip_non_tensors: Leaves out what is no tensor, instead of refusing it.

    Returns:
        The tensors by name, and the names that were left out. Strings among tensors, as quantised checkpoints hold
        them, are always left out.

    Raises:
        FormatError: Not readable without running code from it, or no state dict in it.
        UnsupportedContentError: Leaves that are no tensors.
        RuntimeError: A torch in which such files cannot be read safely.
    """
    _check_torch()
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except (ValueError, RuntimeError, EOFError, KeyError, _unpickling_error()) as error:
        first_line = str(error).partition("\n")[0]
        raise FormatError(f"{os.fspath(path)}: cannot be read as plain weights: {first_line}") from None
    found = _state_dict(content, key)
    if found is None:
        where = f"under key {key!r}" if key else f"as a whole or under {', '.join(_USUAL_KEYS)}"
        raise FormatError(f"{os.fspath(path)}: no state dict {where}")
    tensors = {name: leaf for name, leaf in found.items() if isinstance(leaf, torch.Tensor)}
    others = [name for name, leaf in found.items() if not isinstance(leaf, torch.Tensor)]
    refused = [name for name in others if not isinstance(found[name], str)]
    if refused and not skip_non_tensors:
        raise UnsupportedContentError(
            f"{os.fspath(path)}: no tensors: {', '.join(map(repr, refused))}; they can be left out (skip_non_tensors)"
        )
    return tensors, others


def _state_dict(content: Any, key: Optional[str]) -> Optional[Mapping[str, Any]]:
    if key is not None:
        for step in key.split("."):
            content = content.get(step) if isinstance(content, Mapping) else None
        return content if _holds_tensors(content) else None
    if _holds_tensors(content):
        return content  # type: ignore[no-any-return]
    for usual in _USUAL_KEYS:
        inner = content.get(usual) if isinstance(content, Mapping) else None
        if _holds_tensors(inner):
            return inner
    return None


def _holds_tensors(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and all(isinstance(name, str) for name in content)
        and any(isinstance(leaf, torch.Tensor) for leaf in content.values())
    )


def _is_zip(path: Any) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == _ZIP


def _check_torch() -> None:
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is None or (int(version[1]), int(version[2])) < _SAFE_TORCH:
        raise RuntimeError(
            f"reading .pt and .bin files safely needs torch 2.6 or later (CVE-2025-32434), this is {torch.__version__}"
        )


def _unpickling_error() -> type[Exception]:
    import pickle

    return pickle.UnpicklingError
