"""Modules and state dicts that get a rank's part of a file."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, MutableMapping
from typing import Any, Union

import torch

from tensorizer._format.names import Name
from tensorizer._load.digests import listed
from tensorizer._system.devices import empty, resolve_cuda_device
from tensorizer.distributed._boxes import Box, box_of
from tensorizer.distributed._exchange import Place, whole
from tensorizer.distributed._opened import Opened
from tensorizer.distributed._ranks import Ranks
from tensorizer.errors import LoadError

__all__ = ["Target"]


class Target:
    """What a load fills: where the parts of this rank go, and what becomes of them when they are there.

    Attributes:
        places: By name; of tensors that are one in the target, the first name only.
        missing: Names that the file lacks.
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
        is_module = isinstance(target, torch.nn.Module)
        values = dict(target.state_dict(keep_vars=True)) if isinstance(target, torch.nn.Module) else dict(target)
        stored = {str(name): name for name in opened.file.slices() if isinstance(name, str)}
        values = {name: value for name, value in values.items() if not name.endswith("_extra_state")}
        self.missing = [name for name in values if name not in stored]
        self.unexpected = [name for name in stored if name not in values] if is_module else []
        source = opened.file._container.source_name
        if strict and (self.missing or self.unexpected):
            raise LoadError(
                f"{source}: missing in the file: {listed(self.missing) or 'nothing'}; unexpected: "
                f"{listed(self.unexpected) or 'nothing'}"
            )
        self.places: dict[Name, Place] = {}
        self._whole: dict[Name, bool] = {}
        self._new: dict[str, Any] = {}
        known: dict[int, str] = {}  # tensors of the target that have a place
        self._same: dict[str, str] = {}
        for name, value in values.items():
            if name not in stored:
                continue
            if id(value) in known and isinstance(value, torch.Tensor):
                self._same[name] = known[id(value)]
                continue
            known[id(value)] = name
            self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        part = self._opened.file.get_slice(name)
        shape = tuple(part.shape)
        if isinstance(value, torch.Tensor) and tuple(value.shape) != shape and not self._is_local(name, value):
            raise LoadError(
                f"{self._opened.file._container.source_name}: tensor {name!r:.200}: wanted the shape "
                f"{list(value.shape)}, found {list(shape)}"
            )
        dtype = value.dtype if isinstance(value, torch.Tensor) else part.dtype
        if dtype.is_floating_point != part.dtype.is_floating_point or dtype.is_complex != part.dtype.is_complex:
            raise LoadError(f"tensor {name!r:.200}: wanted {dtype}, found {part.dtype}")
        in_place = isinstance(value, torch.Tensor) and not value.is_meta
        if _is_dtensor(value):
            mesh, placements = value.device_mesh, value.placements
            box = self._box(name, shape, mesh, placements)
            local = value.to_local().detach()
            if not in_place:
                local = self._empty(box, dtype)
                self._new[name] = _dtensor(local, mesh, placements, shape)
        elif (placements := self._planned(name)) is not None:
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
        self._whole[name] = box == whole(shape)
        if tuple(local.shape) != tuple(end - begin for begin, end in box):
            raise LoadError(
                f"tensor {name!r:.200}: this rank's part has the shape {[end - begin for begin, end in box]}, and its "
                f"local tensor {list(local.shape)}"
            )
        self.places[name] = Place(box, local)

    def _is_local(self, name: str, value: torch.Tensor) -> bool:
        """Whether a value may have another shape than the file: a plan cuts it, and it is replaced."""
        return not _is_dtensor(value) and self._planned(name) is not None

    def _empty(self, box: Box, dtype: torch.dtype) -> torch.Tensor:
        device = resolve_cuda_device(self._opened.device)
        return empty([end - begin for begin, end in box], dtype=dtype, device=device)

    def _planned(self, name: str) -> Any:
        """The placements that the plan has for a name; with a mesh, ``Replicate`` for the others."""
        dimensions = 1 if self._mesh is None else self._mesh.ndim
        for pattern, placements in self._plan.items():
            if fnmatch.fnmatchcase(name, pattern):
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
        """Raises where a hash would have to vouch for a part of a tensor."""
        parts = [name for name, is_whole in self._whole.items() if not is_whole]
        if parts:
            raise ValueError(
                f"verify_hash: a part cannot be verified, since the hashes of the file are of whole tensors: "
                f"{listed(parts)}"
            )

    def finish(self) -> None:
        """Puts new tensors into the target."""
        if isinstance(self._target, torch.nn.Module):
            if not self._new:
                return
            state = dict(self._new)
            state.update({alias: self._new[name] for alias, name in self._same.items() if name in self._new})
            self._target.load_state_dict(state, strict=False, assign=True)
            return
        for name, value in self._new.items():
            self._target[name] = value
        for alias, name in self._same.items():
            if name in self._new:
                self._target[alias] = self._new[name]


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
