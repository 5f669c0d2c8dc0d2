"""``tensorizer cp``: bytes as they are, between any two places."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from tensorizer import cli
from tensorizer._system.redaction import shown_uri
from tensorizer.cli.keys import add_key_options, check_keeps_keys, decryption, key_paths
from tensorizer.cli.options import add_common, add_force, check_names_object, stream_options
from tensorizer.cli.output import DIFFERS, OK, Output, UsageError, escaped

if TYPE_CHECKING:
    from tensorizer._files.verify import VerifyReport


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser(
        "cp",
        help="copy a file between any two places",
        description="Copies a file unchanged between paths and URIs; - is standard input or output. The signature "
        "beside a local file (.sig) is copied too.",
    )
    parser.add_argument("source", metavar="SRC", help="a path, URI or -")
    parser.add_argument("target", metavar="DST", help="a path, URI or -")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare the tensors with their digests first; without digests, the copy with the source",
    )
    add_force(parser)
    add_key_options(parser, "the source, for --verify")
    add_common(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    import sys

    from tensorizer._files.copy import check_target, copy_file, sha256_of_file, signature_beside

    source, target = arguments.source, arguments.target
    options = stream_options(arguments, source, target)
    check_names_object(source, target)
    if source == "-" and sys.__stdin__ is None:
        raise UsageError("standard input is closed")
    if arguments.verify and source == "-":
        raise UsageError("--verify reads the source twice, but standard input can be read only once")
    if target == "-":
        if sys.__stdout__ is None:
            raise UsageError("standard output is closed")
        if sys.stdout.isatty():
            raise UsageError("standard output is a terminal: redirect it")
        if output.json:
            raise UsageError("--json and - as the target both write to standard output")
    else:
        check_target(target, arguments.force, options)
    signature = signature_beside(source, target)
    check_keeps_keys(key_paths(arguments), [target, *(signature or ())[1:]])
    compares_bytes = False
    if arguments.verify:
        report = _verify_tensors(arguments, output, options)
        if report is not None and not report.may_be_right:
            from tensorizer._files.verify import describe

            output.error(f"{escaped(report.source)}: {describe(report)}; nothing was copied")
            for mismatch in report.mismatched:
                output.error(escaped(mismatch.reason))
            return DIFFERS
        compares_bytes = report is None or bool(report.unverified)
        if compares_bytes and target == "-":
            raise UsageError(
                f"{escaped(shown_uri(source))} holds tensors without a digest, and --verify cannot read "
                "standard output again to compare bytes: copy it to a file"
            )
    if signature:
        check_target(signature[1], arguments.force, options)
    nbytes = copy_file(source, target, progress=output.progress(), stream_options=options)
    if signature:
        copy_file(*signature, stream_options=options)
    if compares_bytes and sha256_of_file(source, options) != sha256_of_file(target, options):
        output.error(f"{escaped(shown_uri(target))}: its bytes differ from those of {escaped(shown_uri(source))}")
        return DIFFERS
    if output.json:
        document = {"source": shown_uri(source), "target": shown_uri(target), "nbytes": nbytes}
        output.document({**document, "signature": shown_uri(signature[1]) if signature else None})
    else:
        how = ", compared byte by byte with the source" if compares_bytes else ""
        output.detail(f"{escaped(shown_uri(target))}: {nbytes:,} bytes{how}")
    return OK


def _verify_tensors(arguments: argparse.Namespace, output: Output, options: Any) -> VerifyReport | None:
    """The tensors of the source against their digests; ``None`` where neither its name nor its content claims any."""
    with cli.imports():
        from tensorizer._files.inspect import inspect
        from tensorizer._files.verify import verify
    from tensorizer.errors import FormatError

    try:
        info = inspect(arguments.source, stream_options=options)
    except FormatError:
        if _claims_tensors(arguments.source, options):
            raise
        return None
    key = decryption(arguments, output, info.encrypted, what=escaped(info.source))
    return verify(arguments.source, encryption=key, progress=output.progress(), stream_options=options)


def _claims_tensors(source: str, options: Any) -> bool:
    from tensorizer._io.sources import HEAD_NBYTES, begins_as_tensors, open_source

    if shown_uri(source).endswith((".tensors", ".safetensors")):
        return True
    with contextlib.closing(open_source(source, options)) as opened:
        return begins_as_tensors(opened.source.read(0, min(opened.source.size() or 0, HEAD_NBYTES)))
