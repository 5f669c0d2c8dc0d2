"""Puts files outside of docs/ into pages of the site: an extension of Markdown (mkdocs.yml).

A file takes the place of the line ``<!-- scripts/site/pages.py puts CHANGELOG.md here. -->``; its links lead to the
other pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

ROOT = Path(__file__).resolve().parents[2]
PLACE = re.compile(r"<!-- scripts/site/pages\.py puts (\S+) here\. -->")
BEFORE_ALL_OTHERS = 100


def text_of(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8").replace("](../", "](").replace("](docs/", "](")
    text = text.replace("](CHANGELOG.md)", "](changelog.md)")
    return re.sub(r"\[([^\]]+)\]\([A-Z]+(?:\.md)?\)", r"\1", text)  # the licence and the like are no pages


class Pages(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        found = [PLACE.fullmatch(line) for line in lines]
        return [new for line, at in zip(lines, found) for new in (text_of(at[1]).splitlines() if at else [line])]


class PagesExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(Pages(md), "pages", BEFORE_ALL_OTHERS)


def makeExtension(**options: Any) -> PagesExtension:
    return PagesExtension(**options)
