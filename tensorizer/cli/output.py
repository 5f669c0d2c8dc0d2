"""Prints results to standard output and all else to standard error, and sets the exit status (docs/cli.md)."""

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
DIFFERS = 1  # the answer is no: a digest does not match, or files differ
USAGE = 2
UNREACHABLE = 3  # not found, no access, network, disk full
INVALID = 4  # not a valid file
KEY = 5  # a key is missing, wrong or not wanted; authentication or a signature failed
TARGET = 6  # the target exists, or its format cannot hold the content
INTERRUPTED = 130

SCHEMA = 1

_COLOURS = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "dim": "2"}
_GAP = "  "
_SHORTEST_NAME = 16
_SHORTEST_WORD = 3
_LAST_WORDS = 3  # two numbers, and the text between them
_SEPARATOR = re.compile(r"([./](?![^{]*}))")  # not within {0...31}
_NUMBERS = re.compile(r"\A[0-9{]| x[0-9]+\Z")
_BEYOND_ASCII = re.compile(r"[^\n -~]")  # also DEL, which JSON does not escape


def escaped(text: str) -> str:
    """Escapes control characters, terminal codes and direction marks, so that they have no effect on a terminal."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode("ascii")
        for letter in text
    )


def option_of(name: str) -> str:
    """The option that argparse stores under this name."""
    return f"--{name.replace('_', '-')}"


class Output:
    """Prints for one run of a command, as its common options say."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.json: bool = arguments.json
        self.quiet: bool = arguments.quiet
        self.verbose: bool = arguments.verbose
        self._colour: str = arguments.color
        self._progress: bool | None = arguments.progress

    def width(self) -> int | None:
        """Columns of the terminal; ``None`` if the output is not a terminal: then nothing is cut."""
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    def coloured(self, text: str, colour: str) -> str:
        """The text in a colour, if the output is a terminal and the environment does not forbid colours."""
        wanted = sys.stdout.isatty() and not env_text("NO_COLOR") and env_text("TERM") != "dumb"
        if self._colour == "never" or (self._colour == "auto" and not wanted):
            return text
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"

    def line(self, text: str = "") -> None:
        """Prints one line of the result."""
        print(text)

    def document(self, content: dict[str, Any]) -> None:
        """Prints the result as one JSON document."""
        print(_json({"schema": SCHEMA, **content}))

    def note(self, text: str) -> None:
        """Prints a remark beside the result, to standard error."""
        if not self.quiet:
            print(text, file=sys.stderr)

    def detail(self, text: str) -> None:
        """Prints a detail if ``-v`` was given."""
        if self.verbose:
            print(text, file=sys.stderr)

    def error(self, text: str) -> None:
        print(f"tensorizer: {text}", file=sys.stderr)

    def progress(self) -> bool | Any:
        """The argument for ``progress=``: on a terminal, a bar for work that takes long."""
        from tensorizer._progress import bars, terminal_bar

        if self._progress is None:
            return sys.stderr.isatty() and not self.quiet and terminal_bar()
        try:
            return bars(delay=0.0) if self._progress else False
        except ImportError as error:
            raise UsageError("--progress needs the package tqdm: pip install tqdm") from error


def _json(content: dict[str, Any]) -> str:
    """The JSON text of a document. Characters that the output cannot encode or :func:`escaped` escapes are escaped."""
    finite = _finite(content)
    text = json.dumps(finite, indent=2, ensure_ascii=False, allow_nan=False)
    text = _BEYOND_ASCII.sub(lambda m: m[0] if m[0].isprintable() else json.dumps(m[0])[1:-1], text)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(finite, indent=2, allow_nan=False)
    return text


def _finite(value: Any) -> Any:
    """Replaces numbers that JSON lacks by the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int], width: int | None) -> list[str]:
    """Lines of a table. The texts of the first column are cut if the table is wider than `width` columns.

    Args:
        header: Names of the columns.
        rows: For each row, one escaped text per column.
        right: The columns to align to the right.
        width: Columns of the terminal; ``None`` for no limit.
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
    """Shortens a text to `width` columns: it cuts the longest words, and if that is not enough, the middle of the text.

    Numbers and the ends of names stay, because they tell tensors apart.
    """
    if len(text) <= width:
        return text
    parts = _SEPARATOR.split(text)  # words at even positions
    excess = len(text) - width
    for among in (parts[:-_LAST_WORDS:2], parts[::2]):  # the last words tell what a tensor is
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
    """Arguments contradict each other. argparse itself cannot find that."""


def status_of(error: BaseException) -> int:
    """The exit status for an error that ended a command; ``-1`` for an unexpected error."""
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
    # By name, because only commands that open s3:// import botocore: missing keys or profile, malformed configuration.
    if type(error).__module__.partition(".")[0] in ("botocore", "configparser"):
        return UNREACHABLE
    return next((status for kinds, status in statuses if isinstance(error, kinds)), -1)
