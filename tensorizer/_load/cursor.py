"""Tensors and arrays one after the other, from where the last call stopped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Optional

import numpy as np
import torch

from tensorizer._format import dtypes
from tensorizer._format.entries import FilterFuncType, TensorType
from tensorizer._format.names import Name
from tensorizer._load.open_file import OpenFile
from tensorizer._load.open_index import tensor_error

#: Module index, type, name, parameter.
TensorItem = tuple[int, TensorType, Name, torch.nn.Parameter]
#: Module index, type, name, array, is opaque, torch dtype name.
ArrayItem = tuple[int, TensorType, Name, "np.ndarray[Any, Any]", bool, Optional[str]]

# Bytes that a generator reads ahead of its consumer.
_READ_AHEAD_NBYTES = 64 << 20


class Cursor:
    """A position in the selection, moved by reading on. Not for several threads at once."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._position = 0

    def read_tensors(
        self, filter_func: Optional[FilterFuncType], num_tensors: int, verify_hash: Optional[bool], cache: bool
    ) -> Iterator[TensorItem]:
        """Parameters, as ``TensorDeserializer.read_tensors`` yields them."""
        file = self._file
        for i, box in self._read_on(filter_func, num_tensors, verify_hash, cache, raw=False):
            _, _, module_idx = file.described(i)
            # Out of its box, so that this suspended generator does not keep it alive.
            yield module_idx, file.type(i), file.names[i], box.pop()

    def read_arrays(
        self,
        filter_func: Optional[FilterFuncType],
        num_tensors: int,
        allow_raw_data: bool,
        verify_hash: Optional[bool],
        cache: bool,
    ) -> Iterator[ArrayItem]:
        """Arrays, as ``TensorDeserializer.read_numpy_arrays`` yields them."""
        for i, box in self._read_on(filter_func, num_tensors, verify_hash, cache, raw=True):
            yield self._array_item(i, box.pop(), allow_raw_data)

    def _array_item(self, i: int, tensor: torch.Tensor, allow_raw_data: bool) -> ArrayItem:
        _, _, module_idx = self._file.described(i)
        opaque = not dtypes.numpy_has(tensor.dtype)
        if opaque and not allow_raw_data:
            raise ValueError(
                f"tensor {self._file.names[i]!r} has dtype {tensor.dtype}, which numpy lacks; "
                "allow_raw_data=True yields its elements as integers"
            )
        data = tensor.detach()
        try:
            array = (data.view(getattr(torch, f"int{8 * data.element_size()}")) if opaque else data).numpy()
        except ValueError as error:
            problem = f"numpy lacks arrays of its {tensor.dim()} dimensions: {error}"
            raise tensor_error(self._file.source_name, self._file.names[i], problem) from None
        return (
            module_idx,
            self._file.type(i),
            self._file.names[i],
            array,
            opaque,
            str(tensor.dtype) if opaque else None,
        )

    def _read_on(
        self,
        filter_func: Optional[FilterFuncType],
        num_tensors: int,
        verify_hash: Optional[bool],
        cache: bool,
        raw: bool,
    ) -> Iterator[tuple[int, list[Any]]]:
        if num_tensors < -1:
            raise ValueError(f"num_tensors: expected -1 (all) or more, got {num_tensors}")
        left = math.inf if num_tensors == -1 else num_tensors
        while left > 0:
            batch = self._next_batch(filter_func, left)
            if not batch:
                return
            tensors = self._read_batch([i for _, i in batch], verify_hash, cache, raw)
            for position, i in batch:
                self._position = position + 1
                left -= 1
                yield i, [tensors.pop(i)]

    def _next_batch(self, filter_func: Optional[FilterFuncType], left: float) -> list[tuple[int, int]]:
        """(position in the selection, entry) of the next tensors that the filter accepts."""
        batch: list[tuple[int, int]] = []
        nbytes = 0
        selection, index = self._file.selection, self._file.index
        for position in range(self._position, len(selection)):
            i = selection[position]
            size = index.loaded_nbytes(i)
            if len(batch) >= left or (batch and nbytes + size > _READ_AHEAD_NBYTES):
                break
            if filter_func is None or filter_func(self._file.names[i]):
                batch.append((position, i))
                nbytes += size
        return batch

    def _read_batch(self, entries: list[int], verify_hash: Optional[bool], cache: bool, raw: bool) -> dict[int, Any]:
        """The tensors of `entries`, from the cache where they are there; names of one tensor get one."""
        aliases = self._file.aliases
        records = [aliases.get(i, i) for i in entries]
        found = self._read_entries(sorted(set(records)), verify_hash, cache, raw)
        if not self._file.closed:
            self._file.read_headers([i for i in entries if i in aliases])
        return {i: found[record] for i, record in zip(entries, records)}

    def _read_entries(self, entries: list[int], verify_hash: Optional[bool], cache: bool, raw: bool) -> dict[int, Any]:
        verify = self._file.must_verify(verify_hash)
        if raw and any(map(self._is_cast, entries)):
            return dict(zip(entries, self._file.read(entries, verify)))
        if cache:
            return dict(zip(entries, self._file.load(entries, verify_hash)))
        kept = [i for i in entries if i in self._file.kept]
        result: dict[int, Any] = dict(zip(kept, self._file.load(kept, verify_hash)))
        missing = [i for i in entries if i not in result]
        if missing:
            for batch in self._file.read_batches(missing, verify):
                result.update(zip(batch.entries, batch.tensors))
        return result

    def _is_cast(self, i: int) -> bool:
        """Whether the kept form of a tensor is, or would be, another one than the stored one."""
        if self._file.options.dtype is None:
            return False
        kept = self._file.kept.get(self._file.aliases.get(i, i))
        if kept is not None and self._file.has_header(i):
            return kept.dtype != self._file.dtype_of(i)
        return self._file.casts(self._file.stored_dtype(i))
