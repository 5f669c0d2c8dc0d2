"""Finds the part of a tensor that a rank holds, as one box, from the placements on a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tensorizer.errors import FormatError

#: A box: (begin, end) in every dimension.
Box = tuple[tuple[int, int], ...]


def box_of(
    name: str, shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Any
) -> Box:
    """The box of the rank at `coordinate` of a mesh, cut as ``torch.chunk`` cuts: the last parts may be short or empty.

    Several mesh dimensions that cut one dimension cut it from left to right. ``_StridedShard`` (FSDP over tensor
    parallelism) cuts after the others, from right to left, as torch defines it.

    Raises:
        ValueError: No box describes the placement: ``Partial``, an unknown kind, a ``_StridedShard`` of another order.
    """
    box = [(0, size) for size in shape]
    plain, strided = [], []
    for mesh_dim, placement in enumerate(placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise ValueError(f"tensor {name!r:.200}: placement {placement}: expected Shard or Replicate")
        dim = placement.dim + len(box) if placement.dim < 0 else placement.dim
        if not 0 <= dim < len(box):
            raise ValueError(f"tensor {name!r:.200}: {placement} of a tensor of {len(box)} dimensions")
        if kind == "_StridedShard":
            behind = [(m, p.dim) for m, p in enumerate(placements) if m > mesh_dim and hasattr(p, "dim")]
            inner = [mesh_shape[m] for m, d in behind if d % len(box) == dim]
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


def box_at(begins: Sequence[int], sizes: Sequence[int]) -> Box:
    """The box of these sizes that begins at these offsets."""
    return tuple((begin, begin + n) for begin, n in zip(begins, sizes))


def slices_of(box: Box) -> tuple[slice, ...]:
    """The box as an index."""
    return tuple(slice(begin, end) for begin, end in box)


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box], where: str) -> None:
    """Refuses `boxes` (none of them empty) that do not cover a tensor exactly once. With a hole, a load would return
    elements that were never written.

    Raises:
        FormatError: A box is outside of the tensor, two boxes overlap, or the boxes leave a hole.
    """
    tensor = f"{where}: tensor {name!r}"
    for box in boxes:
        if len(box) != len(shape) or any(not 0 <= begin <= end <= n for (begin, end), n in zip(box, shape)):
            raise FormatError(f"{tensor}: expected boxes within {list(shape)}, got {_text(box)}")
    _check_apart(tensor, boxes)
    found = sum(math.prod(end - begin for begin, end in box) for box in boxes)
    if found != math.prod(shape):  # the boxes do not overlap and lie inside, so elements are missing
        raise FormatError(
            f"{tensor} of shape {list(shape)}: its boxes leave a hole: expected {math.prod(shape)} elements, "
            f"got {found} in {', '.join(map(_text, boxes[:4]))}{' …' if len(boxes) > 4 else ''}"
        )


def _check_apart(tensor: str, boxes: Sequence[Box]) -> None:
    if len(boxes) < 2 or not boxes[0]:
        if len(boxes) > 1:
            raise FormatError(f"{tensor}: expected one box of a tensor without dimensions, got {len(boxes)}")
        return
    # Two boxes can overlap only if their ranges overlap in the dimension that is cut most often.
    cut = max(range(len(boxes[0])), key=lambda dim: len({box[dim][0] for box in boxes}))
    is_open: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[cut][0]):
        is_open = [other for other in is_open if other[cut][1] > box[cut][0]]
        for other in is_open:
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other)):
                raise FormatError(f"{tensor}: its boxes {_text(other)} and {_text(box)} overlap")
        is_open.append(box)


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{begin}:{end}" for begin, end in box) + "]"


def check_described(planner: Any, fqn: str, offset: Any) -> None:
    """Checks that a strided shard is the box by which a plan describes it.

    Planners describe every shard by its first row and its size. The strided shards of FSDP over tensor parallelism are
    such boxes. Other strided shards have gaps between their rows: a save would store them as consecutive rows.

    Raises:
        ValueError: The shard is not that box.
    """
    value = (getattr(planner, "state_dict", None) or {}).get(fqn)
    placements = getattr(value, "placements", ())
    if not any(type(placement).__name__ == "_StridedShard" for placement in placements):
        return
    assert value is not None
    mesh, local = value.device_mesh, value.to_local()
    if type(local) is not torch.Tensor:  # it describes itself
        return
    box = box_of(fqn, value.shape, mesh.shape, mesh.get_coordinate(), placements)
    sizes = tuple(end - begin for begin, end in box)
    begins = tuple(begin for begin, _ in box)
    if sizes != tuple(local.shape) or (local.numel() and begins != tuple(offset or ())):
        raise ValueError(
            f"tensor {fqn!r:.200}: the shard of shape {list(local.shape)} by {placements} is not the box at "
            f"{list(offset or ())} that torch's planner takes it for; redistribute it to Shard first"
        )
