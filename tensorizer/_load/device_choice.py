"""Which device each tensor of a load goes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Optional, Union

import torch

from tensorizer._format.names import Name

__all__ = ["DeviceArgument", "DeviceChooser", "target_device"]

_Device = Union[torch.device, str, int]
#: One device; a mapping from names or dotted prefixes of names to devices (``""`` is the default, the longest prefix
#: wins, as in a ``device_map``); or a callable that is given each name.
DeviceArgument = Optional[Union[_Device, Mapping[str, _Device], Callable[[Name], _Device]]]
#: What a mapping or callable turns into.
DeviceChooser = Callable[[Name], torch.device]


def target_device(device: DeviceArgument) -> Union[torch.device, DeviceChooser]:
    """The device, or the choice of devices, that a constructor's ``device`` argument means.

    ``None`` is CUDA where there is any, else the CPU. Surrounding CPU contexts do not count: ``None`` asks for the best
    device, as it always did.

    Raises:
        RuntimeError: CUDA was asked for and there is none.
    """
    if isinstance(device, Mapping):
        return _chooser_of(device)
    if callable(device):
        choose = device
        return lambda name: _one_device(choose(name))
    return _one_device(device)


def _one_device(device: Optional[_Device]) -> torch.device:
    if device is None:
        from tensorizer.utils import get_device

        return get_device()
    resolved = torch.device(device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device {str(resolved)!r} was asked for, but CUDA is not available")
    return resolved


def _chooser_of(devices: Mapping[str, _Device]) -> DeviceChooser:
    resolved = {name: _one_device(device) for name, device in devices.items()}

    def choose(name: Name) -> torch.device:
        text = name if isinstance(name, str) else ".".join(map(str, name))
        text = text[1:] if text.startswith(".") else text
        while text not in resolved:
            if not text:
                raise ValueError(f"device: the mapping has no entry for tensor {name!r} and no default ''")
            text = text.rpartition(".")[0]
        return resolved[text]

    return choose
