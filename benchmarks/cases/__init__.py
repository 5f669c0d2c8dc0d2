"""All cases in the order of the report. Another subject (encryption) is another module."""

from __future__ import annotations

from benchmarks.case import Case
from benchmarks.cases import dcp, encrypted, gpu, local, pretrained, remote

CASES: tuple[Case, ...] = (*local.CASES, *encrypted.CASES, *remote.CASES, *pretrained.CASES, *dcp.CASES)
#: Cases that need a CUDA device: measured when named (``make bench-gpu``).
GPU_CASES: tuple[Case, ...] = gpu.CASES


def case(name: str) -> Case:
    """The case of that name; ``KeyError`` lists those there are."""
    for candidate in (*CASES, *GPU_CASES):
        if candidate.name == name:
            return candidate
    raise KeyError(f"no case {name!r}; there are: {', '.join(names())}")


def cases(name: str) -> list[Case]:
    """The case of that name, or all cases of that family."""
    return [c for c in (*CASES, *GPU_CASES) if c.family == name] or [case(name)]


def names() -> list[str]:
    """What may be asked for: cases, a family by its own name."""
    return list(dict.fromkeys(c.family or c.name for c in (*CASES, *GPU_CASES)))
