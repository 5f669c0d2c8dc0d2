"""What of a file fits a module: one decision for every way of filling one, from names, shapes and dtypes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Optional

import torch

from tensorizer._load.container import Container
from tensorizer._load.reader import known_dtype
from tensorizer._load.report import Mismatch, kind_of

__all__ = ["Fact", "Fit", "Slot", "facts_of", "fit_of", "shown", "slots_in"]


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


class Fact(NamedTuple):
    """What the index says about one tensor of the file."""

    shape: tuple[int, ...]
    dtype: Optional[torch.dtype]  # None: only the record header tells, or torch does not know it
    nbytes: int  # of the payload; a scalar without one has the shape (1,) in the index


class Fit(NamedTuple):
    """Names as they were given."""

    absent: list[str]  # of the module, and neither the file nor a tie supplies them
    unexpected: list[str]  # of the file alone
    mismatched: list[Mismatch]
    tied: dict[str, str]  # from names that the file lacks to the name of the same tensor that it has


def slots_in(modules: Mapping[str, torch.nn.Module]) -> dict[str, Slot]:
    """Every place for a tensor, by stored name."""
    found: dict[str, Slot] = {}
    for path, child in modules.items():
        for attribute, tensor in child._parameters.items():
            found[f"{path}.{attribute}"] = Slot(child, attribute, False, tensor)
        for attribute, buffer in child._buffers.items():
            found[f"{path}.{attribute}"] = Slot(child, attribute, True, buffer)
    return found


def facts_of(container: Container, stored: Mapping[str, int]) -> dict[str, Fact]:
    """What the index says about entries, by the names that the caller has for them."""
    index = container.index
    return {name: Fact(index.shape(i), known_dtype(index.dtype(i)), index.data_nbytes(i)) for name, i in stored.items()}


def shown(stored_name: str) -> str:
    """A stored name as state dicts have it: without the dot in front of tensors of the root."""
    return stored_name[1:] if stored_name.startswith(".") else stored_name


def fit_of(slots: Mapping[str, Slot], facts: Mapping[str, Fact], lacking: Iterable[str]) -> Fit:
    """Compares a module with a file.

    Args:
        slots: Places of the module by name.
        facts: Tensors of the file by the same names.
        lacking: Names of `slots` that the file is to supply and lacks.
    """
    supplied: dict[tuple[int, bool], str] = {}
    for name in facts:
        slot = slots.get(name)
        if slot is not None and slot.tensor is not None:
            supplied.setdefault((id(slot.tensor), slot.is_buffer), name)
    tied, absent = {}, []
    for name in lacking:
        slot = slots[name]
        other = supplied.get((id(slot.tensor), slot.is_buffer))
        if other is None:
            absent.append(name)
        else:
            tied[name] = other
    unexpected = [name for name in facts if name not in slots or slots[name].tensor is None]
    return Fit(absent, unexpected, list(_mismatches(slots, facts)), tied)


def _mismatches(slots: Mapping[str, Slot], facts: Mapping[str, Fact]) -> Iterable[Mismatch]:
    for name, fact in facts.items():
        target = slots[name].tensor if name in slots else None
        if target is None or torch.nn.parameter.is_lazy(target):
            continue
        if target.shape != fact.shape and not (target.dim() == 0 and fact.shape == (1,) and fact.nbytes == 0):
            yield Mismatch(shown(name), "shape", torch.Size(fact.shape), target.shape)
        elif fact.dtype not in (None, target.dtype) and kind_of(fact.dtype) != kind_of(target.dtype):
            yield Mismatch(shown(name), "kind", fact.dtype, target.dtype)
