"""The tensors of a follower: what has to fit, comparing them with sums, and changing them in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from tensorizer import _C
from tensorizer._format.names import listed
from tensorizer._format.payloads import can_be_filled
from tensorizer._load.compare import ModuleView, unfit_in_place
from tensorizer._load.modules import write_over
from tensorizer._load.open_file import OpenFile
from tensorizer._save.records import place_of
from tensorizer._save.session import memory_of
from tensorizer._sync.files import Changes, Pair
from tensorizer._sync.forms import PIECE_NBYTES, Form, added, is_plain, sums_of, tensors_of
from tensorizer._system.cuda_engine import is_fast_device
from tensorizer._system.devices import empty, ordinary_tensors
from tensorizer._system.sizes import runs
from tensorizer.errors import LoadError

_NUMBER_NBYTES = 8

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Place(NamedTuple):
    """Memory that is to hold a tensor."""

    name: str  # the first name of the tensor
    tensor: torch.Tensor


class Target:
    """What a follower fills.

    Attributes:
        tensors: By name, in the order of their bytes. A host copy has none before it gets a form.
        owns: Whether it is a host copy of the follower's own.
    """

    def __init__(self, target: Any, strict: bool) -> None:
        self.owns = target is None
        self._strict = strict
        self._form: Optional[Form] = None
        self.places: list[Place] = []
        if target is None:
            self.tensors: dict[str, torch.Tensor] = {}
        elif isinstance(target, torch.nn.Module):
            slots = ModuleView(target).slots
            self.tensors = tensors_of({n: s.tensor for n, s in slots.items() if s.tensor is not None}, "target")
        else:
            self.tensors = tensors_of(target, "target")

    # ---- what has to fit --------------------------------------------------------------------------------------------

    def take_form(self, form: Form, source: str) -> None:
        """Finds the place of each tensor. A host copy gets new tensors where it has none of the form.

        Raises:
            LoadError: A name is missing, or a tensor cannot hold what the file has. Nothing was changed.
        """
        if self._form == form and not self.owns:
            return
        if self.owns:
            tensors = self.tensors if self._form == form else _allocated(form)
            places = [Place(name, tensors[name]) for name in form.names]
        else:
            tensors, places = self.tensors, self._places(form, source)
        self.tensors, self.places, self._form = tensors, places, form

    def check_form(self, form: Form, source: str) -> None:
        """Raises as :meth:`take_form`, and changes nothing."""
        if not self.owns and self._form != form:
            self._places(form, source)

    def _places(self, form: Form, source: str) -> list[Place]:
        missing, problems, places = [], [], []
        for first, (dtype, shape) in form.tensors.items():
            names = form.names_of(first)
            lacking = [name for name in names if name not in self.tensors]
            missing += lacking
            seen = set()
            for name in names:
                tensor = self.tensors.get(name)
                if tensor is None:
                    continue
                problem = unfit_in_place(tensor, dtype, shape)
                if problem:
                    problems.append(f"{name!r:.200}: {problem}")
                elif (memory := place_of(tensor)) is None or memory not in seen:
                    seen.add(memory)
                    places.append(Place(first, tensor))
        if missing and self._strict:
            problems.insert(0, f"the target has no {listed(missing)}; strict=False leaves them out")
        if problems:
            error = LoadError(f"{source}: {'; '.join(problems)}")
            error.source = source
            raise error
        return places

    @property
    def firsts(self) -> list[str]:
        """The first names of the tensors that have a place."""
        return list(dict.fromkeys(place.name for place in self.places))

    @property
    def is_whole(self) -> bool:
        """Whether every tensor of the form has a place."""
        return self._form is not None and len(self.firsts) == len(self._form.names)

    def names_of(self, firsts: Sequence[str]) -> tuple[str, ...]:
        """All names that the target has of some tensors."""
        assert self._form is not None
        names = [name for first in firsts for name in self._form.names_of(first)]
        return tuple(name for name in names if self.owns or name in self.tensors)

    # ---- comparing --------------------------------------------------------------------------------------------------

    def sums(self) -> list[tuple[str, int]]:
        """The sum of every place: all of it is read."""
        values = sums_of([place.tensor for place in self.places])
        return [(place.name, value) for place, value in zip(self.places, values)]

    def differing(self, changes: Changes, before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
        """Tensors of which the sum would not be that of `after` once the changes are written. Reads only.

        Args:
            changes: What is to be written.
            before: The sums of now.
            after: The sums of then.
        """
        left = [place for place in self.places if place.name not in changes.whole]
        wrong = {p.name for p in left if p.name not in changes.pairs and before[p.name] != after[p.name]}
        changing = [place for place in left if place.name in changes.pairs]
        for place, change in zip(changing, _sum_changes(changing, changes)):
            if added(before[place.name], change) != after[place.name]:
                wrong.add(place.name)
        return [name for name in self.firsts if name in wrong]

    # ---- writing ----------------------------------------------------------------------------------------------------

    def write(self, changes: Changes) -> None:
        """Writes what changes. Twice does the same as once."""
        plain = [p for p in self.places if p.name in changes.pairs and is_plain(p.tensor)]
        _C.write_deltas([(memory_of(p.tensor), changes.pairs[p.name].delta) for p in plain])
        write_over((p.tensor, changes.whole[p.name]) for p in self.places if p.name in changes.whole)
        with torch.inference_mode():
            for place in self.places:
                if place.name in changes.pairs and not is_plain(place.tensor):
                    _write_elements(place.tensor.data, changes.pairs[place.name].delta)

    def fill(self, file: OpenFile) -> None:
        """Reads the tensors of an anchor straight to their places, verified; those of other memory by way of copies."""
        numbers = {str(name): i for i, name in enumerate(file.names)}
        straight: dict[torch.device, dict[int, torch.Tensor]] = {}
        copied: dict[int, list[torch.Tensor]] = {}
        for place in self.places:
            entry = numbers[place.name]
            device = place.tensor.device
            fills = can_be_filled(place.tensor) and (device.type == "cpu" or is_fast_device(device))
            together = straight.setdefault(device, {})
            if fills and file.index.data_nbytes(entry) and not any(entry in found for found in straight.values()):
                together[entry] = place.tensor
            else:
                copied.setdefault(entry, []).append(place.tensor)
        for device, together in straight.items():
            entries = sorted(together)
            if entries:
                file.readers[0].read_into(entries, [together[entry] for entry in entries], device)
        for batch in runs(sorted(copied), file.index.loaded_nbytes, PIECE_NBYTES):
            for entry, tensor in zip(batch, file.read(batch, verify=True)):
                write_over((target, tensor) for target in copied[entry])


def _allocated(form: Form) -> dict[str, torch.Tensor]:
    with ordinary_tensors():
        tensors = {name: empty(shape, dtype=dtype, device="cpu") for name, (dtype, shape) in form.tensors.items()}
    return {**tensors, **{alias: tensors[first] for alias, first in form.ties.items()}}


# --- elements of tensors that C++ does not reach ----------------------------------------------------------------------


def _sum_changes(places: Sequence[Place], changes: Changes) -> Iterator[int]:
    plain = [place for place in places if is_plain(place.tensor)]
    found = _C.sum_changes([(memory_of(place.tensor), changes.pairs[place.name].delta) for place in plain])
    values = iter(found)
    for place in places:
        if is_plain(place.tensor):
            yield next(values)
        else:
            yield _sum_change_of_elements(place.tensor, changes.pairs[place.name])


def _sum_change_of_elements(tensor: torch.Tensor, pair: Pair) -> int:
    value = pair.delta.sum_of_values
    with _as_elements(tensor, writes=False) as flat:
        for first, numbers in _numbers(pair.delta, flat):
            before = flat.index_select(0, numbers.to(flat.device)).cpu()
            value = added(value, -_C.sum_of_elements(memory_of(numbers), memory_of(before), tensor.element_size()))
            del first
    return value


def _write_elements(tensor: torch.Tensor, delta: _C.CheckedDelta) -> None:
    with _as_elements(tensor, writes=True) as flat:
        row = flat[:1]
        for first, numbers in _numbers(delta, flat):
            values = torch.empty((len(numbers), *row.shape[1:]), dtype=flat.dtype)
            delta.copy_values(first, memory_of(values))
            flat.index_copy_(0, numbers.to(flat.device), values.to(flat.device))


def _numbers(delta: _C.CheckedDelta, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The numbers of the elements that change, in pieces, each with the position of its first one."""
    step = PIECE_NBYTES // (2 * (_NUMBER_NBYTES + flat.element_size() * (flat.dim() > 1) + flat.element_size()))
    for first in range(0, delta.changed, step):
        numbers = torch.empty(min(step, delta.changed - first), dtype=torch.int64)
        delta.decode(first, memory_of(numbers))
        yield first, numbers


@contextlib.contextmanager
def _as_elements(tensor: torch.Tensor, *, writes: bool) -> Iterator[torch.Tensor]:
    """The elements one after the other, as integers. Of a tensor that is not contiguous a copy, put back at the end."""
    direct = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    whole = tensor if direct else tensor.resolve_conj().resolve_neg().contiguous()
    flat = whole.view(-1).view(_INTEGERS[tensor.element_size()])
    yield flat.view(-1, 2) if tensor.element_size() == 16 else flat
    if writes and not direct:
        tensor.copy_(whole)
