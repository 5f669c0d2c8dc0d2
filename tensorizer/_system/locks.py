"""Renews locks in forked children, where no thread is left that could release a lock that the parent's threads held."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

#: Owners of a ``_lock``, each with the function that makes the lock. A forked child gets a new one.
makers: MutableMapping[Any, Callable[[], Any]] = weakref.WeakKeyDictionary()


def _make_anew() -> None:
    for owner, make in list(makers.items()):
        owner._lock = make()
    if sys.version_info < (3, 12):  # there, a cached property takes a lock
        package = __name__.partition(".")[0]
        modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == package]
        found = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
        ours = [kind for kind in found if str(kind.__module__).partition(".")[0] == package]
        for attribute in (attribute for kind in ours for attribute in vars(kind).values()):
            if isinstance(attribute, functools.cached_property):
                attribute.lock = threading.RLock()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_make_anew)
