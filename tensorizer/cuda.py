"""Loads to and saves from CUDA devices: their pinned host memory, and whether the device decrypts (docs/gpu.md)."""

from __future__ import annotations

from typing import Optional, Union

import torch

from tensorizer import _C
from tensorizer._system import cuda_engine

__all__ = ["decrypts_on", "pinned_memory", "release_pinned_memory", "set_pinned_memory"]


def pinned_memory(device: Union[torch.device, str, int] = 0) -> dict[str, int]:
    """Returns what this process has pinned for a CUDA device. Does not initialise CUDA.

    Args:
        device: A CUDA device with an index, or the index.

    Returns:
        ``slots`` of the ring, 0 if there is no ring at the moment; ``free_slots``, which no load or save is using;
        ``slot_nbytes``, bytes of one slot; ``users``, loads and saves that use the ring.

    Raises:
        DeviceError: There is no such device.
        ValueError: It is no CUDA device with an index.

    Examples:
        >>> if torch.cuda.is_available():
        ...     print(tensorizer.cuda.pinned_memory(0)["slot_nbytes"])
    """
    status = _C.cuda_pinned_status(_index(device))
    return {name: int(status[name]) for name in ("slots", "free_slots", "slot_nbytes", "users")}


def release_pinned_memory(device: Optional[Union[torch.device, str, int]] = None) -> bool:
    """Frees pinned memory now instead of after 30 s without use. Does not initialise CUDA.

    The next load or save pins it again, which takes some tens of milliseconds.

    Args:
        device: A CUDA device with an index, or the index; ``None`` means every device.

    Returns:
        Whether it is freed; otherwise the last load or save that uses it frees it.

    Raises:
        DeviceError: There is no such device.
        ValueError: It is no CUDA device with an index.

    Examples:
        >>> if torch.cuda.is_available():
        ...     _ = tensorizer.cuda.release_pinned_memory()
    """
    if device is None:
        return bool(_C.cuda_release_all_pinned())
    return bool(_C.cuda_release_pinned(_index(device)))


def set_pinned_memory(*, slots: Optional[int] = None, slot_nbytes: Optional[int] = None) -> None:
    """Sets how much this process pins per device, for the loads and saves that begin from now on.

    A ring that is in use keeps its size; an idle one is replaced when it is needed next.

    Args:
        slots: Slots of a ring, 2 or more. ``None``, the default, goes back to 16, which
            keeps a PCIe link busy while workers fill the others.
        slot_nbytes: Bytes of one slot, 2 MiB or more. ``None`` goes back to 8 MiB.

    Raises:
        ValueError: Too few slots, or too small ones.

    Examples:
        >>> tensorizer.cuda.set_pinned_memory(slots=4)
        >>> tensorizer.cuda.set_pinned_memory()
    """
    if slots is not None and slots < 2:
        raise ValueError(f"slots: expected 2 or more, got {slots}")
    if slot_nbytes is not None and slot_nbytes < 2 << 20:
        raise ValueError(f"slot_nbytes: expected 2 MiB ({2 << 20}) or more, got {slot_nbytes}")
    cuda_engine.set_ring_size(slots, slot_nbytes)


def decrypts_on(device: Union[torch.device, str, int] = 0) -> tuple[bool, str]:
    """Returns whether this device decrypts encrypted files that are loaded to it.

    With ``TENSORIZER_CUDA_DECRYPT=1``, this compiles and tests the device's kernels, unless a load has done that.

    Args:
        device: A CUDA device with an index, or the index.

    Returns:
        Whether the device decrypts, and if not, why. The host always decrypts what the kernels do not support
        (docs/gpu.md).

    Raises:
        DeviceError: There is no such device.
        ValueError: It is no CUDA device with an index, or the variable has another value than auto, 0 and 1.

    Examples:
        >>> if torch.cuda.is_available():
        ...     does, why_not = tensorizer.cuda.decrypts_on(0)
    """
    why = cuda_engine.why_host_decrypts(torch.device("cuda", _index(device)))
    return not why, why


def _index(device: Union[torch.device, str, int]) -> int:
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if named.type != "cuda" or named.index is None:
        raise ValueError(f"device: expected a CUDA device with an index, got {str(named)!r}")
    return int(named.index)
