"""Tensors of a write call that are one tensor: which stands for which in the file (docs/format.md, "Ties")."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Optional

import torch

from tensorizer._format.names import Path
from tensorizer._save.items import Item

__all__ = ["Tie", "check_metadata", "check_ties", "is_unicode", "place_of", "without_aliases"]

#: Path of the alias, path of its target, whether the alias's data are written too.
Tie = tuple[Path, Path, bool]

_CHOICES = ("twice", "once")


def check_ties(ties: Any) -> bool:
    """Whether aliases are left out.

    Raises:
        ValueError: Not one of the choices.
    """
    if ties not in _CHOICES:
        raise ValueError(f"ties: wanted one of {', '.join(_CHOICES)}, found {ties!r}")
    return bool(ties == "once")


def check_metadata(metadata: Any) -> list[tuple[str, str]]:
    """The pairs to store.

    Raises:
        TypeError: Not a mapping from ``str`` to ``str``.
        ValueError: Text with lone surrogates, which UTF-8 cannot hold.
    """
    if metadata is None:
        return []
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata: wanted a mapping from str to str, found {type(metadata).__name__}")
    for key, value in metadata.items():
        for text in (key, value):
            if not isinstance(text, str):
                raise TypeError(f"metadata: wanted str, found {type(text).__name__} at {key!r:.100}")
            if not is_unicode(text):
                raise ValueError(f"metadata: {ascii(key)[:100]}: text that is no Unicode cannot be stored")
    return list(metadata.items())


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold a text: not halves of surrogate pairs, as names of files have for bytes of no encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def without_aliases(items: list[Item], once: bool) -> tuple[list[Item], list[Item], list[Tie]]:
    """The items to write, those that are left out, and the ties between them.

    Tied are tensors of one kind over the same memory with the same shape, strides and dtype; the first one is the
    target. Other overlaps are no ties: such tensors are stored separately. Further names of one place of a module are
    left out in any case: readers that know no ties have that module under its first name alone.
    """
    first: dict[Hashable, Item] = {}
    written: list[Item] = []
    left_out: list[Item] = []
    ties: list[Tie] = []
    for item in items:
        key, own = _identity(item), ("object", id(item.tensor))
        if key is None and item.is_further:
            key = own
        target = item if key is None else first.setdefault(key, item)
        first.setdefault(own, item)
        is_left_out = target is not item and (once or item.is_further)
        if target is not item:
            ties.append((item.path, target.path, not is_left_out))
        (left_out if is_left_out else written).append(item)
    return written, left_out, ties


def _identity(item: Item) -> Optional[Hashable]:
    place = place_of(item.tensor)
    return None if place is None else (item.type, place)


def place_of(tensor: torch.Tensor) -> Optional[Hashable]:
    """Equal for tensors that are one; ``None`` for those without data, which are never tied."""
    if tensor.is_meta or tensor.numel() == 0:
        return None
    kind: Sequence[Hashable] = (tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
    address = _address(tensor)
    if address == 0:  # a wrapper around other tensors
        return (*kind, id(tensor))
    return (*kind, address, tuple(tensor.shape), tensor.stride())


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
