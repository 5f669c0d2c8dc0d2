"""Which tensors a model has: their names, shapes, dtypes and ties, and the sums that stand for their contents."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tensorizer import _C
from tensorizer._format.payloads import stored_dtype
from tensorizer._load.compare import ModuleView
from tensorizer._load.open_file import OpenFile
from tensorizer._save.records import Record, ties_of
from tensorizer._save.session import memory_of

# Of tensors of other devices, what is on its way through host memory at a time.
PIECE_NBYTES = 64 << 20

_MASK = (1 << 64) - 1


class Form(NamedTuple):
    """What must be equal for one version to be told from another by a delta.

    Attributes:
        tensors: Dtype and shape of each tensor, by the first of its names; names in the order of their UTF-8 bytes.
        ties: From further names to the first one of the same tensor.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ties: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """The first name of each tensor, in the order of the sums."""
        return list(self.tensors)

    def names_of(self, first: str) -> list[str]:
        """All names of a tensor."""
        return [first, *(alias for alias, other in self.ties.items() if other == first)]

    def numel(self, name: str) -> int:
        return torch.Size(self.tensors[name][1]).numel()


def order(name: str) -> bytes:
    """What sorts names: their UTF-8 bytes."""
    return name.encode("utf-8", "surrogatepass")


def tensors_of(source: Any, argument: str) -> dict[str, torch.Tensor]:
    """The tensors of a module, as its state dict names them, or of a mapping; by names in the order of their bytes.

    Raises:
        TypeError: Something else, a name that is no text, a value that is no tensor.
    """
    if isinstance(source, torch.nn.Module):
        slots = ModuleView(source).slots
        found: Mapping[Any, Any] = {name: slot.tensor for name, slot in slots.items() if slot.in_state_dict}
    elif isinstance(source, Mapping):
        found = source
    else:
        raise TypeError(f"{argument}: expected a module or a mapping of tensors, got {type(source).__name__}")
    for name, tensor in found.items():
        if not isinstance(name, str):
            raise TypeError(f"{argument}: expected names of type str, got {type(name).__name__}")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{argument}: {name!r:.200}: expected a tensor, got {type(tensor).__name__}")
    return {
        name: found[name].detach() if found[name].requires_grad else found[name] for name in sorted(found, key=order)
    }


def form_of_tensors(tensors: Mapping[str, torch.Tensor]) -> Form:
    """The form of what a publisher was given, in order.

    Raises:
        ValueError: No tensors, or one on the meta device.
        NotImplementedError: A tensor that a file cannot hold.
    """
    if not tensors:
        raise ValueError("tensors: expected at least one tensor, got none")
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"tensor {name!r:.200} cannot be published: it is on the meta device and has no data")
    records = [Record.of_tensor((n,), t, stored_dtype(n, t)) for n, t in tensors.items()]
    ties = {str(alias[0]): str(first[0]) for alias, first in ties_of(records).items()}
    form = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items() if name not in ties}
    return Form(form, ties)


def form_of_anchor(file: OpenFile) -> Form:
    """The form of the tensors of an anchor.

    Raises:
        FormatError: A dtype that this torch has not; names that are no text.
    """
    file.read_dtypes(range(file.index.entry_count))
    ties = {str(alias): str(first) for alias, first in file.ties().items()}
    names = sorted((str(name) for name in file.names if name not in ties), key=order)
    numbers = {str(name): i for i, name in enumerate(file.names)}
    form = {name: (file.dtype_of(numbers[name]), file.described(numbers[name])[1]) for name in names}
    return Form(form, ties)


# --- sums -------------------------------------------------------------------------------------------------------------


def state_of(sums: Sequence[int]) -> str:
    """What stands for a version: the SHA-256 of its sums in hexadecimal digits."""
    return hashlib.sha256(b"".join(value.to_bytes(8, "little") for value in sums)).hexdigest()


def added(value: int, change: int) -> int:
    """A sum after a change, modulo 2^64."""
    return (value + change) & _MASK


def sums_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The sum of each tensor, wherever it is; those of other devices come to the host in pieces."""
    sums = [0] * len(tensors)
    at_once = [i for i, tensor in enumerate(tensors) if is_plain(tensor)]
    parts = [(memory_of(tensors[i]), tensors[i].element_size(), 0) for i in at_once]
    for i, value in zip(at_once, _C.element_sums(parts)):
        sums[i] = value
    for i in set(range(len(tensors))).difference(at_once):
        sums[i] = _sum_in_pieces(tensors[i])
    return sums


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor, one after the other, are host memory at its address."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _sum_in_pieces(tensor: torch.Tensor) -> int:
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    step, value = max(1, PIECE_NBYTES // flat.element_size()), 0
    for begin in range(0, flat.numel(), step):
        piece = flat[begin : begin + step].cpu()
        (part,) = _C.element_sums([(memory_of(piece), piece.element_size(), begin)])
        value = added(value, part)
    return value
