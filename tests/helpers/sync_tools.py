"""Tools for tests of weight synchronisation: models, changes to them, and the same arithmetic in NumPy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def same(one, other) -> bool:
    """Whether two mappings hold the same tensors, byte for byte."""
    return one.keys() == other.keys() and all(torch.equal(raw(one[name]), raw(other[name])) for name in one)


def copy_of(tensors) -> dict:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def change(tensor: torch.Tensor, share: float = 0.01, generator=None) -> int:
    """Changes about this share of the elements, at least one; returns the number."""
    data = tensor.detach()
    count = max(1, int(data.numel() * share))
    flat = raw(data).view(-1, data.element_size())
    chosen = torch.randperm(data.numel(), generator=generator)[:count]
    flat[chosen, 0] ^= 1
    data.copy_(flat.reshape(-1).view(data.dtype).view(data.shape))
    return count


# --- the arithmetic in NumPy ------------------------------------------------------------------------------------------


def fmix(x):
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return x ^ (x >> np.uint64(33))


def sum_of(tensor: torch.Tensor) -> int:
    """The sum of a tensor, as the page of the format defines it."""
    size = tensor.element_size()
    width = -(-size // 8)
    words = np.zeros((tensor.numel(), width * 8), np.uint8)
    words[:, :size] = raw(tensor).numpy().reshape(-1, size)
    with np.errstate(over="ignore"):
        h = fmix(np.arange(tensor.numel(), dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        for column in words.view(np.uint64).T:
            h = fmix(h ^ column)
        return int(h.sum(dtype=np.uint64))


def state_of(tensors) -> str:
    sums = [sum_of(tensors[name]) for name in sorted(tensors, key=str.encode)]
    return hashlib.sha256(b"".join(value.to_bytes(8, "little") for value in sums)).hexdigest()


def positions_of(before: torch.Tensor, after: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    """Positions and values of the elements that changed."""
    size = before.element_size()
    old, new = (raw(tensor).view(-1, size) for tensor in (before, after))
    numbers = (old != new).any(1).nonzero().reshape(-1).tolist()
    text, last = b"", -1
    for number in numbers:
        gap, last = number - last - 1, number
        while gap > 0x7F:
            text, gap = text + bytes([gap & 0x7F | 0x80]), gap >> 7
        text += bytes([gap])
    return text, new[numbers].reshape(-1).view(after.dtype)


# --- the content of a folder ------------------------------------------------------------------------------------------


def pointer_of(folder) -> dict:
    return json.loads((Path(folder) / "latest.json").read_text())


def write_pointer(folder, content) -> None:
    (Path(folder) / "latest.json").write_text(json.dumps(content))


def files_in(folder) -> list:
    return sorted(path.name for path in Path(folder).glob("*.tensors"))


def anchor(version: int) -> str:
    return f"anchor-{version:012d}.tensors"


def delta(version: int) -> str:
    return f"delta-{version:012d}.tensors"
