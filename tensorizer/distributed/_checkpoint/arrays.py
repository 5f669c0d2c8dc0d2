"""Arrays of numbers of NumPy among leaves: records of their bytes, so that no pickle is needed for them.

A leaf of a distributed checkpoint that has any is one record: the size of a JSON text (8 bytes, little-endian), the
text, in which dtype, shape and place stand for each array, and from the next multiple of 64 on the arrays.
"""

from __future__ import annotations

import json
import re
from typing import Any, Optional

import numpy as np
import torch

from tensorizer._format.payloads import adopt, dense_nbytes
from tensorizer.distributed._checkpoint.json_values import NUMPY_NUMBER, NotSimple, Place, encoded, from_json
from tensorizer.errors import FormatError

_ALIGNMENT = 64
_SIZE_NBYTES = 8


def is_array_of_numbers(value: Any) -> bool:
    """Whether a value is an array whose bytes are all of it; subclasses, as of masked arrays, have more."""
    return type(value) is np.ndarray and value.dtype.kind in "biufc"


def array_of(raw: np.ndarray[Any, Any], dtype: Any, shape: Any) -> np.ndarray[Any, Any]:
    """The array that has these bytes, dtype (as ``numpy.dtype.str``) and shape, in memory of its own.

    Raises:
        ValueError, TypeError: There is none.
    """
    if _nbytes(dtype, shape) != raw.nbytes:
        raise ValueError(f"expected the bytes of an array of {dtype} {shape!r:.100}, got {raw.nbytes}")
    found: np.ndarray[Any, Any] = raw.view(np.dtype(dtype)).reshape(shape).copy()
    return found


def _nbytes(dtype: Any, shape: Any) -> int:
    """Of an array, in bytes; raises as :func:`array_of`."""
    if not re.fullmatch(NUMPY_NUMBER, dtype):
        raise ValueError(f"expected the dtype of numbers, got {dtype!r:.50}")
    nbytes = dense_nbytes(shape, np.dtype(dtype).itemsize)
    if nbytes is None:
        raise ValueError(f"expected the shape of an array, got {shape!r:.100}")
    return nbytes


def bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array in C order, without a copy where they lie so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor over the memory of an array where torch knows its dtype, else of its bytes."""
    try:
        return adopt("array", array)[0]
    except (TypeError, ValueError):  # as of other byte orders
        return torch.from_numpy(bytes_of(array))


def pack(value: Any) -> Optional[torch.Tensor]:
    """The bytes that stand for a value of simple types and arrays of numbers; ``None`` for others, and without arrays.

    The way back is :func:`unpack`.
    """
    parts: list[tuple[int, np.ndarray[Any, Any]]] = []
    end = 0

    def leaf(found: Any, _: Place) -> Any:
        nonlocal end
        if not is_array_of_numbers(found):
            raise NotSimple("not simple")
        begin = _aligned(end)
        end = begin + found.nbytes
        parts.append((begin, found))
        return [found.dtype.str, list(found.shape), begin]

    try:
        text = json.dumps(encoded(value, leaf), separators=(",", ":"), allow_nan=False).encode()
    except (NotSimple, RecursionError):
        return None
    if not parts:
        return None
    first = _aligned(_SIZE_NBYTES + len(text))
    content = np.zeros(first + end, np.uint8)
    head = len(text).to_bytes(_SIZE_NBYTES, "little") + text
    content[: len(head)] = np.frombuffer(head, np.uint8)
    for begin, array in parts:
        content[first + begin : first + begin + array.nbytes] = bytes_of(array)
    return torch.from_numpy(content)


def unpack(data: bytes) -> Any:
    """The value of :func:`pack`.

    Raises:
        FormatError: Other bytes.
    """
    size = int.from_bytes(data[:_SIZE_NBYTES], "little")
    if _SIZE_NBYTES + size > len(data):
        raise FormatError(f"expected a text of {size} bytes before arrays, got {len(data)} bytes")
    first = _aligned(_SIZE_NBYTES + size)
    raw = np.frombuffer(data, np.uint8)
    end = 0

    def array(content: Any, _: Place) -> np.ndarray[Any, Any]:
        nonlocal end
        dtype, shape, begin = content
        if type(begin) is not int or begin < end:  # of overlapping ones, few bytes would become many
            raise ValueError(f"expected the place of an array behind {end}, got {begin!r:.50}")
        end = begin + _nbytes(dtype, shape)
        return array_of(raw[first + begin : first + end], dtype, shape)

    return from_json(data[_SIZE_NBYTES : _SIZE_NBYTES + size], array)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
