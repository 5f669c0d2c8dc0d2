"""What of a file fits a module: one view of the module, one decision for every way of filling it.

Both are made from names, shapes and dtypes alone, before a payload is read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Optional

import torch
from torch.nn.parameter import is_lazy

from tensorizer._format.dtypes import known_dtype
from tensorizer._format.entries import TensorType
from tensorizer._format.extra_state import is_without_state, modules_of, saved_beside, state_name, takes_state
from tensorizer._format.payloads import has_own_data
from tensorizer._load.open_file import OpenFile
from tensorizer._load.report import LoadReport, Misfit, kind_of


class Slot(NamedTuple):
    """A place of a module where a tensor belongs, or may belong."""

    module: torch.nn.Module
    attribute: str
    is_buffer: bool
    tensor: Optional[torch.Tensor]  # what is there now; None: registered, but without a tensor

    @property
    def in_state_dict(self) -> bool:
        """Whether ``state_dict`` has it: not without a tensor, not as a non-persistent buffer."""
        hidden = self.is_buffer and self.attribute in self.module._non_persistent_buffers_set
        return self.tensor is not None and not hidden

    @property
    def counts_batches(self) -> bool:
        """Whether a batch norm does without it: its files have a count of batches since torch 0.4.1."""
        return self.attribute == "num_batches_tracked" and isinstance(self.module, torch.nn.modules.batchnorm._NormBase)


class ModuleView:
    """What a module has for a file to fill, found once.

    Attributes:
        module: The module.
        modules: All modules in it by path, under each path that ``state_dict`` goes through.
        slots: The places for tensors, by the names of state dicts; those that state dicts leave out, too.
        extra_state_modules: The modules that take extra state, by its name.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.modules = modules_of(module)
        self.slots: dict[str, Slot] = {}
        for path, child in self.modules.items():
            prefix = f"{path}." if path else ""
            for is_buffer, registered in ((False, child._parameters), (True, child._buffers)):
                for name, tensor in registered.items():
                    self.slots[prefix + name] = Slot(child, name, is_buffer, tensor)
        self.extra_state_modules = {state_name(path): m for path, m in self.modules.items() if takes_state(m)}

    @functools.cached_property
    def groups(self) -> list[list[str]]:
        """Names that stand for one tensor together, in the order of the first of each."""
        return names_by_tensor({name: slot.tensor for name, slot in self.slots.items() if slot.tensor is not None})

    @functools.cached_property
    def loads_itself(self) -> bool:
        """Whether its class has a ``load_state_dict`` of its own."""
        if not isinstance(self.module, torch.nn.Module):  # it answers as much as a load needs
            return False
        return getattr(self.module.load_state_dict, "__func__", None) is not torch.nn.Module.load_state_dict

    @functools.cached_property
    def _changing(self) -> tuple[str, ...]:
        """Beginnings of the names that modules may rename, or give other shapes."""
        # Of BatchNorm it is known what it does: see Slot.counts_batches.
        known = (torch.nn.Module._load_from_state_dict, torch.nn.modules.batchnorm._NormBase._load_from_state_dict)
        return tuple(
            f"{path}." if path else ""
            for path, module in self.modules.items()
            if type(module)._load_from_state_dict not in known or module._load_state_dict_pre_hooks
        )

    @functools.cached_property
    def _has_hooks(self) -> bool:
        """Whether some module may change what was found missing, when all is loaded."""
        return any(module._load_state_dict_post_hooks for module in self.modules.values())

    @property
    def changes_state_dict(self) -> bool:
        """Whether modules may rename or change what is in a state dict."""
        return self.loads_itself or bool(self._changing) or self._has_hooks

    @property
    def takes_state_dict(self) -> bool:
        """Whether modules do more with a state dict than put tensors in their places, which names do not tell."""
        return self.changes_state_dict or bool(self.extra_state_modules)

    @property
    def assigns(self) -> bool:
        """Whether its ``load_state_dict`` can replace tensors, which one of its own class may not."""
        if not self.loads_itself:
            return True
        parameters = inspect.signature(self.module.load_state_dict).parameters
        return "assign" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def may_change(self, name: str) -> bool:
        """Whether a tensor of that name may be renamed, or may get another shape."""
        return self.loads_itself or name.startswith(self._changing)

    def may_lack(self, name: str) -> bool:
        """Whether a difference in that name may be none in the end."""
        slot = self.slots.get(name)
        known = slot is not None and slot.tensor is not None and slot.counts_batches
        return known or self._has_hooks or self.may_change(name)

    def device_of(self, stored_name: Any) -> torch.device:
        """Where a tensor of a file goes: where the module has it; to the CPU what it has on meta or not at all."""
        slot = self.slots.get(shown(str(stored_name)))
        there = None if slot is None else slot.tensor
        return torch.device("cpu") if there is None or there.is_meta else there.device

    def states_stored(self, file: OpenFile, stored: Mapping[str, int], by_modules: bool) -> list[str]:
        """Extra states that are tensors of the file. In one that lists what modules hold, such a name is another's."""
        there = [name for name in self.extra_state_modules if name in stored]
        return [name for name in there if not by_modules or file.type(stored[name]) is TensorType.STATE_DICT]

    def states_given(self, *supplied: Collection[str]) -> dict[str, str]:
        """From the names of extra states to those that a file has for their modules, which may have several names."""
        there = [name for name in self.extra_state_modules if any(name in names for names in supplied)]
        first = {id(self.extra_state_modules[name]): name for name in reversed(there)}
        return {n: n if n in there else first[id(m)] for n, m in self.extra_state_modules.items() if id(m) in first}


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, of which each rank holds a part."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def unfit_in_place(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Why a tensor cannot be written over with one of this dtype and shape; nothing where it can."""
    if is_dtensor(tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return f"expected a plain tensor, got a {type(tensor).__name__} of layout {tensor.layout}"
    if tuple(tensor.shape) != shape:
        return f"expected shape {list(shape)}, got {list(tensor.shape)}"
    if tensor.dtype != dtype:
        return f"expected {dtype}, got {tensor.dtype}"
    if tensor.is_meta:
        return "expected a tensor with data, got one on the meta device"
    if not has_own_data(tensor):
        return "expected a tensor with memory of its own"
    if tensor.numel() and any(step == 0 and n > 1 for step, n in zip(tensor.stride(), shape)):
        return "it is expanded: several of its elements are in one place; clone() it before"
    return ""


def names_by_tensor(values: Mapping[str, Any]) -> list[list[str]]:
    """Names that stand for one tensor together, in the order of the first of each; of other values each for itself."""
    groups: dict[object, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(id(value) if isinstance(value, torch.Tensor) else name, []).append(name)
    return list(groups.values())


def shown(stored_name: str) -> str:
    """A stored name as state dicts have it: without the dot in front of tensors of the root."""
    return stored_name.removeprefix(".")


def decide(
    view: ModuleView,
    file: OpenFile,
    stored: Mapping[str, int],
    states: Mapping[str, Any],
    *,
    by_modules: bool = False,
    expects: Optional[Callable[[str], bool]] = None,
    may_lack: Optional[Callable[[str], bool]] = None,
    refuses: Optional[Callable[[Misfit], bool]] = None,
    replaces: Optional[Callable[[torch.Tensor], bool]] = None,
) -> LoadReport:
    """Which tensors of a file go into a module, and what does not fit. Reads no payload, changes nothing.

    Args:
        view: The module.
        file: The file.
        stored: Entries of the file by the names that state dicts have for them.
        states: Extra states that the file holds apart from its tensors, by name.
        by_modules: The file lists what modules hold, and not a state dict: tensors that have no place in the module, or
            one of another shape, are loaded all the same, and an extra state is never ``None``. Where the file was
            written from a state dict, it is unknown whether what the module lacks was a parameter or a buffer, so that
            is not loaded.
        expects: Whether the file should have a name that it lacks; ``None``: each.
        may_lack: Names that are no difference, on whichever side they are missing; ``None``: none.
        refuses: Which differences of shape and kind count; ``None``: all.
        replaces: Whether a tensor of the module is replaced, and not copied into; ``None``: all are.
    """
    index, slots = file.index, view.slots
    stored_states = view.states_stored(file, stored, by_modules)
    dtypes = {name: known_dtype(index.dtype(i)) for name, i in stored.items()}
    converted = {dtype for dtype in set(dtypes.values()) if file.casts(dtype)}
    supplied: dict[tuple[int, bool], str] = {}
    loaded, cast, unexpected, mismatched = [], [], [], []
    for name, i in stored.items():
        slot, dtype = slots.get(name), dtypes[name]
        target = None if slot is None else slot.tensor
        if slot is None or target is None:
            if name in stored_states:
                continue
            unexpected.append(name)
            if not by_modules or file.type(i) is TensorType.STATE_DICT:
                continue
        else:
            supplied.setdefault((id(target), slot.is_buffer), name)
            if not is_lazy(target) and (target.shape != index.shape(i) or dtype is not target.dtype):
                row = _misfit(name, target, file, i, dtype)
                if row is not None and (refuses is None or refuses(row)):
                    mismatched.append(row)
                    if not by_modules:
                        continue
                copied = dtype not in (None, target.dtype) and replaces is not None and not replaces(target)
                if copied and dtype not in converted:
                    cast.append(name)
        loaded.append(name)
        if dtype in converted:
            cast.append(name)
    tied, missing = {}, []
    for name, slot in slots.items():
        if slot.tensor is None or name in stored or (expects is not None and not expects(name)):
            continue
        other = supplied.get((id(slot.tensor), slot.is_buffer))
        if other is not None:
            # Of a module that is there twice, the file lists one path: what lies under the other one is loaded with it.
            kept = slots[other]
            if not by_modules or kept.module is not slot.module or kept.attribute != slot.attribute:
                tied[name] = other
        elif slot.in_state_dict:
            missing.append(name)
    given = view.states_given(states, stored_states)
    for name, module in view.extra_state_modules.items():
        if name not in given and (expects is None or expects(name)) and (by_modules or not is_without_state(module)):
            missing.append(name)
    if by_modules:
        beside = saved_beside(view.module)
        missing += [name for name in beside if name not in stored and (expects is None or expects(name))]
    unexpected += [name for name in states if name not in view.extra_state_modules]
    return LoadReport(
        module=type(view.module).__name__,
        source=file.source_name,
        loaded=tuple(loaded),
        nbytes=sum(map(index.loaded_nbytes, map(stored.__getitem__, loaded))),
        missing=tuple(name for name in missing if may_lack is None or not may_lack(name)),
        unexpected=tuple(name for name in unexpected if may_lack is None or not may_lack(name)),
        mismatched=tuple(mismatched),
        cast=tuple(cast),
        tied=tied,
    )


def _misfit(name: str, target: torch.Tensor, file: OpenFile, i: int, dtype: Optional[torch.dtype]) -> Optional[Misfit]:
    """How a tensor of the file differs from that of the module; ``None`` where it can take its place."""
    shape = file.index.shape(i)
    if target.shape != shape and not (target.dim() == 0 and file.may_be_scalar(i)):
        return Misfit(name, "shape", torch.Size(shape), target.shape)
    if dtype not in (None, target.dtype) and kind_of(dtype) != kind_of(target.dtype):
        return Misfit(name, "kind", dtype, target.dtype)
    return None
