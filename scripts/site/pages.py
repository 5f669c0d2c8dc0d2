"""Pages of the site that are files outside of docs/; their links lead to the other pages (mkdocs.yml, hooks)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"contributing.md": ".github/CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = PAGES.get(page.file.src_uri)
    if name is None:
        return markdown
    text = (ROOT / name).read_text(encoding="utf-8").replace("](../", "](").replace("](docs/", "](")
    text = text.replace("](CHANGELOG.md)", "](changelog.md)")
    return re.sub(r"\[([^\]]+)\]\([A-Z]+(?:\.md)?\)", r"\1", text)  # the licence and the like are no pages
