"""``tensorizer diff``: what differs between two files."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from tensorizer import cli
from tensorizer._system.redaction import shown_uri
from tensorizer.cli.keys import add_key_options, decryption
from tensorizer.cli.options import NO_SUCH_NAME, add_common, add_filter, name_filter, stream_options
from tensorizer.cli.output import DIFFERS, OK, Output, UsageError, escaped

if TYPE_CHECKING:
    from tensorizer._files.diff import Change, DiffReport


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser(
        "diff",
        help="compare two files",
        description="Compares names, dtypes, shapes and data of two files. Data are read only if stored digests "
        "do not decide. -q prints nothing; the exit status tells.",
    )
    parser.add_argument("a", metavar="A", help="a path or URI: a file, folder or index of shards; a checkpoint folder")
    parser.add_argument("b", metavar="B", help="a path or URI: a file, folder or index of shards; a checkpoint folder")
    parser.add_argument("--rtol", type=_tolerance, default=0.0, metavar="X", help="relative tolerance; default 0")
    parser.add_argument("--atol", type=_tolerance, default=0.0, metavar="X", help="absolute tolerance; default 0")
    parser.add_argument("--ignore-dtype", action="store_true", help="compare values of different dtypes")
    add_filter(parser)
    parser.add_argument("--stat", action="store_true", help="counts only")
    add_key_options(parser, "encrypted files")
    add_common(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    with cli.imports():
        from tensorizer._files.diff import diff
        from tensorizer._files.inspect import is_encrypted

    options = stream_options(arguments, arguments.a, arguments.b)
    encrypted = [is_encrypted(uri, options) for uri in (arguments.a, arguments.b)]
    uris = [uri for uri, is_one in zip((arguments.a, arguments.b), encrypted) if is_one]
    what = " and ".join(escaped(shown_uri(uri)) for uri in dict.fromkeys(uris))
    key = decryption(arguments, output, any(encrypted), what=what) if any(encrypted) else None
    report = diff(
        arguments.a,
        arguments.b,
        rtol=arguments.rtol,
        atol=arguments.atol,
        ignore_dtype=arguments.ignore_dtype,
        filter_func=name_filter(arguments),
        encryption_a=key if encrypted[0] else None,
        encryption_b=key if encrypted[1] else None,
        stream_options=options,
    )
    if arguments.filter is not None and report.ok and not report.same:
        raise UsageError(NO_SUCH_NAME.format(arguments.filter))
    if output.json:
        output.document(_document(report))
    elif not output.quiet:
        _print(report, arguments.stat, output)
    return OK if report.ok else DIFFERS


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not value >= 0:  # NaN too
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text!r}")
    return value


def _print(report: DiffReport, stat: bool, output: Output) -> None:
    from tensorizer._format.names import name_text

    if not stat:
        for name in report.removed:
            output.line(output.coloured(f"- {escaped(name_text(name))}", "red"))
        for name in report.added:
            output.line(output.coloured(f"+ {escaped(name_text(name))}", "green"))
        for change in report.changed:
            output.line(output.coloured(f"~ {escaped(name_text(change.name))}: {escaped(_how(change))}", "yellow"))
    output.line(report.counts())


def _how(change: Change) -> str:
    if change.what != "data":
        return f"{change.a} -> {change.b}"
    parts = [
        f"{label} {value:.3g}"
        for label, value in (("max abs", change.max_abs), ("max rel", change.max_rel))
        if value is not None
    ]
    return f"{change.a}: {', '.join(parts) if parts else 'other bytes'}"


def _document(report: DiffReport) -> dict[str, Any]:
    changed = [change._asdict() for change in report.changed]
    return {"ok": report.ok, **dataclasses.asdict(report), "changed": changed}
