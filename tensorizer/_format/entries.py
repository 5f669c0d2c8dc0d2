"""The small public records that describe what is in a file (docs/format.md, "Index" and "Hashes")."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from tensorizer._format.dtype_names import OPAQUE_SEPARATOR
from tensorizer._format.names import Name
from tensorizer.errors import FormatError

#: A filter: called with a plain name or a tuple of ``str`` and ``int``; a true result selects the tensor.
FilterFuncType = Callable[[Name], Any]


class TensorType(enum.IntEnum):
    """The kind of a tensor when it was written."""

    PARAM = 0
    BUFFER = 1
    STATE_DICT = 2

    @property
    def kind(self) -> str:
        """For people and in reports: ``"parameter"``, ``"buffer"`` or ``"state_dict"``."""
        return "parameter" if self is TensorType.PARAM else self.name.lower()


class FileFeatureFlags(enum.IntFlag):
    """Bits of the prologue's flags field."""

    encrypted = 1
    versioned_headers = 2


class HashType(enum.IntEnum):
    """Kinds of stored digests."""

    CRC32 = 0
    SHA256 = 1


@dataclass(order=True)
class TensorHash:
    """One stored digest; ``hash`` is its value, little-endian for CRC32."""

    __slots__ = ("hash", "type")
    type: HashType
    hash: bytes


@dataclass(order=True)
class TensorEntry:
    """One tensor as the file describes it."""

    __slots__ = (
        "data_length",
        "data_offset",
        "dtype",
        "hashes",
        "header_hashes",
        "metadata_version",
        "name",
        "offset",
        "shape",
        "type",
    )
    metadata_version: int  # 1, or 5 where dimensions are stored with 64 bits
    name: Name
    type: TensorType
    dtype: str  # as stored: a numpy dtype, then a NUL and torch's name if numpy lacks the dtype
    shape: tuple[int, ...]
    offset: int  # offset of the record header in the file
    data_offset: int  # offset of the payload in the file
    data_length: int  # payload bytes; 0 for tensors without data
    hashes: Optional[list[TensorHash]]  # None until the tensor has been read
    header_hashes: Optional[dict[HashType, Any]]

    @property
    def is_long_tensor(self) -> bool:
        """Whether dimensions take 64 bits."""
        return self.metadata_version >= 5

    @property
    def deserialized_length(self) -> int:
        """Bytes that the tensor occupies once loaded."""
        if self.data_length:
            return self.data_length
        return self.itemsize * math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        digits = self.dtype.partition(OPAQUE_SEPARATOR)[0].lstrip("<>|=")[1:]
        if not digits.isdigit():
            raise FormatError(f"tensor {self.name!r}: stored dtype {self.dtype!r} has no size")
        return int(digits)


def flat_name(name: Name, type: TensorType) -> str:
    """A flat name: without the leading dot of tensors of a root module; for a path, its steps joined by dots."""
    text = name if isinstance(name, str) else ".".join(map(str, name))
    of_root = type is not TensorType.STATE_DICT and text.startswith(".") and len(text) > 1
    return text[1:] if of_root else text


def check_filter(filter_func: Optional[FilterFuncType]) -> None:
    """Raises ``TypeError`` for what cannot be called with a name."""
    if filter_func is None or callable(filter_func):
        return
    import torch  # for errors only

    if isinstance(filter_func, torch.dtype):
        raise TypeError(
            f"filter_func: expected a function, got {filter_func}: a dtype is passed by name, dtype={filter_func}"
        )
    raise TypeError(
        f"filter_func: expected a function that is given each name, got {type(filter_func).__name__}; "
        "for a collection of names pass its method, as in filter_func={'a', 'b'}.__contains__"
    )
