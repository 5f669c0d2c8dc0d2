"""Where a command's words go: results to standard output, all else to standard error; tables, escapes, JSON."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from tensorizer._system.config import env_text

__all__ = ["Output", "escaped", "table"]

SCHEMA = 1

_COLOURS = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "dim": "2"}
_GAP = "  "
_SHORTEST_NAME = 16
_SHORTEST_WORD = 3
_LAST_WORDS = 3  # two, and what separates them
_SEPARATOR = re.compile(r"([./](?![^{]*}))")  # not within {0...31}
_NUMBERS = re.compile(r"\A[0-9{]| x[0-9]+\Z")


def escaped(text: str) -> str:
    """The text with control characters, terminal codes and marks of direction written out, as they cannot act then."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode("ascii")
        for letter in text
    )


class Output:
    """How one run of a command prints, as its common options say."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.json: bool = arguments.json
        self.quiet: bool = arguments.quiet
        self.verbose: bool = arguments.verbose
        self._colour: str = arguments.color
        self._progress: bool | None = arguments.progress

    def width(self) -> int | None:
        """Columns of the terminal; ``None`` where the output is none: nothing is cut there."""
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    def coloured(self, text: str, colour: str) -> str:
        """The text in a colour, where colours are wanted: on a terminal, unless the environment objects."""
        if self._colour == "never" or (self._colour == "auto" and not _wants_colour(sys.stdout)):
            return text
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"

    def line(self, text: str = "") -> None:
        """One line of the result."""
        print(text)

    def document(self, content: dict[str, Any]) -> None:
        """The result as one JSON document."""
        print(_json({"schema": SCHEMA, **content}))

    def note(self, text: str) -> None:
        """What is worth knowing beside the result."""
        if not self.quiet:
            print(text, file=sys.stderr)

    def detail(self, text: str) -> None:
        """What only ``-v`` shows."""
        if self.verbose:
            print(text, file=sys.stderr)

    def error(self, text: str) -> None:
        print(f"tensorizer: {text}", file=sys.stderr)

    def progress(self) -> bool | Any:
        """What to pass as ``progress=``: a bar on a terminal, for work that lasts."""
        if self._progress is None:
            wanted = sys.stderr.isatty() and not self.quiet and env_text("TERM") != "dumb"
        else:
            wanted = self._progress
        if not wanted:
            return False
        from tensorizer.cli.bar import Bar

        return Bar(delay=0.0 if self._progress else 1.0)


def _json(content: dict[str, Any]) -> str:
    """The text of a document; what the encoding of the output lacks, and halves of surrogate pairs, as escapes."""
    finite = _finite(content)
    text = json.dumps(finite, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(finite, indent=2, allow_nan=False)
    return text


def _finite(value: Any) -> Any:
    """The value with numbers that JSON lacks as the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and not env_text("NO_COLOR") and env_text("TERM") != "dumb"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int], width: int | None) -> list[str]:
    """Lines of a table. The first column is cut where the table is wider than `width` columns.

    Args:
        header: Names of the columns.
        rows: Texts, as many in each as in the header; escaped already.
        right: Columns whose texts end at the same place.
        width: Columns of the terminal, ``None`` for no limit.
    """
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    if width is not None:
        rest = sum(widths[1:]) + len(_GAP) * (len(header) - 1)
        widths[0] = max(min(widths[0], width - rest), _SHORTEST_NAME)
    result = []
    for line in lines:
        cells = [_cut(line[0], widths[0]), *line[1:]]
        parts = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(cells, widths))]
        result.append(_GAP.join(parts).rstrip())
    return result


def _cut(text: str, width: int) -> str:
    """The text in `width` columns: its longest words shortened, and where that does not do, without its middle.

    Numbers and the ends of a name are what tells tensors apart.
    """
    if len(text) <= width:
        return text
    parts = _SEPARATOR.split(text)  # words at even positions
    excess = len(text) - width
    for among in (parts[:-_LAST_WORDS:2], parts[::2]):  # the last words say what a tensor is
        lengths = {2 * i: len(word) for i, word in enumerate(among) if not _NUMBERS.search(word)}
        while excess > 0 and lengths:
            longest = max(lengths, key=lambda i: lengths[i])
            if lengths[longest] <= _SHORTEST_WORD:
                break
            lengths[longest] -= 1
            parts[longest] = f"{parts[longest].rstrip('…')[: lengths[longest] - 1]}…"
            excess -= 1
    short = "".join(parts)
    if len(short) <= width:
        return short
    tail = (width - 1) * 2 // 3
    return f"{short[: width - 1 - tail]}…{short[len(short) - tail :]}"
