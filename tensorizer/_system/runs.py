"""Cutting sequences into runs of a limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

__all__ = ["runs"]

_Item = TypeVar("_Item")


def runs(items: Sequence[_Item], nbytes_of: Callable[[_Item], int], limit: int) -> Iterator[Sequence[_Item]]:
    """Consecutive items of at most `limit` bytes together, or one item where that alone is larger."""
    begin, total = 0, 0
    for position, item in enumerate(items):
        size = nbytes_of(item)
        if position > begin and total + size > limit:
            yield items[begin:position]
            begin, total = position, 0
        total += size
    if begin < len(items):
        yield items[begin:]
