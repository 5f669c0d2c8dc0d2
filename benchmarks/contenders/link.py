"""The bus to the GPU: what asynchronous copies between pinned memory and the device reach in the same run."""

from __future__ import annotations

import ctypes
import time

from benchmarks import gpu
from benchmarks.contender import Contender

BLOCK = 8 << 20
BLOCKS = 16


class Link(Contender):
    name = "link"
    label = "limit of the link"
    role = "limit"

    def import_library(self) -> None:
        import torch  # noqa: F401

    def version(self) -> str:
        import torch

        return "fake driver" if gpu.is_fake() else str(torch.cuda.get_device_name(0))

    def seconds(self, nbytes: int, *, to_device: bool) -> float:
        """Time to move that many bytes one way, 8 MiB at a time, with nothing in between."""
        if gpu.is_fake():
            return self._fake_seconds(nbytes, to_device)
        import torch

        host = [torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True) for _ in range(BLOCKS)]
        device = torch.empty(nbytes, dtype=torch.uint8, device=gpu.DEVICE)
        for warm in (True, False):
            limit = BLOCK * BLOCKS if warm else nbytes
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for i, at in enumerate(range(0, min(limit, nbytes), BLOCK)):
                there = device[at : at + BLOCK]
                here = host[i % BLOCKS][: there.numel()]
                (there if to_device else here).copy_(here if to_device else there, non_blocking=True)
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def _fake_seconds(self, nbytes: int, to_device: bool) -> float:
        """The fake driver copies at the speed of memory."""
        driver = gpu.fake_device().driver
        device = driver.memory(nbytes, 0)
        memory = device.data_ptr()
        host = (ctypes.c_ubyte * BLOCK)()
        begin = time.perf_counter()
        for at in range(0, nbytes, BLOCK):
            count = min(BLOCK, nbytes - at)
            if to_device:
                driver.write(memory + at, host, count)
            else:
                driver.read(memory + at, host, count)
        return time.perf_counter() - begin
