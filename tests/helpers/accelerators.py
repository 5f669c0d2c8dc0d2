"""A CUDA device for tests: the real one, or the fake driver of ``tests/native/fake_cuda`` under the real engine.

The fake driver moves real bytes through the whole C++ pipeline (ring, streams, events) and checks CUDA's rules. Torch's
CPU build cannot allocate "device" memory, so the lines of ``_system.cuda_engine`` that ask torch for it are replaced:
destinations are then memory of the fake driver, which the host cannot touch.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch

from tensorizer import _C, TensorDeserializer, TensorSerializer
from tensorizer._system import cuda_engine

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "native" / "fake_cuda"


def build_fake_driver() -> Path:
    """Compiles the fake driver, once per change of its sources."""
    library = ROOT / "build" / "fake_cuda" / "libfake_cuda.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    kernels = ROOT / "csrc" / "device" / "cuda" / "kernels"
    made_of = [*FAKE.iterdir(), *FAKE.parent.glob("host_kernels.*"), *kernels.iterdir()]
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists() or library.stat().st_mtime < max(f.stat().st_mtime for f in made_of):
            flags = ["-std=c++20", "-O2", "-g1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"]
            sources = [str(f) for f in sorted([*FAKE.glob("*.cpp"), FAKE.parent / "host_kernels.cpp"])]
            compiler = os.environ.get("CXX", "c++").split()
            partial = library.with_suffix(".partial")
            command = [*compiler, *flags, f"-I{ROOT / 'csrc'}", *sources, "-o", str(partial)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            partial.replace(library)
    return library


class FakeDriver:
    """The fake driver's control functions (``fake_cuda.h``)."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        #: Set to a list, it keeps all memory. To drop a tensor made from a buffer, torch takes the interpreter lock; a
        #: daemon thread cannot have it at exit.
        self.kept: Optional[list[torch.Tensor]] = None
        self._declare("allocate", pointer, ctypes.c_int, size)
        self._declare("free", None, pointer, pointer)
        self._declare("read", None, pointer, pointer, size)
        self._declare("write", None, pointer, pointer, size)
        self._declare("compute", None, pointer, ctypes.c_int, pointer, size, ctypes.c_int, number)
        self._declare("wait", None, pointer, ctypes.c_int)
        self._declare("hold", None, pointer, ctypes.c_int)
        self._declare("let_go", None)
        self._declare("allow_pageable", None, ctypes.c_int)
        self._declare("break_kernels", None, ctypes.c_int)
        self._declare("unify", None, ctypes.c_int)
        self._declare("fail", None, ctypes.c_char_p)
        self._declare("set_delay", None, number, number)
        self._declare("calls", number, ctypes.c_char_p)
        self._declare("leaks", ctypes.c_char_p)
        self._declare("model", None, ctypes.c_char_p)
        self._declare("report", ctypes.c_char_p)
        self._declare("reset", None)

    def _declare(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self._library, f"fake_cuda_{name}")
        function.restype = result
        function.argtypes = list(arguments)
        setattr(self, name, function)

    def memory(self, nbytes: int, device: int) -> torch.Tensor:
        """A flat byte tensor over device memory: only its address may be used. It is freed like torch's own."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        address = self.allocate(device, nbytes)
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        # Not freed at exit, when a thread may still be loading.
        weakref.finalize(array, self.free, address, None).atexit = False
        tensor = torch.frombuffer(array, dtype=torch.uint8)
        if self.kept is not None:
            self.kept.append(tensor)
        return tensor


class OnFakeDevice(torch.Tensor):
    """A tensor over the fake driver's memory that reports a CUDA device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]


class Accelerator:
    """The operations on a device that tests of the CUDA pipeline need."""

    name: str

    def load(self, source: Any, device: Any = "cuda:0", **options: Any) -> dict[Any, torch.Tensor]:
        """Loads all tensors of a file to the device, and copies them back without code of the package."""
        return {name: self.fetch(value) for name, value in TensorDeserializer(source, device=device, **options).items()}

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor on the CPU."""
        raise NotImplementedError

    def put(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor on the device."""
        raise NotImplementedError

    def keep_busy(self, milliseconds: int) -> None:
        """Enqueues work on the current stream."""
        raise NotImplementedError

    def save(self, target: Any, state: dict[str, torch.Tensor], **options: Any) -> None:
        """Saves device tensors."""
        serializer = TensorSerializer(target, **options)
        for name, value in state.items():
            serializer.write_tensor(0, name, 2, value)
        serializer.close()


class RealDevice(Accelerator):
    name = "real"

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach().view(torch.uint8).cpu().view(value.dtype) if value.dim() else value.detach().cpu()

    def put(self, value: torch.Tensor) -> torch.Tensor:
        return value.to("cuda:0")

    def keep_busy(self, milliseconds: int) -> None:
        torch.cuda._sleep(milliseconds * 1_500_000)  # cycles of a clock of about 1.5 GHz


class FakeDevice(Accelerator):
    name = "fake"

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self._with_zeros: set[int] = set()

    def install(self, monkeypatch: Any) -> None:
        """Makes tensorizer see two CUDA devices during a test."""

        def allocate(device: torch.device, nbytes: int, zeros: bool) -> torch.Tensor:
            flat = self.driver.memory(nbytes, device.index)
            if zeros and nbytes:
                # Later than the call, on the caller's stream, as torch does it: a copy must wait for it.
                self.driver.compute(None, device.index, flat.data_ptr(), nbytes, 0, 1000)
                self._with_zeros.add(device.index)
            return flat

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr(cuda_engine, "allocate", allocate)

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        while self._with_zeros:  # written by torch, not by us: whoever reads has to wait for the stream
            self.driver.wait(None, self._with_zeros.pop())
        result = torch.empty(value.shape, dtype=value.dtype)
        nbytes = value.numel() * value.element_size()
        if nbytes:
            self.driver.read(value.data_ptr(), result.data_ptr(), nbytes)
        return result

    def put(self, value: torch.Tensor) -> torch.Tensor:
        nbytes = value.numel() * value.element_size()
        flat = self.driver.memory(nbytes, 0)
        if nbytes:
            self.driver.write(flat.data_ptr(), value.contiguous().data_ptr(), nbytes)
        return flat.view(value.dtype).view(value.shape).as_subclass(OnFakeDevice)

    def keep_busy(self, milliseconds: int) -> None:
        scratch = self.driver.memory(1, 0)
        self.driver.compute(None, 0, scratch.data_ptr(), 1, 1, milliseconds * 1000)


_driver: Optional[FakeDriver] = None


def fake_driver() -> FakeDriver:
    """The fake driver. This process uses it from now on."""
    global _driver
    if _driver is None:
        path = build_fake_driver()
        _C.cuda_set_driver_library(str(path))
        _driver = FakeDriver(path)
    return _driver
