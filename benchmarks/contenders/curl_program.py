"""The ``curl`` program: a process per range, all at the same time, the bytes thrown away."""

from __future__ import annotations

import re
import subprocess

from benchmarks.contender import Contender, HttpPlace, State


class Curl(Contender):
    name = "curl"
    label = "curl, parallel ranges"
    suffix = ".raw"
    shares = "machine"
    makes_tensors = False

    def import_library(self) -> None:
        self.version()

    def version(self) -> str:
        said = subprocess.run(["curl", "--version"], stdout=subprocess.PIPE, text=True, check=True)
        return said.stdout.split()[1]

    def load_http(self, place: HttpPlace) -> State:
        nbytes = self._size_of(place.url)
        share = -(-nbytes // place.connections)
        command = ["curl", "-sf", "-o", "/dev/null", "-w", "%{size_download}", place.url, "-r"]
        processes = [
            subprocess.Popen([*command, f"{begin}-{begin + share - 1}"], stdout=subprocess.PIPE, text=True)
            for begin in range(0, nbytes, share)
        ]
        received = sum(int(process.communicate()[0]) for process in processes)
        if received != nbytes:
            raise RuntimeError(f"{self.label}: {received} bytes, expected {nbytes}")
        return {}

    def _size_of(self, url: str) -> int:
        head = subprocess.run(["curl", "-sfI", url], stdout=subprocess.PIPE, text=True, check=True).stdout
        found = re.search(r"(?im)^content-length:\s*(\d+)", head)
        if not found:
            raise RuntimeError(f"{self.label}: the server does not say how long the file is")
        return int(found[1])
