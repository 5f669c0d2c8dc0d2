"""Translates stored dtypes to the names of torch (docs/format.md, "dtypes"), without importing torch."""

from __future__ import annotations

OPAQUE_SEPARATOR = "\0"

#: From numpy's names of dtypes to torch's, for the dtypes that both have.
NUMPY_NAMES = {
    "|u1": "uint8",
    "|i1": "int8",
    "<i2": "int16",
    "<i4": "int32",
    "<i8": "int64",
    "<u2": "uint16",
    "<u4": "uint32",
    "<u8": "uint64",
    "<f2": "float16",
    "<f4": "float32",
    "<f8": "float64",
    "<c8": "complex64",
    "<c16": "complex128",
    "|b1": "bool",
}


def lacks_name(shown: bytes) -> bool:
    """Whether the index shows only the width of the elements, so that only the record header names the dtype."""
    return b"V" in shown and OPAQUE_SEPARATOR.encode() not in shown


def dtype_text(stored: str) -> str:
    """The name of a stored dtype in torch, without ``torch.``; the stored text if torch has no such dtype."""
    numpy_part, _, name = stored.partition(OPAQUE_SEPARATOR)
    if name:
        return name.replace("torch.", "", 1)
    return NUMPY_NAMES.get(numpy_part) or _other_spelling(numpy_part) or stored


def _other_spelling(numpy_part: str) -> str:
    """torch's name for a dtype in a spelling that no release writes (``"=f4"``, ``"bool"``); empty for other texts."""
    import numpy as np  # few files need it

    try:
        found = np.dtype(numpy_part)
    except (TypeError, ValueError, SyntaxError):  # numpy parses "i4,(" as Python code
        return ""
    return NUMPY_NAMES.get(found.str, "") if found.isnative else ""
