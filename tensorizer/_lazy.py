"""Names of a module that are resolved when somebody asks for them, so that importing it imports little.

They are given once, where type checkers look for them: in the module's block ``if TYPE_CHECKING:``, each imported as
itself (``from package.module import Name as Name``).
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["names_of", "resolver"]

_names: dict[str, dict[str, str]] = {}  # by module, from each name to the module that has it


def names_of(module: str) -> dict[str, str]:
    """From the names that a module resolves on demand to the modules that have them."""
    if module not in _names:
        spec: Any = sys.modules[module].__spec__
        found: dict[str, str] = {}
        for block in ast.parse(spec.loader.get_source(module)).body:
            if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
                for node in block.body:
                    if isinstance(node, ast.ImportFrom) and node.module:
                        found.update({one.name: node.module for one in node.names if one.asname == one.name})
        _names[module] = found
    return _names[module]


def resolver(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a module."""

    def resolve(name: str) -> Any:
        home = None if name.startswith("__") else names_of(module).get(name)
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if home == module:  # a submodule
            return importlib.import_module(f"{module}.{name}")
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[module], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *names_of(module)})

    return resolve, names
