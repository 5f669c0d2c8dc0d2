"""Finds the device that an argument means, and keeps modes of torch away from the tensors that a load makes."""

from __future__ import annotations

import contextlib
from typing import Callable, Optional, Union

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
