"""A naive reader of safetensors files, which tests use as their oracle. It uses only the standard library.

It shares no code with the package, so the two agree only if both are right. It is as strict as the package: a repeated
name, or a number in another spelling, is an error.
"""

from __future__ import annotations

import json
import math
import struct
from typing import NamedTuple, Optional

MAX_HEADER_NBYTES = 100_000_000
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


class BadFile(ValueError):
    """The bytes are not a safetensors file."""


class Tensor(NamedTuple):
    dtype: str
    shape: tuple
    data: bytes


class File(NamedTuple):
    metadata: Optional[dict]
    tensors: dict  # name to Tensor, in the order of the payloads


def _unique(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        raise BadFile("a member twice")
    return found


class _Integer(int):
    pass


def _plain_integer(text):
    """Parses an integer without leading zeros; other numbers stay as they are."""
    return _Integer(text) if text.isdigit() and str(int(text)) == text else float(text)


def _check_depth(text, limit=128):
    depth = 0
    inside = escaped = False
    for c in text:
        if inside:
            inside, escaped = escaped or c != '"', not escaped and c == "\\"
        elif c == '"':
            inside = True
        elif c in "[{":
            depth += 1
            if depth > limit:
                raise BadFile("nested too deeply")
        elif c in "]}":
            depth -= 1


def read(data: bytes) -> File:
    if len(data) < 8:
        raise BadFile("no header length")
    (nbytes,) = struct.unpack_from("<Q", data)
    if nbytes > MAX_HEADER_NBYTES or 8 + nbytes > len(data):
        raise BadFile("the header does not fit")
    try:
        text = data[8 : 8 + nbytes].decode("utf-8")
        _check_depth(text)
        header = json.loads(
            text, object_pairs_hook=lambda pairs: (pairs and _unique(pairs)) or {}, parse_int=_plain_integer
        )
        json.dumps(header, ensure_ascii=False).encode()  # no lone surrogates
    except (UnicodeError, json.JSONDecodeError) as error:
        raise BadFile(str(error)) from None
    if not isinstance(header, dict):
        raise BadFile("not an object")
    metadata = header.pop("__metadata__", None)
    texts = metadata is None or (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()))
    if not texts:
        raise BadFile("metadata")
    return File(metadata, _payloads(header, data, 8 + nbytes))


def _payloads(header: dict, data: bytes, begin_of_data: int) -> dict:
    rows = []
    for name, info in header.items():
        if not isinstance(info, dict):
            raise BadFile("a tensor that is no object")
        try:
            dtype, shape, (begin, end) = info["dtype"], info["shape"], info["data_offsets"]
        except (KeyError, ValueError, TypeError):
            raise BadFile("a member is missing") from None
        numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
        if not isinstance(dtype, str) or not all(isinstance(n, _Integer) and n < 1 << 64 for n in numbers):
            raise BadFile("a member of another type")
        if dtype in BITS:
            if math.prod(n for n in shape if n) * BITS[dtype] >= 1 << 64:
                raise BadFile("too large")
            bits = math.prod(shape) * BITS[dtype]
            if bits % 8 or end - begin != bits // 8:
                raise BadFile("shape and offsets disagree")
        rows.append((begin, end, name, dtype, tuple(map(int, shape))))
    rows.sort(key=lambda row: row[:2])
    expected = 0
    found = {}
    for begin, end, name, dtype, shape in rows:
        if begin != expected or end < begin:
            raise BadFile("a gap, or an overlap")
        expected = end
        found[name] = Tensor(dtype, shape, data[begin_of_data + begin : begin_of_data + end])
    if begin_of_data + expected != len(data):
        raise BadFile("the file ends elsewhere")
    return found


def build(header, payload: bytes = b"", pad: int = 0) -> bytes:
    """A file with a header (text, bytes, or an object to encode as JSON) and its payloads."""
    if isinstance(header, str):
        header = header.encode()
    elif not isinstance(header, bytes):
        header = json.dumps(header, separators=(",", ":")).encode()
    header += b" " * pad
    return struct.pack("<Q", len(header)) + header + payload
