"""Finds the device that an argument means, and keeps modes of torch away from the tensors that a load makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import torch

# torch's own torch.empty. `utils.no_init_or_tensor` replaces it with a function that only models may use.
empty: Callable[..., torch.Tensor] = getattr(torch._C, "_VariableFunctions").empty  # noqa: B009 - has no stub


def resolve_cuda_device(device: torch.device) -> torch.device:
    """Adds the index to a CUDA device that has none.

    It takes the first of these: the index of a ``torch.device("cuda:N")`` context or default device; the current
    device, if CUDA is initialised; ``cuda:0``.
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

    This creates no tensor, since that would initialise CUDA. Contexts of ``torch.device`` and the default device are
    function modes, whose ``device`` attribute is the device that was asked for, with or without an index.
    """
    from torch.overrides import _get_current_function_mode_stack

    for mode in reversed(_get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
        if isinstance(mode, torch.utils._device.DeviceContext):
            return torch.device(mode.device)
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return torch.device("cpu") if default is None else torch.device(default.device)


def ordinary_tensors() -> contextlib.AbstractContextManager[object]:
    """A block in which new tensors are real and ordinary, whatever ``torch.inference_mode`` or dispatch mode is active.

    Weights outlive the block in which they are loaded. Inference tensors could not be trained after it, and fake
    tensors hold no data.
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


def as_device(device: Optional[Union[torch.device, str, int]]) -> torch.device:
    """Converts an argument to a device. A number means a CUDA device, even without CUDA; ``None`` means the CPU."""
    if device is None:
        return torch.device("cpu")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def get_device() -> torch.device:
    """Returns ``torch.device("cuda")``, without an index, if CUDA is available, else ``torch.device("cpu")``.

    Examples:
        >>> device = tensorizer.utils.get_device()
    """
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# --- the argument device= ---------------------------------------------------------------------------------------------

_Device = Union[torch.device, str, int]
#: One device; a mapping from names or dotted prefixes of names to devices (``""`` is the default, the longest prefix
#: wins, as in a ``device_map``); or a callable that is given each name, a ``str`` or a tuple of its steps.
DeviceArgument = Optional[Union[_Device, Mapping[str, _Device], Callable[[Any], _Device]]]
#: What a mapping or callable turns into.
DeviceChooser = Callable[[Any], torch.device]


def target_device(device: DeviceArgument) -> Union[torch.device, DeviceChooser]:
    """The device, or the choice of devices, that a constructor's ``device`` argument means.

    ``None`` is CUDA where there is any, else the CPU. Surrounding CPU contexts do not count: ``None`` asks for the best
    device, as it always did.

    Raises:
        RuntimeError: CUDA was asked for and there is none; text that torch takes for no device.
        TypeError: Something else.
    """
    if isinstance(device, Mapping):
        return _chooser_of(device)
    if callable(device):
        choose = device
        return lambda name: one_device(choose(name))
    return one_device(device)


def one_device(device: Optional[_Device]) -> torch.device:
    """One device; ``None`` is CUDA where there is any. Raises as :func:`target_device`."""
    if device is None:
        return get_device()
    resolved = _parsed(device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device {str(resolved)!r} was asked for, but CUDA is not available")
    return resolved


def _parsed(device: _Device) -> torch.device:
    if isinstance(device, torch.dtype):
        raise TypeError(f"device: expected a device, got {device}: a dtype is passed by name, dtype={device}")
    if not isinstance(device, (torch.device, str, int)):
        raise TypeError(
            f"device: expected text, a number, a torch.device, a mapping or a function, got {type(device).__name__}"
        )
    try:
        return as_device(device)
    except RuntimeError as error:
        raise RuntimeError(
            "device: expected None (CUDA if there is one, else the CPU), a device of torch as 'cpu' or 'cuda:1', "
            f"or, for several devices, a mapping from names to devices or a function of the name, got {device!r}"
        ) from error


def _chooser_of(devices: Mapping[str, _Device]) -> DeviceChooser:
    resolved = {name: one_device(device) for name, device in devices.items()}

    def choose(name: Any) -> torch.device:
        text = name if isinstance(name, str) else ".".join(map(str, name))
        text = text[1:] if text.startswith(".") else text
        while text not in resolved:
            if not text:
                raise ValueError(f"device: the mapping has no entry for tensor {name!r} and no default ''")
            text = text.rpartition(".")[0]
        return resolved[text]

    return choose
