"""Tensors in memory against the digests that the file stores for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional

import torch

from tensorizer._format.names import Name
from tensorizer._format.payloads import contiguous
from tensorizer.errors import MissingHashError

if TYPE_CHECKING:
    from tensorizer._load.container import Container

__all__ = ["holds", "listed", "missing_hashes"]

# Names in a message that is about many tensors.
_SHOWN_NAMES = 5


def holds(container: Container, i: int, tensor: torch.Tensor) -> Optional[bool]:
    """Whether the bytes of a tensor, wherever they are, are those that the file vouches for.

    ``None``: the tensor was stored with data and without a digest, so nothing can be said.
    """
    data = contiguous(tensor, on_device=False)
    nbytes = data.numel() * data.element_size()
    index = container.index
    if index.data_nbytes(i) == 0 and index.loaded_nbytes(i) > 0:  # written without data: zeros
        flat = data.reshape(-1).view(torch.uint8)
        return nbytes == index.loaded_nbytes(i) and not bool(flat.any())
    if container.lacks_hashes(i):
        return None
    headers, position = container.header(i)
    return bool(headers.matches(position, data.data_ptr() if nbytes else 0, nbytes))


def listed(names: Sequence[Name]) -> str:
    """Names for a message, the first few of many."""
    return ", ".join(repr(name) for name in names[:_SHOWN_NAMES]) + (", …" if len(names) > _SHOWN_NAMES else "")


def missing_hashes(source: str, names: Sequence[Name]) -> MissingHashError:
    """The error for tensors that were to be verified and have no digest."""
    error = MissingHashError(
        f"{source}: cannot verify {len(names)} tensors that have no stored hash: {listed(names)}; "
        "allow_missing_hashes=True takes them unverified"
    )
    error.source = source
    return error
