"""Lists the records that a save writes, in order, and finds tied tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch

from tensorizer._format.dtypes import stored_for_tensor
from tensorizer._format.entries import TensorType
from tensorizer._format.extra_state import gives_state, modules_of
from tensorizer._format.names import Name, Path, name_of, path_of
from tensorizer._format.payloads import stored_dtype

#: Path of the alias, path of its target, and whether the data of the alias are written, too.
Tie = tuple[Path, Path, bool]

_KIND_LETTERS = {TensorType.PARAM: "p", TensorType.BUFFER: "b", TensorType.STATE_DICT: "sd"}


class ModuleTensor(NamedTuple):
    """One parameter or buffer, and its place in the module."""

    module: torch.nn.Module  # the module that holds it
    attribute: str  # its name in that module
    module_idx: int  # position of the module in named_modules()
    name: str  # "<module path>.<attribute>"; a tensor of the root starts with a dot
    is_buffer: bool
    tensor: torch.Tensor
    is_second_name: bool = False  # a second name of a tensor or module that was listed before


@dataclasses.dataclass(eq=False)
class Record:
    """One tensor to write, and the source of its data."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    type: TensorType = TensorType.STATE_DICT
    module_idx: int = 0
    without_data: bool = False
    """From the meta device: the record holds no payload."""
    source: Any = None
    """Where the data come from: a tensor, an entry of a file, what a planner has. Whoever reads it knows."""
    stored: Optional[str] = None
    """The dtype as the file has it, where that is not what the torch dtype is usually called."""
    is_second_name: bool = False
    """Left out and told as a tie, whatever becomes of other ties."""
    tensor_nbytes: int = dataclasses.field(init=False)
    """Of the tensor in memory."""
    nbytes: int = dataclasses.field(init=False)
    """Of its data."""

    def __post_init__(self) -> None:
        self.tensor_nbytes = math.prod(self.shape) * self.dtype.itemsize
        self.nbytes = 0 if self.without_data else self.tensor_nbytes

    @classmethod
    def of_tensor(
        cls,
        path: Path,
        tensor: torch.Tensor,
        stored: str,
        type: TensorType = TensorType.STATE_DICT,
        module_idx: int = 0,
        is_second_name: bool = False,
    ) -> Record:
        """The record of a tensor that holds its own data."""
        shape = tuple(tensor.shape)
        return cls(path, tensor.dtype, shape, type, module_idx, tensor.is_meta, tensor, stored, is_second_name)

    @property
    def name(self) -> Name:
        """The name that users see."""
        return name_of(self.path)

    @property
    def stored_dtype(self) -> str:
        """The dtype as ``.tensors`` files store it. Raises the errors of :func:`stored_for_tensor`."""
        return self.stored or stored_for_tensor(self.dtype)

    def begin(self) -> tuple[Path, bytes, tuple[int, ...], int, int, int, bool]:
        """The argument of ``SaveSession.begin_call``: path, stored dtype, shape, type, module, bytes of the payload,
        and whether it has no data. A scalar on the meta device is stored as a real zero (docs/format.md)."""
        nbytes = self.tensor_nbytes if not self.shape else self.nbytes
        dtype = self.stored_dtype.encode()
        return self.path, dtype, self.shape, int(self.type), self.module_idx, nbytes, self.without_data

    def __str__(self) -> str:
        place = f"{self.module_idx}:{_KIND_LETTERS[self.type]}:{self.name}"
        return f"{place} dtype {self.dtype} shape {self.shape}, {self.nbytes} bytes"


def check_name(name: Any, kind: TensorType) -> Path:
    """The path that a caller's name stands for.

    Raises:
        TypeError: The name is neither a text nor a tuple.
        ValueError: The name of a module's tensor has several steps.
    """
    if not isinstance(name, (str, tuple)):
        raise TypeError(f"name: expected a str or a tuple of str and int, got {type(name).__name__}")
    path = path_of(name)
    if kind is not TensorType.STATE_DICT and not (len(path) == 1 and isinstance(path[0], str)):
        raise ValueError(f"name: paths like {name!r} are legal for STATE_DICT tensors only")
    return path


# --- the tensors of modules -----------------------------------------------------------------------------------------


def walk_module(
    root: torch.nn.Module, include_non_persistent_buffers: bool, under_all_names: bool = False
) -> Iterator[ModuleTensor]:
    """Every tensor of `root` in file order: per module its parameters, then its buffers, in registration order.

    A module that is registered under two names appears once, as does a tensor that one module registers twice. Tensors
    that different modules share appear once per name (docs/format.md, "Modules"). With `under_all_names`, all of them
    appear under each of their names, as in the state dict.
    """
    positions = {id(module): position for position, (_, module) in enumerate(root.named_modules())}
    passed: set[int] = set()
    for path, module in modules_of(root).items() if under_all_names else root.named_modules():
        listed: set[int] = set()
        for attribute, tensor, is_buffer in _tensors_of(module, under_all_names):
            is_second_name = id(module) in passed or id(tensor) in listed
            listed.add(id(tensor))
            if not is_buffer or include_non_persistent_buffers or attribute not in module._non_persistent_buffers_set:
                name = f"{path}.{attribute}"
                module_idx = positions.get(id(module), 0)
                yield ModuleTensor(module, attribute, module_idx, name, is_buffer, tensor, is_second_name)
        passed.add(id(module))


def _tensors_of(module: torch.nn.Module, under_all_names: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The module's own tensors: name, tensor, and whether it is a buffer."""
    if under_all_names:
        for registered, is_buffer in ((module._parameters, False), (module._buffers, True)):
            yield from ((name, tensor, is_buffer) for name, tensor in registered.items() if tensor is not None)
        return
    yield from ((name, parameter, False) for name, parameter in module.named_parameters(recurse=False))
    yield from ((name, buffer, True) for name, buffer in module.named_buffers(recurse=False))


def record_of(held: ModuleTensor) -> Record:
    """The record of a module's tensor. Raises the errors of :func:`stored_dtype`."""
    kind = TensorType.BUFFER if held.is_buffer else TensorType.PARAM
    stored = stored_dtype(held.name, held.tensor)
    # Readers treat a larger position as the largest one.
    return Record.of_tensor(
        (held.name,), held.tensor, stored, kind, min(held.module_idx, 0xFFFF), is_second_name=held.is_second_name
    )


def modules_with_extra_state(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules of `root`, by path, whose class has state beyond tensors."""
    return {path: module for path, module in root.named_modules() if gives_state(module)}


def extra_states(root: torch.nn.Module) -> dict[str, Any]:
    """The extra states of the modules that have any, by path."""
    states = {path: module.get_extra_state() for path, module in modules_with_extra_state(root).items()}
    return {path: state for path, state in states.items() if state is not None}


# --- ties -----------------------------------------------------------------------------------------------------------


def ties_of(records: Iterable[Record]) -> dict[Path, Path]:
    """Maps each further name of a tied tensor to its first name in `records`. The sources of the records are tensors.

    Tensors are tied if they are of one kind and have the same memory, shape, strides and dtype. Tensors that overlap in
    another way are stored separately. A second name for one place in a module is a tie as well.
    """
    first: dict[Hashable, Path] = {}
    ties: dict[Path, Path] = {}
    for record in records:
        place = place_of(record.source)
        key: Optional[Hashable] = None if place is None else (record.type, place)
        own = ("object", id(record.source))
        if key is None and record.is_second_name:
            key = own
        kept = record.path if key is None else first.setdefault(key, record.path)
        first.setdefault(own, record.path)
        if kept is not record.path:
            ties[record.path] = kept
    return ties


def place_of(tensor: torch.Tensor) -> Optional[Hashable]:
    """A key that is equal for tied tensors; ``None`` for tensors without data, which are never tied."""
    if tensor.is_meta or tensor.numel() == 0:
        return None
    kind: Sequence[Hashable] = (tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
    address = _address(tensor)
    if address == 0:  # a wrapper around other tensors
        return (*kind, id(tensor))
    return (*kind, address, tuple(tensor.shape), tensor.stride())


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
