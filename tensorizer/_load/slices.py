"""Parts of a tensor, read without the rest of it."""

from __future__ import annotations

import math
from typing import Any, Protocol, cast

import torch

from tensorizer._format.dtypes import torch_dtype
from tensorizer._format.safetensors import safetensors_dtype
from tensorizer._load.container import Container

__all__ = ["ContainerSlice", "SliceSource", "TensorSlice"]


class SliceSource(Protocol):
    """Where the elements of one tensor come from."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stored_dtype: str
    """As ``safetensors`` calls it, or as it is stored."""

    def read_rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of dimension 0, on the target device."""

    def read_whole(self) -> torch.Tensor:
        """The whole tensor, on the target device."""


class TensorSlice:
    """One tensor of an open file; ``slice[index]`` reads the part that `index` names.

    Takes integers, slices with positive steps, ``...``, ``None``, lists of integers and boolean masks, as torch does.
    Rows of dimension 0 are read alone; of the other dimensions the rows that cover them.
    """

    def __init__(self, name: str, source: SliceSource) -> None:
        self._name, self._source = name, source

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._source.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def ndim(self) -> int:
        return len(self._source.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self._source.shape) * self._source.dtype.itemsize

    def get_shape(self) -> list[int]:
        return list(self._source.shape)

    def get_dtype(self) -> str:
        return self._source.stored_dtype

    def is_floating_point(self) -> bool:
        return self._source.dtype.is_floating_point

    def __repr__(self) -> str:
        return f"<TensorSlice of {self._name!r}: {self.dtype}, {list(self.shape)}>"

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        if self.ndim == 0 or not parts:
            return self._source.read_whole()[index]
        first, rest = parts[0], parts[1:]
        rows = self._source.shape[0]
        if isinstance(first, slice):
            begin, end, step = first.indices(rows)
            if step < 0:
                raise ValueError(f"tensor {self._name!r}: wanted a positive step, found {step}")
            part = self._source.read_rows(begin, max(begin, end))
            return part[(slice(None, None, step), *rest)]
        if isinstance(first, int) and not isinstance(first, bool):
            row = first + rows if first < 0 else first
            if not 0 <= row < rows:
                raise IndexError(f"tensor {self._name!r}: index {first} is out of range for {rows} rows")
            return self._source.read_rows(row, row + 1)[(0, *rest)]
        if isinstance(first, list) and first and all(type(i) is int for i in first) and not rest:
            wanted = [i + rows if i < 0 else i for i in first]
            if min(wanted) < 0 or max(wanted) >= rows:
                raise IndexError(f"tensor {self._name!r}: an index of {first} is out of range for {rows} rows")
            begin = min(wanted)
            return self._source.read_rows(begin, max(wanted) + 1)[[i - begin for i in wanted]]
        return self._source.read_whole()[index]


class ContainerSlice:
    """Elements of one tensor of an open container."""

    def __init__(self, container: Container, entry: int, device: torch.device) -> None:
        self._container, self._entry, self._device = container, entry, device
        index = container.index
        text = index.dtype(entry).decode("utf-8", "replace")
        self.dtype = torch_dtype(text)
        self.shape = tuple(index.shape(entry))
        self.stored_dtype = safetensors_dtype(self.dtype) or text

    def read_rows(self, begin: int, end: int) -> torch.Tensor:
        index, source = self._container.index, self._container.source
        if source is None:
            raise RuntimeError("the file is closed; tensors that were not loaded before are out of reach")
        row_nbytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        nbytes = (end - begin) * row_nbytes
        whole = index.encrypted or index.data_nbytes(self._entry) < index.loaded_nbytes(self._entry)
        if whole or nbytes == 0:  # chunks of a cipher are authenticated together; zeros are not stored
            return self.read_whole()[begin:end]
        rows = torch.empty(nbytes, dtype=torch.uint8)
        source.readinto(index.data_offset(self._entry) + begin * row_nbytes, cast(Any, rows.numpy()))
        return rows.view(self.dtype).view(end - begin, *self.shape[1:]).to(self._device)

    def read_whole(self) -> torch.Tensor:
        (tensor,) = self._container.read_raw([self._entry], False).tensors
        return tensor.to(self._device)
