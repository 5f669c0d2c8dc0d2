#!/usr/bin/env python3
"""Writes docs/what-ran-where.md from the records in ran.json.

    ran.py                                                writes the page
    ran.py COLUMN WHAT SYSTEM PYTHON TORCH COMMAND RESULT  adds a record, then writes the page

A record is one command that somebody ran and saw end: nothing else may be on the page. COLUMN is a column of the
matrix, or empty. SYSTEM, PYTHON and TORCH are one version, or as many as there were combinations, with commas.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "what-ran-where.md"
RECORDS = Path(__file__).with_name("ran.json")
FIELDS = ("column", "what", "system", "python", "torch", "command", "result")
COLUMNS = ("wheel, smoke run", "wheel, suite", "checkout, suite", "builds")
PLACE = ("python", "system", "torch")  # what a row of the matrix is of
HEAD = """<!-- scripts/site/ran.py writes this page from ran.json. -->
# Tested versions

Each cell says whether a run passed, with the number of the run in the [list below](#the-runs). *Partly* means that some
tests failed or could not run; the list says which. Nobody tried what has an empty cell or no row.

The smoke run is `scripts/packaging/smoke.py`: files, checksums, damage, encryption, HTTP, and the commands `inspect`,
`verify`, `encrypt` and `decrypt`. The suite is what `make test` runs; with a wheel it runs in a folder without the
package, and without the tests of the repository itself.

All runs are on x86-64 Linux and the CPU unless the list says otherwise. Nothing has run on a GPU, on macOS, on Windows,
or natively on aarch64.

"""
RUNS = """
## The runs

"""
LIMITS = """
## Limits of older releases of torch

- torch 2.1 and 2.2 have no `uint16`, `uint32` and `uint64`.
- In `tensorizer_loading`, `weights_only=True` accepts only the dtypes that this torch itself accepts: not bfloat16,
  bool, uint8 and float8 with torch 2.1, not uint16 with torch 2.5.
- `torch.save` of torch 2.5.0 fails on Python 3.13 (`'persistent_id' is read-only`), with or without this package.
"""


def places(record: dict[str, str]) -> list[tuple[str, ...]]:
    """The combinations of PLACE that a record is about: lists go together item by item, a single item with all."""
    lists = [record[field].split(", ") for field in PLACE]
    count = max(map(len, lists))
    if any(len(items) not in (1, count) for items in lists):
        raise ValueError(f"{record['what']}: expected one or {count} of each of {', '.join(PLACE)}, got {lists}")
    return list(zip(*(items * count if len(items) == 1 else items for items in lists)))


def in_order(place: tuple[str, ...]) -> list[Any]:
    """A key that sorts versions by their numbers."""
    return [[int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item)] for item in place]


def cell(records: list[dict[str, str]], column: str, place: tuple[str, ...]) -> str:
    found = []
    for number, record in enumerate(records, 1):
        if record["column"] == column and place in places(record):
            passed = record["result"].startswith("passed") and "failed" not in record["result"]
            found.append(f"{'passed' if passed else '*partly*'} ({number})")
    return ", ".join(found)


def table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [list(head), ["---"] * len(head), *rows])


def page(records: list[dict[str, str]]) -> str:
    unknown = {record["column"] for record in records} - {*COLUMNS, ""}
    if unknown:
        raise ValueError(f"expected a column of {', '.join(COLUMNS)}, got {', '.join(unknown)}")
    of_matrix = {place for record in records if record["column"] for place in places(record)}
    matrix = [
        [*place, *(cell(records, column, place) for column in COLUMNS)] for place in sorted(of_matrix, key=in_order)
    ]
    fields = FIELDS[1:]
    runs = [[str(number), *(record[field] for field in fields)] for number, record in enumerate(records, 1)]
    return HEAD + table((*PLACE, *COLUMNS), matrix) + RUNS + table(("run", *fields), runs) + LIMITS


def main() -> None:
    records = json.loads(RECORDS.read_text())
    if len(sys.argv) == 1 + len(FIELDS):
        records.append(dict(zip(FIELDS, sys.argv[1:])))
    elif len(sys.argv) != 1:
        sys.exit(f"usage: ran.py [{' '.join(field.upper() for field in FIELDS)}]")
    text = page(records)  # first, so that a wrong record is not kept
    RECORDS.write_text(json.dumps(records, indent=2, ensure_ascii=False) + "\n")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
