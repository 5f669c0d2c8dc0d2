"""Chooses which tensors take the fast path to and from CUDA devices, and makes the engine that copies them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Callable, Optional

import torch

from tensorizer import _C
from tensorizer._system.config import env_text, share_of_node
from tensorizer._system.devices import empty, ordinary_tensors

# 16 slots of 8 MiB keep a PCIe link busy while workers fill other slots; more do not make it faster.
DEFAULT_RING_SLOTS = 16
LEAST_RING_SLOTS = 4  # for a rank that shares its machine with others
DEFAULT_RING_SLOT_NBYTES = 8 << 20
IDLE_SECONDS = 30.0  # an unused ring is freed after that


def is_fast_device(device: torch.device) -> bool:
    """Whether copies to this device go through the pinned ring. It needs CUDA with a driver; ROCm does not count."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return bool(_C.cuda_driver_is_present())


def shares_host_memory(device: torch.device) -> bool:
    """Whether this is a CUDA device that uses the memory of the host (GB10, GB200, Jetson)."""
    return is_fast_device(device) and _C.cuda_shares_host_memory(device.index)


# The number of slots and their bytes that the program chose; None for the defaults.
_ring_size: tuple[Optional[int], Optional[int]] = (None, None)


def set_ring_size(slots: Optional[int], slot_nbytes: Optional[int]) -> None:
    """Sets the size of the rings that later loads and saves make; see :func:`tensorizer.cuda.set_pinned_memory`."""
    global _ring_size
    _ring_size = slots, slot_nbytes


def engine_for(device: torch.device) -> _C.CudaCopyEngine:
    """Makes an engine for one load or save, whose copies are ordered with the caller's current stream on `device`.

    The device must have an index.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    slots, slot_nbytes = _ring_size
    return _C.CudaCopyEngine(
        device.index,
        stream,
        slots=share_of_node(DEFAULT_RING_SLOTS, LEAST_RING_SLOTS) if slots is None else slots,
        slot_nbytes=DEFAULT_RING_SLOT_NBYTES if slot_nbytes is None else slot_nbytes,
        keep_idle_seconds=IDLE_SECONDS,
        # auto means the host until the kernels have run on a GPU (docs/gpu.md).
        open_on_device=_decrypt() == "1",
    )


def on_current_streams(work: Callable[..., None], devices: Iterable[torch.device]) -> Callable[..., None]:
    """Wraps `work` for another thread, so that it uses the caller's current streams there, not the default streams."""
    streams = [torch.cuda.current_stream(device) for device in devices if device.type == "cuda"]

    def on_streams(*args: Any) -> None:
        with contextlib.ExitStack() as entered:
            for stream in streams:
                entered.enter_context(torch.cuda.stream(stream))
            work(*args)

    return on_streams


def why_host_decrypts(device: torch.device) -> str:
    """The reason why the host decrypts chunks for this device; empty if the device decrypts them.

    If the device is to decrypt, this waits for its kernels.
    """
    if not is_fast_device(device):
        return "it is no CUDA device with a driver"
    chosen = _decrypt()
    if chosen == "0":
        return "TENSORIZER_CUDA_DECRYPT is 0"
    if chosen == "auto":
        return "TENSORIZER_CUDA_DECRYPT is auto, which means the host until the kernels have run on a GPU"
    return engine_for(device).why_not_opened()


def _decrypt() -> str:
    """Returns the value of ``TENSORIZER_CUDA_DECRYPT``."""
    text = env_text("TENSORIZER_CUDA_DECRYPT") or "auto"
    if text not in ("auto", "0", "1"):
        raise ValueError(f"environment variable TENSORIZER_CUDA_DECRYPT: expected auto, 0 or 1, got {text!r}")
    return text


def allocate(device: torch.device, nbytes: int, zeros: bool) -> torch.Tensor:
    """Allocates a flat byte tensor on the current stream of `device`; without `zeros`, its bytes are undefined."""
    with ordinary_tensors():
        return (torch.zeros if zeros else empty)(nbytes, dtype=torch.uint8, device=device)
