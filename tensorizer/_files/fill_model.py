"""Filling a model from a file by the names of its state dict, whatever wrote the file."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch

from tensorizer._files.names import flat_names
from tensorizer._format.extra_state import is_without_state, state_name, takes_state
from tensorizer._format.names import modules_of
from tensorizer._load.fit import Slot, facts_of, fit_of, shown, slots_in
from tensorizer._load.modules import differing, insert_into_module
from tensorizer._load.report import LoadReport, Mismatch
from tensorizer._system.devices import ordinary_tensors
from tensorizer.deserializer import TensorDeserializer
from tensorizer.errors import LoadError

__all__ = ["ModelFill", "device_of_names", "fill_model"]


def fill_model(
    model: torch.nn.Module,
    file: TensorDeserializer,
    strict: bool,
    assign: Union[bool, str],
    ignore_mismatched_sizes: bool,
) -> LoadReport:
    """Decides from the index what fits, refuses what does not, then reads and places.

    Raises:
        LoadError: What :func:`tensorizer.torch.load_model` documents.
    """
    return ModelFill(model, file, assign, ignore_mismatched_sizes).run(strict)


class _Ways(NamedTuple):
    """What modules do with a state dict in ways of their own, so that names and shapes do not tell what fits."""

    whole: bool  # the class has a load_state_dict of its own
    below: tuple[str, ...]  # beginnings of the names that modules may rename, or give other shapes
    hooks: bool  # some may change what was found missing, when all is loaded

    @classmethod
    def of(cls, model: torch.nn.Module, modules: Mapping[str, torch.nn.Module]) -> _Ways:
        plain = torch.nn.Module
        # Of BatchNorm it is known what it does: see _is_filled_in.
        known = (plain._load_from_state_dict, torch.nn.modules.batchnorm._NormBase._load_from_state_dict)
        changed = [
            path
            for path, module in modules.items()
            if type(module)._load_from_state_dict not in known or module._load_state_dict_pre_hooks
        ]
        hooks = any(module._load_state_dict_post_hooks for module in modules.values())
        whole = getattr(model.load_state_dict, "__func__", None) is not plain.load_state_dict
        return cls(whole, tuple(f"{path}." if path else "" for path in changed), hooks)

    @property
    def are_own(self) -> bool:
        return self.whole or bool(self.below) or self.hooks

    def may_change(self, name: str) -> bool:
        """Whether a tensor of that name may be renamed, or may get another shape."""
        return self.whole or name.startswith(self.below)

    def may_lack(self, name: str) -> bool:
        """Whether a difference in that name may be none in the end."""
        return self.hooks or self.may_change(name)


def _receivers(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """The modules that take extra state, by what state dicts call it."""
    return {state_name(path): module for path, module in modules.items() if takes_state(module)}


class ModelFill:
    """One load into a model: what fits is decided when it is made, from index and model alone.

    Attributes:
        report: What the file has and lacks for the model; complete after :meth:`run`.
        slots: The places of the model that hold a tensor, by state-dict name.
        facts: What the index says about the tensors of the file, by the same names.
        takes_itself: Whether modules do more with a state dict than put tensors in their places.
    """

    def __init__(
        self, model: torch.nn.Module, file: TensorDeserializer, assign: Union[bool, str], ignore_sizes: bool
    ) -> None:
        self._model, self._file, self._assign, self._ignore_sizes = model, file, assign, ignore_sizes
        self._container = file._container
        self._modules = modules_of(model)
        self._ways = _Ways.of(model, self._modules)
        self.slots: dict[str, Slot] = {
            shown(name): slot for name, slot in slots_in(self._modules).items() if slot.tensor is not None
        }
        self._stored = flat_names(self._container)
        self.facts = facts_of(self._container, self._stored)
        self._receivers = _receivers(self._modules)
        self._states = {state_name(path): state for path, state in self._container.extra_states().items()}
        self._same_states = self._states_under_other_names()
        absent = self._receivers.keys() - self._stored.keys() - self._states.keys() - self._same_states.keys()
        # As with the state dict of such a model: its None is handed back.
        none = [name for name in self._receivers if name in absent and is_without_state(self._receivers[name])]
        self._given_states = {**dict.fromkeys(none), **self._states}
        self._groups = self._tied_names()
        self.takes_itself = self._ways.are_own or bool(self._receivers)
        if self.takes_itself and any(self._is_replaced(s.tensor) for s in self.slots.values() if s.in_state_dict):
            self._assign = True  # load_state_dict replaces all or none
        self.report = self._decide()

    def run(self, strict: bool) -> LoadReport:
        begin = time.perf_counter()
        report = self.report
        refused = [] if self._ignore_sizes else list(report.mismatched)
        if refused or (strict and (report.missing or report.unexpected)):
            raise report.error(refused, strict)
        skipped = {row.name for row in report.mismatched}
        wanted = self._stored.keys() if self.takes_itself else self.slots.keys()
        chosen = {name: i for name, i in self._stored.items() if name in wanted and name not in skipped}
        tensors = dict(zip(chosen, self._file._loaded.load(list(chosen.values()))))
        groups = [group for group in self._groups.values() if len(group) > 1]
        conflicting = [name for group in groups for name in differing(group, tensors)]
        report = dataclasses.replace(report, conflicting=tuple(conflicting))
        if strict and conflicting:
            raise report.error((), strict=True)
        if self.takes_itself:
            report = self._give(tensors, report, strict)
        else:
            self._place(tensors, self._groups.values())
        self.report = dataclasses.replace(report, seconds=time.perf_counter() - begin)
        return self.report

    def _states_under_other_names(self) -> dict[str, str]:
        """Names of extra state that the file has under another name of the module, to that one."""
        first = {id(m): name for name, m in self._receivers.items() if name in self._states or name in self._stored}
        return {
            name: first[id(module)]
            for name, module in self._receivers.items()
            if id(module) in first and name not in self._states and name not in self._stored
        }

    def _tied_names(self) -> dict[int, list[str]]:
        """Names of the model by the tensor they stand for."""
        groups: dict[int, list[str]] = {}
        for name, slot in self.slots.items():
            groups.setdefault(id(slot.tensor), []).append(name)
        return groups

    def _decide(self) -> LoadReport:
        """What is known before anything is read."""
        container, ways = self._container, self._ways
        facts = {name: fact for name, fact in self.facts.items() if name not in self._receivers}
        fit = fit_of(self.slots, facts, [name for name in self.slots if name not in self._stored])
        left = {row.name for row in fit.mismatched if self._matters(row)}
        loaded = [name for name in self._stored if name in self.slots and name not in left]
        absent = [name for name in fit.absent if self.slots[name].in_state_dict and not self._is_filled_in(name)]
        given = self._given_states.keys() | self._same_states.keys()
        absent += [name for name in self._receivers if name not in self._stored and name not in given]
        unexpected = [*fit.unexpected, *(name for name in self._states if name not in self._receivers)]
        return LoadReport(
            module=type(self._model).__name__,
            source=container.source_name,
            loaded=tuple(loaded),
            nbytes=sum(map(container.index.loaded_nbytes, map(self._stored.__getitem__, loaded))),
            missing=tuple(name for name in absent if not ways.may_lack(name)),
            unexpected=tuple(name for name in unexpected if not ways.may_lack(name)),
            mismatched=tuple(row for row in fit.mismatched if self._matters(row)),
            cast=tuple(self._cast(loaded)),
            tied=fit.tied,
        )

    def _matters(self, row: Mismatch) -> bool:
        """Of a place on the meta device nothing is kept, so that its kind does not matter."""
        if self._ways.may_change(row.name) and not self._ignore_sizes:
            return False
        target = self.slots[row.name].tensor
        return row.what == "shape" or (target is not None and not target.is_meta)

    def _is_filled_in(self, name: str) -> bool:
        """Whether a batch norm does without: its files have a count of batches since torch 0.4.1."""
        slot = self.slots[name]
        return slot.attribute == "num_batches_tracked" and isinstance(slot.module, torch.nn.modules.batchnorm._NormBase)

    def _cast(self, loaded: Sequence[str]) -> list[str]:
        """Names whose tensors are converted: while they are read, or when they are copied into those of the model."""
        stored = {fact.dtype for fact in self.facts.values()}
        converted = {dtype for dtype in stored if self._container.converts_dtype(dtype)}
        found = []
        for name in loaded:
            dtype, target = self.facts[name].dtype, self.slots[name].tensor
            differs = target is not None and dtype not in (None, target.dtype)
            if dtype in converted or (differs and not self._is_replaced(target)):
                found.append(name)
        return found

    def _is_replaced(self, target: Optional[torch.Tensor]) -> bool:
        return target is not None and (self._assign is True or (self._assign == "auto" and target.is_meta))

    def _place(self, tensors: Mapping[str, torch.Tensor], groups: Iterable[list[str]]) -> None:
        for group in groups:
            target = self.slots[group[0]].tensor
            assert target is not None
            found = [tensors[name] for name in group if name in tensors] if len(group) > 1 else [tensors.get(group[0])]
            source = found[0] if found else None
            if source is None and self._is_replaced(target) and target.is_meta and self._is_filled_in(group[0]):
                with ordinary_tensors():
                    source = torch.zeros((), dtype=target.dtype, device=self._container.device_of(group[0]))
            if source is None:
                continue
            if self._is_replaced(target):
                replacement = _in_place_of(target, source)
                for name in group:
                    slot = self.slots[name]
                    stored_name = name if "." in name else f".{name}"
                    insert_into_module(self._modules, stored_name, slot.is_buffer, replacement)
            else:
                with torch.no_grad():
                    target.copy_(source)

    def _give(self, tensors: Mapping[str, torch.Tensor], report: LoadReport, strict: bool) -> LoadReport:
        """Hands a state dict to the model, which decides what becomes of it."""
        assign = self._assign is True
        # Buffers that state dicts leave out are no business of load_state_dict.
        hidden = {n: t for n, t in tensors.items() if n in self.slots and not self.slots[n].in_state_dict}
        state: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items() if name not in hidden}
        state.update(self._given_states)
        state.update({name: state[other] for name, other in self._same_states.items()})
        left = {row.name for row in report.mismatched}
        for group in self._groups.values():
            target = self.slots[group[0]].tensor
            first = next((tensors[name] for name in group if name in tensors), None)
            if first is None or target is None:
                continue
            # One object under all names, so that what is assigned stays tied.
            given = _in_place_of(target, first) if assign and isinstance(target, torch.nn.Parameter) else first.detach()
            state.update({name: given for name in group if self.slots[name].in_state_dict and name not in left})
        options: dict[str, Any] = {"assign": True} if assign else {}
        try:
            # A method of another class may answer nothing: then it has to be the judge.
            result = self._model.load_state_dict(state, strict=strict and self._ways.whole, **options)
        except RuntimeError as error:
            refusal = LoadError(str(error))
            refusal.report, refusal.source = report, report.source
            raise refusal from None
        self._place(hidden, [group for group in self._groups.values() if not hidden.keys().isdisjoint(group)])
        unexpected = tuple(getattr(result, "unexpected_keys", ()))
        loaded = tuple(name for name in tensors if name not in unexpected)
        report = dataclasses.replace(
            report,
            loaded=loaded,
            nbytes=sum(self._container.index.loaded_nbytes(self._stored[name]) for name in loaded),
            missing=tuple(name for name in getattr(result, "missing_keys", ()) if name not in left),
            unexpected=unexpected,
        )
        if strict and (report.missing or report.unexpected):
            raise report.error((), strict=True)
        return report


def _in_place_of(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    wanted = target.requires_grad and (source.is_floating_point() or source.is_complex())
    with ordinary_tensors():
        return torch.nn.Parameter(source.detach(), requires_grad=wanted)


def device_of_names(model: torch.nn.Module, device: Optional[Any]) -> Any:
    """Where each tensor of a file goes: where the model has it; to the CPU what the model has on meta or not at all."""
    if device is not None:
        return device
    places = {
        shown(name): torch.device("cpu") if slot.tensor is None or slot.tensor.is_meta else slot.tensor.device
        for name, slot in slots_in(modules_of(model)).items()
    }
    return lambda name: places.get(shown(str(name)), torch.device("cpu"))
