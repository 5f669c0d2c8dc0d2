"""Loads to and saves from a CUDA device. Not among the cases of a plain run: ``make bench-gpu`` names them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarks import gpu, memory, models
from benchmarks.case import Bench, Case, Goal
from benchmarks.cases.remote import http_place
from benchmarks.contenders.link import Link
from benchmarks.servers import services


def load_from(bench: Bench, place: Any, *, first: bool = False) -> float:
    """All tensors on the device, until it has them; for the second time in this process unless `first`."""
    gpu.require_device()
    if isinstance(bench.contender, Link):
        return bench.contender.seconds(bench.manifest.nbytes, to_device=True)
    memory.warm_page_cache(place if isinstance(place, Path) else bench.path)
    load = getattr(bench.contender, bench.case.needs)
    if not first:  # buffers are pinned and memory of the device allocated now, as they are for the link
        load(place)
        gpu.settle()
    with bench.clock():
        state = load(place)
        gpu.settle()
    bench.check({name: tensor.half() for name, tensor in gpu.fetch(state).items()})  # as it was written
    return bench.seconds


def load(bench: Bench) -> float:
    """From a file in the page cache, or from the server that has it."""
    return load_from(bench, bench.place)


def load_first(bench: Bench) -> float:
    """From a file in the page cache, by a process that has loaded nothing large."""
    return load_from(bench, bench.path, first=True)


def load_tmpfs(bench: Bench) -> float:
    """From a file in memory."""
    if isinstance(bench.contender, Link):
        return load_from(bench, bench.path)
    copy = Path(bench.settings["tmpfs"]) / f"bench-load-{bench.contender.name}{bench.contender.suffix}"
    try:
        shutil.copyfile(bench.path, copy)
        return load_from(bench, copy)
    finally:
        copy.unlink(missing_ok=True)


def save(bench: Bench) -> float:
    """The whole state dict from the device into a new file in memory."""
    gpu.require_device()
    if isinstance(bench.contender, Link):
        return bench.contender.seconds(bench.manifest.nbytes, to_device=False)
    bench.scratch = Path(bench.settings["tmpfs"])
    state = gpu.put(models.read_base(bench.folder))
    gpu.settle()
    try:
        with bench.clock():
            getattr(bench.contender, bench.case.needs)(state, bench.target)
        if bench.target.stat().st_size < bench.manifest.nbytes:
            raise RuntimeError(f"{bench.contender.label}: the file is too short")
    finally:
        bench.target.unlink(missing_ok=True)
    return bench.seconds


LOAD_GOALS = (Goal("link", at_least=0.92), Goal("reference", at_least=3.0))

CASES = (
    Case("gpu-load-hot", "load to the GPU, page cache hot", "load_gpu", load, limit="link", goals=LOAD_GOALS),
    Case(
        "gpu-load-first",
        "first load to the GPU in a process",
        "load_gpu",
        load_first,
        limit="link",
        goals=(Goal("link", at_least=0.85),),
    ),
    Case("gpu-load-tmpfs", "load to the GPU from tmpfs", "load_gpu", load_tmpfs, limit="link", goals=LOAD_GOALS),
    Case(
        "gpu-load-encrypted",
        "load to the GPU, decrypted by the host",
        "load_gpu_encrypted",
        load,
        limit="link",
        variant="encrypted",
    ),
    Case(
        "gpu-load-decrypting",
        "load to the GPU, decrypted by the GPU",
        "load_gpu_decrypting",
        load,
        limit="link",
        goals=(Goal("link", at_least=0.9),),
        variant="encrypted",
    ),
    Case(
        "gpu-load-crc32",
        "load to the GPU, CRC-32 verified",
        "load_gpu_verified",
        load,
        limit="link",
        goals=(Goal("link", at_least=0.9),),
        variant="crc32",
    ),
    Case(
        "gpu-load-sha256",
        "load to the GPU, SHA-256 verified",
        "load_gpu_verified",
        load,
        limit="link",
        variant="sha256",
    ),
    Case("gpu-load-dtype", "load to the GPU as float32", "load_gpu_float32", load, limit="link"),
    Case(
        "gpu-load-http",
        "load to the GPU over HTTP, object store",
        "load_gpu_http",
        load,
        limit="link",
        locate=http_place,
        service=services.object_store,
    ),
    Case("gpu-load-many", "18,867 small tensors to the GPU", "load_gpu", load, model="many", limit="link"),
    Case(
        "gpu-save-tmpfs",
        "save from the GPU to tmpfs",
        "save_gpu",
        save,
        limit="link",
        goals=(Goal("reference", at_least=5.0),),
    ),
    Case("gpu-save-encrypted", "save from the GPU to tmpfs, encrypted", "save_gpu_encrypted", save, limit="link"),
)
