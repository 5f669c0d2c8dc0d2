"""Which device a load goes to, and what kind of tensors it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Callable, Optional, Union

import torch

__all__ = ["DeviceArgument", "DeviceChooser", "ordinary_tensors", "resolve_cuda_device", "target_device"]

_Device = Union[torch.device, str, int]
_Name = Union[str, "tuple[Union[str, int], ...]"]
#: One device; a mapping from names or dotted prefixes of names to devices (``""`` is the default, the longest prefix
#: wins, as in a ``device_map``); or a callable that is given each name.
DeviceArgument = Optional[Union[_Device, Mapping[str, _Device], Callable[[_Name], _Device]]]
#: What a mapping or callable turns into.
DeviceChooser = Callable[[_Name], torch.device]


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

    def choose(name: _Name) -> torch.device:
        text = name if isinstance(name, str) else ".".join(map(str, name))
        text = text[1:] if text.startswith(".") else text
        while text not in resolved:
            if not text:
                raise ValueError(f"device: the mapping has no entry for tensor {name!r} and no default ''")
            text = text.rpartition(".")[0]
        return resolved[text]

    return choose


def resolve_cuda_device(device: torch.device) -> torch.device:
    """Gives a CUDA device without an index the one that is meant here and now.

    In this order: a ``torch.device("cuda:N")`` context or default device that names an index; the current device,
    where CUDA is initialised; ``cuda:0``.
    """
    if device.type != "cuda" or device.index is not None:
        return device
    ambient = _ambient_device()
    if ambient.type == "cuda" and ambient.index is not None:
        return ambient
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", 0)


def _ambient_device() -> torch.device:
    """The device that factory functions use here: the innermost device context, or the default device.

    Asked without creating a tensor, since that would initialise CUDA. Contexts of ``torch.device`` and the default
    device are function modes whose ``device`` attribute says what was asked for, index or not.
    """
    from torch.overrides import _get_current_function_mode_stack

    for mode in reversed(_get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
        if isinstance(mode, torch.utils._device.DeviceContext):
            return torch.device(mode.device)
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return torch.device("cpu") if default is None else torch.device(default.device)


def ordinary_tensors() -> contextlib.AbstractContextManager[object]:
    """Within it new tensors are real and ordinary ones, whatever ``torch.inference_mode`` or dispatch mode is active.

    Weights outlive the block in which they happen to be loaded: inference tensors could not be trained after it, and
    fake ones hold no data.
    """
    modes = torch._C._len_torch_dispatch_stack()
    if not modes and not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    if modes:
        from torch.utils._python_dispatch import _disable_current_modes

        stack.enter_context(_disable_current_modes())
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    return stack
