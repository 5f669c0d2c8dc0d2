"""Settings that come from the environment: read here and nowhere else, each documented where it is used."""

from __future__ import annotations

import os
from typing import Optional

__all__ = ["env_float", "env_int", "env_text", "http_proxy_is_named"]


def env_text(name: str) -> Optional[str]:
    """The variable's value, or ``None`` where it is unset or empty."""
    return os.environ.get(name) or None


def http_proxy_is_named() -> bool:
    """Whether libcurl would find a proxy for plain HTTP in the environment (``no_proxy`` aside)."""
    return any(env_text(name) for name in ("http_proxy", "all_proxy", "ALL_PROXY"))


def env_int(name: str, minimum: int) -> Optional[int]:
    """The variable as an integer ``>= minimum``; ``None`` where unset.

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
    if value < minimum:
        raise ValueError(f"environment variable {name}: wanted an integer >= {minimum}, found {text!r}")
    return value


def env_float(name: str, minimum: float) -> Optional[float]:
    """The variable as a number ``>= minimum``; ``None`` where unset.

    Raises:
        ValueError: The text is no such number; the message names the variable.
    """
    text = env_text(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value >= minimum:
        raise ValueError(f"environment variable {name}: wanted a number >= {minimum}, found {text!r}")
    return value
