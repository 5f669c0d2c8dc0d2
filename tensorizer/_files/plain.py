"""All tensors of an open file as a plain dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tensorizer._files.names import double_name, flat_name
from tensorizer.deserializer import TensorDeserializer
from tensorizer.errors import FormatError

__all__ = ["plain_tensors"]


def plain_tensors(file: TensorDeserializer) -> dict[str, Any]:
    """What :func:`tensorizer.torch.load_file` returns: names that stand for one tensor get one object.

    Raises:
        FormatError: Two tensors would have one name.
    """
    container = file._container
    keys: dict[Any, Any] = {name: name for name in file}
    for i in container.selection:
        name = container.names[i]
        if isinstance(name, str):
            keys[name] = flat_name(name, container.type(i))
    double = double_name(keys.items())
    if double is not None:
        raise FormatError(f"{container.source_name}: {double}")
    known: dict[int, torch.Tensor] = {}  # by the id of the Parameter, which `file` keeps alive
    return {keys[name]: _plain(value, known) for name, value in file.items()}


def _plain(value: Any, known: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return known.setdefault(id(value), value.detach())
    if isinstance(value, Mapping):
        if value and all(isinstance(key, int) for key in value):
            return [_plain(value[key], known) for key in sorted(value)]
        return {key: _plain(inner, known) for key, inner in value.items()}
    return value
