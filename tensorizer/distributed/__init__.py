"""Many processes: one file for all ranks of a group, and checkpoints of ``torch.distributed.checkpoint``.

Names are resolved when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorizer._load.report import LoadReport as LoadReport
    from tensorizer._load.report import RankReport as RankReport
    from tensorizer.distributed._checkpoint.consolidation import consolidate as consolidate
    from tensorizer.distributed._checkpoint.defaults import dcp_default as dcp_default
    from tensorizer.distributed._checkpoint.reader import TensorizerReader as TensorizerReader
    from tensorizer.distributed._checkpoint.upkeep import VerifyReport as VerifyReport
    from tensorizer.distributed._checkpoint.upkeep import is_complete as is_complete
    from tensorizer.distributed._checkpoint.upkeep import prune as prune
    from tensorizer.distributed._checkpoint.upkeep import verify as verify
    from tensorizer.distributed._checkpoint.writer import TensorizerWriter as TensorizerWriter
    from tensorizer.distributed._loading import load as load
    from tensorizer.distributed._loading import load_sharded as load_sharded

# From the public names to the modules that define them.
_MODULES = {
    "LoadReport": "tensorizer._load.report",
    "RankReport": "tensorizer._load.report",
    "TensorizerReader": "_checkpoint.reader",
    "TensorizerWriter": "_checkpoint.writer",
    "VerifyReport": "_checkpoint.upkeep",
    "consolidate": "_checkpoint.consolidation",
    "dcp_default": "_checkpoint.defaults",
    "is_complete": "_checkpoint.upkeep",
    "load": "_loading",
    "load_sharded": "_loading",
    "prune": "_checkpoint.upkeep",
    "verify": "_checkpoint.upkeep",
}

__all__ = [
    *_MODULES,
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    import torch.distributed

    if not torch.distributed.is_available():
        raise ImportError(f"{__name__}.{name}: this build of torch has no torch.distributed")
    where = module if module.startswith("tensorizer.") else f"{__name__}.{module}"
    value = getattr(importlib.import_module(where), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
