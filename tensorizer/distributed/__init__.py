"""Storage for ``torch.distributed.checkpoint``, which saves checkpoints and fills models of many ranks.

Names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorizer.distributed._checkpoint.defaults import dcp_default as dcp_default
    from tensorizer.distributed._checkpoint.existing import is_complete as is_complete
    from tensorizer.distributed._checkpoint.existing import verify as verify
    from tensorizer.distributed._checkpoint.reader import TensorizerReader as TensorizerReader
    from tensorizer.distributed._checkpoint.to_files import dcp_to_files as dcp_to_files
    from tensorizer.distributed._checkpoint.writer import TensorizerWriter as TensorizerWriter

# The module from which each name is imported on first use.
_ORIGINS = {
    "dcp_default": "tensorizer.distributed._checkpoint.defaults",
    "dcp_to_files": "tensorizer.distributed._checkpoint.to_files",
    "is_complete": "tensorizer.distributed._checkpoint.existing",
    "verify": "tensorizer.distributed._checkpoint.existing",
    "TensorizerReader": "tensorizer.distributed._checkpoint.reader",
    "TensorizerWriter": "tensorizer.distributed._checkpoint.writer",
}

__all__ = [
    "TensorizerReader",
    "TensorizerWriter",
    "dcp_default",
    "dcp_to_files",
    "is_complete",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _ORIGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch.distributed

    if not torch.distributed.is_available():
        raise ImportError(f"{__name__}.{name}: this build of torch has no torch.distributed")
    value = getattr(importlib.import_module(_ORIGINS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
