"""Upper bounds for threads, as callers give them."""

from __future__ import annotations

from typing import Optional

__all__ = ["thread_limit"]

_MORE_THAN_THERE_WILL_EVER_BE = 0xFFFF


def thread_limit(name: str, limit: Optional[int]) -> int:
    """The bound that the extension takes for the argument `name`: 0, as many as are useful, for ``None``.

    Raises:
        TypeError: Not an int.
        ValueError: Below 1.
    """
    if limit is None:
        return 0
    if not isinstance(limit, int):
        raise TypeError(f"{name}: wanted an int, found {type(limit).__name__}")
    if limit < 1:
        raise ValueError(f"{name}: wanted 1 or more, found {limit}")
    return min(int(limit), _MORE_THAN_THERE_WILL_EVER_BE)
