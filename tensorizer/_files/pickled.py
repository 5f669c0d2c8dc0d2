"""State dicts in ``.pt`` and ``.bin`` files, read by torch without running what is in them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch

from tensorizer import _C
from tensorizer._files.contents import not_storable
from tensorizer._io.shards import MAX_INDEX_NBYTES
from tensorizer.errors import FormatError, StreamNotFoundError, UnsupportedContentError

__all__ = ["pickled_files", "read_pickled"]

_INDEX = ".bin.index.json"
_EXTENSIONS = (".bin", ".pt", ".pth")
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
# Where training scripts keep the state dict of a checkpoint, in the order in which they are tried.
_USUAL_KEYS = ("state_dict", "model_state_dict", "model", "module")
_SAFE_TORCH = (2, 6)  # before, weights_only=True could be got around (CVE-2025-32434)


def pickled_files(source: Any) -> list[str]:
    """The files that a local path stands for, where they hold what ``torch.save`` writes; else none.

    Args:
        source: A file, an index of ``.bin`` files, or a folder with either and no other model file.

    Raises:
        FormatError: An index that is none, or that names files outside of its folder.
        StreamNotFoundError: A file that the index names is missing.
    """
    if not isinstance(source, (str, os.PathLike)) or (isinstance(source, str) and "://" in source):
        return []
    path = os.fspath(source)
    if os.path.isdir(path):
        names = os.listdir(path)
        if any(name.endswith((".safetensors", ".tensors")) for name in names):
            return []
        found = [name for name in names if name.endswith(_INDEX)] or [n for n in names if n.endswith(_EXTENSIONS)]
        return pickled_files(os.path.join(path, found[0])) if len(found) == 1 else []
    if path.endswith(_INDEX) and os.path.isfile(path):
        return _files_of_index(path)
    return [path] if _is_pickle(path) else []


def _files_of_index(path: str) -> list[str]:
    with open(path, "rb") as file:
        text = file.read(MAX_INDEX_NBYTES + 1)
    try:
        weight_map, _ = _C.parse_shard_index(text)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    files = list(dict.fromkeys(weight_map.values()))
    for name in files:
        if os.path.basename(name) != name or not name.endswith(_EXTENSIONS):
            raise FormatError(f"{path}: wanted the name of a file in its folder, found {name!r:.200}")
        if not os.path.exists(os.path.join(os.path.dirname(path), name)):
            raise StreamNotFoundError(f"{path}: its shard {name!r:.200} is missing")
    return [os.path.join(os.path.dirname(path), name) for name in files]


def _is_pickle(source: str) -> bool:
    if not os.path.isfile(source):  # opening a pipe would wait for its writer
        return False
    try:
        with open(source, "rb") as file:
            head = file.read(4)
    except OSError:
        return False
    return head == _ZIP or head[:1] == _PICKLE


def read_pickled(
    files: Sequence[str], key: Optional[str] = None, skip_non_tensors: bool = False
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a pickled state dict.

    Args:
        files: Local files, which are taken together.
        key: Where the state dict is, in dots: ``"model.ema"``. ``None``: the whole file, or the first of the places
            where training scripts keep it.
        skip_non_tensors: Leaves out what is no tensor, instead of refusing it.

    Returns:
        The tensors by name, and the names that were left out. Strings among tensors, as quantised checkpoints hold
        them, are always left out.

    Raises:
        FormatError: Not readable without running code from it, or no state dict in it.
        UnsupportedContentError: Leaves that are no tensors, or tensors that no file can hold (sparse, quantised).
        ImportError: A torch in which such files cannot be read safely.
    """
    _check_torch()
    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []
    for path in files:
        found, skipped = _read_one(path, key, skip_non_tensors)
        twice = tensors.keys() & found.keys()
        if twice:
            raise FormatError(f"{path}: tensor {min(twice)!r:.200} is in another file of the model, too")
        tensors.update(found)
        others += skipped
    return tensors, others


def _read_one(path: str, key: Optional[str], skip_non_tensors: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of damaged bytes pickle makes whatever its instructions come upon
        first_line = _TERMINAL_CODES.sub("", str(error)).strip().partition("\n")[0]
        raise FormatError(f"{path}: cannot be read as plain weights: {first_line or type(error).__name__}") from None
    found = _state_dict(content, key)
    if found is None:
        where = f"under key {key!r}" if key else f"as a whole or under {', '.join(_USUAL_KEYS)}"
        raise FormatError(f"{path}: no state dict {where}")
    tensors = {name: leaf for name, leaf in found.items() if isinstance(leaf, torch.Tensor)}
    others = [name for name, leaf in found.items() if not isinstance(leaf, torch.Tensor)]
    refused = [name for name in others if not isinstance(found[name], str)]
    if refused and not skip_non_tensors:
        raise UnsupportedContentError(
            f"{path}: no tensors: {', '.join(map(repr, refused))}; they can be left out (skip_non_tensors)"
        )
    unfit = not_storable(tensors)
    if unfit:
        raise UnsupportedContentError(f"{path}: {'; '.join(unfit)}")
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
        raise ImportError(
            f"reading .pt and .bin files safely needs torch 2.6 or later (CVE-2025-32434), this is {torch.__version__}"
        )
