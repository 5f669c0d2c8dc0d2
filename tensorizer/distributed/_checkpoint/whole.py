"""Puts the tensors of a checkpoint together from their boxes, for functions that work on files of whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tensorizer._save.records import Record
from tensorizer._system.devices import empty
from tensorizer.distributed._boxes import box_at, check_cover, slices_of
from tensorizer.distributed._checkpoint.boxes import CheckpointFiles, Saved, WantedBox, saved_parts
from tensorizer.distributed._checkpoint.folder import Folder
from tensorizer.distributed._checkpoint.json_values import encoded
from tensorizer.distributed._checkpoint.marker import JSON, Marker, Stored


class Boxes(NamedTuple):
    """The source of a record: a saved tensor."""

    name: str
    dtype: torch.dtype
    boxes: list[tuple[tuple[int, ...], Stored]]  # the offsets and the places of the boxes


def whole_tensors(folder: Folder, markers: Sequence[Marker]) -> list[Record]:
    """The tensors by name, each with its :class:`Boxes`.

    If ranks saved without collectives, the boxes of a tensor are in several markers.

    Raises:
        FormatError: The boxes of a tensor overlap or leave a hole.
    """
    found: dict[str, Record] = {}
    taken: dict[str, set[torch.Size]] = {}  # the offsets of the boxes so far
    for marker in markers:
        for name, item in marker.metadata.state_dict_metadata.items():
            if not isinstance(item, TensorStorageMetadata) or is_of_parts(marker, name, item):
                continue
            dtype = item.properties.dtype
            whole = found.setdefault(name, Record((name,), dtype, tuple(item.size), source=Boxes(name, dtype, [])))
            there = taken.setdefault(name, set())
            new = [c.offsets for c in item.chunks if c.sizes.numel() and c.offsets not in there]
            whole.source.boxes.extend((tuple(at), marker.stored[MetadataIndex(name, at)]) for at in new)
            there.update(new)
    for name, whole in found.items():
        check_cover(name, whole.shape, [box_at(at, stored.shape) for at, stored in whole.source.boxes], folder.where)
    return list(found.values())


def is_of_parts(marker: Marker, name: str, item: TensorStorageMetadata) -> bool:
    """Whether a tensor is made of others, which were saved in its place."""
    boxes = [chunk.offsets for chunk in item.chunks if chunk.sizes.numel()]
    return bool(boxes) and marker.stored[MetadataIndex(name, boxes[0])].parts is not None


def inner_tensors(markers: Sequence[Marker]) -> list[Record]:
    """The inner tensors that other tensors are made of, such as ``weight.qdata`` of ``weight``, one for each box, as
    :func:`whole_tensors` returns them."""
    found: dict[str, Record] = {}
    for marker in markers:
        for name, item in marker.metadata.state_dict_metadata.items():
            if not isinstance(item, TensorStorageMetadata) or not is_of_parts(marker, name, item):
                continue
            for chunk in item.chunks:
                stored = marker.stored.get(MetadataIndex(name, chunk.offsets)) if chunk.sizes.numel() else None
                if stored is None or stored.parts is None:
                    continue
                at = "" if tuple(chunk.sizes) == tuple(item.size) else f"@{','.join(map(str, chunk.offsets))}"
                for saved in saved_parts(name, stored.parts):
                    shape = saved.stored.shape
                    source = Boxes(saved.name, saved.dtype, [((0,) * len(shape), saved.stored)])
                    found[saved.name + at] = Record((saved.name + at,), saved.dtype, shape, source=source)
    return list(found.values())


def read_whole(files: CheckpointFiles, chosen: Sequence[Record]) -> list[torch.Tensor]:
    """Reads tensors that :func:`whole_tensors` has found, with the saved dtype."""
    wholes = [empty(record.shape, dtype=record.source.dtype, device="cpu") for record in chosen]
    files.read(want for record, whole in zip(chosen, wholes) for want in _boxes(record.source, whole))
    return wholes


def _boxes(source: Boxes, whole: torch.Tensor) -> Iterator[WantedBox]:
    """The boxes of a tensor, each with its target in the whole tensor."""
    for offsets, stored in source.boxes:
        part = slices_of(box_at(offsets, stored.shape))
        all_of_it = tuple(slice(0, n) for n in stored.shape)
        yield WantedBox(Saved(source.name, stored, source.dtype), all_of_it, whole[part])


def values_of(markers: Sequence[Marker], files: CheckpointFiles, prefix: str) -> tuple[dict[str, Any], list[str]]:
    """The simple values whose names begin with the prefix, and the names of leaves that no file of tensors can hold."""
    values: dict[str, Any] = {}
    left_out = []
    for marker in markers:
        for name, item in marker.metadata.state_dict_metadata.items():
            short = without_prefix(prefix, name)
            if short is None:
                continue
            if isinstance(item, TensorStorageMetadata):
                if is_of_parts(marker, name, item):
                    left_out.append(name)
                continue
            stored = marker.stored[MetadataIndex(name)]
            if stored.kind != JSON:
                left_out.append(name)
                continue
            values[short] = encoded(files.read_value(name, stored))
    return values, left_out


def without_prefix(prefix: str, name: str) -> Optional[str]:
    """A name without the prefix; ``None`` if it does not begin with the prefix, or is equal to it."""
    return name[len(prefix) :] if name.startswith(prefix) and name != prefix else None
