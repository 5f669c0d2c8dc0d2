"""Names of a module that are resolved when they are first asked for, so that importing it imports nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

__all__ = ["names_on_demand"]


def names_on_demand(
    module: str, package: str, defined_in: Mapping[str, str], submodules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a module.

    Args:
        module: Its ``__name__``.
        package: Its ``__package__``.
        defined_in: From names to the modules of the package that define them.
        submodules: Names of modules of the package.
    """

    def get(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in defined_in:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{defined_in[name]}"), name)
        setattr(sys.modules[module], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[module]), *defined_in, *submodules})
