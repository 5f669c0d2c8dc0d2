"""Sizes for people to read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Optional, TypeVar

__all__ = ["convert_bytes", "runs"]


def convert_bytes(num: float, decimal: bool = True) -> str:
    """A size for people to read.

    Args:
        num: Number of bytes, whole or not.
        decimal: ``True`` counts in KB, MB, ... (steps of 1000), ``False`` in KiB, MiB, ... (steps of 1024).

    Returns:
        One decimal and the first unit in which the value is below one step, for example ``"123.5 MB"``. The largest
        unit is PB or PiB. Negative values stay in ``bytes``.
    """
    step = 1000 if decimal else 1024
    units = ("KB", "MB", "GB", "TB", "PB") if decimal else ("KiB", "MiB", "GiB", "TiB", "PiB")
    value, unit = num, "bytes"
    for unit_name in units:
        if value < step:
            break
        value, unit = value / step, unit_name
    return f"{float(value):.1f} {unit}"


# --- runs of a limited size -----------------------------------------------------------------------------------------

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
