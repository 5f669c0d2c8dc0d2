"""All tensors of an open file as a plain dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    container, selection = file._container, file._container.selection
    keys: dict[Any, Any] = {name: name for name in file}
    nested = False
    for i in selection:
        name = container.names[i]
        if not isinstance(name, str):
            nested = True
        elif name.startswith("."):
            keys[name] = flat_name(name, container.type(i))
    if len(set(keys.values())) < len(keys):
        raise FormatError(f"{container.source_name}: {double_name(keys.items())}")
    known: dict[int, torch.Tensor] = {}  # by the id of the Parameter, which `file` keeps alive
    values: Iterable[tuple[Any, Any]] = file.items() if nested else zip(keys, file._loaded.load(selection))
    return {keys[name]: _plain(value, known) for name, value in values}


def _plain(value: Any, known: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return known.setdefault(id(value), value.detach())
    if isinstance(value, Mapping):
        if value and all(isinstance(key, int) for key in value):
            return [_plain(value[key], known) for key in sorted(value)]
        return {key: _plain(inner, known) for key, inner in value.items()}
    return value
