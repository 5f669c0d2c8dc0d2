"""Reads settings from the environment. No other module does; each variable is documented at its use."""

from __future__ import annotations

import os
from typing import Optional

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
