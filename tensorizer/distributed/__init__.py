"""Many processes: one file for all ranks of a group, and checkpoints of ``torch.distributed.checkpoint``.

Names are resolved when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorizer._system.on_demand import names_on_demand

if TYPE_CHECKING:
    from tensorizer._load.report import LoadReport as LoadReport
    from tensorizer._load.report import RankReport as RankReport
    from tensorizer.distributed._checkpoint.defaults import dcp_default as dcp_default
    from tensorizer.distributed._checkpoint.existing import VerifyReport as VerifyReport
    from tensorizer.distributed._checkpoint.existing import consolidate as consolidate
    from tensorizer.distributed._checkpoint.existing import is_complete as is_complete
    from tensorizer.distributed._checkpoint.existing import prune as prune
    from tensorizer.distributed._checkpoint.existing import verify as verify
    from tensorizer.distributed._checkpoint.reader import TensorizerReader as TensorizerReader
    from tensorizer.distributed._checkpoint.writer import TensorizerWriter as TensorizerWriter
    from tensorizer.distributed._loading import load as load
    from tensorizer.distributed._loading import load_sharded as load_sharded

__all__ = [
    "LoadReport",
    "RankReport",
    "TensorizerReader",
    "TensorizerWriter",
    "VerifyReport",
    "consolidate",
    "dcp_default",
    "is_complete",
    "load",
    "load_sharded",
    "prune",
    "verify",
]

_get, __dir__ = names_on_demand(__name__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        import torch.distributed

        if not torch.distributed.is_available():
            raise ImportError(f"{__name__}.{name}: this build of torch has no torch.distributed")
    return _get(name)
