#!/usr/bin/env python3
"""Writes docs/what-ran-where.md from the records in ran.json.

    ran.py                                         writes the page
    ran.py WHAT SYSTEM PYTHON TORCH COMMAND RESULT  adds a record, then writes the page

A record is one run that somebody saw: the page says nothing that is not one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "what-ran-where.md"
RECORDS = Path(__file__).with_name("ran.json")
FIELDS = ("what", "system", "python", "torch", "command", "result")
HEAD = """<!-- scripts/site/ran.py writes this page from ran.json. -->
# What ran where

Each row is one run, on x86-64 and the CPU unless the row says otherwise. Nobody has tried combinations that are not
listed. Nothing has run on a GPU, on macOS, on Windows, or natively on aarch64. *Earlier* wheels have the same
libraries, of the same versions, from Debian's source packages.

"""
LIMITS = """
## Limits of older releases of torch

- torch 2.1 and 2.2 have no `uint16`, `uint32` and `uint64`.
- In `tensorizer_loading`, `weights_only=True` accepts only the dtypes that this torch itself accepts: not bfloat16,
  bool, uint8 and float8 with torch 2.1, not uint16 with torch 2.5.
- `torch.save` of torch 2.5.0 fails on Python 3.13 (`'persistent_id' is read-only`), with or without this package.
"""


def page(records: list[dict[str, str]]) -> str:
    rows = [" | ".join(FIELDS), "|".join("---" for _ in FIELDS)]
    rows += [" | ".join(record[field] for field in FIELDS) for record in records]
    return HEAD + "".join(f"| {row} |\n" for row in rows) + LIMITS


def main() -> None:
    records = json.loads(RECORDS.read_text())
    if len(sys.argv) == 1 + len(FIELDS):
        records.append(dict(zip(FIELDS, sys.argv[1:])))
        RECORDS.write_text(json.dumps(records, indent=2, ensure_ascii=False) + "\n")
    elif len(sys.argv) != 1:
        sys.exit(f"usage: ran.py [{' '.join(field.upper() for field in FIELDS)}]")
    PAGE.write_text(page(records))


if __name__ == "__main__":
    main()
