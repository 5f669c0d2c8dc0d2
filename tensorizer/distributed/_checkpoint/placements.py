"""Tensors of a state whose placements torch's planners cannot describe."""

from __future__ import annotations

from typing import Any

import torch

from tensorizer.distributed._boxes import box_of

__all__ = ["check_described"]


def check_described(planner: Any, fqn: str, offset: Any) -> None:
    """Sees that a strided shard begins, and is as large, as the box that a plan made of it.

    Planners describe every shard by its first row and its size. FSDP over tensor parallelism has strided shards that
    are such boxes; others are rows with gaps between them, which would be saved or filled as the rows behind the first.

    Args:
        planner: Of the save or load.
        fqn: The tensor.
        offset: Where the plan says that it begins.

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
