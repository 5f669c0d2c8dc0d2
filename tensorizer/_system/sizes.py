"""Sizes as people read and write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Optional, TypeVar, Union

_SIZE = r"(?i)\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGTP])(i?))?B?\s*"


def convert_bytes(num: float, decimal: bool = True) -> str:
    """A size for people to read.

    Args:
        num: Number of bytes, whole or not.
        decimal: ``True`` counts in KB, MB, ... (steps of 1000), ``False`` in KiB, MiB, ... (steps of 1024).

    Returns:
        One decimal and the first unit in which the value is below one step, for example ``"123.5 MB"``. The largest
        unit is PB or PiB. Negative values stay in ``bytes``.

    Examples:
        >>> tensorizer.utils.convert_bytes(1_500_000)
        '1.5 MB'
    """
    step = 1000 if decimal else 1024
    units = ("KB", "MB", "GB", "TB", "PB") if decimal else ("KiB", "MiB", "GiB", "TiB", "PiB")
    value, unit = num, "bytes"
    for unit_name in units:
        if value < step:
            break
        value, unit = value / step, unit_name
    return f"{float(value):.1f} {unit}"


def size_text(nbytes: float) -> str:
    """A size for people, the same in every table, report and message: ``"1 byte"``, ``"512 bytes"``, ``"4.1 KB"``
    (steps of 1000)."""
    return counted(round(nbytes), "byte") if nbytes < 1000 else convert_bytes(nbytes)


def counted(count: int, noun: str, nouns: Optional[str] = None) -> str:
    """A number with its noun: ``"1 tensor"``, ``"2,000 tensors"``. Pass `nouns` if the plural needs more than an s."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def parse_size(name: str, value: Union[int, str]) -> int:
    """A number of bytes, from a number or a text with a unit.

    Raises:
        TypeError: It is neither a number nor a text.
        ValueError: It is negative or not a size; the message contains `name`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{name}: expected a number of bytes or a text as '500GB', got {type(value).__name__}")
    if isinstance(value, int):
        if not 0 <= value < 1 << 63:
            raise ValueError(f"{name}: expected a number of bytes >= 0, got {value}")
        return value
    found = re.fullmatch(_SIZE, value)
    if found is None:
        raise ValueError(f"{name}: expected a size as '500GB' or '200GiB', got {value!r}")
    power = " KMGTP".index((found[2] or " ").upper())
    return min(int(float(found[1]) * (1024 if found[3] else 1000) ** power), (1 << 63) - 1)


# --- runs of a limited size -----------------------------------------------------------------------------------------

_Item = TypeVar("_Item")


def runs(
    items: Sequence[_Item],
    nbytes_of: Callable[[_Item], int],
    limit: Union[float, Callable[[int], float]],
    kind_of: Optional[Callable[[_Item], Hashable]] = None,
) -> Iterator[Sequence[_Item]]:
    """Cuts items into runs: consecutive items of at most `limit` bytes together, or one item if it is larger.

    Args:
        items: The items to cut.
        nbytes_of: Returns the size of an item.
        limit: Most bytes of a run; ``math.inf`` for no limit. Or a function that returns it for a run that begins
            behind so many bytes.
        kind_of: Returns the kind of an item. All items of a run have one kind.
    """
    begin, before, total = 0, 0, 0
    for position, item in enumerate(items):
        size = nbytes_of(item)
        most = limit(before) if callable(limit) else limit
        changes = kind_of is not None and position > begin and kind_of(item) != kind_of(items[begin])
        if position > begin and (total + size > most or changes):
            yield items[begin:position]
            begin, before, total = position, before + total, 0
        total += size
    if begin < len(items):
        yield items[begin:]
