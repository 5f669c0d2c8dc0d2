"""Indices with lists, masks and tensors in them: what to read, and what to take of that."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

_BASIC = frozenset({int, slice, type(...), type(None)})


def is_basic(index: Any) -> bool:
    """Whether the extension understands an index as it is."""
    if type(index) is tuple:
        return _BASIC.issuperset(map(type, index))
    return type(index) in _BASIC


def cover(index: Any, shape: Sequence[int]) -> tuple[list[tuple[Any, ...]], tuple[Any, ...]]:
    """Reads an index as torch does. Rows that a list or mask of dimension 0 names are read alone.

    Returns:
        Basic indices of what to read, whose results follow each other along dimension 0 where there are several; and
        the rest of the index, for what was read.

    Raises:
        IndexError: Out of range, too many dimensions, or no index.
        ValueError: A step below 1.
    """
    items = [_plain(item) for item in (index if isinstance(index, tuple) else (index,))]
    named = sum(map(_dimensions, items))
    if named > len(shape):
        raise IndexError(f"too many indices for tensor of dimension {len(shape)}")
    items = _without_ellipsis(items, len(shape) - named)
    boxes: list[tuple[Any, ...]] = [()]
    rest: list[Any] = []
    dim = 0
    for item in items:
        taken = _dimensions(item)
        if isinstance(item, torch.Tensor) and taken:
            covers, left = _cover_tensor(item, shape[dim : dim + taken], dim)
            if len(covers) > 1 and dim > 0:  # everything between the first and the last
                first, last = covers[0][0].start, covers[-1][0].stop
                rows = [i - first for (part,) in covers for i in range(part.start, part.stop)]
                covers, left = [(slice(first, last),)], torch.tensor(rows, device="cpu")[left]
            boxes = [box + part for box, part in itertools.product(boxes, covers)]
            rest.append(left)
        elif taken:
            boxes = [(*box, _one(item, shape[dim], dim) if isinstance(item, int) else item) for box in boxes]
            rest.append(0 if isinstance(item, int) else slice(None))
        else:
            rest.append(item)
        dim += taken
    return boxes, tuple(rest)


def _cover_tensor(item: torch.Tensor, sizes: Sequence[int], dim: int) -> tuple[list[tuple[slice, ...]], torch.Tensor]:
    """The ranges of rows that an index of some dimensions names, and what indexes them once they were read."""
    if item.dtype == torch.bool:
        if tuple(item.shape) != tuple(sizes):
            raise IndexError(
                f"The shape of the mask {list(item.shape)} at index {dim} does not match the shape of the indexed "
                f"tensor {list(sizes)} at index {dim}"
            )
        if item.dim() == 1:
            item = item.nonzero().reshape(-1)
        else:
            places = item.nonzero()
            lows, highs = (places.amin(0), places.amax(0) + 1) if len(places) else ([0] * item.dim(), [0] * item.dim())
            ranges = tuple(slice(int(low), int(high)) for low, high in zip(lows, highs))
            return [ranges], item[ranges]
    (size,) = sizes
    item = item.to(torch.int64)
    if item.numel() == 0:
        return [(slice(0, min(size, 1)),)], item
    wrapped = torch.where(item < 0, item + size, item)
    if int(wrapped.min()) < 0 or int(wrapped.max()) >= size:
        wrong = item[(wrapped < 0) | (wrapped >= size)].reshape(-1)[0]
        raise IndexError(f"index {int(wrong)} is out of bounds for dimension {dim} with size {size}")
    rows, places = torch.unique(wrapped, sorted=True, return_inverse=True)
    begins = [0, *((rows[1:] != rows[:-1] + 1).nonzero().reshape(-1) + 1).tolist(), len(rows)]
    values = rows.tolist()
    return [(slice(values[a], values[b - 1] + 1),) for a, b in zip(begins, begins[1:])], places


def _plain(item: Any) -> Any:
    """One item of an index as an int, slice, ``...``, ``None``, bool or CPU tensor."""
    if item is None or item is ... or isinstance(item, (bool, slice)):
        return item
    if isinstance(item, torch.Tensor) or hasattr(item, "__array__"):
        tensor = torch.as_tensor(item, device="cpu").detach()
    elif isinstance(item, (list, tuple, range)):
        tensor = (
            torch.tensor(list(item), device="cpu") if len(item) else torch.zeros(0, dtype=torch.int64, device="cpu")
        )
    elif hasattr(item, "__index__"):
        return operator.index(item)
    else:
        raise IndexError(
            "only integers, slices (`:`), ellipsis (`...`), None and long or byte Variables are valid indices "
            f"(got {type(item).__name__})"
        )
    if tensor.is_floating_point() or tensor.is_complex():
        raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
    if tensor.dtype == torch.uint8:
        tensor = tensor.bool()
    return int(tensor) if tensor.dim() == 0 and tensor.dtype != torch.bool else tensor


def _dimensions(item: Any) -> int:
    """Of the tensor, that an item stands for."""
    if item is None or item is ... or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype == torch.bool:
        return item.dim()
    return 1


def _without_ellipsis(items: list[Any], not_named: int) -> list[Any]:
    whole = [slice(None)] * not_named
    if not any(item is ... for item in items):
        return items + whole
    at = next(i for i, item in enumerate(items) if item is ...)
    return items[:at] + whole + [item for item in items[at + 1 :] if item is not ...]


def _one(i: int, size: int, dim: int) -> slice:
    if not -size <= i < size:
        raise IndexError(f"index {i} is out of bounds for dimension {dim} with size {size}")
    return slice(i % size, i % size + 1)
