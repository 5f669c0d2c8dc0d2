"""Which part of a tensor a rank holds: placements on a mesh as one box."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tensorizer.errors import FormatError

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
    """The box of these sizes that begins there."""
    return tuple((begin, begin + n) for begin, n in zip(begins, sizes))


def slices_of(box: Box) -> tuple[slice, ...]:
    """The box as an index."""
    return tuple(slice(begin, end) for begin, end in box)


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box], where: str) -> None:
    """Refuses `boxes` with elements that do not cover a tensor exactly once: what nobody wrote would be loaded, or
    written twice.

    Raises:
        FormatError: A box outside of the tensor, two that overlap, or a hole.
    """
    tensor = f"{where}: tensor {name!r}"
    for box in boxes:
        if len(box) != len(shape) or any(not 0 <= begin <= end <= n for (begin, end), n in zip(box, shape)):
            raise FormatError(f"{tensor}: expected boxes within {list(shape)}, got {_text(box)}")
    _check_apart(tensor, boxes)
    found = sum(math.prod(end - begin for begin, end in box) for box in boxes)
    if found != math.prod(shape):  # they lie apart and inside, so something is left
        raise FormatError(
            f"{tensor} of shape {list(shape)}: its boxes leave a hole: expected {math.prod(shape)} elements, "
            f"got {found} in {', '.join(map(_text, boxes[:4]))}{' …' if len(boxes) > 4 else ''}"
        )


def _check_apart(tensor: str, boxes: Sequence[Box]) -> None:
    if len(boxes) < 2 or not boxes[0]:
        if len(boxes) > 1:
            raise FormatError(f"{tensor}: expected one box of a tensor without dimensions, got {len(boxes)}")
        return
    # Along the dimension that is cut most, only boxes that are open at the same place can overlap.
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
    """Sees that a strided shard begins, and is as large, as the box that a plan made of it.

    Planners describe every shard by its first row and its size. FSDP over tensor parallelism has strided shards that
    are such boxes; others are rows with gaps between them, which would be saved or filled as the rows behind the first.

    Raises:
        ValueError: The shard is not that box.
    """
    value = (getattr(planner, "state_dict", None) or {}).get(fqn)
    placements = getattr(value, "placements", ())
    if not any(type(placement).__name__ == "_StridedShard" for placement in placements):
        return
    assert value is not None
    mesh, local = value.device_mesh, value.to_local()
    if type(local) is not torch.Tensor:  # one that describes itself
        return
    box = box_of(fqn, value.shape, mesh.shape, mesh.get_coordinate(), placements)
    sizes = tuple(end - begin for begin, end in box)
    begins = tuple(begin for begin, _ in box)
    if sizes != tuple(local.shape) or (local.numel() and begins != tuple(offset or ())):
        raise ValueError(
            f"tensor {fqn!r:.200}: the shard of shape {list(local.shape)} by {placements} is not the box at "
            f"{list(offset or ())} that torch's planner takes it for; redistribute it to Shard first"
        )
