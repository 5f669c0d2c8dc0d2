"""All tensors of an open file as a plain dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tensorizer.deserializer import TensorDeserializer

__all__ = ["plain_tensors"]


def plain_tensors(file: TensorDeserializer) -> dict[str, Any]:
    """What :func:`tensorizer.torch.load_file` returns: names that stand for one tensor get one object."""
    known: dict[int, torch.Tensor] = {}  # by the id of the Parameter, which `file` keeps alive
    return {_without_dot(name): _plain(value, known) for name, value in file.items()}


def _without_dot(name: Any) -> Any:
    return name[1:] if isinstance(name, str) and name.startswith(".") and len(name) > 1 else name


def _plain(value: Any, known: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return known.setdefault(id(value), value.detach())
    if isinstance(value, Mapping):
        if value and all(isinstance(key, int) for key in value):
            return [_plain(value[key], known) for key in sorted(value)]
        return {key: _plain(inner, known) for key, inner in value.items()}
    return value
