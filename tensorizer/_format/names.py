"""Names of tensors: plain text on a flat top level, else the path through nested containers."""

from __future__ import annotations

from typing import Union

__all__ = ["Key", "Name", "Path", "display", "path_of"]

#: One layer of a path: a mapping's key, or a position in a list.
Key = Union[str, int]
Path = tuple[Key, ...]
#: What users see: ``str`` for a tensor stored under a single text key, else the whole path.
Name = Union[str, Path]


def path_of(name: Name) -> Path:
    """The path that a name stands for."""
    return (name,) if isinstance(name, str) else name


def display(path: Path) -> str:
    """A path for messages, cut to 200 characters."""
    return "the top level" if not path else "/".join(map(str, path))[:200]
