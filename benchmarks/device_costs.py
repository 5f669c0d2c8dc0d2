"""What the calls of a CUDA driver cost here: the constants that ``benchmarks.model_gpu`` assumes, measured.

``python -m benchmarks.device_costs`` asks the driver itself, without torch: copies in both directions by size and
number of streams, many small copies one by one and in one call, pinning, allocating, streams, events, compiling the
kernels. Every figure is the median of the rounds, with the lowest and the highest; ``--json`` keeps them all.

``--library`` names another driver than ``libcuda.so.1``: the tests use the fake one. What the kernels cost is the
difference of ``gpu-load-decrypting`` to ``gpu-load-hot`` in ``make bench-gpu``. The contender ``machine`` of ``make
bench`` is what the processor copies and hashes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable

MIB = 1 << 20
KERNELS = Path(__file__).resolve().parent.parent / "csrc" / "device" / "cuda" / "kernels" / "kernels.ptx"
#: The version of each function that is asked for: its signature is part of the binary interface.
# fmt: off
FUNCTIONS = {
    "cuInit": 2000, "cuDeviceGet": 2000, "cuDeviceGetName": 2000, "cuDevicePrimaryCtxRetain": 7000,
    "cuDevicePrimaryCtxRelease": 11000, "cuCtxPushCurrent": 4000, "cuCtxPopCurrent": 4000, "cuStreamCreate": 2000,
    "cuStreamDestroy": 4000, "cuStreamSynchronize": 2000, "cuEventCreate": 2000, "cuEventDestroy": 4000,
    "cuEventRecord": 2000, "cuEventQuery": 2000, "cuMemHostRegister": 6050, "cuMemHostUnregister": 4000,
    "cuMemAlloc": 3020, "cuMemFree": 3020, "cuMemcpyHtoDAsync": 3020, "cuMemcpyDtoHAsync": 3020,
    "cuMemcpyBatchAsync": 12080, "cuModuleLoadData": 2000, "cuModuleUnload": 2000,
}
# fmt: on
_NO_TIMING, _NON_BLOCKING = 2, 1  # flags of events and of streams


class Driver:
    """The functions of a driver, which raise where it returns an error."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._functions: dict[str, Any] = {}
        for name, version in FUNCTIONS.items():
            address, status = ctypes.c_void_p(), ctypes.c_int()
            find = self._library.cuGetProcAddress_v2
            asked = (name.encode(), ctypes.byref(address), version, ctypes.c_uint64(0), ctypes.byref(status))
            if find(*asked) == 0 and address.value:
                self._functions[name] = ctypes.CFUNCTYPE(ctypes.c_int)(address.value)

    def has(self, name: str) -> bool:
        return name in self._functions

    def __call__(self, name: str, *arguments: Any) -> None:
        result = self._functions[name](*arguments)
        if result != 0:
            raise RuntimeError(f"{name} returned {result}")

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """What a function returns through its first argument."""
        result = ctypes.c_void_p()
        self(name, ctypes.byref(result), *arguments)
        return result


class HostMemory:
    """Pages of this process; ``huge`` asks for huge ones."""

    def __init__(self, nbytes: int, *, huge: bool = True) -> None:
        self._pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        self._view = (ctypes.c_char * nbytes).from_buffer(self._pages)
        self.address = ctypes.addressof(self._view)
        ctypes.memset(self.address, 1, nbytes)

    def close(self) -> None:
        del self._view
        self._pages.close()


class Costs:
    """The measurements, each a list of values of its rounds, by name."""

    def __init__(self, driver: Driver, rounds: int, scale: float) -> None:
        self._driver = driver
        self._rounds = rounds
        self._scale = scale  # of sizes, so that a test is short
        self.found: dict[str, list[float]] = {}

    def _note(self, name: str, value: Callable[[], float]) -> None:
        self.found[name] = [value() for _ in range(self._rounds)]

    def _size(self, nbytes: int) -> int:
        return max(64 << 10, int(nbytes * self._scale))

    @contextmanager
    def _pinned(self, nbytes: int) -> Iterator[HostMemory]:
        memory = HostMemory(nbytes)
        self._driver("cuMemHostRegister", ctypes.c_void_p(memory.address), ctypes.c_size_t(nbytes), 0)
        try:
            yield memory
        finally:
            self._driver("cuMemHostUnregister", ctypes.c_void_p(memory.address))
            memory.close()

    @contextmanager
    def _device(self, nbytes: int) -> Iterator[int]:
        memory = self._driver.made("cuMemAlloc", ctypes.c_size_t(nbytes))
        try:
            yield memory.value or 0
        finally:
            self._driver("cuMemFree", memory)

    @contextmanager
    def _streams(self, count: int) -> Iterator[list[ctypes.c_void_p]]:
        streams = [self._driver.made("cuStreamCreate", _NON_BLOCKING) for _ in range(count)]
        try:
            yield streams
        finally:
            for stream in streams:
                self._driver("cuStreamDestroy", stream)

    def _copy(self, to_device: bool, host: int, device: int, nbytes: int, stream: ctypes.c_void_p) -> None:
        here, there = ctypes.c_void_p(host), ctypes.c_uint64(device)
        name, to, source = ("HtoD", there, here) if to_device else ("DtoH", here, there)
        self._driver(f"cuMemcpy{name}Async", to, source, ctypes.c_size_t(nbytes), stream)

    def _synchronized(self, streams: list[ctypes.c_void_p], enqueue: Callable[[], None]) -> float:
        began = time.perf_counter()
        enqueue()
        for stream in streams:
            self._driver("cuStreamSynchronize", stream)
        return time.perf_counter() - began

    def links(self) -> None:
        """Gigabytes a second by direction, size of a copy and number of streams."""
        for each in (self._size(n * MIB) for n in (2, 4, 8, 16)):
            for count in (1, 4, 16):
                for name, ways in (("up", [True]), ("down", [False]), ("both", [True, False])):
                    row = f"copy {name}, {each >> 10} KiB, {count} streams [GB/s]"
                    self.found[row] = self._link(each, count, ways)

    def _link(self, each: int, count: int, ways: list[bool]) -> list[float]:
        total = self._size(256 * MIB)
        with self._pinned(2 * total) as host, self._device(2 * total) as device, self._streams(count) as streams:
            # What goes down lies behind what goes up, and is on another stream than its neighbour if there are several.
            copies = [
                (to_device, at if to_device else total + at, streams[i % count if to_device else -1 - i % count])
                for i, at in enumerate(range(0, total - each + 1, each))
                for to_device in ways
            ]

            def enqueue() -> None:
                for to_device, at, stream in copies:
                    self._copy(to_device, host.address + at, device + at, each, stream)

            self._synchronized(streams, enqueue)
            moved = len(copies) * each / 1e9
            return [moved / self._synchronized(streams, enqueue) for _ in range(self._rounds)]

    def small_copies(self) -> None:
        """Microseconds for each of 1000 copies of 8 KiB."""
        count, each = 1000, 8 << 10
        with self._pinned(count * each) as host, self._device(count * each) as device, self._streams(1) as streams:

            def one_by_one() -> None:
                for at in range(0, count * each, each):
                    self._copy(True, host.address + at, device + at, each, streams[0])

            self._note("small copy, one by one [us]", lambda: self._synchronized(streams, one_by_one) / count * 1e6)
            if not self._driver.has("cuMemcpyBatchAsync"):
                return
            pointers, sizes = ctypes.c_uint64 * count, (ctypes.c_size_t * count)(*[each] * count)
            to = pointers(*range(device, device + count * each, each))
            source = pointers(*range(host.address, host.address + count * each, each))
            attributes = (ctypes.c_int * 6)(1, 0, 0, 0, 0, 0)  # in the order of the stream

            def at_once() -> None:
                first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
                tail = (attributes, ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(failed), streams[0])
                self._driver("cuMemcpyBatchAsync", to, source, sizes, ctypes.c_size_t(count), *tail)

            self._note("small copy, in one call [us]", lambda: self._synchronized(streams, at_once) / count * 1e6)

    def pinning(self) -> None:
        """Milliseconds to make pages and to register them."""
        for nbytes in (self._size(n * MIB) for n in (8, 16, 128)):
            for huge in (True, False):
                kind = f"{nbytes >> 10} KiB, {'huge' if huge else 'small'} pages [ms]"
                pairs = [self._pin(nbytes, huge) for _ in range(self._rounds)]
                self.found[f"fault in {kind}"] = [making for making, _ in pairs]
                self.found[f"register {kind}"] = [registering for _, registering in pairs]

    def _pin(self, nbytes: int, huge: bool) -> tuple[float, float]:
        began = time.perf_counter()
        memory = HostMemory(nbytes, huge=huge)
        there = time.perf_counter()
        self._driver("cuMemHostRegister", ctypes.c_void_p(memory.address), ctypes.c_size_t(nbytes), 0)
        done = time.perf_counter()
        self._driver("cuMemHostUnregister", ctypes.c_void_p(memory.address))
        memory.close()
        return (there - began) * 1e3, (done - there) * 1e3

    def allocating(self) -> None:
        """Milliseconds to allocate device memory, without an allocator that keeps it."""
        for nbytes in (self._size(n * MIB) for n in (8, 64, 1024)):
            self.found[f"allocate {nbytes >> 10} KiB [ms]"] = [self._allocate(nbytes) for _ in range(self._rounds)]

    def _allocate(self, nbytes: int) -> float:
        began = time.perf_counter()
        memory = self._driver.made("cuMemAlloc", ctypes.c_size_t(nbytes))
        seconds = time.perf_counter() - began
        self._driver("cuMemFree", memory)
        return seconds * 1e3

    def calls(self) -> None:
        """Microseconds a call."""
        with self._streams(1) as (stream,):
            event = self._driver.made("cuEventCreate", _NO_TIMING)

            def each(call: Callable[[], None], count: int = 200) -> float:
                began = time.perf_counter()
                for _ in range(count):
                    call()
                return (time.perf_counter() - began) / count * 1e6

            def make_stream() -> None:
                self._driver("cuStreamDestroy", self._driver.made("cuStreamCreate", _NON_BLOCKING))

            def make_event() -> None:
                self._driver("cuEventDestroy", self._driver.made("cuEventCreate", _NO_TIMING))

            self._note("make and destroy a stream [us]", lambda: each(make_stream, 20))
            self._note("make and destroy an event [us]", lambda: each(make_event))
            self._note("record an event [us]", lambda: each(lambda: self._driver("cuEventRecord", event, stream)))
            self._driver("cuStreamSynchronize", stream)
            self._note("query an event [us]", lambda: each(lambda: self._driver("cuEventQuery", event)))
            self._driver("cuEventDestroy", event)

    def compiling(self) -> None:
        """Milliseconds to load the kernels; the driver keeps what it has compiled, so the first round may be longer."""
        text = ctypes.c_char_p(KERNELS.read_bytes())

        def load() -> float:
            began = time.perf_counter()
            module = self._driver.made("cuModuleLoadData", text)
            seconds = time.perf_counter() - began
            self._driver("cuModuleUnload", module)
            return seconds * 1e3

        if self._driver.has("cuModuleLoadData"):
            self._note("load the kernels [ms]", load)


def about_the_machine(driver: Driver, device: Any) -> dict[str, str]:
    name = ctypes.create_string_buffer(128)
    driver("cuDeviceGetName", name, len(name), device)
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    found = {
        "device": name.value.decode(),
        "processor": f"{models[0] if models else 'unknown'}, {os.cpu_count()} cores",
    }
    if program := shutil.which("nvidia-smi"):
        asked = "driver_version,clocks.sm,clocks.mem,pcie.link.gen.current,pcie.link.width.current"
        command = [program, f"--query-gpu={asked}", "--format=csv,noheader", "--id=0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found[asked] = done.stdout.strip()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes")
    parser.add_argument("--library", default="libcuda.so.1")
    parser.add_argument("--json", type=Path, default=None, help="a file for all values")
    settings = parser.parse_args()
    driver = Driver(settings.library)
    driver("cuInit", 0)
    device = ctypes.c_int()
    driver("cuDeviceGet", ctypes.byref(device), 0)
    machine = about_the_machine(driver, device)
    driver("cuCtxPushCurrent", driver.made("cuDevicePrimaryCtxRetain", device))
    costs = Costs(driver, settings.rounds, settings.scale)
    try:
        for measure in (costs.links, costs.small_copies, costs.pinning, costs.allocating, costs.calls, costs.compiling):
            measure()
    finally:
        driver.made("cuCtxPopCurrent")
        driver("cuDevicePrimaryCtxRelease", device)
    for key, value in machine.items():
        print(f"{key}: {value}")
    print(f"{'':48}{'median':>10}{'lowest':>10}{'highest':>10}")
    for row, values in costs.found.items():
        print(f"{row:48}{statistics.median(values):10.2f}{min(values):10.2f}{max(values):10.2f}")
    if settings.json:
        settings.json.write_text(json.dumps({"machine": machine, "rounds": costs.found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
