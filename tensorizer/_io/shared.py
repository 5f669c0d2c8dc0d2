"""What several files that one call opens share: the credentials and the client of their store."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any, Optional, TypeVar, cast

Made = TypeVar("Made")


class Shared:
    """What the files that one call opens have in common, as a client of their store. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[tuple[Any, Any]] = []

    def get(self, key: Any, make: Callable[[], Made]) -> Made:
        """What was made for an equal `key`, or is made now."""
        with self._lock:
            for known, value in self._made:
                if known == key:
                    return cast(Made, value)
            value = make()
            self._made.append((key, value))
            return value


_shared: contextvars.ContextVar[Optional[Shared]] = contextvars.ContextVar("tensorizer_shared", default=None)


def shared(key: Any, make: Callable[[], Made]) -> Made:
    """What `make` makes: once for all files that :func:`sharing` opens, as far as the `key` is equal."""
    among = _shared.get()
    return make() if among is None else among.get(key, make)


@contextlib.contextmanager
def sharing(among: Optional[Shared] = None) -> Iterator[None]:
    """Files that are opened within it, by this thread and those that take its context, share what they can: with those
    of an outer call of it, or, with `among`, with those that were opened with the same one before."""
    if _shared.get() is not None and among is None:
        yield
        return
    token = _shared.set(Shared() if among is None else among)
    try:
        yield
    finally:
        _shared.reset(token)
