"""Names of a module that are resolved when they are first asked for, so that importing it imports nothing else."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from importlib.abc import InspectLoader
from types import CodeType
from typing import Any, cast


def names_on_demand(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a module, for the names that it imports for type checkers only.

    Its block ``if TYPE_CHECKING:`` gives each name and where it is defined. These functions look the imports up in the
    module's compiled code, which is there without the source, too.
    """

    @functools.cache
    def origins() -> dict[str, str]:
        spec = sys.modules[module].__spec__
        assert spec is not None
        return _imports(cast(CodeType, cast(InspectLoader, spec.loader).get_code(module)))

    def get(name: str) -> Any:
        # Python asks for names with underscores at both ends by itself, `__path__` for example.
        if name[:2] == "__" or name not in origins():
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        origin = origins()[name]
        if origin == module:
            return importlib.import_module(f"{module}.{name}")
        value = getattr(importlib.import_module(origin), name)
        setattr(sys.modules[module], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[module]), *origins()})


def _imports(code: CodeType) -> dict[str, str]:
    """From the names that the code of a module imports, whether it runs or not, to the modules they come from."""
    from opcode import EXTENDED_ARG, opmap

    # By hand: `dis` describes every instruction at length, which takes more than a millisecond of each import.
    origin, found, further = "", {}, 0
    for operation, argument in zip(code.co_code[::2], code.co_code[1::2]):
        argument |= further
        further = argument << 8 if operation == EXTENDED_ARG else 0
        if operation == opmap["IMPORT_NAME"]:
            origin = code.co_names[argument]
        elif operation == opmap["IMPORT_FROM"]:
            found[code.co_names[argument]] = origin
    return found
