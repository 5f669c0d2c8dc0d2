"""tensorizer: PyTorch models, state dicts and checkpoints to one file, and back at the speed of the hardware.

Names and submodules are imported on first use, so that ``import tensorizer`` by itself imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import importlib.machinery
from typing import TYPE_CHECKING, Any

from tensorizer._version import __version__ as __version__
from tensorizer.errors import *  # noqa: F403 - every exception of the package

if TYPE_CHECKING:
    from tensorizer import cache as cache
    from tensorizer import cli as cli
    from tensorizer import cuda as cuda
    from tensorizer import deserializer as deserializer
    from tensorizer import distributed as distributed
    from tensorizer import encryption as encryption
    from tensorizer import errors as errors
    from tensorizer import integrations as integrations
    from tensorizer import legacy as legacy
    from tensorizer import progress as progress
    from tensorizer import protobuf as protobuf
    from tensorizer import serialization as serialization
    from tensorizer import serializer as serializer
    from tensorizer import signing as signing
    from tensorizer import stream_io as stream_io
    from tensorizer import tensors_pb2 as tensors_pb2
    from tensorizer import torch as torch
    from tensorizer import torch_compat as torch_compat
    from tensorizer import utils as utils
    from tensorizer import weight_sync as weight_sync
    from tensorizer._files.convert import convert as convert
    from tensorizer._files.diff import DiffReport as DiffReport
    from tensorizer._files.diff import diff as diff
    from tensorizer._files.inspect import FileInfo as FileInfo
    from tensorizer._files.inspect import TensorInfo as TensorInfo
    from tensorizer._files.inspect import inspect as inspect
    from tensorizer._files.sign import sign as sign
    from tensorizer._files.verify import VerifyReport as VerifyReport
    from tensorizer._files.verify import verify as verify
    from tensorizer._format.entries import FilterFuncType as FilterFuncType
    from tensorizer._format.entries import TensorType as TensorType
    from tensorizer._load.compare import LoadReport as LoadReport
    from tensorizer.deserializer import TensorDeserializer as TensorDeserializer
    from tensorizer.encryption import DecryptionParams as DecryptionParams
    from tensorizer.encryption import EncryptionParams as EncryptionParams
    from tensorizer.integrations.engines import load_stream as load_stream
    from tensorizer.legacy import load_model as load_model
    from tensorizer.legacy import serialize_model as serialize_model
    from tensorizer.serializer import TensorSerializer as TensorSerializer
    from tensorizer.signing import PublicKey as PublicKey
    from tensorizer.signing import SigningKey as SigningKey
    from tensorizer.torch import load as load
    from tensorizer.torch import load_file as load_file
    from tensorizer.torch import safe_open as safe_open
    from tensorizer.torch import save as save
    from tensorizer.torch import save_file as save_file
    from tensorizer.torch import save_model as save_model

# Public names, and the module from which each is imported on first use. Type checkers see the imports above; a test
# compares the two.
_ORIGINS = {
    "convert": "tensorizer._files.convert",
    "DiffReport": "tensorizer._files.diff",
    "diff": "tensorizer._files.diff",
    "FileInfo": "tensorizer._files.inspect",
    "TensorInfo": "tensorizer._files.inspect",
    "inspect": "tensorizer._files.inspect",
    "sign": "tensorizer._files.sign",
    "VerifyReport": "tensorizer._files.verify",
    "verify": "tensorizer._files.verify",
    "FilterFuncType": "tensorizer._format.entries",
    "TensorType": "tensorizer._format.entries",
    "LoadReport": "tensorizer._load.compare",
    "TensorDeserializer": "tensorizer.deserializer",
    "DecryptionParams": "tensorizer.encryption",
    "EncryptionParams": "tensorizer.encryption",
    "load_stream": "tensorizer.integrations.engines",
    "load_model": "tensorizer.legacy",
    "serialize_model": "tensorizer.legacy",
    "TensorSerializer": "tensorizer.serializer",
    "PublicKey": "tensorizer.signing",
    "SigningKey": "tensorizer.signing",
    "load": "tensorizer.torch",
    "load_file": "tensorizer.torch",
    "safe_open": "tensorizer.torch",
    "save": "tensorizer.torch",
    "save_file": "tensorizer.torch",
    "save_model": "tensorizer.torch",
}
_SUBMODULES = {
    "cache",
    "cli",
    "cuda",
    "deserializer",
    "distributed",
    "encryption",
    "errors",
    "integrations",
    "legacy",
    "progress",
    "protobuf",
    "serialization",
    "serializer",
    "signing",
    "stream_io",
    "tensors_pb2",
    "torch",
    "torch_compat",
    "utils",
    "weight_sync",
}

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
    # Up to here as in the published package. Our own submodules are not listed: a star import would put `torch` or
    # `cuda` in the place of modules that the program imported.
    "DiffReport",
    "FileInfo",
    "LoadReport",
    "PublicKey",
    "SigningKey",
    "TensorInfo",
    "VerifyReport",
    "convert",
    "diff",
    "inspect",
    "load",
    "load_file",
    "load_model",
    "load_stream",
    "safe_open",
    "save",
    "save_file",
    "save_model",
    "serialize_model",
    "sign",
    "verify",
]
__all__ += errors.__all__


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _ORIGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ORIGINS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__})


def _require_build() -> None:
    """Raises an error with advice if the extension is not compiled, or only for another Python."""
    # Looks only beside these files: the finder of an editable install would find the module of another checkout.
    if importlib.machinery.PathFinder.find_spec(f"{__name__}._C", __path__) is not None:
        return
    import pathlib
    import sys

    built = sorted(path.name for folder in __path__ for path in pathlib.Path(folder).glob("_C.*.so"))
    found = f" (found {', '.join(built)}, which is for another one)" if built else ""
    raise ImportError(
        f"tensorizer is not built: its compiled module for Python {sys.version_info.major}.{sys.version_info.minor} is "
        f"missing in {__path__[0]}{found}. Run `pip install -e .` or `make build` in the source checkout; where the "
        "package is installed as well, start Python in another folder",
        name=f"{__name__}._C",
        path=__path__[0],
    )


_require_build()
