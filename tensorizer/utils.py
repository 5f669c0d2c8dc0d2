"""Small helpers around models and memory: memory in use, readable sizes, building models without allocation."""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

import torch

from tensorizer._system.devices import get_device
from tensorizer._system.patches import no_init_or_tensor
from tensorizer._system.sizes import convert_bytes

__all__ = [  # noqa: RUF022 - the order that callers know
    "convert_bytes",
    "get_device",
    "GlobalGPUMemoryUsage",
    "TorchGPUMemoryUsage",
    "CPUMemoryUsage",
    "MemoryUsage",
    "get_mem_usage",
    "get_gpu_name",
    "no_init_or_tensor",
]

Device = Union[torch.device, str, int, None]


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes >> 20:,}MiB"


def get_gpu_name() -> str:
    """Returns the name of the current CUDA device, or ``"N/A"`` if there is none. Initialises CUDA if present.

    Examples:
        >>> name = tensorizer.utils.get_gpu_name()
    """
    if not torch.cuda.is_available():
        return "N/A"
    return torch.cuda.get_device_name(torch.cuda.current_device())


class GlobalGPUMemoryUsage(NamedTuple):
    """Memory of one GPU, over all processes that use it, in bytes.

    Examples:
        >>> if torch.cuda.is_available():
        ...     print(tensorizer.utils.GlobalGPUMemoryUsage.now())
    """

    total: int
    free: int
    used: int

    @classmethod
    def now(cls, device: Device = None) -> Optional[GlobalGPUMemoryUsage]:
        """Take a snapshot.

        Args:
            device: A CUDA device; ``None`` is the current one.

        Returns:
            The snapshot, or ``None`` without CUDA or if neither torch nor NVML can tell.
        """
        if not torch.cuda.is_available():
            return None
        try:
            free, total = torch.cuda.mem_get_info(device)
        except RuntimeError:
            return cls._from_nvml(device)
        return cls(total, free, total - free)

    @classmethod
    def _from_nvml(cls, device: Device) -> Optional[GlobalGPUMemoryUsage]:
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            info = pynvml.nvmlDeviceGetHandleByIndex(_nvml_index(device))
            memory = pynvml.nvmlDeviceGetMemoryInfo(info)
        except pynvml.NVMLError:
            return None
        return cls(int(memory.total), int(memory.free), int(memory.used))

    def __str__(self) -> str:
        return f"GPU: (U: {_mebibytes(self.used)} F: {_mebibytes(self.free)} T: {_mebibytes(self.total)})"


def _nvml_index(device: Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


class TorchGPUMemoryUsage(NamedTuple):
    """Memory that torch's allocator holds on one GPU, in bytes: reserved from the driver, and in use by tensors.

    Examples:
        >>> if torch.cuda.is_available():
        ...     print(tensorizer.utils.TorchGPUMemoryUsage.now())
    """

    reserved: int
    reserved_max: int
    used: int
    used_max: int

    @classmethod
    def now(cls, device: Device = None) -> Optional[TorchGPUMemoryUsage]:
        """Take a snapshot.

        Args:
            device: A CUDA device; ``None`` is the current one.

        Returns:
            The snapshot, or ``None`` without CUDA.
        """
        if not torch.cuda.is_available():
            return None
        stats = torch.cuda.memory_stats(device)
        return cls(
            stats.get("reserved_bytes.all.current", 0),
            stats.get("reserved_bytes.all.peak", 0),
            stats.get("allocated_bytes.all.current", 0),
            stats.get("allocated_bytes.all.peak", 0),
        )

    def __str__(self) -> str:
        reserved = f"{_mebibytes(self.reserved)}/{_mebibytes(self.reserved_max)}"
        return f"TORCH: (R: {reserved}, A: {_mebibytes(self.used)}/{_mebibytes(self.used_max)})"


class CPUMemoryUsage(NamedTuple):
    """Host memory in bytes: the peak of this process, and what it may still allocate.

    Examples:
        >>> tensorizer.utils.CPUMemoryUsage.now().free > 0
        True
    """

    maxrss: int
    free: int

    @classmethod
    def now(cls) -> CPUMemoryUsage:
        """Take a snapshot.

        Returns:
            ``maxrss`` is the peak resident memory of this process plus that of its largest child that has ended.
            ``free`` is what may still be allocated without swapping, file cache included: the machine's figure or what
            the memory limits of the process's control groups (v1 or v2) leave, whichever is less.
        """
        import psutil

        from tensorizer._system.cgroup import memory_available

        free = int(psutil.virtual_memory().available)
        allowed = memory_available()
        return cls(_peak_rss(), free if allowed is None else min(free, allowed))

    def __str__(self) -> str:
        return f"CPU: (maxrss: {_mebibytes(self.maxrss)} F: {_mebibytes(self.free)})"


def _peak_rss() -> int:
    """Peak resident bytes of this process, and of its largest child that has ended."""
    import resource

    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(kind).ru_maxrss for kind in who) * 1024  # Linux counts KiB


class MemoryUsage(NamedTuple):
    """Host and GPU memory at one moment; the GPU parts are ``None`` without a GPU.

    Examples:
        >>> tensorizer.utils.MemoryUsage.now().cpu.free > 0
        True
    """

    cpu: CPUMemoryUsage
    gpu: Optional[GlobalGPUMemoryUsage]
    torch: Optional[TorchGPUMemoryUsage]

    @classmethod
    def now(cls, device: Device = None) -> MemoryUsage:
        """Take a snapshot. If CUDA is available, this may initialise it.

        Args:
            device: A CUDA device; ``None`` is the current one.
        """
        gpu: Optional[GlobalGPUMemoryUsage] = None
        torch_usage: Optional[TorchGPUMemoryUsage] = None
        try:
            gpu = GlobalGPUMemoryUsage.now(device)
            torch_usage = TorchGPUMemoryUsage.now(device)
        except AssertionError:  # torch raises this in a build without CUDA
            pass
        return cls(CPUMemoryUsage.now(), gpu, torch_usage)

    def __str__(self) -> str:
        return " ".join(str(part) for part in self if part is not None)


def get_mem_usage() -> str:
    """Returns one line about host and GPU memory at this moment. If CUDA is available, this may initialise it.

    Examples:
        >>> tensorizer.utils.get_mem_usage().startswith("CPU: ")
        True
    """
    return str(MemoryUsage.now())
