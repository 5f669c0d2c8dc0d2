"""Reads settings from the environment, as no other module does, and checks arguments.

If the extension cannot convert an argument, its error quotes all arguments of the call, which may be secrets. So these
functions check first: their errors name the argument and the type or number that was found, and never show a text.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from typing import Any, Optional

# Eleven days. Longer times are shortened to it, so that sums of times never overflow.
MAX_SECONDS = 1_000_000
# The variables that libcurl reads for plain HTTP, in its order.
_HTTP_PROXIES = ("http_proxy", "all_proxy", "ALL_PROXY")


def env_text(name: str) -> Optional[str]:
    """The variable's value, or ``None`` if it is unset or empty."""
    return os.environ.get(name) or None


def http_proxy_is_secure() -> bool:
    """Whether libcurl connects over TLS to the proxy for plain HTTP that the environment names."""
    return any(is_secure_proxy(env_text(name)) for name in _HTTP_PROXIES)


def is_secure_proxy(url: Optional[str]) -> bool:
    """Whether libcurl connects to this proxy over TLS."""
    return (url or "").lower().startswith("https:")


def env_int(name: str, minimum: int, maximum: int = (1 << 63) - 1) -> Optional[int]:
    """The variable as an integer from `minimum` to `maximum`; ``None`` if it is unset.

    Raises:
        ValueError: The text is not such an integer; the message names the variable.
    """
    text = env_text(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if not minimum <= value <= maximum:
        wanted = f">= {minimum}" if maximum == (1 << 63) - 1 else f"from {minimum} to {maximum}"
        raise ValueError(f"environment variable {name}: expected an integer {wanted}, got {text!r}")
    return value


def env_seconds(name: str, *, above_zero: bool = False) -> Optional[float]:
    """The variable as a time in seconds, at least 0 or above 0, at most `MAX_SECONDS`; ``None`` if it is unset.

    Raises:
        ValueError: The text is not such a number; the message names the variable.
    """
    text = env_text(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (value > 0 if above_zero else value >= 0):
        raise ValueError(f"environment variable {name}: expected {wanted_seconds(above_zero)}, got {text!r}")
    return min(value, float(MAX_SECONDS))


def wanted_seconds(above_zero: bool) -> str:
    """Describes in words which times are accepted."""
    return f"a number {'above 0' if above_zero else '>= 0'} (seconds)"


def share_of_node(most: int, least: int) -> int:
    """This process's share of `most`, which the ranks of one machine divide among them; never below `least`."""
    ranks = ranks_of_node()
    return most if ranks == 1 else max(least, most // ranks)


def ranks_of_node() -> int:
    """The number of ranks on this machine: ``LOCAL_WORLD_SIZE``, which torchrun and similar programs set, else 1."""
    return env_int("LOCAL_WORLD_SIZE", 1) or 1


# --- arguments --------------------------------------------------------------------------------------------------------


def text(name: str, value: Any) -> str:
    """Returns `value` if it is a ``str`` that can be encoded as UTF-8.

    Raises:
        TypeError: It is another type.
        ValueError: It contains half of a surrogate pair, as Python's names of files that are not UTF-8 do.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected str, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: expected text that UTF-8 can encode, got a lone surrogate") from None
    return value


def suggestion(name: str, known: Sequence[str]) -> str:
    """What to write instead of an unknown name."""
    import difflib  # only errors need it

    near = difflib.get_close_matches(name.removeprefix("torch_"), known, 1)
    return f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(known)}"


def integer(name: str, value: Any, least: int = 0, most: int = (1 << 63) - 1, wanted: Optional[str] = None) -> int:
    """Returns `value` as an ``int`` from `least` to `most`; `wanted` describes the range in words.

    Raises:
        TypeError: It is not an integer.
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
    """The argument ``buffer_size``, however small; `default` for ``None``. Raises the errors of :func:`integer`."""
    return default if value is None else integer("buffer_size", value, -(1 << 63), wanted="a number of bytes")


def binary_mode(mode: str, allowed: Sequence[str], scheme: Optional[str]) -> str:
    """Returns the mode of a stream with its letters in the usual order. ``ValueError`` if it is not `allowed`."""
    ordered = "".join(sorted(mode, key="rwaxb+".find))
    if ordered not in allowed:
        raise ValueError(f"mode for {scheme}://: expected one of {', '.join(allowed)}, got {mode!r}")
    return ordered


def seconds(name: str, value: Any, *, above_zero: bool = False) -> float:
    """Returns `value` as a time of at least 0, or above 0. Longer times and infinity become `MAX_SECONDS`.

    Raises:
        TypeError: It is not a number.
        ValueError: It is too small, or NaN.
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
    """The limit of threads to pass to the extension; ``None`` becomes 0, for as many as are useful.

    Raises:
        TypeError: The argument `name` is not an int.
        ValueError: It is below 1.
    """
    if limit is None:
        return 0
    if not isinstance(limit, int):
        raise TypeError(f"{name}: expected an int, got {type(limit).__name__}")
    if limit < 1:
        raise ValueError(f"{name}: expected 1 or more, got {limit}")
    return min(int(limit), _MORE_THAN_THERE_WILL_EVER_BE)
