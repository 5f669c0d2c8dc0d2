"""Modules and state dicts that get a rank's part of a file."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import importlib
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Optional, Union

import torch

from tensorizer._format.extra_state import gives_state, state_name, takes_state
from tensorizer._format.names import Name, listed
from tensorizer._format.payloads import same_bits
from tensorizer._load.fit import ModuleView, Slot, decide, is_dtensor, names_by_tensor, shown
from tensorizer._load.modules import as_trainable_as
from tensorizer._load.parts import get_slice
from tensorizer._load.report import LoadReport
from tensorizer._system.devices import empty, resolve_cuda_device
from tensorizer.distributed._boxes import Box, box_of, slices_of
from tensorizer.distributed._exchange import Part, whole
from tensorizer.distributed._ranks import GroupFile, Ranks
from tensorizer.errors import LoadError


class ShardedFill:
    """One load into the parts that this rank has of a module or state dict: where they go, and what becomes of them.

    Attributes:
        parts: By the name in the file; of tensors that are one in the target, the first name only, and with `strict`
            the others that the file has a tensor of their own for.
        report: What the file has and lacks for the target.
    """

    def __init__(
        self,
        target: Union[torch.nn.Module, MutableMapping[str, Any]],
        opened: GroupFile,
        mesh: Any,
        plan: Mapping[str, Any],
        ranks: Ranks,
        strict: bool,
    ) -> None:
        for name, value, kinds in (("target", target, (torch.nn.Module, MutableMapping)), ("plan", plan, (Mapping,))):
            if not isinstance(value, kinds):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"{name}: expected a {wanted}, got {type(value).__name__}")
        self._target, self._opened, self._mesh, self._plan, self._ranks = target, opened, mesh, plan, ranks
        file = self._file = opened.file
        self._source = file.source_name
        in_file = dict.fromkeys(name for name in file.numbers if isinstance(name, str))
        states = {state_name(path): state for path, state in file.extra_states().items()}
        self._strict = strict
        self._view: Optional[ModuleView] = None
        self._copies: frozenset[str] = frozenset()
        if isinstance(target, torch.nn.Module):
            self._view, self._copies = _view_of(target)
        if self._view is None:
            assert not isinstance(target, torch.nn.Module)
            # Extra state is replaced, whatever was there: its next shape is for its module to say.
            values = {n: None if _is_state_name(n) and not is_dtensor(value) else value for n, value in target.items()}
            self._stored = _stored_names(values, in_file)
            self._states = {n: s for n, s in states.items() if n in values and n not in self._stored}
            groups = names_by_tensor({name: value for name, value in values.items() if name not in self._states})
            lacking = {name for names in groups if not any(n in self._stored for n in names) for name in names}
            self.report = LoadReport(
                type(target).__name__,
                self._source,
                loaded=tuple(name for name in values if name in self._stored or name in self._states),
                missing=tuple(name for name in values if name in lacking),
            )
        else:
            slots, groups = self._view.slots, self._view.groups
            values = {name: slot.tensor for name, slot in slots.items() if slot.tensor is not None}
            self._stored = _stored_names({**values, **self._view.takers}, in_file)
            self._states = {name: state for name, state in states.items() if name in self._view.takers}
            entries = {name: opened.entry(stored) for name, stored in self._stored.items()}
            # Shapes are compared where parts are cut: what a plan cuts may have another one.
            self.report = decide(self._view, file, entries, states, refuses=lambda row: False)
        self._values: dict[str, Any] = values
        report = self.report
        if strict and (report.missing or report.unexpected):
            raise LoadError(
                f"{self._source}: missing in the file: {listed(report.missing) or 'nothing'}; "
                f"unexpected: {listed(report.unexpected) or 'nothing'}"
            )
        self.parts: dict[Name, Part] = {}
        self._whole: dict[Name, bool] = {}
        self._new: dict[str, Any] = {}
        self._same: dict[str, str] = {}  # names to the one that their tensor is loaded under
        self._compared: dict[str, str] = {}  # names that the file has a tensor of their own for, to the same one
        for names in groups:
            supplied = [name for name in names if name in self._stored]
            if supplied and not self._is_filled(names[0]):
                # Each of its names is replaced by what the file has under it.
                for name in supplied[1:]:
                    self._add(name, [name])
                names = [name for name in names if name not in supplied[1:]]
            if supplied:
                self._add(supplied[0], names)
                self._same.update({name: supplied[0] for name in names if name != supplied[0]})
                if strict and len(names) > 1:
                    self._expect_same(supplied[0], supplied[1:])
        self._state_parts: dict[str, Part] = {}  # of states that are tensors, in mappings
        for name, state in self._states.items():
            if name in self._values:
                self._add_state(name, state)
        compared = {self._stored[name] for name in self._compared}
        nbytes = sum(part.into.nbytes for name, part in self.parts.items() if name not in compared)
        self.report = dataclasses.replace(self.report, nbytes=nbytes)

    def _is_filled(self, name: str) -> bool:
        """Whether the target keeps what it has under a name as one tensor, whose data alone are loaded."""
        return self._view is not None or is_dtensor(self._values[name])

    def _add(self, name: str, names: Sequence[str]) -> None:
        """Finds the place of the tensor that `names` of the target are, which the file has under the first argument."""
        part = get_slice(self._file, self._stored[name])
        place = self._part(name, names, tuple(part.shape), part.dtype)
        self._whole[self._stored[name]] = place.box == whole(part.shape)
        self.parts[self._stored[name]] = place

    def _add_state(self, name: str, state: Any) -> None:
        """Finds the place of an extra state in a mapping."""
        if isinstance(state, torch.Tensor):
            self._state_parts[name] = self._part(name, [name], tuple(state.shape), state.dtype)
        elif self._values[name] is None:
            self._new[name] = state
        else:
            raise LoadError(
                f"{self._source}: {name!r:.200}: expected a tensor for the DTensor that is "
                f"there, got a {type(state).__name__}"
            )

    def _part(self, name: str, names: Sequence[str], shape: tuple[int, ...], found: torch.dtype) -> Part:
        """Where this rank's part of a tensor of the file goes; notes what is new."""
        value = self._values[name]
        if name in self._copies and not is_dtensor(value) and type(value) not in (torch.Tensor, torch.nn.Parameter):
            kind = type(value).__name__  # such as the ShardedTensors of FSDP1, which DTensors have replaced
            raise LoadError(
                f"{self._source}: {name!r:.200}: expected a plain tensor or a DTensor to fill, got a {kind}"
            )
        planned = None if is_dtensor(value) else self._planned(names)
        # What a plan cuts may have another shape than in the file: it is replaced.
        if isinstance(value, torch.Tensor) and tuple(value.shape) != shape and planned is None:
            raise LoadError(
                f"{self._source}: tensor {name!r:.200}: expected the shape {list(value.shape)}, got {list(shape)}"
            )
        dtype = value.dtype if isinstance(value, torch.Tensor) else found
        if dtype.is_floating_point != found.is_floating_point or dtype.is_complex != found.is_complex:
            raise LoadError(f"{self._source}: tensor {name!r:.200}: expected {dtype}, got {found}")
        in_place = isinstance(value, torch.Tensor) and not value.is_meta and name not in self._copies
        if is_dtensor(value):
            mesh, placements = value.device_mesh, value.placements
            box = self._box(name, shape, mesh, placements)
            local = value.to_local().detach()
            if not in_place:
                local = self._empty(box, dtype)
                self._new[name] = _dtensor(local, mesh, placements, shape)
        elif planned is not None:
            box = self._box(name, shape, self._mesh, planned)
            local = self._empty(box, dtype)
            self._new[name] = local if self._mesh is None else _dtensor(local, self._mesh, planned, shape)
        else:
            box = whole(shape)
            local = value.detach() if in_place and self._view is not None else self._empty(box, dtype)
            if not in_place or self._view is None:
                self._new[name] = local
        if tuple(local.shape) != tuple(end - begin for begin, end in box):
            raise LoadError(
                f"tensor {name!r:.200}: this rank's part has the shape {[end - begin for begin, end in box]}, and its "
                f"local tensor {list(local.shape)}"
            )
        return Part(box, local)

    def _expect_same(self, first: str, others: Sequence[str]) -> None:
        """Loads what the file has under other names of a tensor, to compare it with what it has under the first."""
        place, shape = self.parts[self._stored[first]], tuple(get_slice(self._file, self._stored[first]).shape)
        own = {self._opened.entry(self._stored[first])}
        for name in others:
            stored = self._stored[name]
            if stored in self.parts or self._opened.entry(stored) in own:
                continue
            own.add(self._opened.entry(stored))
            found = tuple(get_slice(self._file, stored).shape)
            if found != shape:
                raise LoadError(
                    f"{self._source}: tensor {name!r:.200}: expected the shape {list(shape)}, got {list(found)}"
                )
            self.parts[stored] = Part(place.box, torch.empty_like(place.into))
            self._whole[stored] = self._whole[self._stored[first]]
            self._compared[name] = first

    def _compare(self) -> None:
        for name, first in self._compared.items():
            one, other = (self.parts[self._stored[n]].into for n in (first, name))
            if not same_bits(one, other):
                raise LoadError(
                    f"{self._source}: conflicting values for {name!r:.200}, which is one tensor with {first!r:.200}"
                )

    def _empty(self, box: Box, dtype: torch.dtype) -> torch.Tensor:
        device = resolve_cuda_device(self._opened.device)
        return empty([end - begin for begin, end in box], dtype=dtype, device=device)

    def _planned(self, names: Sequence[str]) -> Any:
        """The placements that the plan has for the names of a tensor; with a mesh, ``Replicate`` for the others."""
        dimensions = 1 if self._mesh is None else self._mesh.ndim
        for pattern, placements in self._plan.items():
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                found = tuple(placements) if isinstance(placements, (list, tuple)) else (placements,)
                if len(found) != dimensions:
                    raise ValueError(f"plan[{pattern!r}]: expected {dimensions} placements, got {len(found)}")
                return found
        if self._mesh is None or (not self._plan and self._view is not None):
            return None
        return (_tensor_module().Replicate(),) * dimensions

    def _box(self, name: str, shape: tuple[int, ...], mesh: Any, placements: Any) -> Box:
        if mesh is None:
            return box_of(name, shape, (self._ranks.size,), (self._ranks.rank,), placements)
        coordinate = mesh.get_coordinate()
        if coordinate is None:  # not a rank of this mesh: it holds nothing
            return tuple((0, 0) for _ in shape)
        return box_of(name, shape, tuple(mesh.mesh.shape), coordinate, placements)

    def refuse_parts(self) -> None:
        """Raises ``ValueError`` if a hash would have to vouch for a part of a tensor, or for a converted one."""
        parts = [name for name, is_whole in self._whole.items() if not is_whole]
        if parts:
            raise ValueError(
                f"{self._source}: verify_hash: a part cannot be verified, since the hashes of the file are of whole "
                f"tensors: {listed(parts)}"
            )
        stored = {name: get_slice(self._file, name).dtype for name in self.parts}
        converted = [name for name, place in self.parts.items() if place.into.dtype != stored[name]]
        if converted:
            first = converted[0]
            raise ValueError(
                f"{self._source}: verify_hash: converted tensors have no stored hash: {listed(converted)} (of the "
                f"first: expected {self.parts[first].into.dtype}, got {stored[first]})"
            )

    def finish(self) -> None:
        """Puts new tensors into the target.

        Raises:
            LoadError: The file has different contents for names of one tensor.
        """
        self._compare()
        for name, place in self._state_parts.items():
            place.into.copy_(self._states[name][slices_of(place.box)])
        new: dict[str, Any] = {}
        for name, value in self._new.items():
            old = self._values[name]
            is_parameter = self._view is not None and isinstance(old, torch.nn.Parameter)
            new[name] = as_trainable_as(old, value) if is_parameter else value
        new.update({alias: new[name] for alias, name in self._same.items() if name in new})
        if self._view is None:
            assert not isinstance(self._target, torch.nn.Module)
            self._target.update(new)
            return
        for name in [name for name in new if not self._view.slots[name].in_state_dict]:
            slot = self._view.slots[name]
            setattr(slot.module, slot.attribute, new.pop(name))
        copies = {name: new.pop(name) for name in self._copies & new.keys()}
        if copies:  # FSDP1, and whoever else has hooks that make them, takes them back
            result = self._view.module.load_state_dict(copies, strict=False)
            refused = getattr(result, "unexpected_keys", ())
            if refused and self._strict:
                raise LoadError(f"{self._source}: unexpected: {listed(refused)}")
        if new:  # through load_state_dict, whose hooks tell FSDP2 of the new tensors
            self._view.module.load_state_dict(new, strict=False, assign=True)
        for name, taker in self._view.takers.items():
            if name in self._states:
                taker.set_extra_state(self._states[name])
            elif name in self._stored:
                taker.set_extra_state(get_slice(self._file, self._stored[name])[...])


def _view_of(module: torch.nn.Module) -> tuple[ModuleView, frozenset[str]]:
    """What a module has by the names of its state dict, which wrappers leave themselves out of; and which of that are
    copies, so that the module would not notice what they are filled with."""
    view = ModuleView(module)
    own = {id(slot.tensor): slot.tensor for slot in view.slots.values() if slot.tensor is not None}
    with _unasked(view.modules.values()):
        state = module.state_dict(keep_vars=True)
    found = {name: value for name, value in state.items() if isinstance(value, torch.nn.Module)}
    known = {id(owner) for owner in found.values()}
    paths = {state_name(path): m for path, m in view.modules.items() if gives_state(m) or takes_state(m)}
    takers = {name: child for name, child in paths.items() if id(child) not in known} | found
    hidden = {name: slot for name, slot in view.slots.items() if slot.is_buffer and not slot.in_state_dict}
    view.takers = {name: child for name, child in takers.items() if takes_state(child)}
    view.slots = {
        name: Slot(module, name, False, value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name not in paths
    }
    there = {name: slot.tensor for name, slot in view.slots.items() if slot.tensor is not None}
    made = {name: tensor for name, tensor in there.items() if id(tensor) not in own and not tensor.is_meta}
    memory = {_memory(tensor) for tensor in own.values()} - {0} if made else set()
    view.slots.update((name, slot) for name, slot in hidden.items() if slot.tensor is not None)
    return view, frozenset(name for name, tensor in made.items() if _memory(tensor) not in memory)


def _memory(tensor: Any) -> int:
    """Where the memory of a tensor begins, that of its local part for DTensors; 0 for tensors without any."""
    try:
        local: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
        return int(local.untyped_storage().data_ptr())
    except (RuntimeError, ValueError):  # wrappers, and lazy parameters
        return 0


@contextlib.contextmanager
def _unasked(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Keeps ``state_dict`` from calling ``get_extra_state``, which may be slow, or fail before there is a state.

    In place of its extra state, a state dict has the module itself.
    """
    with contextlib.ExitStack() as restored:
        for module in {id(m): m for m in modules if gives_state(m)}.values():
            attributes = vars(module)
            if "get_extra_state" in attributes:
                restored.callback(attributes.__setitem__, "get_extra_state", attributes["get_extra_state"])
            else:
                restored.callback(attributes.pop, "get_extra_state", None)
            attributes["get_extra_state"] = lambda module=module: module
        yield


def _is_state_name(name: str) -> bool:
    """Whether state dicts call extra state so."""
    return name.rpartition(".")[2] == state_name("")


def _stored_names(values: Container[str], in_file: Collection[str]) -> dict[str, str]:
    """From what the target calls the tensors of a file, or would call them, to the names that the file has for them.

    Files that were written from modules have a dot before some.
    """
    found: dict[str, str] = {}
    for stored in in_file:
        plain = shown(stored)
        found[stored if stored in values or plain in in_file else plain] = stored
    return found


def _tensor_module() -> Any:
    try:
        return importlib.import_module("torch.distributed.tensor")
    except ImportError:  # torch 2.3, 2.4
        return importlib.import_module("torch.distributed._tensor")


def _dtensor(local: torch.Tensor, mesh: Any, placements: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """A DTensor over this rank's part, without a collective."""
    stride = empty(shape, device="meta").stride()
    made: torch.Tensor = _tensor_module().DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return made
