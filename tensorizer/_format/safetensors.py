"""The ``.safetensors`` side of the formats: names of dtypes, and the header that is written (docs/format.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

import torch

from tensorizer.errors import UnsupportedContentError

__all__ = ["METADATA", "HeaderEntry", "canonical_order", "header_bytes", "safetensors_dtype"]

METADATA = "__metadata__"
_MOST_HEADER_NBYTES = 100_000_000

# In the order of the reference's enumeration, reversed: the rank by which its writer sorts.
_BY_RANK = (
    ("U64", "uint64"),
    ("I64", "int64"),
    ("F64", "float64"),
    ("C64", "complex64"),
    ("F32", "float32"),
    ("U32", "uint32"),
    ("I32", "int32"),
    ("BF16", "bfloat16"),
    ("F16", "float16"),
    ("U16", "uint16"),
    ("I16", "int16"),
    ("F8_E5M2FNUZ", "float8_e5m2fnuz"),
    ("F8_E4M3FNUZ", "float8_e4m3fnuz"),
    ("F8_E8M0", "float8_e8m0fnu"),
    ("F8_E4M3", "float8_e4m3fn"),
    ("F8_E5M2", "float8_e5m2"),
    ("I8", "int8"),
    ("U8", "uint8"),
    ("F4", "float4_e2m1fn_x2"),
    ("BOOL", "bool"),
)
_RANK = {name: rank for rank, (name, _) in enumerate(_BY_RANK)}
_OF_TORCH: dict[torch.dtype, str] = {
    getattr(torch, torch_name): name for name, torch_name in _BY_RANK if hasattr(torch, torch_name)
}


def safetensors_dtype(dtype: torch.dtype) -> Optional[str]:
    """What the format calls a torch dtype; ``None`` where it has no name for it."""
    return _OF_TORCH.get(dtype)


class HeaderEntry(NamedTuple):
    """One tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def canonical_order(entries: Sequence[HeaderEntry]) -> list[int]:
    """Positions of `entries` in the order of the reference's writer: dtypes by rank, then names by their bytes."""

    def key(position: int) -> tuple[int, bytes]:
        entry = entries[position]
        return _RANK[_OF_TORCH[entry.dtype]], entry.name.encode("utf-8", "surrogatepass")

    return sorted(range(len(entries)), key=key)


def header_bytes(entries: Sequence[HeaderEntry], metadata: Optional[Mapping[str, str]]) -> bytes:
    """The length field and the header of a file that holds `entries` one behind the other.

    Padded with spaces to a multiple of 8, so that every payload of the canonical order lies at a multiple of its
    element size; metadata keep their order.

    Raises:
        UnsupportedContentError: A dtype without a name, a tensor named ``__metadata__``, a header that is too long.
    """
    check_entries(entries)
    header: dict[str, object] = {}
    if metadata is not None:
        header[METADATA] = dict(metadata)
    begin = 0
    for entry in entries:
        shape = list(entry.shape)
        dtype = _OF_TORCH[entry.dtype]
        if dtype == "F4":  # counted in elements of four bits, of which torch's type holds two
            shape[-1] *= 2
        header[entry.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + entry.nbytes]}
        begin += entry.nbytes
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise UnsupportedContentError("a name or metadata text that is no Unicode cannot be stored in JSON") from None
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER_NBYTES:
        raise UnsupportedContentError(
            f"the header of a .safetensors file has at most {_MOST_HEADER_NBYTES} bytes, this one {len(text)}"
        )
    return len(text).to_bytes(8, "little") + text


def check_entries(entries: Sequence[HeaderEntry]) -> None:
    """Refuses, by name and all at once, what the format cannot hold."""
    strange = [f"{entry.name!r} ({entry.dtype})" for entry in entries if entry.dtype not in _OF_TORCH]
    strange += [
        f"{entry.name!r} (a scalar of {entry.dtype})"
        for entry in entries
        if _OF_TORCH.get(entry.dtype) == "F4" and not entry.shape
    ]
    if strange:
        raise UnsupportedContentError(f".safetensors has no dtype for {', '.join(strange)}")
    if any(entry.name == METADATA for entry in entries):
        raise UnsupportedContentError(f"no reader of .safetensors finds a tensor named {METADATA!r}")
