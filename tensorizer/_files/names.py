"""One text per tensor of a file, as state dicts and ``.safetensors`` call it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Optional

from tensorizer._format.entries import TensorType
from tensorizer._format.names import Name
from tensorizer._load.container import Container
from tensorizer.errors import FormatError

__all__ = ["double_name", "flat_name", "flat_names"]


def flat_name(name: Name, type: TensorType) -> str:
    """A name without the dot in front that modules give tensors of their root; the steps of a path joined by dots."""
    text = name if isinstance(name, str) else ".".join(map(str, name))
    of_root = type is not TensorType.STATE_DICT and text.startswith(".") and len(text) > 1
    return text[1:] if of_root else text


def double_name(named: Iterable[tuple[object, Hashable]]) -> Optional[str]:
    """Which names would be one, as text for an error; ``None`` where all differ.

    Args:
        named: Names as they are stored, and what would stand for each.
    """
    seen: dict[Hashable, object] = {}
    for name, text in named:
        if text in seen:
            first, second, both = (ascii(value)[:200] for value in (seen[text], name, text))
            return f"tensors {first} and {second} would both be named {both}"
        seen[text] = name
    return None


def flat_names(container: Container) -> dict[str, int]:
    """The chosen entries of a file by name.

    Raises:
        FormatError: Two tensors would have one name.
    """
    found: dict[str, int] = {}
    for i in container.selection:
        name = container.names[i]
        found[name if isinstance(name, str) and name[:1] != "." else flat_name(name, container.type(i))] = i
    if len(found) < len(container.selection):
        named = [(container.names[i], flat_name(container.names[i], container.type(i))) for i in container.selection]
        raise FormatError(f"{container.source_name}: {double_name(named)}")
    return found
