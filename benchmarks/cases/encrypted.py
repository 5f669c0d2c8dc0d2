"""Encrypted files with a key (no passphrase): loads from the page cache, saves to memory, kernels by threads."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from benchmarks import memory
from benchmarks.case import Bench, Case, Goal
from benchmarks.cases.local import limit, save
from benchmarks.contenders.sodium import Sodium


def load(bench: Bench) -> float:
    """All tensors, file in the page cache; the limit decrypts from memory to memory."""
    if isinstance(bench.contender, Sodium):
        return limit(bench, "box-open", Path("-"), str(bench.manifest.nbytes))
    memory.warm_page_cache(bench.path)
    with bench.clock():
        state = bench.contender.load_encrypted(bench.path)
    bench.check(state)
    return bench.seconds


def load_on(bench: Bench, threads: int) -> float:
    """As :func:`load` with so many threads."""
    bench.threads = threads
    if isinstance(bench.contender, Sodium):
        return load(bench)
    memory.warm_page_cache(bench.path)
    with bench.clock():
        state = bench.contender.load_encrypted_on(bench.path, threads)
    bench.check(state)
    return bench.seconds


def save_tmpfs(bench: Bench) -> float:
    """Into memory, with SHA-256. The limit encrypts, hashes and writes one after the other, on all cores each time."""
    bench.scratch = Path(bench.settings["tmpfs"])
    if not isinstance(bench.contender, Sodium):
        return save(bench, sync=False)
    memory.warm_page_cache(bench.path)
    nbytes = str(bench.manifest.nbytes)
    return (
        limit(bench, "box-seal", Path("-"), nbytes)
        + limit(bench, "sha256", bench.path)
        + limit(bench, "write", bench.target, nbytes)
    )


def thread_counts(cores: int) -> list[int]:
    """Where the chart has points: every number up to four, then powers of two, and all cores."""
    return sorted({n for n in range(1, cores + 1) if n <= 4 or n & (n - 1) == 0} | {cores})


CASES = (
    Case(
        "encrypted-load",
        "load, encrypted, page cache hot",
        "load_encrypted",
        load,
        limit="libsodium",
        goals=(
            Goal("reference", at_least=1.8, who="ours-libsodium"),
            Goal("libsodium", at_least=0.8, who="ours-libsodium"),
            Goal("libsodium", at_least=1.15),
        ),
        variant="encrypted",
    ),
    Case(
        "encrypted-save",
        "save to tmpfs, encrypted, SHA-256",
        "save_encrypted",
        save_tmpfs,
        limit="libsodium",
        goals=(Goal("reference", at_least=1.5, who="ours-libsodium"), Goal("reference", at_least=1.9)),
    ),
    *(
        Case(
            f"crypto-threads-{threads}",
            f"load, encrypted, by threads: {threads}",
            "load_encrypted_on",
            partial(load_on, threads=threads),
            limit="libsodium",
            variant="encrypted",
            family="crypto-threads",
            at=threads,
        )
        for threads in thread_counts(len(os.sched_getaffinity(0)))
    ),
)
