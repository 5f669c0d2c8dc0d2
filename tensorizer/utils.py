"""Small helpers around models and memory: memory in use, readable sizes, building models without allocation."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional, TypeVar, Union, overload

import torch

from tensorizer._system.devices import get_device as get_device
from tensorizer._system.patches import Activity, Block, CountedPatch, in_this_task
from tensorizer._system.sizes import convert_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

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
Model = TypeVar("Model")


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


# --- models without allocation and initialisation -----------------------------------------------------------------

_skipping_init: ContextVar[bool] = ContextVar("tensorizer_skipping_init", default=False)

_torch_empty: Callable[..., torch.Tensor] = torch.empty
_QUIET_MODULES: tuple[Any, ...] = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm)


@wraps(_torch_empty)
def _empty_on_meta(*args: Any, **kwargs: Any) -> torch.Tensor:
    if _skipping_init.get() and kwargs.get("out") is None:
        kwargs["device"] = "meta"
        kwargs.pop("pin_memory", None)  # only host memory can be pinned
    return _torch_empty(*args, **kwargs)


def _quiet(reset_parameters: Callable[..., None]) -> Callable[..., None]:
    @wraps(reset_parameters)
    def reset_unless_skipping(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if not _skipping_init.get():
            reset_parameters(self, *args, **kwargs)

    return reset_unless_skipping


@cache
def _let_torch_note_its_functions() -> None:
    """Uses a ``torch.device(...)`` context once, since its first use records which functions make tensors.

    These should be torch's own functions, not replacements.
    """
    with torch.device("cpu"):
        _torch_empty(0)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    _let_torch_note_its_functions()
    yield torch, "empty", _empty_on_meta
    for module in _QUIET_MODULES:
        yield module, "reset_parameters", _quiet(module.reset_parameters)


_without_values = CountedPatch(_replacements)


@overload
def no_init_or_tensor(loading_code: None = None) -> AbstractContextManager[None]: ...


@overload
def no_init_or_tensor(loading_code: Callable[[], Model]) -> Model: ...


def no_init_or_tensor(loading_code: Optional[Callable[[], Any]] = None) -> Any:
    """Build a model without spending time or memory on parameters that a file is about to supply.

    Two forms:

        >>> from tensorizer.utils import no_init_or_tensor
        >>> with no_init_or_tensor():
        ...     model = torch.nn.Linear(4, 2)
        >>> model = no_init_or_tensor(lambda: torch.nn.Linear(4, 2))

    While it is active, ``torch.empty`` makes tensors on the meta device (an explicit ``device=`` is overridden) and
    ``reset_parameters`` of ``Linear``, ``Embedding`` and ``LayerNorm`` does nothing. Everything else works as always:
    buffers made by ``torch.zeros``, ``torch.arange`` and the like are real and on the ambient device. To have them
    where the model will run, also wrap the code in ``torch.device(device)``.

    The effect is limited to the current thread and coroutine. A nested use changes nothing. The original functions are
    restored when the last active context ends.

    Args:
        loading_code: Called without arguments inside the context; ``None`` returns the context manager itself.

    Returns:
        The result of ``loading_code()``, or the context manager.

    Raises:
        TypeError: ``loading_code`` is neither ``None`` nor callable.
    """
    block = Block(lambda: Activity(lambda: _without_values, lambda: in_this_task(_skipping_init, True)))
    if loading_code is None:
        return block
    if not callable(loading_code):
        raise TypeError(
            "no_init_or_tensor: expected a callable without arguments or nothing (as a context manager), "
            f"got {type(loading_code).__name__}"
        )
    with block:
        return loading_code()
