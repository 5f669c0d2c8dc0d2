"""The state of memory and page cache before a clock starts, and how much memory a process takes while it runs."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, Optional

PAGE = mmap.PAGESIZE
BLOCK = 8 << 20


def fault_in_and_free(nbytes: int) -> None:
    """Touch ``nbytes`` of fresh memory and give it back.

    On virtual machines freed memory may have gone back to the host, and faulting it in again can be ten times slower
    than anything measured here; so every contender finds the same amount of memory ready. Private memory, since shared
    memory comes in small pages: huge ones would have to be put together from them on the contender's clock.
    """
    import numpy

    with mmap.mmap(-1, max(nbytes, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        view = numpy.frombuffer(memory, dtype=numpy.uint8)
        view[::PAGE] = 1
        del view


def warm_page_cache(path: Path) -> None:
    """Read the file once, so that all of it is in the page cache."""
    buffer = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def drop_page_cache(path: Path) -> None:
    """Put the file's bytes out of the page cache.

    Asks for this file alone, which needs no rights; where pages stay nevertheless (mapped by somebody), root drops all
    caches of the machine.

    Raises:
        RuntimeError: More than one page in a hundred is still cached.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_share(path) > 0.01:
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1")
    if (share := cached_share(path)) > 0.01:
        raise RuntimeError(f"{path.name}: {share:.0%} of the file stay in the page cache")


def cached_share(path: Path) -> float:
    """Part of the file, 0 to 1, that is in the page cache now (mincore)."""
    size = path.stat().st_size
    if size == 0:
        return 0.0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    pages = (size + PAGE - 1) // PAGE
    resident = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"cannot map {path.name}")
    try:
        if libc.mincore(address, size, resident) != 0:
            raise OSError(ctypes.get_errno(), f"mincore of {path.name}")
    finally:
        libc.munmap(address, size)
    return sum(byte & 1 for byte in bytes(resident)) / pages


class Usage(NamedTuple):
    """Resident memory of a process, in bytes: what it owns, and everything including mapped files."""

    owned: int
    all: int


def usage_of(process: int) -> Usage:
    """What ``/proc`` says now; pages of mapped files, which the kernel can drop, are not counted as owned."""
    kib = {}
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        field, _, value = line.partition(":")
        if field in ("RssAnon", "RssShmem", "VmRSS"):
            kib[field] = int(value.split()[0])
    return Usage((kib["RssAnon"] + kib["RssShmem"]) << 10, kib["VmRSS"] << 10)


class PeakSampler:
    """Watches this process from a process of its own, a thousand times per second, from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self._watcher: Optional[subprocess.Popen[str]] = None

    def start(self) -> Usage:
        """Begin to watch; returns the usage at this moment."""
        self._watcher = subprocess.Popen(
            [sys.executable, "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._watcher.stdout is not None
        self._watcher.stdout.readline()
        return usage_of(os.getpid())

    def stop(self) -> Usage:
        """End watching; returns the highest figures seen."""
        assert self._watcher is not None
        answer, _ = self._watcher.communicate("\n")
        owned, everything = answer.split()
        return Usage(int(owned), int(everything))


def _watch(process: int) -> None:
    import select

    print("ready", flush=True)
    owned = everything = 0
    while True:
        done, _, _ = select.select([sys.stdin], [], [], 0.001)
        now = usage_of(process)
        owned, everything = max(owned, now.owned), max(everything, now.all)
        if done:
            break
    print(owned, everything)


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
