"""Names of tensors: a plain text at the top level, or a path through nested containers."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Optional, Union

# How many names a message about many tensors lists.
_SHOWN_NAMES = 5

#: One step of a path: a key of a mapping, or a position in a list.
Key = Union[str, int]
Path = tuple[Key, ...]
#: A name as users see it: ``str`` for a tensor stored under a single text key, else the whole path.
Name = Union[str, Path]


def path_of(name: Name) -> Path:
    """The path that a name stands for."""
    return (name,) if isinstance(name, str) else name


def name_of(path: Path) -> Name:
    """The name that users see for a path."""
    return path[0] if len(path) == 1 and isinstance(path[0], str) else path


def display(path: Path) -> str:
    """A path for messages, cut to 200 characters."""
    return "the top level" if not path else "/".join(map(str, path))[:200]


def name_text(name: Name) -> str:
    """A name for people: the steps of a path joined by slashes."""
    return name if isinstance(name, str) else "/".join(map(str, name))


def natural_key(name: Name) -> tuple[tuple[int, int, str], ...]:
    """A sort key that orders names as people count: ``layers.2`` before ``layers.10``."""
    parts = re.split(r"([0-9]+)", name_text(name))
    return tuple((0, int(part), part) if i % 2 else (1, 0, part) for i, part in enumerate(parts))


def layer_of(name: Name) -> str:
    """The part of a model that a tensor belongs to: its name up to the first number, else to the first dot."""
    text = name_text(name).replace("/", ".").lstrip(".")
    found = re.match(r"(?:[^.]+\.)*?[0-9]+(?=\.|\Z)", text)
    return found[0] if found else text.partition(".")[0]


def listed(names: Sequence[Name]) -> str:
    """Lists names for a message; only the first few if there are many."""
    return ", ".join(repr(name) for name in names[:_SHOWN_NAMES]) + (", …" if len(names) > _SHOWN_NAMES else "")


def no_such_name(source: str, name: object, names: Iterable[Name]) -> KeyError:
    """The error for a name that is not in a file; it suggests the most similar name."""
    import difflib  # only errors need it

    near = difflib.get_close_matches(str(name), map(name_text, names), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return KeyError(f"{source}: no tensor {name!r:.200}{hint}")


def double_name(named: Iterable[tuple[object, Hashable]]) -> Optional[str]:
    """Describes, for an error, names that would become the same name; ``None`` if all stay different.

    Args:
        named: Stored names, each with the name that would replace it.
    """
    seen: dict[Hashable, object] = {}
    for name, text in named:
        if text in seen:
            first, second, both = (ascii(value)[:200] for value in (seen[text], name, text))
            return f"tensors {first} and {second} would both be named {both}"
        seen[text] = name
    return None
