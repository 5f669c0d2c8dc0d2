"""Cutting sequences into runs of a limited size."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Optional, TypeVar

__all__ = ["runs"]

_Item = TypeVar("_Item")


def runs(
    items: Sequence[_Item],
    nbytes_of: Callable[[_Item], int],
    limit: float,
    kind_of: Optional[Callable[[_Item], Hashable]] = None,
) -> Iterator[Sequence[_Item]]:
    """Consecutive items of at most `limit` bytes together, or one item where that alone is larger.

    Args:
        items: What is cut.
        nbytes_of: The size of an item.
        limit: Bytes; ``math.inf`` for no limit.
        kind_of: Items of different kinds are never in one run.
    """
    begin, total = 0, 0
    for position, item in enumerate(items):
        size = nbytes_of(item)
        changes = kind_of is not None and position > begin and kind_of(item) != kind_of(items[begin])
        if position > begin and (total + size > limit or changes):
            yield items[begin:position]
            begin, total = position, 0
        total += size
    if begin < len(items):
        yield items[begin:]
