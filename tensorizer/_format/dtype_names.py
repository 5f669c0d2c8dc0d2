"""What stored dtypes are called (docs/format.md, "dtypes"); without torch."""

from __future__ import annotations

OPAQUE_SEPARATOR = "\0"

#: What torch calls the dtypes that numpy has too, by what numpy calls them.
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
    """Whether an index shows the width of elements and no more, so that only the record header names their dtype."""
    return b"V" in shown and OPAQUE_SEPARATOR.encode() not in shown


def dtype_text(stored: str) -> str:
    """A stored dtype as torch calls it, without ``torch.``; as it is stored where torch has no such dtype."""
    numpy_part, _, name = stored.partition(OPAQUE_SEPARATOR)
    if name:
        return name.replace("torch.", "", 1)
    return NUMPY_NAMES.get(numpy_part) or _other_spelling(numpy_part) or stored


def _other_spelling(numpy_part: str) -> str:
    """What torch calls a dtype that is spelt as no release writes it (``"=f4"``, ``"bool"``); empty for others."""
    import numpy as np  # for few files

    try:
        found = np.dtype(numpy_part)
    except (TypeError, ValueError, SyntaxError):  # numpy takes "i4,(" for Python
        return ""
    return NUMPY_NAMES.get(found.str, "") if found.isnative else ""
