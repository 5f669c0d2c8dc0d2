"""libsodium alone: what its secretbox gets out of the cores from memory to memory, with no file and no tensors."""

from __future__ import annotations

from benchmarks.contenders.machine import Machine


class Sodium(Machine):
    name = "libsodium"
    label = "limit of libsodium"
    shares = Machine.name  # the same raw bytes, where a case hashes them
