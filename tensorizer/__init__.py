"""tensorizer: PyTorch models, state dicts and checkpoints to one file, and back at the speed of the hardware."""

from __future__ import annotations

from typing import Any

from tensorizer import serialization as serialization
from tensorizer import stream_io, torch_compat, utils
from tensorizer._version import __version__ as __version__
from tensorizer.errors import HashMismatchError as HashMismatchError
from tensorizer.errors import LoadError as LoadError
from tensorizer.errors import MissingHashError as MissingHashError
from tensorizer.errors import VerificationError as VerificationError
from tensorizer.serialization import (
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


def __getattr__(name: str) -> Any:
    if name in ("load_model", "serialize_model"):  # the names of releases before 1.0
        from tensorizer import legacy

        return getattr(legacy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
