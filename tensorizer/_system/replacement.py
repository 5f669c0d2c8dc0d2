"""What stands in the place of somebody else's functions and classes for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Replacement"]


class Replacement:
    """Puts things in the place of attributes while at least one block that needs that is active, in any thread.

    Args:
        places: Asked when the first block begins: the owner of each attribute, its name, and what takes its place.
    """

    def __init__(self, places: Callable[[], Iterable[tuple[Any, str, Any]]]) -> None:
        self._places = places
        self._lock = threading.RLock()
        self._users = 0
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            try:
                for owner, name, new in self._places():
                    self._originals.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, new)
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            while self._users == 0 and self._originals:
                setattr(*self._originals.pop())
