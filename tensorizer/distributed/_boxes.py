"""Which part of a tensor a rank holds: placements on a mesh as one box."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["Box", "box_of"]

#: (begin, end) in every dimension.
Box = tuple[tuple[int, int], ...]


def box_of(
    name: str, shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Any
) -> Box:
    """The box of the rank at `coordinate` of a mesh, cut as ``torch.chunk`` cuts: the last parts may be short or empty.

    A dimension that several mesh dimensions cut is cut from left to right; by ``_StridedShard`` (FSDP over tensor
    parallelism) after the others, from right to left, as torch defines it.

    Raises:
        ValueError: A placement that no box describes: ``Partial``, another kind, a ``_StridedShard`` of another order.
    """
    box = [(0, size) for size in shape]
    plain, strided = [], []
    for mesh_dim, placement in enumerate(placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise ValueError(f"tensor {name!r:.200}: placement {placement}: wanted Shard or Replicate")
        dim = placement.dim + len(box) if placement.dim < 0 else placement.dim
        if not 0 <= dim < len(box):
            raise ValueError(f"tensor {name!r:.200}: {placement} of a tensor of {len(box)} dimensions")
        if kind == "_StridedShard":
            inner = [mesh_shape[m] for m, d in plain_after(placements, mesh_dim) if d % len(box) == dim]
            if placement.split_factor != math.prod(inner):
                raise ValueError(
                    f"tensor {name!r:.200}: {placement} has a split factor of {placement.split_factor}, and the mesh "
                    f"dimensions behind it cut {math.prod(inner)} times; redistribute it to Shard first"
                )
            strided.append((mesh_dim, dim))
        else:
            plain.append((mesh_dim, dim))
    for mesh_dim, dim in [*plain, *reversed(strided)]:
        begin, end = box[dim]
        part = -(-(end - begin) // mesh_shape[mesh_dim])
        first = min(begin + part * coordinate[mesh_dim], end)
        box[dim] = (first, min(first + part, end))
    return tuple(box)


def plain_after(placements: Any, mesh_dim: int) -> list[tuple[int, int]]:
    """(mesh dimension, tensor dimension) of the shards behind a mesh dimension."""
    return [(m, placement.dim) for m, placement in enumerate(placements) if m > mesh_dim and hasattr(placement, "dim")]
