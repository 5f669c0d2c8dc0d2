"""This project with one of its cipher kernels, whichever it would choose itself."""

from __future__ import annotations

import platform
from pathlib import Path

from benchmarks.contender import Contender, State
from benchmarks.contenders.ours import Ours

# Of this processor; libsodium's is OursLibsodium.
KERNELS = ("neon",) if platform.machine() == "aarch64" else ("avx512ifma", "avx512", "avx2")


class OursKernel(Contender):
    role = "variant"
    shares = Ours.name  # every kernel writes the same bytes

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.name = f"ours-{kernel}"
        self.label = f"this project, {kernel}"
        self.suffix = Ours.suffix
        self._ours = Ours()

    def import_library(self) -> None:
        self._ours.import_library()
        from tensorizer import _C

        if not _C.select_kernel(self.kernel):
            raise RuntimeError(f"this processor has no {self.kernel}")

    def version(self) -> str:
        return self._ours.version()

    def prepare_encrypted(self, state: State, path: Path) -> None:
        self._ours.prepare_encrypted(state, path)

    def load_encrypted_on(self, path: Path, threads: int = 1) -> State:
        return self._ours.load_encrypted_on(path, threads)


class OursLibsodium(OursKernel):
    def __init__(self) -> None:
        super().__init__("libsodium")

    def load_encrypted(self, path: Path) -> State:
        return self._ours.load_encrypted(path)

    def save_encrypted(self, state: State, path: Path, *, sync: bool = False) -> None:
        self._ours.save_encrypted(state, path, sync=sync)
