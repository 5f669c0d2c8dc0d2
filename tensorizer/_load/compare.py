"""What of a file fits a module: one view of the module, one decision for every way of filling it, and what
users are told of that.

View and decision are made from names, shapes and dtypes alone, before a payload is read.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch.nn.parameter import is_lazy

from tensorizer._format.dtypes import known_dtype
from tensorizer._format.entries import TensorType
from tensorizer._format.extra_state import is_without_state, modules_of, saved_beside, state_name, takes_state
from tensorizer._format.payloads import has_own_data
from tensorizer._load.open_file import OpenFile
from tensorizer._system.sizes import counted, size_text
from tensorizer.errors import LoadError

_MAX_LINES = 100  # of a cell in a notebook


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


# --- what users are told ----------------------------------------------------------------------------------------------


class Misfit(NamedTuple):
    """A tensor of the file whose shape or kind differs from what the module has under its name."""

    name: str  # as in the module's state dict
    what: str  # "shape" or "kind"
    file: Union[torch.Size, torch.dtype]
    model: Union[torch.Size, torch.dtype]

    def __str__(self) -> str:
        if self.what == "shape":  # torch's own words
            return (
                f"size mismatch for {self.name}: copying a param with shape {self.file} from checkpoint, "
                f"the shape in current model is {self.model}."
            )
        return f"{self.what} mismatch for {self.name}: the file holds {self.file}, the model {self.model}."


@dataclasses.dataclass(frozen=True, repr=False)
class LoadReport:
    """What a load puts into a module and what it does not. Names are those of the module's state dict.

    Attributes:
        module: Class of the module.
        source: The file, without secrets.
        loaded: Tensors of the file that are placed in the module.
        nbytes: Their bytes.
        seconds: Time of reading and placing them; 0 if nothing was read.
        missing: Parameters, persistent buffers and extra states of the module that neither the file nor a tie supplies;
            after ``load_into_module`` also what its classes save beside these.
        unexpected: Tensors of the file that the module has no parameter or buffer for.
        mismatched: Tensors of another shape or kind (floating point, complex, integer, bool) than the module's.
        cast: Tensors that the load converts to another dtype.
        tied: Names that the file lacks, but that the module ties to a name of the file; from alias to that name.
        conflicting: Names that the module ties and the file holds with different contents.
    """

    module: str
    source: str
    loaded: tuple[str, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Misfit, ...] = ()
    cast: tuple[str, ...] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    conflicting: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether file and module have the same names, shapes and kinds."""
        return not (self.missing or self.unexpected or self.mismatched or self.conflicting)

    @property
    def missing_keys(self) -> list[str]:
        """``missing``, by the name that ``load_state_dict`` has for it."""
        return list(self.missing)

    @property
    def unexpected_keys(self) -> list[str]:
        """``unexpected``, by the name that ``load_state_dict`` has for it."""
        return list(self.unexpected)

    def __iter__(self) -> Iterator[list[str]]:
        """``missing, unexpected = report``, as with what ``load_state_dict`` returns."""
        return iter((self.missing_keys, self.unexpected_keys))

    def __repr__(self) -> str:
        module = f" into {self.module}" if self.module else ""
        loaded = f"{counted(len(self.loaded), 'tensor')}, {size_text(self.nbytes)}, of {self.source}{module}"
        if self.ok:
            return f"<LoadReport: {loaded}: all names match>"
        rows = [
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("mismatched", [row.name for row in self.mismatched]),
            ("conflicting", self.conflicting),
        ]
        lines = [f"{title:12} {name}" for title, names in rows for name in joined_runs(names)]
        return "\n".join([f"<LoadReport: {loaded}", *lines, ">"])

    def _repr_html_(self) -> str:
        """A table for Jupyter: how much was loaded, and the names of what did not fit."""
        from html import escape  # its table of entities takes time to import

        rows = [
            ("loaded", [f"{counted(len(self.loaded), 'tensor')}, {size_text(self.nbytes)} in {self.seconds:.3f} s"]),
            ("missing", joined_runs(self.missing)),
            ("unexpected", joined_runs(self.unexpected)),
            ("mismatched", [str(row) for row in self.mismatched]),
            ("conflicting", joined_runs(self.conflicting)),
            ("cast", joined_runs(self.cast)),
            ("tied", [f"{alias} = {name}" for alias, name in self.tied.items()]),
        ]
        body = "".join(f"<tr><td>{title}</td><td>{_listed(lines)}</td></tr>" for title, lines in rows if lines)
        title = escape(f"{self.module} from {self.source}")
        return f"<div><p><code>{title}</code></p><table><tbody>{body}</tbody></table></div>"

    def error(self, mismatched: Sequence[Misfit], strict: bool) -> LoadError:
        """The error for a load that does not go on, in the words of ``load_state_dict``.

        Args:
            mismatched: Which of the mismatches are errors.
            strict: Whether missing, unexpected and conflicting names are errors, too.
        """
        problems = [str(row) for row in mismatched]
        if strict:
            problems += [f"conflicting values for {name}, which the model ties." for name in self.conflicting]
            for title, names in (("Unexpected", self.unexpected), ("Missing", self.missing)):
                quoted = ", ".join(f'"{name}"' for name in names)
                if quoted:
                    problems.insert(0, f"{title} key(s) in state_dict: {quoted}. ")
        return self.refusal("\n\t".join([f"Error(s) in loading state_dict for {self.module}:", *problems]))

    def refusal(self, text: str) -> LoadError:
        """The error for a load that does not go on, in other words."""
        error = LoadError(text)
        error.report, error.source = self, self.source
        return error


def misplaced(stored: Iterable[str], lacking: Collection[str]) -> str:
    """Where tensors are that a module lacks, if the file or the module has them one or more levels deeper; or nothing.

    Args:
        stored: Names of the file that have no place in the module.
        lacking: Names of the module that the file lacks.
    """
    stored = list(stored)
    found = _beginning(stored, lacking)
    if found is not None:
        prefix, name = found
        return f"; the file has {prefix + name!r}, the module {name!r}: load_into_module(..., prefix={prefix!r})?"
    found = _beginning(lacking, set(stored))
    if found is not None:
        prefix, name = found
        return f"; the file has {name!r}, the module {prefix + name!r}: load into its submodule {prefix[:-1]!r}?"
    return ""


def _beginning(longer: Iterable[str], shorter: Collection[str]) -> Optional[tuple[str, str]]:
    """What stands in front of most of the `shorter` names among the `longer` ones, and the first of these names."""
    found: dict[str, list[str]] = {}
    for name in longer:
        at = name.find(".")
        while at >= 0:
            if name[at + 1 :] in shorter:
                found.setdefault(name[: at + 1], []).append(name[at + 1 :])
            at = name.find(".", at + 1)
    if not found:
        return None
    prefix = max(found, key=lambda key: len(found[key]))
    return prefix, found[prefix][0]


def _listed(lines: Sequence[str]) -> str:
    """Lines of a cell; those beyond what a notebook should keep are counted."""
    from html import escape

    shown = [escape(line) for line in lines[:_MAX_LINES]]
    left_out = len(lines) - len(shown)
    return "<br>".join([*shown, f"… and {left_out:,} more"] if left_out else shown)


def kind_of(dtype: torch.dtype) -> str:
    """What numbers of a dtype are: those of one kind can stand for each other, if with other precision."""
    if dtype == torch.bool:
        return "bool"
    if dtype.is_complex:
        return "complex"
    return "floating point" if dtype.is_floating_point else "integer"


def joined_runs(names: Iterable[str]) -> list[str]:
    """Names for a table; those that differ in one number alone are one line: ``layers.{0...31}.weight``."""
    shapes: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for name in names:
        parts = re.split(r"(?<![^.])(\d+)(?![^.])", name)  # whole components
        shapes.setdefault(tuple(parts[::2]), []).append(tuple(map(int, parts[1::2])))
    return [line for texts, numbers in shapes.items() for line in _lines(texts, numbers)]


def _lines(texts: tuple[str, ...], numbers: list[tuple[int, ...]]) -> Iterator[str]:
    columns = [sorted(set(column)) for column in zip(*numbers)]
    varying = [i for i, column in enumerate(columns) if len(column) > 1]
    if len(varying) != 1:
        yield from ("".join(_woven(texts, map(str, row))) for row in numbers)
        return
    (position,) = varying
    runs = itertools.groupby(enumerate(columns[position]), key=lambda pair: pair[1] - pair[0])
    for _, run in runs:
        values = [value for _, value in run]
        shown = str(values[0]) if len(values) == 1 else f"{{{values[0]}...{values[-1]}}}"
        row = [shown if i == position else str(column[0]) for i, column in enumerate(columns)]
        yield "".join(_woven(texts, row))


def _woven(texts: Sequence[str], between: Iterable[str]) -> Iterator[str]:
    for text, number in itertools.zip_longest(texts, between, fillvalue=""):
        yield text
        yield number
