"""Names, sizes and the index of files that share one set of tensors (docs/format.md, "Shards")."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Union

from tensorizer._system.sizes import parse_size

__all__ = ["index_bytes", "index_name", "name_of_shard", "names_of_model", "nbytes_of", "shard_names"]


def nbytes_of(size: Union[str, int]) -> int:
    """Bytes of a size like ``"5GB"``: ``GB`` is decimal, as ``huggingface_hub`` counts; fractions are allowed.

    Raises:
        ValueError: No such size, or none above 0.
    """
    try:
        nbytes = parse_size("max_shard_size", size)
    except (TypeError, ValueError):
        nbytes = 0
    if nbytes < 1:
        raise ValueError(f"max_shard_size: wanted bytes, or a text like '5GB' or '500MB', found {size!r}")
    return nbytes


def shard_names(name: str, count: int) -> list[str]:
    """``model.safetensors`` for one, ``model-00001-of-00002.safetensors`` and so on for more."""
    if count == 1:
        return [name]
    stem, extension = os.path.splitext(name)
    return [f"{stem}-{number:05}-of-{count:05}{extension}" for number in range(1, count + 1)]


def name_of_shard(name: str) -> str:
    """The name without the number: what :func:`shard_names` was given."""
    return re.sub(r"-\d{5}-of-\d{5}(?=\.[^./]*\Z|\Z)", "", name)


def names_of_model(name: str, among: Iterable[str]) -> list[str]:
    """Those of `among` that are a model of that name: its file, its index, its shards in whatever number."""
    stem, extension = os.path.splitext(name)
    shard = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}{re.escape(extension)}\Z")
    return sorted(other for other in among if other in (name, index_name(name)) or shard.match(other))


def index_name(name: str) -> str:
    """The index that belongs to a name: ``model.safetensors.index.json``."""
    return f"{name}.index.json"


def index_bytes(files: Mapping[str, str], total_size: int, metadata: Mapping[str, Any]) -> bytes:
    """The index of shards.

    Args:
        files: From the name of each tensor to its file.
        total_size: Bytes of all tensors, shared ones counted once.
        metadata: Further texts.
    """
    content = {"metadata": {**metadata, "total_size": total_size}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(content, indent=2, sort_keys=False, ensure_ascii=False) + "\n").encode()
