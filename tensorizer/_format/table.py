"""The table of tensors that Jupyter shows. It is made from the index; no tensor is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple, Union

from tensorizer._format.names import Name, layer_of, natural_key, path_of
from tensorizer._system.sizes import counted, size_text

# A notebook stores the output of its cells: tens of thousands of rows would make it unusable.
_MAX_ROWS = 500
_MAX_OPEN_ROWS = 20  # a longer table is folded until the user opens it

# Sorts the rows by the clicked column, and in reverse order on the next click, if the page allows scripts.
_SORT = (
    "const t=this.closest('table'),i=this.cellIndex,d=this.dataset.d=this.dataset.d==1?-1:1;"
    "[...t.tBodies[0].rows].sort((a,b)=>d*a.cells[i].dataset.v.localeCompare("
    "b.cells[i].dataset.v,undefined,{numeric:true})).forEach(r=>t.tBodies[0].append(r))"
)


class Row(NamedTuple):
    """The cells of one tensor's row."""

    name: Name
    kind: str
    dtype: str
    shape: Sequence[int]
    nbytes: int
    digests: str = ""  # known for tensors that were read


_Cell = tuple[str, Union[str, int]]  # the text of a cell, and its sort key


def tensors_table(title: str, rows: Sequence[Row]) -> str:
    """HTML for tensors: totals by dtype and by layer, and a table with a row for each, in the natural order of names.

    Columns with the same text in all rows are left out. A long table is folded.

    Args:
        title: Text above the table.
        rows: The tensors. The table has rows for the first 500 and counts the others.
    """
    ordered = sorted(rows, key=lambda row: natural_key(row.name))
    columns: dict[str, Callable[[Row], _Cell]] = {"name": _name_cell}
    facts: dict[str, Callable[[Row], str]] = {
        "kind": lambda row: row.kind,
        "dtype": lambda row: row.dtype,
        "hashes": lambda row: row.digests,
    }
    told = {name: lambda row, fact=fact: (fact(row) or "–", fact(row)) for name, fact in facts.items()}
    varies = {name: len({fact(row) for row in rows}) > 1 for name, fact in facts.items()}
    columns.update({name: told[name] for name in ("kind", "dtype") if varies[name]})
    columns["shape"] = lambda row: (str(list(row.shape)), str(list(row.shape)))
    columns["size"] = lambda row: (size_text(row.nbytes), row.nbytes)
    if varies["hashes"]:
        columns["hashes"] = told["hashes"]
    left_out = len(ordered) - _MAX_ROWS
    more = f"<p>… and {left_out:,} more tensors; entries() lists all</p>" if left_out > 0 else ""
    body = _table(list(columns), [[cell(row) for cell in columns.values()] for row in ordered[:_MAX_ROWS]])
    dtypes = _totals("dtype", rows, lambda row: row.dtype)
    layers = _totals("layer", ordered, lambda row: layer_of(row.name))
    tensors = _folded(counted(len(rows), "tensor"), body + more, len(rows) <= _MAX_OPEN_ROWS)
    return f"<div><p><code>{escape(title)}</code></p>{dtypes}{layers}{tensors}</div>"


def _name_cell(row: Row) -> _Cell:
    name = " / ".join(map(str, path_of(row.name)))
    return name, name


def _totals(what: str, rows: Sequence[Row], key: Callable[[Row], str]) -> str:
    """A folded table of sums over the rows that have the same key."""
    groups: dict[str, list[int]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row.nbytes)
    if len(groups) < 2 and what != "dtype":
        return ""
    cells: list[list[_Cell]] = [
        [(name, name), (f"{len(sizes):,}", len(sizes)), (size_text(sum(sizes)), sum(sizes))]
        for name, sizes in list(groups.items())[:_MAX_ROWS]
    ]
    shown = ", ".join(f"{name} {size}" for (name, _), _, (size, _) in cells[:4])
    summary = f"by {what}: {shown}{', …' if len(cells) > 4 else ''}"
    return _folded(summary, _table([what, "tensors", "size"], cells), False)


def _folded(summary: str, content: str, is_open: bool) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{content}</details>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[_Cell]]) -> str:
    heads = "".join(
        f'<th style="text-align:left;cursor:pointer" onclick="{escape(_SORT)}">{column} ⇅</th>' for column in columns
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: _Cell) -> str:
    shown, value = cell
    return f'<td style="text-align:left" data-v="{escape(str(value))}">{escape(shown)}</td>'
