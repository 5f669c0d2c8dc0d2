"""Docstrings as the API reference shows them: roles become links, comments of fields their documentation.

mkdocstrings reads the sources as text and calls this (mkdocs.yml). ``:func:`open_stream``` links to the function if the
reference has it, else it is plain code; ``docs/format.md`` links to that page; ``#:`` above a field of a class is
its documentation.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]
ROLE = re.compile(r":(?:class|func|meth|attr|mod|exc|data|obj|const):`(~?)([\w.]+)`")
PAGE = re.compile(r"(?:`{1,2})?\bdocs/([\w-]+)\.md(?:`{1,2})?")


class Roles(griffe.Extension):
    """Rewrites every docstring of a package once all of it is known."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self.seen: set[int] = set()
        self.visit(pkg)

    def visit(self, thing: griffe.Object) -> None:
        if id(thing) in self.seen:
            return
        self.seen.add(id(thing))
        if thing.docstring is None and thing.is_attribute and thing.parent and thing.parent.is_class:
            comment = comment_above(thing)
            thing.docstring = griffe.Docstring(comment, parent=thing) if comment else None
        if thing.docstring is not None:
            text = ROLE.sub(lambda match: link(thing, match[2], bool(match[1])), thing.docstring.value)
            thing.docstring.value = PAGE.sub(page, text)
        for member in list(thing.members.values()):
            if not member.is_alias:
                self.visit(member)


def link(thing: griffe.Object, name: str, shorten: bool) -> str:
    """A link from the docstring of ``thing`` to what ``name`` means there; code if the reference has no such place."""
    shown = name.rpartition(".")[2] if shorten else name.removeprefix("tensorizer.")
    try:
        path = thing.resolve(name)
    except griffe.NameResolutionError:
        path = name
    try:
        path = thing.modules_collection[path].canonical_path
    except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
        return f"`{shown}`"
    return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'


def page(match: re.Match[str]) -> str:
    if not (ROOT / "docs" / f"{match[1]}.md").is_file():
        return match[0]
    return f"[{match[1]}](../{match[1]}.md)"


def comment_above(field: griffe.Object) -> str:
    """The ``#:`` comment right above a field."""
    lines: list[str] = []
    source, number = field.lines_collection[field.filepath], (field.lineno or 1) - 2
    while 0 <= number < len(source) and source[number].strip().startswith("#:"):
        lines.insert(0, source[number].strip()[2:].strip())
        number -= 1
    return " ".join(lines)
