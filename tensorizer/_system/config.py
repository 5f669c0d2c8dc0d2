"""Settings that come from the environment: read here and nowhere else, each documented where it is used."""

from __future__ import annotations

import os
from typing import Optional

# Eleven days: longer times are as long, so that sums of them overflow nowhere.
MAX_SECONDS = 1_000_000
# What libcurl reads for plain HTTP, in its order.
_HTTP_PROXIES = ("http_proxy", "all_proxy", "ALL_PROXY")


def env_text(name: str) -> Optional[str]:
    """The variable's value, or ``None`` where it is unset or empty."""
    return os.environ.get(name) or None


def http_proxy_is_secure() -> bool:
    """Whether the proxy that libcurl finds for plain HTTP in the environment is reached over TLS."""
    return any(is_secure_proxy(env_text(name)) for name in _HTTP_PROXIES)


def is_secure_proxy(url: Optional[str]) -> bool:
    """Whether a proxy is one that is reached over TLS."""
    return (url or "").lower().startswith("https:")


def env_int(name: str, minimum: int, maximum: int = (1 << 63) - 1) -> Optional[int]:
    """The variable as an integer from `minimum` to `maximum`; ``None`` where unset.

    Raises:
        ValueError: The text is no such integer; the message names the variable.
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
    """The variable as a time in seconds, at least 0 or above it, `MAX_SECONDS` at most; ``None`` where unset.

    Raises:
        ValueError: The text is no such number; the message names the variable.
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
    """Which times are taken, in words."""
    return f"a number {'above 0' if above_zero else '>= 0'} (seconds)"


def share_of_node(most: int, least: int) -> int:
    """This process's share of what the ranks of one machine have together: `most`, or fewer, but not below `least`."""
    ranks = ranks_of_node()
    return most if ranks == 1 else max(least, most // ranks)


def ranks_of_node() -> int:
    """How many ranks this machine has: ``LOCAL_WORLD_SIZE``, which torchrun and its like set; without it 1."""
    return env_int("LOCAL_WORLD_SIZE", 1) or 1
