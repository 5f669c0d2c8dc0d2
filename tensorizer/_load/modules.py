"""Placing tensors into a module."""

from __future__ import annotations

import dataclasses
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Optional

import torch

from tensorizer._format.entries import FilterFuncType, TensorType
from tensorizer._format.extra_state import state_name, takes_state
from tensorizer._format.names import modules_of
from tensorizer._format.payloads import same_bits
from tensorizer._load.container import Container
from tensorizer._load.fit import facts_of, fit_of, shown, slots_in
from tensorizer._load.loaded_tensors import LoadedTensors
from tensorizer._load.report import LoadReport, Mismatch
from tensorizer._system.devices import ordinary_tensors

__all__ = ["ModuleLoad", "differing", "insert_into_module", "live_tensors"]

logger = logging.getLogger("tensorizer.serialization")


class ModuleLoad:
    """One load into a module: decided as a whole, then read, then placed."""

    def __init__(
        self, container: Container, module: torch.nn.Module, filter_func: Optional[FilterFuncType], strict: bool
    ) -> None:
        self._container, self._strict = container, strict
        # Strict loads are narrowed on both sides: what the filter refuses need not be in the file.
        narrows = filter_func if strict else None
        self._adapted: dict[int, torch.nn.Parameter] = {}  # by the id of the loaded one
        self._wanted = _places(container, container.accepted_by(filter_func))
        self._modules = dict(module.named_modules())
        paths = {name.rpartition(".")[0] for name in self._wanted}
        if isinstance(module, torch.nn.Module) and not paths <= self._modules.keys():
            self._modules = modules_of(module)  # the file has further paths of modules that are there twice
        self._slots = slots_in(self._modules)
        absent = [name for name, slot in self._slots.items() if slot.tensor is not None and name not in self._wanted]
        if filter_func is not None:
            refused = set(container.names)
            absent = [name for name in absent if name not in refused and (narrows is None or narrows(name))]
        self._receivers = {path: m for path, m in self._modules.items() if takes_state(m)}
        stored = container.extra_states()
        self._extra = {p: s for p, s in stored.items() if filter_func is None or filter_func(state_name(p))}
        # One that is there under several paths has its state stored under one.
        given = {id(self._receivers[path]) for path in stored if path in self._receivers}
        without = [state_name(path) for path, m in self._receivers.items() if path not in stored and id(m) not in given]
        fit = fit_of(self._slots, facts_of(container, self._wanted), absent)
        # Of a state dict nobody knows whether what the module lacks was a parameter or a buffer.
        for name in fit.unexpected:
            if container.type(self._wanted[name]) is TensorType.STATE_DICT:
                del self._wanted[name]
        self._buffers = self._buffers_of(self._wanted)
        self._ties, self._absent = fit.tied, fit.absent
        self.report = LoadReport(
            module=type(module).__name__,
            source=container.source_name,
            loaded=tuple(map(shown, self._wanted)),
            nbytes=sum(map(container.index.loaded_nbytes, self._wanted.values())),
            missing=(
                *(shown(name) for name in self._absent if self._slots[name].in_state_dict),
                *(name for name in without if narrows is None or narrows(name)),
            ),
            unexpected=(
                *map(shown, fit.unexpected),
                *(state_name(path) for path in self._extra if path not in self._receivers),
            ),
            mismatched=tuple(fit.mismatched),
            cast=tuple(map(shown, filter(self._is_cast, self._wanted))) if container.converts else (),
            tied={shown(alias): shown(name) for alias, name in self._ties.items()},
        )

    def _buffers_of(self, wanted: Mapping[str, int]) -> set[str]:
        """The tensors that are placed as buffers: of those of a state dict only the module knows."""
        type_of = self._container.index.type
        types = {name: type_of(i) for name, i in wanted.items()}
        return {
            name
            for name, type in types.items()
            if type == TensorType.BUFFER or (type == TensorType.STATE_DICT and self._slots[name].is_buffer)
        }

    def _target(self, name: str) -> Optional[torch.Tensor]:
        """What the module has under a stored name."""
        slot = self._slots.get(name)
        return None if slot is None else slot.tensor

    def _is_cast(self, name: str) -> bool:
        return self._container.may_cast(self._wanted[name])

    def check(self, strict: bool) -> None:
        """Refuses what cannot be placed, and with `strict` whatever does not fit; nothing was touched then.

        Raises:
            KeyError: The module has no such submodule, or something else of the name.
            LoadError: Real tensors of the module have another shape or kind; with `strict`, all that load_state_dict
                refuses.
        """
        if strict and not self.report.ok:
            raise self.report.error(self.report.mismatched, strict=True)
        for name in self._wanted:
            self._check_placeable(name, name in self._buffers)
        real = [row for row in self.report.mismatched if not self._is_meta(row)]
        if real:
            raise self.report.error(real, strict=False)

    def _is_meta(self, row: Mismatch) -> bool:
        target = self._target(row.name if row.name in self._slots else f".{row.name}")
        return target is not None and target.is_meta

    def _check_placeable(self, name: str, is_buffer: bool) -> None:
        path, _, attribute = name.rpartition(".")
        module = self._modules.get(path)
        if module is None:
            raise KeyError(f"{name}: the module has no submodule {path!r}")
        if not attribute:
            raise KeyError(f"{name!r}: a tensor of a module cannot be without a name")
        registered = module._buffers if is_buffer else module._parameters
        if attribute not in registered and hasattr(module, attribute):
            wanted = "buffer" if is_buffer else "parameter"
            raise KeyError(f"{name}: wanted a {wanted} or nothing of that name in the module, found something else")

    def run(self, loaded: LoadedTensors, verify_hash: Optional[bool]) -> None:
        """Reads and places the tensors; after an error of reading the module is as it was.

        Emits one warning (on behalf of the caller's caller) for meta tensors that are replaced by others of another
        shape or kind.
        """
        started = time.perf_counter()
        tensors = dict(zip(self._wanted, loaded.load(list(self._wanted.values()), verify_hash)))
        for name in self._conflicting(tensors):
            del tensors[name]  # the first name counts
        self._tell()
        for name, tensor in tensors.items():
            slot, is_buffer = self._slots.get(name), name in self._buffers
            if slot is not None and slot.tensor is not None and not is_buffer:
                tensors[name] = self._as_trainable_as(slot.tensor, tensor)
            insert_into_module(self._modules, name, is_buffer, tensors[name])
        for alias, name in self._ties.items():
            insert_into_module(self._modules, alias, self._slots[alias].is_buffer, tensors[name])
        for path, state in self._extra.items():
            if path in self._receivers:
                self._receivers[path].set_extra_state(state)
        self.report = dataclasses.replace(self.report, seconds=time.perf_counter() - started)

    def _conflicting(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of a place that the file has a tensor of other contents for, under an earlier name.

        Raises:
            LoadError: There are some, and the load is strict.
        """
        places: dict[tuple[int, str], list[str]] = {}
        for name in tensors:
            if name in self._slots:
                places.setdefault((id(self._slots[name].module), self._slots[name].attribute), []).append(name)
        found = [name for names in places.values() if len(names) > 1 for name in differing(names, tensors)]
        self.report = dataclasses.replace(self.report, conflicting=tuple(map(shown, found)))
        if self._strict and found:
            raise self.report.error((), strict=True)
        return found

    def _as_trainable_as(self, target: torch.Tensor, tensor: torch.nn.Parameter) -> torch.nn.Parameter:
        """The parameter, or another one over its memory, with the ``requires_grad`` of what it replaces."""
        wanted = target.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        if wanted == tensor.requires_grad:
            return tensor
        if id(tensor) not in self._adapted:  # what is tied stays tied
            with ordinary_tensors():
                self._adapted[id(tensor)] = torch.nn.Parameter(tensor.detach(), requires_grad=wanted)
        return self._adapted[id(tensor)]

    def _tell(self) -> None:
        if self.report.mismatched:
            rows = [f"{row.name} (file {row.file}, module {row.model})" for row in self.report.mismatched]
            warnings.warn(
                f"{self.report.source}: {len(rows)} tensors of {self.report.module} on the meta device are replaced by "
                f"tensors of another shape or kind: {'; '.join(rows)}",
                stacklevel=4,
            )
        left = [shown(name) for name in self._absent if (target := self._target(name)) is not None and target.is_meta]
        if left:
            logger.warning(
                "%s has no data for %d tensors of %s, which stay on the meta device: %s",
                self.report.source,
                len(left),
                self.report.module,
                ", ".join(left[:20]) + (", …" if len(left) > 20 else ""),
            )


def differing(names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Of the names of one tensor of a model those that a file holds with other contents than the first that it has."""
    supplied = [name for name in names if name in tensors]
    if len(supplied) < 2:
        return []
    first = tensors[supplied[0]]
    return [name for name in supplied[1:] if tensors[name] is not first and not same_bits(first, tensors[name])]


def _places(container: Container, entries: Sequence[int]) -> dict[str, int]:
    """Entries by the name of a tensor in a module, that of a root with its dot; of two, the later one."""
    found: dict[str, int] = {}
    for i in entries:
        name = container.names[i]
        if not isinstance(name, str):
            raise NotImplementedError(
                f"tensor {name!r} was written from nested containers, which have no modules to load into; "
                "deserializer.tree() gives the containers, and module.load_state_dict() takes one of them"
            )
        place = name if "." in name else f".{name}"
        found.pop(place, None)
        found[place] = i
    return found


def insert_into_module(
    modules: Mapping[str, torch.nn.Module], name: str, is_buffer: bool, tensor: torch.Tensor
) -> None:
    """Registers `tensor` under its stored name; what was registered there before is replaced.

    Buffers become plain tensors and keep their persistence; a buffer that did not exist becomes persistent.

    Raises:
        KeyError: No module of that path, or the attribute exists as the other kind.
    """
    path, _, attribute = name.rpartition(".")
    module = modules.get(path)
    if module is None:
        raise KeyError(f"{name}: the module has no submodule {path!r}")
    if is_buffer:
        # Persistence is named only where it is not the default: subclasses may have a register_buffer without it.
        options = {"persistent": False} if attribute in module._non_persistent_buffers_set else {}
        with ordinary_tensors():
            plain = tensor.detach()
        module.register_buffer(attribute, plain, **options)
    else:
        if not isinstance(tensor, torch.nn.Parameter):
            tensor = torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())
        module.register_parameter(attribute, tensor)


def live_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module by state-dict name: its state dict plus every named buffer, and every tied name."""
    tensors = _with_ties(module.named_buffers)
    tensors.update(_with_ties(module.named_parameters))
    tensors.update((name, value) for name, value in module.state_dict().items() if isinstance(value, torch.Tensor))
    return tensors


def _with_ties(listing: Callable[..., Iterator[tuple[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """What a module lists; every tied name too, unless its class overrides the method with fewer arguments."""
    try:
        return dict(listing(remove_duplicate=False))
    except TypeError:
        return dict(listing())
