"""A JSON file of the runner as Markdown tables: ``python -m benchmarks.markdown benchmarks/out/bench-….json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def figure(value: float) -> str:
    """Three digits that matter, whole numbers above a hundred."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def row(case: dict[str, Any], names: list[str]) -> str:
    """One case as a row: its figures by contender, the limit, the goals."""
    by_name = {result["contender"]: result for result in case["results"]}
    cells = []
    for name in names:
        result = by_name.get(name)
        shown = result["shown"] if result else None
        cell = "" if shown is None else figure(shown)
        cells.append(f"**{cell}**" if name == "ours" and cell else cell)
    limit = by_name.get(case["limit"])
    cells.append(figure(limit["shown"]) if limit and limit["shown"] is not None else "")
    ours = by_name.get("ours", {})
    reference, share = ours.get("versus_reference"), ours.get("of_limit")
    cells.append(f"{reference:.1f} x" if reference else "")
    cells.append(f"{share:.0%}" if share else "")
    return f"| {case['title']}, {case['unit']} | " + " | ".join(cells) + " |"


def document(facts: dict[str, Any]) -> str:
    """The whole file: what it was measured on, the table, the goals."""
    labels = {
        result["contender"]: result["label"]
        for case in facts["cases"]
        for result in case["results"]
        if result["role"] != "limit"
    }
    names = list(labels)
    machine = facts["machine"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"{facts['size'] / 1e9:g} GB, medians of {facts['runs']} runs; {facts['method']}.",
        "",
        "| case | " + " | ".join([*labels.values(), "limit", "ours / reference", "ours / limit"]) + " |",
        "|---" * (len(names) + 4) + "|",
        *(row(case, names) for case in facts["cases"]),
        "",
        "| case | goal | |",
        "|---|---|---|",
    ]
    for case in facts["cases"]:
        lines += [f"| {case['title']} | {g['text']} | {'met' if g['met'] else 'missed'} |" for g in case["goals"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(json.loads(Path(sys.argv[1]).read_text())), end="")
