"""State dicts in memory as something to write."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Optional

import torch

from tensorizer._files.contents import StateDictContents
from tensorizer._format.payloads import stored_dtype

__all__ = ["check_state_dict", "contents_of"]


def check_state_dict(tensors: Any) -> Mapping[str, torch.Tensor]:
    """The mapping itself.

    Raises:
        ValueError: No mapping of names to tensors, or tensors that no file can hold (sparse, quantised), by name.
    """
    if not isinstance(tensors, Mapping):
        raise ValueError(f"tensors: wanted a mapping of names to tensors, found {type(tensors).__name__}")
    wrong = [
        f"{name!r} ({type(tensor).__name__})"
        for name, tensor in tensors.items()
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor)
    ]
    if wrong:
        raise ValueError(f"tensors: wanted names and tensors, found {', '.join(wrong)}")
    refused = []
    for name, tensor in tensors.items():
        try:
            stored_dtype(name, tensor)
        except NotImplementedError as error:
            refused.append(str(error))
        if tensor.is_meta:
            refused.append(f"tensor {name!r} is on the meta device and has no data")
    if refused:
        raise ValueError("; ".join(refused))
    return tensors


def contents_of(tensors: Mapping[str, torch.Tensor], metadata: Optional[Mapping[str, str]]) -> StateDictContents:
    """What to write; one warning names tensors that overlap without being the same."""
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f"metadata: wanted texts, found {key!r}: {value!r}")
    contents = StateDictContents("a state dict", tensors)
    contents.metadata = dict(metadata or {})
    overlapping = _overlapping({name: tensor for name, tensor in tensors.items() if name not in contents.ties})
    if overlapping:
        warnings.warn(
            f"tensors that share parts of their memory are stored apart, and will share none when loaded: "
            f"{', '.join(overlapping)}",
            stacklevel=3,
        )
    return contents


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors whose areas of one storage overlap, in the order of their addresses."""
    areas: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        begin = int(tensor.storage_offset()) * tensor.element_size()
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) * tensor.element_size()
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        areas.setdefault(storage, []).append((begin, begin + int(last) + tensor.element_size(), name))
    found: list[str] = []
    for runs in areas.values():
        runs.sort()
        end, owner = -1, ""
        for begin, stop, name in runs:
            if begin < end:
                found += [repr(other) for other in (owner, name) if repr(other) not in found]
            if stop > end:
                end, owner = stop, name
    return found
