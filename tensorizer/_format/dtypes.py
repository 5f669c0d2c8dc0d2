"""Maps the texts of stored dtypes to torch dtypes and back (docs/format.md, "dtypes")."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from tensorizer._format.dtype_names import NUMPY_NAMES, OPAQUE_SEPARATOR
from tensorizer.errors import FormatError

_STORED_TO_TORCH: dict[str, torch.dtype] = {
    stored: getattr(torch, name) for stored, name in NUMPY_NAMES.items() if hasattr(torch, name)
}  # uint16/32/64 came with torch 2.3
_TORCH_TO_STORED = {dtype: stored for stored, dtype in _STORED_TO_TORCH.items()}
_QUANTIZED = {
    getattr(torch, name) for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4") if hasattr(torch, name)
}
_VOID = {1: "|V1", 2: "<V2", 4: "<V4", 8: "<V8"}

# DLPack type codes (dlpack.h)
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX = 0, 1, 2, 4, 5
_DLPACK = {
    torch.uint8: (_UINT, 8),
    torch.int8: (_INT, 8),
    torch.int16: (_INT, 16),
    torch.int32: (_INT, 32),
    torch.int64: (_INT, 64),
    torch.float16: (_FLOAT, 16),
    torch.float32: (_FLOAT, 32),
    torch.float64: (_FLOAT, 64),
    torch.bfloat16: (_BFLOAT, 16),
    torch.complex64: (_COMPLEX, 64),
    torch.complex128: (_COMPLEX, 128),
}
#: The dtypes that ``dtype=`` converts to each other. Tensors of other dtypes stay as they are stored.
CASTABLE = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
INTEGER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TORCH_NAME = r"torch\.([A-Za-z_]\w*)\Z"


class LoadedDtype(NamedTuple):
    """Tells the extension how to make a tensor of one stored dtype."""

    code: int  # DLPack type code
    bits: int
    dtype: torch.dtype
    reinterpret: bool  # made as integers of the same width, then viewed as `dtype`
    differentiable: bool  # the Parameter's requires_grad: floating point and complex types


def torch_dtype(stored: str) -> torch.dtype:
    """The torch dtype that a stored dtype names.

    Raises:
        FormatError: The text names no dtype that the running torch has.
    """
    numpy_part, _, name = stored.partition(OPAQUE_SEPARATOR)
    if "V" not in numpy_part:
        return _STORED_TO_TORCH.get(numpy_part) or _normalized(numpy_part)
    if not _numpy_dtype(numpy_part.replace("V", "i"), stored).isnative:
        raise FormatError(f"stored dtype {stored!r} has foreign byte order")
    match = re.match(_TORCH_NAME, name)
    found = getattr(torch, match.group(1), None) if match else None
    if not isinstance(found, torch.dtype):
        raise FormatError(f"stored dtype {stored!r}: this torch ({torch.__version__}) has no dtype {name!r}")
    itemsize = _numpy_dtype(numpy_part, stored).itemsize
    if found.itemsize != itemsize:
        raise FormatError(
            f"stored dtype {stored!r}: expected elements of {itemsize} bytes, {name} has {found.itemsize}"
        )
    return found


@functools.lru_cache(maxsize=64)
def known_dtype(stored: bytes) -> Optional[torch.dtype]:
    """The torch dtype that an index shows; ``None`` if only the record header names it, or torch does not have it."""
    try:
        return torch_dtype(stored.decode("utf-8", "replace"))
    except FormatError:
        return None


@functools.lru_cache(maxsize=256)
def casts(stored: Optional[torch.dtype], wanted: Optional[torch.dtype]) -> bool:
    """Whether ``dtype=wanted`` converts tensors of the dtype `stored`; True also if `stored` is unknown."""
    return wanted in CASTABLE and stored != wanted and (stored is None or stored in CASTABLE)


def _numpy_dtype(text: str, stored: str) -> np.dtype[Any]:
    try:
        return np.dtype(text)
    except (TypeError, ValueError, SyntaxError):  # numpy parses "i4,(" as Python code
        raise FormatError(f"stored dtype {stored!r} is not a numpy dtype") from None


def _normalized(numpy_part: str) -> torch.dtype:
    """Accepts other spellings of a native dtype ("<i1", "=f4", "bool"). Foreign byte order is an error, as in torch."""
    dtype = _numpy_dtype(numpy_part, numpy_part)
    if not dtype.isnative:
        raise FormatError(f"stored dtype {numpy_part!r} has foreign byte order")
    known = _STORED_TO_TORCH.get(dtype.str)
    if known is None:
        raise FormatError(f"stored dtype {numpy_part!r} has no counterpart in torch {torch.__version__}")
    return known


@functools.lru_cache(maxsize=64)
def resolve(stored: bytes) -> LoadedDtype:
    """The extension calls this once for each stored dtype of a load."""
    dtype = torch_dtype(stored.decode("utf-8", "replace"))
    differentiable = dtype.is_floating_point or dtype.is_complex
    direct = _DLPACK.get(dtype)
    if direct is not None:
        return LoadedDtype(*direct, dtype, False, differentiable)
    code, bits = _DLPACK[INTEGER_OF_WIDTH[dtype.itemsize]]
    return LoadedDtype(code, bits, dtype, True, differentiable)


def stored_for_tensor(dtype: torch.dtype) -> str:
    """The text to store for a torch dtype.

    Raises:
        NotImplementedError: Quantized dtypes, whose scales the format cannot hold.
        ValueError: An element width other than 1, 2, 4 or 8 bytes.
    """
    stored = _TORCH_TO_STORED.get(dtype)
    if stored is not None:
        return stored
    if dtype in _QUANTIZED:
        raise NotImplementedError(f"tensors of dtype {dtype} cannot be stored: the format holds no scales")
    void = _VOID.get(dtype.itemsize)
    if void is None:
        raise ValueError(
            f"tensors of dtype {dtype} cannot be stored: expected elements of 1, 2, 4 or 8 bytes, got {dtype.itemsize}"
        )
    return f"{void}{OPAQUE_SEPARATOR}{dtype}"


def stored_for_array(dtype: np.dtype[np.generic]) -> str:
    """The text to store for a numpy dtype that torch can adopt.

    Raises:
        ValueError: Foreign byte order.
        TypeError: A dtype that torch does not know.
    """
    if not dtype.isnative:
        raise ValueError(f"arrays of dtype {dtype.str} cannot be stored: convert them to native byte order first")
    if dtype.str not in _STORED_TO_TORCH:
        raise TypeError(f"arrays of dtype {dtype} cannot be stored: torch has no such type")
    return dtype.str


def numpy_has(dtype: torch.dtype) -> bool:
    """Whether numpy has arrays of this dtype."""
    return dtype in _TORCH_TO_STORED


# --- the argument dtype= ----------------------------------------------------------------------------------------------


def as_dtype(dtype: Any) -> Optional[torch.dtype]:
    """A ``dtype=`` argument: a ``torch.dtype``, its name, or ``None``.

    Raises:
        TypeError: Something else; the message says which dtype may be meant.
    """
    found = named_dtype(dtype) if isinstance(dtype, str) else dtype
    if isinstance(found, torch.dtype) or dtype is None:
        return found
    meant = meant_dtype(dtype)
    hint = f"; did you mean {str(meant).removeprefix('torch.')!r}?" if meant is not None else ""
    raise TypeError(f"dtype: expected a torch.dtype or its name, got {type(dtype).__name__} ({dtype!r:.100}){hint}")


def named_dtype(name: str) -> Optional[torch.dtype]:
    """The dtype that torch calls so, with or without ``torch.``."""
    found = getattr(torch, name.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def meant_dtype(text: Any) -> Optional[torch.dtype]:
    """The dtype that a text may have been meant for; ``None`` where none is near."""
    if not isinstance(text, str):
        return None
    import difflib

    names = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
    near = difflib.get_close_matches(text.rpartition(".")[2].lower(), names, 1, 0.5)  # 0.5: "fp16" is float16
    return named_dtype(near[0]) if near else None
