"""A JSON file of the runner as Markdown tables: ``python -m benchmarks.markdown benchmarks/out/bench-….json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def figure(value: float) -> str:
    """Three digits that matter, whole numbers above a hundred."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rows(case: dict[str, Any], names: list[str]) -> list[str]:
    """One case as rows: this project beside the others, then this project set in other ways."""
    by_name = {result["contender"]: result for result in case["results"]}
    variants = [result for result in case["results"] if result["role"] == "variant" and result["shown"] is not None]
    return [
        row(case, case["title"], by_name, names),
        *(row(case, f"{case['title']} ({v['label']})", {**by_name, "ours": v}, names) for v in variants),
    ]


def row(case: dict[str, Any], title: str, by_name: dict[str, Any], names: list[str]) -> str:
    """One row: the figures by contender, the best of them in bold, the limit, our own in relation to others."""
    shown = {name: by_name[name]["shown"] for name in names if name in by_name and by_name[name]["shown"] is not None}
    best = (max if case["unit"] == "GB/s" else min)(shown.values(), default=None)
    cells = []
    for name in names:
        cell = figure(shown[name]) if name in shown else ""
        cells.append(f"**{cell}**" if cell and shown[name] == best else cell)
    limit = by_name.get(case["limit"])
    cells.append(figure(limit["shown"]) if limit and limit["shown"] is not None else "")
    ours = by_name.get("ours", {})
    reference, share = ours.get("versus_reference"), ours.get("of_limit")
    cells.append(f"{reference:.1f} x" if reference else "")
    cells.append(f"{share:.0%}" if share else "")
    return f"| {title}, {case['unit']} | " + " | ".join(cells) + " |"


def family_table(cases: list[dict[str, Any]]) -> list[str]:
    """Cases that are one chart: a row per contender, a column per point."""
    labels = {result["contender"]: result["label"] for case in cases for result in case["results"]}
    lines = [f"| {cases[0]['title'].partition(':')[0]}, {cases[0]['unit']} | "]
    lines[0] += " | ".join(str(case["at"]) for case in cases) + " |"
    lines.append("|---" * (len(cases) + 1) + "|")
    for name, label in labels.items():
        found = [next((r["shown"] for r in case["results"] if r["contender"] == name), None) for case in cases]
        lines.append(f"| {label} | " + " | ".join("" if f is None else figure(f) for f in found) + " |")
    return lines


def document(facts: dict[str, Any]) -> str:
    """The whole file: what it was measured on, the table, the goals."""
    alone = [case for case in facts["cases"] if not case["family"]]
    labels = {
        result["contender"]: result["label"]
        for case in alone
        for result in case["results"]
        if result["role"] not in ("limit", "variant")
    }
    names = list(labels)
    machine = facts["machine"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"{facts['size'] / 1e9:g} GB, medians of {facts['runs']} runs; {facts['method']}.",
        "",
        "| case | " + " | ".join([*labels.values(), "limit", "ours / reference", "ours / limit"]) + " |",
        "|---" * (len(names) + 4) + "|",
        *(line for case in alone for line in rows(case, names)),
        "",
        "| case | goal | |",
        "|---|---|---|",
    ]
    for case in facts["cases"]:
        lines += [f"| {case['title']} | {g['text']} | {'met' if g['met'] else 'missed'} |" for g in case["goals"]]
    for family in dict.fromkeys(case["family"] for case in facts["cases"] if case["family"]):
        lines += ["", *family_table([case for case in facts["cases"] if case["family"] == family])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(json.loads(Path(sys.argv[1]).read_text())), end="")
