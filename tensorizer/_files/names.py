"""One text per tensor of a file, as state dicts and ``.safetensors`` call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tensorizer._format.entries import TensorType
from tensorizer._format.names import Key, Name, Path, double_name, path_of
from tensorizer._format.tree import branch
from tensorizer._load.open_file import OpenFile
from tensorizer._load.reader import file_error


def flat_name(name: Name, type: TensorType) -> str:
    """A name without the dot in front that modules give tensors of their root; the steps of a path joined by dots."""
    text = name if isinstance(name, str) else ".".join(map(str, name))
    of_root = type is not TensorType.STATE_DICT and text.startswith(".") and len(text) > 1
    return text[1:] if of_root else text


def flat_names(file: OpenFile) -> dict[str, int]:
    """The chosen entries of a file by name.

    Raises:
        FormatError: Two tensors would have one name.
    """
    found: dict[str, int] = {}
    for i in file.selection:
        name = file.names[i]
        found[name if isinstance(name, str) and name[:1] != "." else flat_name(name, file.type(i))] = i
    if len(found) < len(file.selection):
        named = [(file.names[i], flat_name(file.names[i], file.type(i))) for i in file.selection]
        raise file_error(file.source_name, double_name(named))
    return found


def state_dict_of(file: OpenFile, tensors: Sequence[torch.Tensor]) -> dict[Any, Any]:
    """The tensors of the chosen entries as a state dict: nested names as dicts, integer keys below the top as lists.

    Raises:
        FormatError: Two tensors would have one name.
    """
    names = [file.names[i] for i in file.selection]
    if all(isinstance(name, str) for name in names):
        return dict(zip(flat_names(file), tensors))
    below: dict[Key, list[tuple[Path, torch.Tensor]]] = {}  # by what the file calls what is on the top
    keys: dict[Key, Key] = {}
    for i, name, tensor in zip(file.selection, names, tensors):
        top, *path = path_of(name)
        keys[top] = flat_name(name, file.type(i)) if isinstance(name, str) else top
        below.setdefault(top, []).append((tuple(path), tensor))
    double = double_name(keys.items())
    if double is not None:
        raise file_error(file.source_name, double)
    return {keys[top]: branch(pairs) for top, pairs in below.items()}


def is_quantised_by_torchao(config: Any) -> bool:
    """Whether the configuration of a model, as the library has it or as in its file, says so."""
    quantised = (config if isinstance(config, Mapping) else getattr(config, "__dict__", {})).get("quantization_config")
    method = (
        quantised.get("quant_method") if isinstance(quantised, Mapping) else getattr(quantised, "quant_method", None)
    )
    return str(getattr(method, "value", method)) == "torchao"
