"""libsodium alone: what its secretbox gets out of the cores from memory to memory, with no file and no tensors."""

from __future__ import annotations

from benchmarks.contenders.machine import Machine


class Sodium(Machine):
    name = "libsodium"
    label = "limit of libsodium"

    def file_name(self, variant: str = "") -> str:
        return Machine().file_name(variant)  # the same raw bytes, where a case hashes them
