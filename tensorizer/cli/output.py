"""What a command says: results to standard output, all else to standard error, and the exit status (docs/cli.md)."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensorizer._system.config import env_text

OK = 0
DIFFERS = 1  # the answer is no: a digest that does not match, files that differ
USAGE = 2
UNREACHABLE = 3  # not found, no access, network, disk full
INVALID = 4  # not a valid file
KEY = 5  # missing, wrong or not wanted; authentication failed, a signature too
TARGET = 6  # it exists, or its format cannot hold the content
INTERRUPTED = 130

SCHEMA = 1

_COLOURS = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "dim": "2"}
_GAP = "  "
_SHORTEST_NAME = 16
_SHORTEST_WORD = 3
_LAST_WORDS = 3  # two, and what separates them
_SEPARATOR = re.compile(r"([./](?![^{]*}))")  # not within {0...31}
_NUMBERS = re.compile(r"\A[0-9{]| x[0-9]+\Z")
_BEYOND_ASCII = re.compile(r"[^\n -~]")  # DEL too, which JSON leaves as it is


def escaped(text: str) -> str:
    """The text with control characters, terminal codes and marks of direction written out, as they cannot act then."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode("ascii")
        for letter in text
    )


def option_of(name: str) -> str:
    """The option that argparse stores under a name."""
    return f"--{name.replace('_', '-')}"


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
        wanted = sys.stdout.isatty() and not env_text("NO_COLOR") and env_text("TERM") != "dumb"
        if self._colour == "never" or (self._colour == "auto" and not wanted):
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
        from tensorizer._progress import bars, terminal_bar

        if self._progress is None:
            return False if self.quiet else terminal_bar()
        try:
            return bars(delay=0.0) if self._progress else False
        except ImportError as error:
            raise UsageError("--progress needs the package tqdm: pip install tqdm") from error


def _json(content: dict[str, Any]) -> str:
    """The text of a document; what the encoding of the output lacks, and what :func:`escaped` names, as escapes."""
    finite = _finite(content)
    text = json.dumps(finite, indent=2, ensure_ascii=False, allow_nan=False)
    text = _BEYOND_ASCII.sub(lambda m: m[0] if m[0].isprintable() else json.dumps(m[0])[1:-1], text)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(finite, indent=2, allow_nan=False)
    return text


def _finite(value: Any) -> Any:
    """The value with numbers that JSON lacks as the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


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
    numbers = [part for part in parts[:-1] if _NUMBERS.search(part)]
    lead = "".join(f"…{number}" for number in numbers)
    rest = width - len(lead) - 1
    if numbers and rest >= _SHORTEST_WORD:
        end = text.rindex(numbers[-1]) + len(numbers[-1])
        return f"{lead}…{text[max(end + 1, len(text) - rest) :]}"
    tail = (width - 1) * 2 // 3
    return f"{short[: width - 1 - tail]}…{short[len(short) - tail :]}"


# --- the exit status -------------------------------------------------------------------------------------------------


class UsageError(Exception):
    """Arguments that contradict each other, found after they were parsed."""


def status_of(error: BaseException) -> int:
    """The exit status for an error that ended a command; ``-1`` for one that nobody expected."""
    from tensorizer import errors

    statuses: tuple[tuple[tuple[type[BaseException], ...], int], ...] = (  # the first that fits
        ((KeyboardInterrupt,), INTERRUPTED),
        ((UsageError,), USAGE),
        ((errors.CryptographyError,), KEY),
        ((errors.HashMismatchError,), DIFFERS),
        ((errors.UnsupportedContentError, errors.FieldRangeError), TARGET),
        ((errors.FormatError,), INVALID),
        ((FileExistsError,), TARGET),
        ((OSError, ImportError), UNREACHABLE),
        ((ValueError, TypeError), USAGE),
    )
    if type(error).__module__.partition(".")[0] in ("botocore", "configparser"):  # which only who opens s3:// imports
        return UNREACHABLE  # missing keys, a missing profile, a malformed configuration file
    return next((status for kinds, status in statuses if isinstance(error, kinds)), -1)
