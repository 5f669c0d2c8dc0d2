"""What a write call writes: its tensors, and how many of them are copied at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch

from tensorizer._format.entries import TensorType
from tensorizer._format.names import Path
from tensorizer._format.payloads import is_copied
from tensorizer._save.modules import ModuleTensor
from tensorizer._system import cuda_engine

__all__ = ["Item", "batches", "check_name"]

# Bytes of copies (non-contiguous tensors, other devices) that exist at a time.
_COPY_BUDGET_NBYTES = 256 << 20

_KIND_LETTERS = {TensorType.PARAM: "p", TensorType.BUFFER: "b", TensorType.STATE_DICT: "sd"}


class Item(NamedTuple):
    """One tensor of a write call."""

    path: Path
    tensor: torch.Tensor
    dtype: str  # as stored
    type: TensorType
    module_idx: int
    owner: Optional[ModuleTensor] = None  # where remove_tensors takes it from
    is_further: bool = False  # a name that is recorded for the first one of its tensor, whatever becomes of ties

    @property
    def nbytes(self) -> int:
        return 0 if self.tensor.is_meta else self.tensor.numel() * self.tensor.element_size()

    def describe(self) -> tuple[Path, bytes, tuple[int, ...], int, int, int, bool]:
        """What the extension plans with."""
        scalar_meta = self.tensor.is_meta and self.tensor.dim() == 0
        nbytes = self.tensor.element_size() if scalar_meta else self.nbytes
        return (
            self.path,
            self.dtype.encode(),
            tuple(self.tensor.shape),
            int(self.type),
            self.module_idx,
            nbytes,
            self.tensor.is_meta,
        )

    def __str__(self) -> str:
        name = self.path[0] if len(self.path) == 1 else self.path
        place = f"{self.module_idx}:{_KIND_LETTERS[self.type]}:{name}"
        return f"{place} dtype {self.tensor.dtype} shape {tuple(self.tensor.shape)}, {self.nbytes} bytes"


def check_name(name: Any, kind: TensorType) -> Path:
    if isinstance(name, str):
        return (name,)
    if not isinstance(name, tuple):
        raise TypeError(f"name: wanted a str or a tuple of str and int, found {type(name).__name__}")
    if kind is not TensorType.STATE_DICT and not (len(name) == 1 and isinstance(name[0], str)):
        raise ValueError(f"name: paths like {name!r} are legal for STATE_DICT tensors only")
    return name


def _copied_nbytes(item: Item) -> int:
    """Bytes that writing the item takes beyond the item itself, or sets free."""
    copied = is_copied(item.tensor, on_device=cuda_engine.is_fast_device(item.tensor.device))
    return item.nbytes if copied or item.owner is not None else 0


def batches(items: list[Item]) -> Iterator[list[Item]]:
    """Consecutive items of one device whose copies fit the budget together."""
    batch: list[Item] = []
    nbytes = 0
    for item in items:
        size = _copied_nbytes(item)
        if batch and (nbytes + size > _COPY_BUDGET_NBYTES or item.tensor.device != batch[0].tensor.device):
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += size
    if batch:
        yield batch
