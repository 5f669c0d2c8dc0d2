"""The names that callers import from here. All of them are defined elsewhere."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tensorizer import _C
from tensorizer._encryption import DecryptionParams, EncryptionParams
from tensorizer._format.entries import FileFeatureFlags, FilterFuncType, HashType, TensorEntry, TensorHash, TensorType
from tensorizer._system import perf
from tensorizer._system.devices import resolve_cuda_device
from tensorizer.deserializer import TensorDeserializer
from tensorizer.errors import (
    CryptographyError,
    FormatError,
    HashMismatchError,
    InvalidVersionError,
    StreamError,
    TensorizerError,
    TruncatedError,
)
from tensorizer.serializer import TensorSerializer

__all__ = [
    "TensorSerializer",
    "TensorDeserializer",
    "TensorType",
    "CryptographyError",
    "EncryptionParams",
    "DecryptionParams",
    "FilterFuncType",
]

logger = logging.getLogger("tensorizer.serialization")

#: The newest data version that can be read, and the features that first needed each version (docs/format.md, "Data
#: versions").
TENSORIZER_VERSION = 5
LONG_TENSOR_TENSORIZER_VERSION = 5
META_TENSOR_TENSORIZER_VERSION = 4
ENCRYPTION_TENSORIZER_VERSION = 3
OPAQUE_TENSORIZER_VERSION = 2
NON_OPAQUE_TENSORIZER_VERSION = 1

TENSORIZER_MAGIC = b"|TZR|"
OPAQUE_DTYPE_SEP = "\0"

#: Number of processors that this process may use: its scheduling mask, limited by the quota of its control group.
cpu_count: int = _C.cpu_quota()
lz4 = None

_enable_perf_stats: bool = perf.enabled
_get_perf_stats = perf.totals


_FileFeatureFlags = FileFeatureFlags


class _FileHeader:
    """Callers find the class of the version error here."""

    InvalidVersionError = InvalidVersionError


def _resolve_cuda_device(device: Any = "cuda") -> torch.device:
    """Adds the index of the current CUDA device to a device without one."""
    return resolve_cuda_device(torch.device(device))


# Reachable from here although not in __all__, as integrators expect.
_ALSO_HERE = (
    FormatError,
    HashMismatchError,
    HashType,
    StreamError,
    TensorEntry,
    TensorHash,
    TensorizerError,
    TruncatedError,
)
