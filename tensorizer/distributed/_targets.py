"""Modules and state dicts that get a rank's part of a file."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any, Union

import torch

from tensorizer._format.extra_state import state_name
from tensorizer._format.names import Name
from tensorizer._format.payloads import same_bits
from tensorizer._load.digests import listed
from tensorizer._load.fit import shown
from tensorizer._system.devices import empty, resolve_cuda_device
from tensorizer.distributed._boxes import Box, box_of
from tensorizer.distributed._exchange import Place, whole
from tensorizer.distributed._extra_states import ModuleState, is_state_name, state_of
from tensorizer.distributed._opened import Opened
from tensorizer.distributed._ranks import Ranks
from tensorizer.errors import LoadError

__all__ = ["Target"]


class Target:
    """What a load fills: where the parts of this rank go, and what becomes of them when they are there.

    Attributes:
        places: By the name in the file; of tensors that are one in the target, the first name only, and with `strict`
            the others that the file has a tensor of their own for.
        missing: Names that the file lacks, and no other name of their tensor supplies.
        unexpected: Names of the file that the target lacks.
    """

    def __init__(
        self,
        target: Union[torch.nn.Module, MutableMapping[str, Any]],
        opened: Opened,
        mesh: Any,
        plan: Mapping[str, Any],
        ranks: Ranks,
        strict: bool,
    ) -> None:
        self._target, self._opened, self._mesh, self._plan, self._ranks = target, opened, mesh, plan, ranks
        self._hidden = _hidden_buffers(target) if isinstance(target, torch.nn.Module) else {}
        self._state = state_of(target) if isinstance(target, torch.nn.Module) else ModuleState({}, {})
        self._values = self._values_of(target)
        in_file = dict.fromkeys(name for name in opened.file.slices() if isinstance(name, str))
        self._stored = _stored_names(self._values, in_file)
        states = {state_name(path): state for path, state in opened.file._container.extra_states().items()}
        # What the target takes of the states that a .tensors file holds apart from its tensors.
        takers = self._state.takers
        self._states = {
            name: state
            for name, state in states.items()
            if name in takers or (name in self._values and name not in self._stored)
        }
        self._takers = {name: module for name, module in takers.items() if name in in_file}
        groups = _names_by_tensor({name: value for name, value in self._values.items() if name not in self._states})
        lacking = {name for names in groups if not any(n in self._stored for n in names) for name in names}
        self.missing = [name for name in self._values if name in lacking and name not in self._hidden]
        self.missing += self._state.lacking({**self._takers, **self._states})
        self.unexpected: list[str] = []
        if isinstance(target, torch.nn.Module):
            used = {*self._stored.values(), *self._takers}
            self.unexpected = [shown(name) for name in in_file if name not in used]
            self.unexpected += [name for name in states if name not in takers]
        if strict and (self.missing or self.unexpected):
            raise LoadError(
                f"{opened.file._container.source_name}: missing in the file: {listed(self.missing) or 'nothing'}; "
                f"unexpected: {listed(self.unexpected) or 'nothing'}"
            )
        self.places: dict[Name, Place] = {}
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
        self._parts: dict[str, Place] = {}  # of states that are tensors, in mappings
        for name, state in self._states.items():
            if name in self._values:
                self._add_state(name, state)

    def _values_of(self, target: Union[torch.nn.Module, MutableMapping[str, Any]]) -> dict[str, Any]:
        """What a target has, by name; every name of a tensor."""
        if isinstance(target, torch.nn.Module):
            hidden = {name: module._buffers[attribute] for name, (module, attribute) in self._hidden.items()}
            return {**self._state.tensors, **hidden}
        # Extra state is replaced, whatever was there: its next shape is for its module to say.
        return {n: None if is_state_name(n) and not _is_dtensor(value) else value for n, value in target.items()}

    def _is_filled(self, name: str) -> bool:
        """Whether the target keeps what it has under a name as one tensor, whose data alone are loaded."""
        return isinstance(self._target, torch.nn.Module) or _is_dtensor(self._values[name])

    def _add(self, name: str, names: Sequence[str]) -> None:
        """Finds the place of the tensor that `names` of the target are, which the file has under the first argument."""
        part = self._opened.file.get_slice(self._stored[name])
        place = self._place(name, names, tuple(part.shape), part.dtype)
        self._whole[self._stored[name]] = place.box == whole(part.shape)
        self.places[self._stored[name]] = place

    def _add_state(self, name: str, state: Any) -> None:
        """Finds the place of an extra state in a mapping."""
        if isinstance(state, torch.Tensor):
            self._parts[name] = self._place(name, [name], tuple(state.shape), state.dtype)
        elif self._values[name] is None:
            self._new[name] = state
        else:
            raise LoadError(
                f"{self._opened.file._container.source_name}: {name!r:.200}: wanted a tensor for the DTensor that is "
                f"there, found a {type(state).__name__}"
            )

    def _place(self, name: str, names: Sequence[str], shape: tuple[int, ...], found: torch.dtype) -> Place:
        """Where this rank's part of a tensor of the file goes; notes what is new."""
        value = self._values[name]
        if isinstance(value, torch.Tensor) and tuple(value.shape) != shape and not self._is_local(names, value):
            raise LoadError(
                f"{self._opened.file._container.source_name}: tensor {name!r:.200}: wanted the shape "
                f"{list(value.shape)}, found {list(shape)}"
            )
        dtype = value.dtype if isinstance(value, torch.Tensor) else found
        if dtype.is_floating_point != found.is_floating_point or dtype.is_complex != found.is_complex:
            raise LoadError(
                f"{self._opened.file._container.source_name}: tensor {name!r:.200}: wanted {dtype}, found {found}"
            )
        in_place = isinstance(value, torch.Tensor) and not value.is_meta
        if _is_dtensor(value):
            mesh, placements = value.device_mesh, value.placements
            box = self._box(name, shape, mesh, placements)
            local = value.to_local().detach()
            if not in_place:
                local = self._empty(box, dtype)
                self._new[name] = _dtensor(local, mesh, placements, shape)
        elif (placements := self._planned(names)) is not None:
            box = self._box(name, shape, self._mesh, placements)
            local = self._empty(box, dtype)
            self._new[name] = local if self._mesh is None else _dtensor(local, self._mesh, placements, shape)
        else:
            box = whole(shape)
            local = (
                value.detach() if in_place and isinstance(self._target, torch.nn.Module) else self._empty(box, dtype)
            )
            if not in_place or not isinstance(self._target, torch.nn.Module):
                self._new[name] = local
        if tuple(local.shape) != tuple(end - begin for begin, end in box):
            raise LoadError(
                f"tensor {name!r:.200}: this rank's part has the shape {[end - begin for begin, end in box]}, and its "
                f"local tensor {list(local.shape)}"
            )
        return Place(box, local)

    def _expect_same(self, first: str, others: Sequence[str]) -> None:
        """Loads what the file has under other names of a tensor, to compare it with what it has under the first."""
        place, shape = self.places[self._stored[first]], tuple(self._opened.file.get_slice(self._stored[first]).shape)
        own = {self._opened.entry(self._stored[first])}
        for name in others:
            stored = self._stored[name]
            if stored in self.places or self._opened.entry(stored) in own:
                continue
            own.add(self._opened.entry(stored))
            found = tuple(self._opened.file.get_slice(stored).shape)
            if found != shape:
                raise LoadError(
                    f"{self._opened.file._container.source_name}: tensor {name!r:.200}: wanted the shape "
                    f"{list(shape)}, found {list(found)}"
                )
            self.places[stored] = Place(place.box, torch.empty_like(place.into))
            self._whole[stored] = self._whole[self._stored[first]]
            self._compared[name] = first

    def _compare(self) -> None:
        for name, first in self._compared.items():
            one, other = (self.places[self._stored[n]].into for n in (first, name))
            if not same_bits(one, other):
                raise LoadError(
                    f"{self._opened.file._container.source_name}: conflicting values for {name!r:.200}, which is one "
                    f"tensor with {first!r:.200}"
                )

    def _is_local(self, names: Sequence[str], value: torch.Tensor) -> bool:
        """Whether a value may have another shape than the file: a plan cuts it, and it is replaced."""
        return not _is_dtensor(value) and self._planned(names) is not None

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
                    raise ValueError(f"plan[{pattern!r}]: wanted {dimensions} placements, found {len(found)}")
                return found
        if self._mesh is None or (not self._plan and isinstance(self._target, torch.nn.Module)):
            return None
        return _replicated(dimensions)

    def _box(self, name: str, shape: tuple[int, ...], mesh: Any, placements: Any) -> Box:
        if mesh is None:
            return box_of(name, shape, (self._ranks.size,), (self._ranks.rank,), placements)
        coordinate = mesh.get_coordinate()
        if coordinate is None:  # not a rank of this mesh: it holds nothing
            return tuple((0, 0) for _ in shape)
        return box_of(name, shape, tuple(mesh.mesh.shape), coordinate, placements)

    def refuse_parts(self) -> None:
        """Raises where a hash would have to vouch for a part of a tensor, or for what it is converted to.

        Raises:
            ValueError: There is such a place.
        """
        source = self._opened.file._container.source_name
        parts = [name for name, is_whole in self._whole.items() if not is_whole]
        if parts:
            raise ValueError(
                f"{source}: verify_hash: a part cannot be verified, since the hashes of the file are of whole tensors: "
                f"{listed(parts)}"
            )
        stored = {name: self._opened.file.get_slice(name).dtype for name in self.places}
        converted = [name for name, place in self.places.items() if place.into.dtype != stored[name]]
        if converted:
            first = converted[0]
            raise ValueError(
                f"{source}: verify_hash: converted tensors have no stored hash: {listed(converted)} (of the first: "
                f"wanted {self.places[first].into.dtype}, found {stored[first]})"
            )

    def finish(self) -> None:
        """Puts new tensors into the target.

        Raises:
            LoadError: The file has different contents for names of one tensor.
        """
        self._compare()
        for name, place in self._parts.items():
            part = tuple(slice(begin, end) for begin, end in place.box)
            place.into.copy_(self._states[name][part])
        new: dict[str, Any] = {}
        for name, value in self._new.items():
            old = self._values[name]
            if isinstance(self._target, torch.nn.Module) and isinstance(old, torch.nn.Parameter):
                value = torch.nn.Parameter(value, requires_grad=old.requires_grad)
            new[name] = value
        new.update({alias: new[name] for alias, name in self._same.items() if name in new})
        if not isinstance(self._target, torch.nn.Module):
            self._target.update(new)
        elif new:
            for name in self._hidden.keys() & new.keys():
                module, attribute = self._hidden[name]
                setattr(module, attribute, new.pop(name))
            self._target.load_state_dict(new, strict=False, assign=True)
        for name, module in self._state.takers.items():
            if name in self._states:
                module.set_extra_state(self._states[name])
        for name, module in self._takers.items():
            module.set_extra_state(self._opened.file.get_slice(name)[...])


def _hidden_buffers(module: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """The buffers of a module that its state dict leaves out; files that were written from modules may have them."""
    return {
        f"{path}.{attribute}" if path else attribute: (child, attribute)
        for path, child in module.named_modules(remove_duplicate=False)
        for attribute in child._non_persistent_buffers_set
        if child._buffers.get(attribute) is not None
    }


def _stored_names(values: Mapping[str, Any], in_file: Collection[str]) -> dict[str, str]:
    """What the file calls the names that it has: files that were written from modules have a dot before some."""
    found: dict[str, str] = {}
    for name in values:
        dotted = f".{name}"
        if name in in_file:
            found[name] = name
        elif dotted in in_file and dotted not in values:
            found[name] = dotted
    return found


def _names_by_tensor(values: Mapping[str, Any]) -> list[list[str]]:
    """Names that stand for one tensor together; in the order of the first of each."""
    groups: dict[object, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(id(value) if isinstance(value, torch.Tensor) else name, []).append(name)
    return list(groups.values())


def _is_dtensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def _tensor_module() -> Any:
    import importlib

    try:
        return importlib.import_module("torch.distributed.tensor")
    except ImportError:  # torch 2.3, 2.4
        return importlib.import_module("torch.distributed._tensor")


def _replicated(dimensions: int) -> tuple[Any, ...]:
    return (_tensor_module().Replicate(),) * dimensions


def _dtensor(local: torch.Tensor, mesh: Any, placements: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """A DTensor over this rank's part, without a collective."""
    stride = empty(shape, device="meta").stride()
    made: torch.Tensor = _tensor_module().DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return made
