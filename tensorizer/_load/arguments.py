"""What callers pass to a load: which device and dtype they mean, and what to write instead of a wrong one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import torch

from tensorizer._format.entries import FilterFuncType
from tensorizer._format.names import Name
from tensorizer._system.devices import as_device, get_device

_Device = Union[torch.device, str, int]
#: One device; a mapping from names or dotted prefixes of names to devices (``""`` is the default, the longest prefix
#: wins, as in a ``device_map``); or a callable that is given each name.
DeviceArgument = Optional[Union[_Device, Mapping[str, _Device], Callable[[Name], _Device]]]
#: What a mapping or callable turns into.
DeviceChooser = Callable[[Name], torch.device]


def check_filter(filter_func: Optional[FilterFuncType]) -> None:
    """Raises ``TypeError`` for what cannot be called with a name."""
    if filter_func is None or callable(filter_func):
        return
    if isinstance(filter_func, torch.dtype):
        raise TypeError(
            f"filter_func: expected a function, got {filter_func}: a dtype is passed by name, dtype={filter_func}"
        )
    raise TypeError(
        f"filter_func: expected a function that is given each name, got {type(filter_func).__name__}; "
        "for a collection of names pass its method, as in filter_func={'a', 'b'}.__contains__"
    )


def as_dtype(dtype: Any) -> Optional[torch.dtype]:
    """A ``dtype=`` argument: a ``torch.dtype``, its name, or ``None``.

    Raises:
        TypeError: Something else; the message says which dtype may be meant.
    """
    found = named_dtype(dtype) if isinstance(dtype, str) else dtype
    if isinstance(found, torch.dtype) or dtype is None:
        return found
    meant = meant_dtype(dtype)
    hint = f"; did you mean {str(meant).removeprefix('torch.')!r}?" if meant is not None else ""
    raise TypeError(f"dtype: expected a torch.dtype or its name, got {type(dtype).__name__} ({dtype!r:.100}){hint}")


def named_dtype(name: str) -> Optional[torch.dtype]:
    """The dtype that torch calls so, with or without ``torch.``."""
    found = getattr(torch, name.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def meant_dtype(text: Any) -> Optional[torch.dtype]:
    """The dtype that a text may have been meant for; ``None`` where none is near."""
    if not isinstance(text, str):
        return None
    import difflib

    names = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
    near = difflib.get_close_matches(text.rpartition(".")[2].lower(), names, 1, 0.5)  # 0.5: "fp16" is float16
    return named_dtype(near[0]) if near else None


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

    def choose(name: Name) -> torch.device:
        text = name if isinstance(name, str) else ".".join(map(str, name))
        text = text[1:] if text.startswith(".") else text
        while text not in resolved:
            if not text:
                raise ValueError(f"device: the mapping has no entry for tensor {name!r} and no default ''")
            text = text.rpartition(".")[0]
        return resolved[text]

    return choose


def maps(backend: Optional[str], mmap: Optional[bool] = False) -> Optional[bool]:
    """What ``backend`` and ``mmap`` mean together: ``"mmap"`` maps where nothing speaks against it.

    Raises:
        ValueError: A backend that ``safetensors`` does not know; where it is installed, its ``SafetensorError`` too.
    """
    if backend in (None, "mmap", "pread"):
        return None if backend == "mmap" and not mmap else mmap
    kinds: tuple[type, ...] = (ValueError,)
    with contextlib.suppress(ImportError):
        from safetensors import SafetensorError

        kinds = (SafetensorError, ValueError)
    raise type("UnknownBackendError", kinds, {})(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')
