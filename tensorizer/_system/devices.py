"""Which device is meant here and now, and what kind of tensors a load makes."""

from __future__ import annotations

import contextlib
from typing import Callable, Optional, Union

import torch

# torch.empty as torch made it: `utils.no_init_or_tensor` puts another function there, which is for models alone.
empty: Callable[..., torch.Tensor] = getattr(torch._C, "_VariableFunctions").empty  # noqa: B009 - has no stub


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


def as_device(device: Optional[Union[torch.device, str, int]]) -> torch.device:
    """The device; a number is that of a CUDA device, as torch has it, also where there is none. ``None`` is the CPU."""
    if device is None:
        return torch.device("cpu")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def get_device() -> torch.device:
    """Returns ``torch.device("cuda")``, without an index, if CUDA is available, else ``torch.device("cpu")``.

    Examples:
        >>> device = tensorizer.utils.get_device()
    """
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
