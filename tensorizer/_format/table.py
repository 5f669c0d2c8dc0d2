"""The table that Jupyter shows for a deserializer: what the index says, nothing loaded."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Union

from tensorizer._format import dtypes
from tensorizer._format.entries import TensorEntry, TensorType
from tensorizer._format.names import path_of
from tensorizer._system.sizes import convert_bytes

# A notebook keeps what it shows: tens of thousands of rows would make it unusable.
_MAX_ROWS = 500

_COLUMNS = ("name", "kind", "dtype", "shape", "size", "hashes")
_KINDS = {TensorType.PARAM: "parameter", TensorType.BUFFER: "buffer", TensorType.STATE_DICT: "state dict"}

# Sorts the rows by the clicked column, and the other way round on the next click. Works where the page allows scripts.
_SORT = (
    "const t=this.closest('table'),i=this.cellIndex,d=this.dataset.d=this.dataset.d==1?-1:1;"
    "[...t.tBodies[0].rows].sort((a,b)=>d*a.cells[i].dataset.v.localeCompare("
    "b.cells[i].dataset.v,undefined,{numeric:true})).forEach(r=>t.tBodies[0].append(r))"
)


def _cell(shown: str, value: Union[str, int]) -> str:
    return f'<td style="text-align:left" data-v="{escape(str(value))}">{escape(shown)}</td>'


def _row(entry: TensorEntry) -> str:
    name, dtype, kind = " / ".join(map(str, path_of(entry.name))), dtypes.dtype_text(entry.dtype), _KINDS[entry.type]
    shape, nbytes = list(entry.shape), entry.deserialized_length
    hashes = " ".join(f"{stored.type.name}:{stored.hash.hex()[:8]}" for stored in entry.hashes or ())
    cells = [
        _cell(name, name),
        _cell(kind, kind),
        _cell(dtype, dtype),
        _cell(str(shape), str(shape)),
        _cell(convert_bytes(nbytes, decimal=False), nbytes),
        _cell(hashes or "–", hashes),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def entries_table(title: str, entries: Sequence[TensorEntry]) -> str:
    """An HTML table of entries.

    Args:
        title: Text above the table.
        entries: What to show; the first 500 in full, the others as a number. Digests are known of tensors that were
            read; the others show a dash.
    """
    heads = "".join(
        f'<th style="text-align:left;cursor:pointer" onclick="{escape(_SORT)}">{column} ⇅</th>' for column in _COLUMNS
    )
    rows = "".join(map(_row, entries[:_MAX_ROWS]))
    left_out = len(entries) - _MAX_ROWS
    more = f"<p>… and {left_out:,} more tensors; entries() lists all</p>" if left_out > 0 else ""
    return (
        f"<div><p><code>{escape(title)}</code></p>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{more}</div>"
    )
