"""State dicts in memory as something to write."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Optional

import torch

from tensorizer._files.contents import StateDictContents
from tensorizer._format.extra_state import state_name
from tensorizer._format.names import modules_of
from tensorizer._format.payloads import stored_dtype
from tensorizer._load.fit import shown, slots_in
from tensorizer._save.ties import is_unicode, place_of

__all__ = ["check_state_dict", "contents_of", "is_of_modules", "not_storable", "state_of"]


def state_of(model: torch.nn.Module, include_non_persistent_buffers: bool = False) -> dict[str, Any]:
    """The state dict of a model, without extra states that are ``None``."""
    slots = slots_in(modules_of(model)) if include_non_persistent_buffers else {}
    hidden = {shown(name): slot.tensor for name, slot in slots.items() if slot.is_buffer and slot.tensor is not None}
    return {**hidden, **{name: value for name, value in model.state_dict().items() if value is not None}}


def is_of_modules(model: torch.nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether a state dict is what the modules hold, and not something that a class or hook has made of it."""
    modules = modules_of(model)
    slots = {shown(name): slot for name, slot in slots_in(modules).items()}
    held = {name: slot.tensor for name, slot in slots.items() if slot.tensor is not None}
    persistent = {name for name, slot in slots.items() if slot.in_state_dict}
    extra = {state_name(path) for path in modules}
    tensors = {name: value for name, value in state.items() if name not in extra}
    return persistent <= tensors.keys() <= held.keys() and all(
        isinstance(value, torch.Tensor) and place_of(value) == place_of(held[name]) for name, value in tensors.items()
    )


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
    refused = not_storable(tensors)
    if refused:
        raise ValueError("; ".join(refused))
    return tensors


def not_storable(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """What is wrong with those that no file can hold."""
    refused = []
    for name, tensor in tensors.items():
        try:
            stored_dtype(name, tensor)
        except (NotImplementedError, ValueError) as error:
            text = str(error)
            refused.append(text if repr(name) in text else f"tensor {name!r}: {text}")
            continue
        if tensor.is_meta:
            refused.append(f"tensor {name!r} is on the meta device and has no data")
    return refused


def contents_of(tensors: Mapping[str, torch.Tensor], metadata: Optional[Mapping[str, str]]) -> StateDictContents:
    """What to write; one warning names tensors that overlap without being the same."""
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f"metadata: wanted texts, found {key!r}: {value!r}")
        if not (is_unicode(key) and is_unicode(value)):
            raise ValueError(f"metadata: {ascii(key)[:100]}: text that is no Unicode cannot be stored")
    contents = StateDictContents("a state dict", tensors)
    contents.metadata = None if metadata is None else dict(metadata)
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
        tensor = tensor.detach()  # some wrappers give the tensor that they stand for
        address = 0 if tensor.numel() == 0 else tensor.untyped_storage().data_ptr()
        if address == 0:
            continue
        begin = int(tensor.storage_offset()) * tensor.element_size()
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) * tensor.element_size()
        areas.setdefault((tensor.device, address), []).append((begin, begin + int(last) + tensor.element_size(), name))
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
