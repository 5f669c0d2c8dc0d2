"""Checks of arguments that reach the extension together with secrets.

What the extension cannot take it quotes, and all arguments of the call with it. These errors name the argument, and the
type or the number that was found; a text they never show.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Optional

from tensorizer._system.config import MAX_SECONDS, wanted_seconds


def text(name: str, value: Any) -> str:
    """`value`, if it is a ``str`` that can be sent.

    Raises:
        TypeError: It is another type.
        ValueError: It has half of a surrogate pair, as names of files that are no UTF-8 have.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected str, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: expected text that UTF-8 can encode, got a lone surrogate") from None
    return value


def integer(name: str, value: Any, least: int = 0, most: int = (1 << 63) - 1, wanted: Optional[str] = None) -> int:
    """`value` as an ``int`` from `least` to `most`; `wanted` says that in words.

    Raises:
        TypeError: It is no integer.
        ValueError: It is smaller or larger.
    """
    wanted = wanted or f"an integer from {least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected {wanted}, got {type(value).__name__}") from None
    if not least <= number <= most:
        raise ValueError(f"{name}: expected {wanted}, got {_shown(number)}")
    return number


def buffer_size(value: Any, default: int) -> int:
    """The argument of that name, however small; `default` for ``None``. Raises as :func:`integer`."""
    return default if value is None else integer("buffer_size", value, -(1 << 63), wanted="a number of bytes")


def binary_mode(mode: str, allowed: Sequence[str], scheme: Optional[str]) -> str:
    """The mode of a stream, its letters in the usual order; raises ``ValueError`` for one that is not `allowed`."""
    ordered = "".join(sorted(mode, key="rwaxb+".find))
    if ordered not in allowed:
        raise ValueError(f"mode for {scheme}:// must be one of {', '.join(allowed)}, got {mode!r}")
    return ordered


def seconds(name: str, value: Any, *, above_zero: bool = False) -> float:
    """`value` as a time: at least 0, or above it. Larger ones, and infinity, are ``config.MAX_SECONDS``.

    Raises:
        TypeError: It is no number.
        ValueError: It is smaller, or not a number.
    """
    wanted = wanted_seconds(above_zero)
    if isinstance(value, (str, bytes, bytearray)) or (
        not hasattr(value, "__float__") and not hasattr(value, "__index__")
    ):
        raise TypeError(f"{name}: expected {wanted}, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (number > 0 if above_zero else number >= 0):
        raise ValueError(f"{name}: expected {wanted}, got {_shown(value)}")
    return min(number, float(MAX_SECONDS))


def _shown(number: Any) -> str:
    return repr(number) if not isinstance(number, int) or abs(number) < 10**30 else "a number of more than 30 digits"


# --- upper bounds for threads ---------------------------------------------------------------------------------------

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
        raise TypeError(f"{name}: expected an int, got {type(limit).__name__}")
    if limit < 1:
        raise ValueError(f"{name}: expected 1 or more, got {limit}")
    return min(int(limit), _MORE_THAN_THERE_WILL_EVER_BE)
