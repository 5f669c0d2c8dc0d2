#!/usr/bin/env python3
"""Draws one case of the benchmark's JSON as SVG: a bar per contender, for light and for dark pages.

    chart.py RESULTS.json CASE OUTPUT    writes OUTPUT-light.svg, OUTPUT-dark.svg, and the case alone as OUTPUT.json

All three are part of the repository, so that the README and the site need nothing to show the pictures, and a test can
compare them with the figures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH = 640
ROW = 34
LABEL = 205  # pixels left of the bars
TOP = 44
FIGURE = 42  # pixels of "0.306"
THEMES = {
    "light": {
        "text": "#1f2328",
        "muted": "#59636e",
        "ours": "#1769aa",
        "other": "#aab6c0",
        "limit": "#c2410c",
        "inside": "#ffffff",
    },
    "dark": {
        "text": "#e6edf3",
        "muted": "#9198a1",
        "ours": "#58a6ff",
        "other": "#57606a",
        "limit": "#fb923c",
        "inside": "#0d1117",
    },
}


def figures(case: dict[str, Any]) -> list[tuple[str, float, str]]:
    """(label, value, role) of every contender that has a figure, ours first, then from fast to slow."""
    found = [(r["label"], float(r["shown"]), r["role"]) for r in case["results"] if r["shown"] is not None]
    bars = [row for row in found if row[2] != "limit"]
    return sorted(bars, key=lambda row: (row[2] != "ours", -row[1]))


def limit_of(case: dict[str, Any]) -> tuple[str, float] | None:
    """What the limit is of, and its value."""
    return next(((r["label"], float(r["shown"])) for r in case["results"] if r["role"] == "limit" and r["shown"]), None)


def draw(case: dict[str, Any], theme: str) -> str:
    """The picture as text."""
    colours, rows, limit = THEMES[theme], figures(case), limit_of(case)
    longest = max([value for _, value, _ in rows] + ([limit[1]] if limit else []))
    scale = (WIDTH - LABEL - 60) / longest
    height = TOP + ROW * len(rows) + 28
    line = round(limit[1] * scale, 1) if limit else 0.0
    title = f"{case['title']}, {case['unit']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="system-ui, sans-serif" font-size="14">',
        f"<title>{escape(title)}</title>",
        f'<text x="0" y="20" font-weight="600" fill="{colours["text"]}">{escape(title)}</text>',
    ]
    for number, (label, value, role) in enumerate(rows):
        y = TOP + ROW * number
        length = round(value * scale, 1)
        colour = colours["ours" if role == "ours" else "other"]
        parts += [
            f'<text x="{LABEL - 10}" y="{y + 17}" text-anchor="end" fill="{colours["text"]}">{escape(label)}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{length}" height="24" rx="3" fill="{colour}"/>',
            _beside(length, y, f"{value:.3g}", line, colours["text"], colours["inside" if role == "ours" else "text"]),
        ]
    if limit:
        x = LABEL + line
        bottom = TOP + ROW * len(rows)
        parts += [
            f'<path d="M{x} {TOP - 6}V{bottom}" stroke="{colours["limit"]}" stroke-width="2" stroke-dasharray="5 4"/>',
            f'<text x="{x}" y="{bottom + 18}" text-anchor="end" fill="{colours["muted"]}">'
            f"{escape(limit[0].replace(':', ' of'))}: {limit[1]:.3g}</text>",
        ]
    return "\n".join([*parts, "</svg>", ""])


def _beside(length: float, y: int, text: str, line: float, colour: str, inside: str) -> str:
    """The figure behind its bar, or in it where the line of the limit would go through it."""
    if length < line < length + 12 + FIGURE:
        return f'<text x="{LABEL + length - 6}" y="{y + 17}" text-anchor="end" fill="{inside}">{text}</text>'
    return f'<text x="{LABEL + length + 6}" y="{y + 17}" fill="{colour}">{text}</text>'


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    results, name, output = sys.argv[1:]
    facts = json.loads(Path(results).read_text())
    case = next((case for case in facts["cases"] if case["name"] == name), None)
    if case is None:
        sys.exit(f"{results} has no case {name}: expected one of {', '.join(case['name'] for case in facts['cases'])}")
    Path(f"{output}.json").write_text(json.dumps({**facts, "cases": [case]}, indent=1) + "\n")
    for theme in THEMES:
        Path(f"{output}-{theme}.svg").write_text(draw(case, theme))


if __name__ == "__main__":
    main()
