"""The bus to the GPU: what asynchronous copies between pinned memory and the device reach in the same run."""

from __future__ import annotations

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
        import tensorizer._C as native

        memory = gpu.fake_device().driver.memory(nbytes, 0)
        host = bytearray(nbytes)
        engine = native.CudaCopyEngine(0, 0)
        begin = time.perf_counter()
        if to_device:
            engine.upload(host, memory.data_ptr())
        else:
            engine.download(memory.data_ptr(), host)
        return time.perf_counter() - begin
