"""The machine itself: what plain C++ (``limits.cpp``) gets out of memory, disk and hashing units in the same run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from benchmarks.contender import Contender, State


class Machine(Contender):
    name = "machine"
    label = "limit of the machine"
    suffix = ".raw"
    role = "limit"

    def import_library(self) -> None:
        if "BENCH_LIMITS" not in os.environ:
            raise RuntimeError("BENCH_LIMITS names no program: start through the runner")

    def version(self) -> str:
        return "limits.cpp"

    def prepare(self, state: State, path: Path) -> None:
        with path.open("wb") as file:
            for tensor in state.values():
                file.write(tensor.numpy().data)

    def limit(self, what: str, *arguments: str) -> float:
        """Seconds that one limit took: see ``limits.cpp`` for what there is.

        Raises:
            subprocess.CalledProcessError: The program failed; its words are on standard error.
        """
        command = [os.environ["BENCH_LIMITS"], what, *arguments]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return float(json.loads(result.stdout)["seconds"])
