"""Local files, host memory: the cases of the core."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from pathlib import Path

from benchmarks import memory
from benchmarks.case import Bench, Case, Goal
from benchmarks.contender import State
from benchmarks.contenders.bare_python import BarePython
from benchmarks.contenders.machine import Machine
from benchmarks.memory import PeakSampler
from benchmarks.models import read_base
from benchmarks.sync import fsync_path

READERS_OF_DISK = 16  # requests that keep a disk busy do not depend on the number of cores


def limit(bench: Bench, what: str, path: Path, *more: str) -> float:
    """Seconds of one machine limit; ``bench.contender`` is the machine."""
    assert isinstance(bench.contender, Machine)
    return bench.contender.limit(what, str(bench.threads), str(path), *more)


def load(bench: Bench) -> float:
    """All tensors, file in the page cache."""
    memory.warm_page_cache(bench.path)
    if bench.contender.name == "machine":
        return limit(bench, "hot", bench.path)
    with bench.clock():
        state = getattr(bench.contender, bench.case.needs)(bench.path)
    bench.check(state)
    return bench.seconds


def load_second(bench: Bench) -> float:
    """All tensors again, in a process that has loaded and dropped them before."""
    memory.warm_page_cache(bench.path)
    if bench.contender.name == "machine":
        return limit(bench, "resident", bench.path)
    with bench.clock():
        state = bench.contender.load(bench.path)
    del state
    with bench.clock():
        state = bench.contender.load(bench.path)
    bench.check(state)
    return bench.seconds


def load_cold(bench: Bench) -> float:
    """All tensors, no byte of the file in the page cache."""
    memory.drop_page_cache(bench.path)
    if isinstance(bench.contender, Machine):
        return bench.contender.limit("direct", str(READERS_OF_DISK), str(bench.path))
    with bench.clock(page_cache_nbytes=bench.path.stat().st_size):
        state = getattr(bench.contender, bench.case.needs)(bench.path)
    bench.check(state)
    return bench.seconds


def load_mapped_touch(bench: Bench) -> float:
    """Mapped tensors, and every byte of them read once by torch."""
    memory.warm_page_cache(bench.path)
    if bench.contender.name == "machine":
        return limit(bench, "touch", bench.path)
    with bench.clock():
        state = bench.contender.load_mapped(bench.path)
        total = touch_all(state)
    if total == 0:
        raise RuntimeError(f"{bench.contender.label}: nothing but zeros")
    bench.check(state)
    return bench.seconds


def touch_all(state: State) -> int:
    """Read every byte as fast as torch can add up integers."""
    import torch

    total = 0
    for tensor in state.values():
        flat = tensor.detach().view(-1)
        words = flat[: flat.numel() // 4 * 4]
        total ^= int(words.view(torch.int64).sum())
    return total


def load_many(bench: Bench) -> float:
    """Many small tensors, file in the page cache."""
    if isinstance(bench.contender, BarePython):
        with bench.clock():
            bench.contender.make_parameters(bench.path)
        return bench.seconds
    return load(bench)


def load_verified(bench: Bench) -> float:
    """All tensors with every digest checked."""
    memory.warm_page_cache(bench.path)
    if bench.contender.name == "machine":
        return limit(bench, "sha256", bench.path)
    return load(bench)


def stream(bench: Bench) -> float:
    """All tensors one after the other, each copied to where an engine has it, in memory that is there."""
    import torch

    memory.warm_page_cache(bench.path)
    return streamed_into(bench, {name: torch.ones_like(tensor) for name, tensor in read_base(bench.folder).items()})


def streamed_into(bench: Bench, resident: State) -> float:
    """Seconds in which the contender's ``needs`` method gave all tensors of ``resident``, and they were copied."""
    with bench.clock():
        for name, tensor in getattr(bench.contender, bench.case.needs)(bench.place):
            resident[name].copy_(tensor)
    bench.check(resident)
    return bench.seconds


def load_one(bench: Bench) -> float:
    """From the file's name to one feed-forward matrix in hand."""
    memory.warm_page_cache(bench.path)
    with bench.clock():
        state = bench.contender.load_one(bench.path, bench.manifest.one)
    if state[bench.manifest.one].nbytes != bench.manifest.one_nbytes:
        raise RuntimeError(f"{bench.contender.label}: wrong tensor")
    return bench.seconds


def save(bench: Bench, sync: bool) -> float:
    """The whole state dict into a new file, by the contender's ``needs`` method."""
    from benchmarks import models

    state = models.read_base(bench.folder)
    save_state = getattr(bench.contender, bench.case.needs)
    bench.target.unlink(missing_ok=True)
    os.sync()
    try:
        with bench.clock():
            save_state(state, bench.target, sync=sync)
        if bench.target.stat().st_size < bench.manifest.nbytes:
            raise RuntimeError(f"{bench.contender.label}: the file is too short")
    finally:
        bench.target.unlink(missing_ok=True)
    return bench.seconds


def save_disk(bench: Bench) -> float:
    """Until fsync has returned."""
    if bench.contender.name == "machine":
        return limit(bench, "write-sync", bench.target, str(bench.manifest.nbytes))
    return save(bench, sync=True)


def save_tmpfs(bench: Bench) -> float:
    """Into memory: copying alone. The limit writes first and hashes then, on all cores each time."""
    bench.scratch = Path(bench.settings["tmpfs"])
    if bench.contender.name == "machine":
        memory.warm_page_cache(bench.path)
        return limit(bench, "write", bench.target, str(bench.manifest.nbytes)) + limit(bench, "sha256", bench.path)
    return save(bench, sync=False)


def save_tmpfs_write(bench: Bench) -> float:
    """As :func:`save_tmpfs` with no more than a CRC32; the limit writes alone."""
    bench.scratch = Path(bench.settings["tmpfs"])
    if bench.contender.name == "machine":
        return limit(bench, "write", bench.target, str(bench.manifest.nbytes))
    return save(bench, sync=False)


def convert(bench: Bench) -> float:
    """From one file in the page cache to another one that is on the disk; the limit is ``cp`` and fsync."""
    memory.warm_page_cache(bench.path)
    bench.target.unlink(missing_ok=True)
    os.sync()
    try:
        with bench.clock():
            if bench.contender.name == "machine":
                subprocess.run(["cp", "--reflink=never", str(bench.path), str(bench.target)], check=True)
                fsync_path(bench.target)
            else:
                getattr(bench.contender, bench.case.needs)(bench.path, bench.target)
        if bench.target.stat().st_size < bench.manifest.nbytes:
            raise RuntimeError(f"{bench.contender.label}: the file is too short")
    finally:
        bench.target.unlink(missing_ok=True)
    return bench.seconds


def import_library(bench: Bench) -> float:
    """The import, in a process that has torch already."""
    import torch  # noqa: F401

    gc.collect()  # otherwise torch's objects may be collected during the import, which takes 70 ms and more
    begin = time.perf_counter()
    bench.contender.import_library()
    return time.perf_counter() - begin


def load_memory(bench: Bench) -> float:
    """Highest memory owned during a load, beyond what was there before and the payload itself."""
    memory.warm_page_cache(bench.path)
    sampler = PeakSampler()
    before = sampler.start()
    state = bench.contender.load(bench.path)
    peak = sampler.stop()
    bench.check(state)
    return max(0, peak.owned - before.owned - bench.manifest.nbytes)


def save_memory(bench: Bench) -> float:
    """Highest memory owned during a save, beyond what was there before (the model among it)."""
    from benchmarks import models

    state = models.read_base(bench.folder)
    sampler = PeakSampler()
    before = sampler.start()
    try:
        bench.contender.save(state, bench.target)
    finally:
        bench.target.unlink(missing_ok=True)
    return max(0, sampler.stop().owned - before.owned)


CASES = (
    Case(
        "load-hot",
        "load, page cache hot, owned memory",
        "load",
        load,
        limit="machine",
        goals=(
            Goal("machine", at_least=0.75),
            Goal("reference", at_least=4.0),
            Goal("ours", at_least=0.97, who="ours-safetensors"),
            Goal("safetensors", at_least=1.0, who="ours-safetensors"),
            Goal("fastsafetensors", at_least=1.0, who="ours-safetensors"),
            Goal("runai", at_least=1.0, who="ours-safetensors"),
        ),
    ),
    Case(
        "stream-hot",
        "tensor by tensor into memory of an engine",
        "stream",
        stream,
        goals=tuple(Goal(who, at_least=1.0) for who in ("safetensors", "runai", "fastsafetensors")),
    ),
    Case(
        "load-second",
        "second load in one process",
        "load",
        load_second,
        limit="machine",
        goals=(Goal("reference", at_least=4.0),),
    ),
    Case(
        "map-open",
        "mapped tensors: open",
        "load_mapped",
        load,
        unit="ms",
        goals=(Goal("safetensors", at_least=1.0), Goal("safetensors", at_least=1.0, who="ours-safetensors")),
    ),
    Case(
        "map-touch",
        "mapped tensors: open and read every byte",
        "load_mapped",
        load_mapped_touch,
        unit="ms",
        limit="machine",
        goals=(Goal("safetensors", at_least=1.3),),
    ),
    Case(
        "load-cold-direct",
        "load past the page cache, which is cold",
        "load_direct",
        load_cold,
        limit="machine",
        goals=(Goal("machine", at_least=0.9), Goal("runai", at_least=1.0)),
    ),
    Case(
        "load-cold-buffered",
        "load through the page cache, which is cold",
        "load_buffered",
        load_cold,
        limit="machine",
        goals=(Goal("torch", at_least=1.0), Goal("reference", at_least=1.0)),
    ),
    Case(
        "load-many",
        "18,867 small tensors",
        "load",
        load_many,
        model="many",
        unit="ms",
        limit="bare-python",
        goals=(Goal(at_most=80.0), Goal("safetensors", at_least=2.0, who="ours-safetensors")),
    ),
    Case(
        "load-verified",
        "load with both digests verified",
        "load_verified",
        load_verified,
        limit="machine",
        goals=(Goal("reference", at_least=2.2),),
    ),
    Case(
        "load-one",
        "one feed-forward matrix out of the file",
        "load_one",
        load_one,
        unit="ms",
        goals=(Goal(at_most=5.0),),
    ),
    Case(
        "save-disk",
        "save to disk until fsync returns",
        "save",
        save_disk,
        limit="machine",
        goals=(Goal("machine", at_least=0.85),),
    ),
    Case(
        "save-tmpfs",
        "save to tmpfs, both digests",
        "save",
        save_tmpfs,
        limit="machine",
        goals=(Goal("machine", at_least=0.9),),
    ),
    Case(
        "save-tmpfs-crc32",
        "save to tmpfs, CRC32 (others: no digest)",
        "save_crc32",
        save_tmpfs_write,
        limit="machine",
        goals=(Goal("torch", at_least=1.0), Goal("safetensors", at_least=1.0)),
    ),
    Case(
        "convert",
        "a .safetensors file to .tensors on the disk, with both digests",
        "convert",
        convert,
        limit="machine",
        goals=(Goal("machine", at_least=0.8, who="ours-safetensors"),),
    ),
    Case(
        "convert-checked",
        "the same, read back and compared",
        "convert_checked",
        convert,
        limit="machine",
    ),
    Case(
        "import",
        "import on top of torch",
        "import_time",
        import_library,
        model="tiny",
        unit="ms",
        goals=(Goal(at_most=30.0),),
    ),
    Case(
        "memory-load",
        "memory of a load beyond the payload",
        "load",
        load_memory,
        unit="MB",
        goals=(Goal(at_most=67.1),),
    ),
    Case(
        "memory-save",
        "memory of a save beyond the model",
        "save",
        save_memory,
        unit="MB",
        goals=(Goal(at_most=314.6),),
    ),
)
