"""Stores leaves with NumPy arrays of numbers as their bytes, so that they need no pickle.

Such a leaf of a distributed checkpoint is one record: the size of a JSON text (8 bytes, little-endian), the text, which
has dtype, shape and offset of each array in its place, and the arrays, from the next multiple of 64 on.
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
    """Whether a value is an array that consists of its bytes alone; subclasses such as masked arrays have more."""
    return type(value) is np.ndarray and value.dtype.kind in "biufc"


def array_of(raw: np.ndarray[Any, Any], dtype: Any, shape: Any) -> np.ndarray[Any, Any]:
    """A new array with these bytes, dtype (as ``numpy.dtype.str``) and shape.

    Raises:
        ValueError, TypeError: No array of numbers has this dtype, shape and number of bytes.
    """
    if _nbytes(dtype, shape) != raw.nbytes:
        raise ValueError(f"expected the bytes of an array of {dtype} {shape!r:.100}, got {raw.nbytes}")
    found: np.ndarray[Any, Any] = raw.view(np.dtype(dtype)).reshape(shape).copy()
    return found


def _nbytes(dtype: Any, shape: Any) -> int:
    """The size of an array in bytes. Raises the errors of :func:`array_of`."""
    if not re.fullmatch(NUMPY_NUMBER, dtype):
        raise ValueError(f"expected the dtype of numbers, got {dtype!r:.50}")
    nbytes = dense_nbytes(shape, np.dtype(dtype).itemsize)
    if nbytes is None:
        raise ValueError(f"expected the shape of an array, got {shape!r:.100}")
    return nbytes


def bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array in C order; they are copied only if the array has another order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor over the memory of an array; it has the array's dtype if torch knows it, else bytes."""
    try:
        return adopt("array", array)[0]
    except (TypeError, ValueError):  # for example another byte order
        return torch.from_numpy(bytes_of(array))


def pack(value: Any) -> Optional[torch.Tensor]:
    """Encodes a value of simple types and arrays of numbers; ``None`` for other values and those without arrays.

    :func:`unpack` decodes it.
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
    """Decodes the bytes of :func:`pack`.

    Raises:
        FormatError: :func:`pack` does not write such bytes.
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
        if type(begin) is not int or begin < end:  # overlapping arrays could turn a few bytes into many
            raise ValueError(f"expected the place of an array behind {end}, got {begin!r:.50}")
        end = begin + _nbytes(dtype, shape)
        return array_of(raw[first + begin : first + end], dtype, shape)

    return from_json(data[_SIZE_NBYTES : _SIZE_NBYTES + size], array)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
