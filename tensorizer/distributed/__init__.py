"""Many processes: one file for all ranks of a group. Names are resolved when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorizer.distributed._loading import load as load
    from tensorizer.distributed._loading import load_sharded as load_sharded
    from tensorizer.distributed._report import LoadReport as LoadReport
    from tensorizer.distributed._report import RankReport as RankReport

# From the public names to the modules that define them.
_MODULES = {
    "LoadReport": "_report",
    "RankReport": "_report",
    "load": "_loading",
    "load_sharded": "_loading",
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
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
