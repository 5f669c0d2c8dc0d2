"""Checks of what callers pass to a load: what is wrong, and what to write instead."""

from __future__ import annotations

from typing import Any, Optional

import torch

from tensorizer._format.entries import FilterFuncType

__all__ = ["check_dtype", "check_filter"]


def check_filter(filter_func: Optional[FilterFuncType]) -> None:
    """Refuses what cannot be called with a name.

    Raises:
        TypeError: Not a function.
    """
    if filter_func is None or callable(filter_func):
        return
    if isinstance(filter_func, torch.dtype):
        raise TypeError(f"filter_func: found {filter_func}, which is a dtype: pass it by name, dtype={filter_func}")
    raise TypeError(
        f"filter_func: wanted a function that is given each name, found {type(filter_func).__name__}; "
        "for a collection of names pass its method, as in filter_func={'a', 'b'}.__contains__"
    )


def check_dtype(dtype: Any) -> None:
    """Refuses anything but a ``torch.dtype`` or ``None``.

    Raises:
        TypeError: Another type.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return
    meant = getattr(torch, dtype.rpartition(".")[2], None) if isinstance(dtype, str) else None
    hint = f"; write {meant}" if isinstance(meant, torch.dtype) else ""
    raise TypeError(f"dtype: wanted a torch.dtype, found {type(dtype).__name__} ({dtype!r:.100}){hint}")
