"""``tensorizer cp``: bytes as they are, between any two places."""

from __future__ import annotations

import argparse
from typing import Any

from tensorizer._system.redaction import shown_uri
from tensorizer.cli.exit_codes import DIFFERS, OK, UsageError
from tensorizer.cli.options import add_common, add_force, check_names_object, stream_options
from tensorizer.cli.output import Output, escaped


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser(
        "cp",
        help="copy a file between any two places",
        description="Copies a file as it is between paths and URIs; - is standard input or output.",
    )
    parser.add_argument("source", metavar="SRC", help="a path, URI or -")
    parser.add_argument("target", metavar="DST", help="a path, URI or -")
    parser.add_argument("--verify", action="store_true", help="compare the source's tensors with their digests first")
    add_force(parser)
    add_common(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    import sys

    from tensorizer._files.copy import check_target, copy_file
    from tensorizer._files.verify import verify

    source, target = arguments.source, arguments.target
    options = stream_options(arguments, source, target)
    check_names_object(source, target)
    if arguments.verify and source == "-":
        raise UsageError("--verify reads the source twice, which standard input cannot give")
    if target == "-":
        if sys.stdout.isatty():
            raise UsageError("standard output is a terminal: redirect it")
        if output.json:
            raise UsageError("--json and a target of - would share standard output")
    else:
        check_target(target, arguments.force, options)
    if arguments.verify:
        report = verify(source, stream_options=options)
        if not report.ok:
            for mismatch in report.mismatched:
                output.error(escaped(mismatch.reason))
            return DIFFERS
    nbytes = copy_file(source, target, progress=output.progress(), stream_options=options)
    if output.json:
        output.document({"source": shown_uri(source), "target": shown_uri(target), "nbytes": nbytes})
    else:
        output.detail(f"{escaped(shown_uri(target))}: {nbytes:,} bytes")
    return OK
