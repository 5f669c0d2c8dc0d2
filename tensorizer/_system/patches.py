"""Other values in place of attributes of other libraries, as long as somebody needs them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

_Value = TypeVar("_Value")


class CountedPatch(contextlib.AbstractContextManager[None]):
    """Replaces attributes while at least one block that needs it is active, anywhere in the process.

    Args:
        replacements: Called when the first block begins; gives owners, names of their attributes, and what goes there.
    """

    def __init__(self, replacements: Callable[[], Iterable[tuple[Any, str, Any]]]) -> None:
        self._replacements = replacements
        self._undo = contextlib.ExitStack()
        self._blocks = 0
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        with self._lock:
            if self._blocks == 0:
                with contextlib.ExitStack() as undo:
                    for owner, name, value in self._replacements():
                        undo.callback(setattr, owner, name, getattr(owner, name))
                        setattr(owner, name, value)
                    self._undo = undo.pop_all()
            self._blocks += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                self._undo.close()

    @contextlib.contextmanager
    def for_this_task(self, variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
        """A block that needs the patch, and in which `variable`, which tells it from other threads, has a value."""
        outer = variable.get()
        with self:
            variable.set(value)
            try:
                yield
            finally:
                variable.set(outer)
