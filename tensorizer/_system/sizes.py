"""Sizes for people to read."""

from __future__ import annotations

__all__ = ["convert_bytes"]


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
