"""Filling a model from a file by the names of its state dict, whatever wrote the file."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping
from typing import Any, Optional, Union

import torch

from tensorizer._format.dtypes import torch_dtype
from tensorizer._load.fit import Fact, Slot, fit_of, shown, slots_in
from tensorizer._load.modules import insert_into_module
from tensorizer._load.report import LoadReport
from tensorizer._system.devices import ordinary_tensors
from tensorizer.deserializer import TensorDeserializer

__all__ = ["fill_model", "report_for", "takes_state_dicts_itself"]


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
    if takes_state_dicts_itself(model):
        return _by_load_state_dict(model, file, strict, assign)
    return _ModelFill(model, file, assign, ignore_mismatched_sizes).run(strict)


def report_for(model: torch.nn.Module, file: TensorDeserializer) -> LoadReport:
    """What a file has and lacks for a model, by name and shape; nothing is read but the index."""
    return _ModelFill(model, file, True, False).report()


def takes_state_dicts_itself(model: torch.nn.Module) -> bool:
    """Whether a module does more with a state dict than put tensors in their places."""
    plain = torch.nn.Module
    for module in model.modules():
        kind = type(module)
        own = kind._load_from_state_dict is not plain._load_from_state_dict
        batch_norm = isinstance(module, torch.nn.modules.batchnorm._NormBase)  # only fills in what old files lack
        extra = kind.get_extra_state is not plain.get_extra_state
        hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks
        if (own and not batch_norm) or extra or hooks:
            return True
    return False


def _by_load_state_dict(
    model: torch.nn.Module, file: TensorDeserializer, strict: bool, assign: Union[bool, str]
) -> LoadReport:
    """For modules with a way of their own: everything is read, and the module decides."""
    begin = time.perf_counter()
    tensors = {shown(str(name)): tensor.detach() for name, tensor in file.items()}
    replaces = any(t.is_meta for t in model.state_dict().values() if isinstance(t, torch.Tensor))
    report = LoadReport(module=type(model).__name__, source=file._container.source_name)
    try:
        result = model.load_state_dict(tensors, strict=False, assign=replaces if assign == "auto" else bool(assign))
    except RuntimeError as error:
        from tensorizer.errors import LoadError

        raise LoadError(str(error)) from None
    report = dataclasses.replace(
        report,
        loaded=tuple(name for name in tensors if name not in result.unexpected_keys),
        nbytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        seconds=time.perf_counter() - begin,
        missing=tuple(result.missing_keys),
        unexpected=tuple(result.unexpected_keys),
    )
    if strict and not report.ok:
        raise report.error((), strict=True)
    return report


class _ModelFill:
    """One load into a model."""

    def __init__(
        self, model: torch.nn.Module, file: TensorDeserializer, assign: Union[bool, str], ignore_sizes: bool
    ) -> None:
        self._model, self._file, self._assign, self._ignore_sizes = model, file, assign, ignore_sizes
        self._modules = dict(model.named_modules())
        self._slots: dict[str, Slot] = {
            shown(name): slot for name, slot in slots_in(self._modules).items() if slot.tensor is not None
        }
        self._stored: dict[str, Any] = {shown(str(name)): name for name in file}  # what the file calls each name
        self._groups = self._tied_names()
        self._facts = {shown(str(entry.name)): entry for entry in file.entries()}
        for alias, kept in file.ties.items():
            if shown(str(kept)) in self._facts:  # a filter may have left out both
                self._facts.setdefault(shown(str(alias)), self._facts[shown(str(kept))])

    def run(self, strict: bool) -> LoadReport:
        begin = time.perf_counter()
        report = self.report()
        refused = [] if self._ignore_sizes else list(report.mismatched)
        if refused or (strict and (report.missing or report.unexpected)):
            raise report.error(refused, strict)
        skipped = {row.name for row in report.mismatched}
        self._read_together({name for name in report.loaded if name not in skipped})
        tensors: dict[str, torch.Tensor] = {}
        for group in self._groups.values():
            conflict = self._read_group([name for name in group if name not in skipped], tensors)
            if conflict:
                report = dataclasses.replace(report, conflicting=(*report.conflicting, *conflict))
        if strict and report.conflicting:
            raise report.error((), strict=True)
        self._place(tensors)
        return dataclasses.replace(report, seconds=time.perf_counter() - begin)

    def _tied_names(self) -> dict[int, list[str]]:
        """Names of the model by the tensor they stand for."""
        groups: dict[int, list[str]] = {}
        for name, slot in self._slots.items():
            groups.setdefault(id(slot.tensor), []).append(name)
        return groups

    def report(self) -> LoadReport:
        facts = {name: Fact(tuple(self._facts[name].shape), self._dtype_of(name)) for name in self._stored}
        fit = fit_of(self._slots, facts, [name for name in self._slots if name not in self._stored])
        loaded = [name for name in self._stored if name in self._slots]
        return LoadReport(
            module=type(self._model).__name__,
            source=self._file._container.source_name,
            loaded=tuple(loaded),
            nbytes=sum(self._facts[name].deserialized_length for name in loaded),
            missing=tuple(name for name in fit.absent if self._slots[name].in_state_dict),
            unexpected=tuple(fit.unexpected),
            mismatched=tuple(row for row in fit.mismatched if row.what == "shape" or not self._is_meta(row.name)),
            tied=fit.tied,
        )

    def _dtype_of(self, name: str) -> Optional[torch.dtype]:
        """Of a tensor that the model has a place for; this torch need not know the others."""
        return torch_dtype(self._facts[name].dtype) if name in self._slots else None

    def _is_meta(self, name: str) -> bool:
        """Of a place on the meta device nothing is kept, so that its kind does not matter."""
        tensor = self._slots[name].tensor
        return tensor is not None and tensor.is_meta

    def _read_together(self, names: Collection[str]) -> None:
        """Reads in one go what is asked for name by name afterwards."""
        container = self._file._container
        wanted = [i for i in container.selection if shown(str(container.names[i])) in names]
        self._file._loaded.load(wanted)

    def _read_group(self, names: list[str], into: dict[str, torch.Tensor]) -> list[str]:
        """Reads what the names of one tensor of the model share; returns names whose contents differ."""
        supplied = [name for name in names if name in self._stored]
        if not supplied:
            return []
        first = self._file[self._stored[supplied[0]]]
        into[supplied[0]] = first
        conflicting = []
        for name in supplied[1:]:
            other = self._file[self._stored[name]]
            if other is not first and not _same_bits(first, other):
                conflicting.append(name)
        return conflicting

    def _place(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for group in self._groups.values():
            source = next((tensors[name] for name in group if name in tensors), None)
            if source is None:
                continue
            target = self._slots[group[0]].tensor
            assert target is not None
            if self._assign is True or (self._assign == "auto" and target.is_meta):
                replacement = _in_place_of(target, source)
                for name in group:
                    slot = self._slots[name]
                    stored_name = name if "." in name else f".{name}"
                    insert_into_module(self._modules, stored_name, slot.is_buffer, replacement)
            else:
                with torch.no_grad():
                    target.copy_(source)


def _in_place_of(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    wanted = target.requires_grad and (source.is_floating_point() or source.is_complex())
    with ordinary_tensors():
        return torch.nn.Parameter(source.detach(), requires_grad=wanted)


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    a, b = x.detach(), y.detach()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8).to(a.device))


def device_of_names(model: torch.nn.Module, device: Optional[Any]) -> Any:
    """Where each tensor of a file goes: where the model has it; to the CPU what the model has on meta or not at all."""
    if device is not None:
        return device
    places = {
        shown(name): torch.device("cpu") if slot.tensor is None or slot.tensor.is_meta else slot.tensor.device
        for name, slot in slots_in(dict(model.named_modules())).items()
    }
    return lambda name: places.get(shown(str(name)), torch.device("cpu"))
