"""tensorizer: PyTorch models, state dicts and checkpoints to one file, and back at the speed of the hardware."""

from __future__ import annotations

from typing import Any

from . import serialization, stream_io, torch_compat, utils
from ._version import __version__
from .errors import HashMismatchError
from .serialization import (
    CryptographyError,
    DecryptionParams,
    EncryptionParams,
    FilterFuncType,
    TensorDeserializer,
    TensorSerializer,
    TensorType,
)

__all__ = [
    "TensorSerializer",
    "TensorDeserializer",
    "TensorType",
    "CryptographyError",
    "EncryptionParams",
    "DecryptionParams",
    "FilterFuncType",
    "stream_io",
    "torch_compat",
    "utils",
    "protobuf",
    "tensors_pb2",
]
