"""Makes headers of ``.safetensors`` files, and refuses tensors that the format cannot hold (docs/safetensors.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Optional

import torch

from tensorizer import _C
from tensorizer._format.dtypes import stored_for_tensor
from tensorizer.errors import UnsupportedContentError

METADATA = "__metadata__"


def safetensors_dtype(dtype: torch.dtype) -> Optional[str]:
    """The format's name for a torch dtype; ``None`` if it has none."""
    try:
        return _C.safetensors_dtype(stored_for_tensor(dtype).encode())
    except (NotImplementedError, ValueError):  # the format has no such dtype
        return None


#: Name, dtype and shape of a tensor to write.
Entry = tuple[str, torch.dtype, tuple[int, ...]]


def canonical_order(entries: Sequence[Entry]) -> list[int]:
    """Positions of checked entries in the order of the safetensors library: by rank of the dtype, then by name."""
    return _C.safetensors_order(_described(entries))


def header_bytes(entries: Sequence[Entry], metadata: Optional[Mapping[str, str]]) -> bytes:
    """The length field and the header of a file that holds checked `entries` one behind the other.

    The header is padded with spaces to a multiple of 8, so that in the canonical order every payload starts at a
    multiple of its element size. Metadata keep their order.

    Raises:
        FieldRangeError: The header is too long.
    """
    return _C.safetensors_header(_described(entries), None if metadata is None else list(metadata.items()))


def check_entries(entries: Sequence[Entry]) -> None:
    """Refuses tensors that the format cannot hold; one error names them all."""
    names = {dtype: safetensors_dtype(dtype) for dtype in {dtype for _, dtype, _ in entries}}
    strange = [f"{name!r} ({dtype})" for name, dtype, _ in entries if names[dtype] is None]
    strange += [
        f"{name!r} (a scalar of {dtype})" for name, dtype, shape in entries if names[dtype] == "F4" and not shape
    ]
    if strange:
        raise UnsupportedContentError(f".safetensors has no dtype for {', '.join(strange)}")
    for name, _, _ in entries:
        if name == METADATA:
            raise UnsupportedContentError(f"no reader of .safetensors finds a tensor named {METADATA!r}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UnsupportedContentError(f"tensor {name!r}: names that are no Unicode cannot be stored") from None


def _described(entries: Sequence[Entry]) -> list[tuple[str, bytes, Sequence[int], int]]:
    stored = {dtype: stored_for_tensor(dtype).encode() for dtype in {dtype for _, dtype, _ in entries}}
    return [(name, stored[dtype], shape, math.prod(shape) * dtype.itemsize) for name, dtype, shape in entries]
