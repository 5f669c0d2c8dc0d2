"""Models over several devices: the map, and the hooks that move activations between them (``accelerate``)."""

from __future__ import annotations

from typing import Any, Optional

import torch

__all__ = ["dispatch", "holds_everything", "resolve"]

_BALANCED = ("auto", "balanced", "balanced_low_0")


def resolve(model: Any, device_map: Any, max_memory: Optional[dict[Any, Any]], dtype: torch.dtype) -> dict[str, Any]:
    """From names of modules to devices, as the library would choose them for an empty model.

    Args:
        model: With parameters on the meta device.
        device_map: A mapping, a device, or ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``.
        max_memory: Bytes, or texts like ``"1GB"``, by device.
        dtype: Of the parameters.

    Raises:
        ValueError: Another word.
        ImportError: ``accelerate`` is not installed.
    """
    if isinstance(device_map, (torch.device, int)):
        return {"": device_map}
    if not isinstance(device_map, str):
        return dict(device_map)
    if device_map not in (*_BALANCED, "sequential"):
        try:
            return {"": torch.device(device_map)}
        except RuntimeError:
            wanted = ", ".join((*_BALANCED, "sequential"))
            raise ValueError(f"device_map: wanted {wanted}, a device or a mapping, found {device_map!r}") from None
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory, get_max_memory

    whole = list(getattr(model, "_no_split_modules", None) or ())
    limits: Any = max_memory
    if device_map in _BALANCED:
        limits = get_balanced_memory(model, max_memory, whole, dtype=dtype, low_zero=device_map == "balanced_low_0")
    limits = get_max_memory(limits)
    return dict(infer_auto_device_map(model, limits, whole, dtype=dtype))


def holds_everything(device_map: dict[str, Any]) -> bool:
    """Whether no part is to stay on the disk, which the library alone arranges."""
    return "disk" not in device_map.values()


def dispatch(model: Any, device_map: dict[str, Any]) -> None:
    """Puts the hooks in place where there is more than one device, and buffers where their modules are."""
    devices = {torch.device(f"cuda:{place}" if isinstance(place, int) else place) for place in device_map.values()}
    if len(devices) == 1:
        model.to(devices.pop())  # buffers: the parameters are there
        return
    from accelerate import dispatch_model

    dispatch_model(model, device_map=device_map)
