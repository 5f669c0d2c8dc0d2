"""Names of a module that are resolved when they are first asked for, so that importing it imports nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

__all__ = ["names_on_demand"]


def names_on_demand(
    module: str, defined_in: Mapping[str, str], submodules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a module.

    Args:
        module: Its ``__name__``.
        defined_in: From names to the modules that define them, without ``tensorizer.`` in front.
        submodules: Names of modules of ``tensorizer``.
    """

    def get(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"tensorizer.{name}")
        if name not in defined_in:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"tensorizer.{defined_in[name]}"), name)
        setattr(sys.modules[module], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[module]), *defined_in, *submodules})
