"""The network itself: what plain C++ (``limits_net.cpp``) receives over sockets in the same run."""

from __future__ import annotations

import json
import subprocess

from benchmarks.contender import Contender


class Sockets(Contender):
    name = "sockets"
    label = "limit: raw sockets"
    suffix = ".raw"
    role = "limit"
    shares = "machine"

    def import_library(self) -> None:
        pass

    def version(self) -> str:
        return "limits_net.cpp"

    def limit(self, program: str, what: str, connections: int, target: str) -> float:
        """Seconds that one limit took: see ``limits_net.cpp`` for what there is.

        Raises:
            subprocess.CalledProcessError: The program failed; its words are on standard error.
        """
        command = [program, what, str(connections)]
        result = subprocess.run(command, input=target, stdout=subprocess.PIPE, text=True, check=True)
        return float(json.loads(result.stdout)["seconds"])
