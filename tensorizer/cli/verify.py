"""``tensorizer verify``: compares data with stored digests."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from tensorizer import cli
from tensorizer._system.redaction import shown_uri
from tensorizer._system.sizes import size_text
from tensorizer.cli.keys import add_key_options, decryption
from tensorizer.cli.options import NO_SUCH_NAME, add_common, add_filter, add_verify, name_filter, stream_options
from tensorizer.cli.output import DIFFERS, OK, Output, UsageError, escaped

if TYPE_CHECKING:
    from tensorizer._files.verify import VerifyReport


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="compare the data of a file with its digests",
        description="Reads every tensor and compares it with the digests and authentication codes in the file. "
        "A .safetensors file has no digests: its structure is checked; --sha256 and --verify check its bytes.",
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a path or URI: a file, folder or index of shards; a checkpoint folder"
    )
    add_filter(parser)
    parser.add_argument("--sha256", metavar="HEX", help="the expected SHA-256 of the whole file")
    add_verify(parser)
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first tensor that does not match")
    group = parser.add_argument_group("signature")
    group.add_argument(
        "--public-key", metavar="PATH", action="append", help="require a signature by this key, or by one of several"
    )
    add_key_options(parser, "the file")
    add_common(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    with cli.imports():
        from tensorizer._files.inspect import is_encrypted
        from tensorizer._files.verify import verify

    if arguments.sha256 and len(arguments.files) > 1:
        raise UsageError("--sha256 takes one file")
    reports = []
    for file in arguments.files:
        options = stream_options(arguments, file)
        key = decryption(arguments, output, is_encrypted(file, options), what=escaped(shown_uri(file)))
        report = verify(
            file,
            encryption=key,
            filter_func=name_filter(arguments),
            sha256=arguments.sha256,
            fail_fast=arguments.fail_fast,
            num_readers=arguments.num_readers,
            progress=output.progress(),
            stream_options=options,
            public_key=arguments.public_key,
            verify=arguments.verify,
        )
        reports.append(report)
        if not output.json and (_has_checked(report, arguments) or not report.ok):
            _print(report, output)
        if arguments.fail_fast and not report.ok:
            break
    if all(reports) and not any(_has_checked(report, arguments) for report in reports):
        raise UsageError(NO_SUCH_NAME.format(arguments.filter))
    if output.json:
        output.document({"ok": all(reports), "files": [_document(report) for report in reports]})
    return OK if all(reports) else DIFFERS


def _has_checked(report: VerifyReport, arguments: argparse.Namespace) -> bool:
    return arguments.filter is None or bool(report.verified or report.mismatched or report.unverified)


def _print(report: VerifyReport, output: Output) -> None:
    if report.ok and output.quiet:
        return
    known = report.verified or report.sha256_matches or not report.unverified
    verdict = output.coloured("ok" if known else "structure ok", "green")
    if not report.ok:
        verdict = output.coloured("FAILED", "red")
    rate = f"{size_text(report.nbytes)} in {report.seconds:.1f} s"
    output.line(f"{escaped(report.source)}: {verdict}: {report.counts()} ({rate})")
    for signer in report.signers:
        output.line(f"  signed by {signer}")
    if report.authenticated in ("key", "both"):
        output.line("  authenticated by its key")
    for mismatch in report.mismatched:
        output.line(f"  {escaped(mismatch.reason)}")
    for differing in report.differing:
        output.line(f"  {escaped(differing.reason)}")
    if report.sha256_matches:
        which = f"file matches {report.sha256}" if report.sha256 else "files matches"
        output.line(f"  SHA-256 of the {which}")
    elif report.sha256_matches is not None:
        return
    elif report.format == "safetensors":
        hint = " (--verify checks the bytes)"
        output.note(f"  a .safetensors file has no digests: only its structure was checked{hint}")


def _document(report: VerifyReport) -> dict[str, Any]:
    content = dataclasses.asdict(report)
    content.pop("sharded")
    of_rows = {name: [row._asdict() for row in getattr(report, name)] for name in ("mismatched", "differing")}
    return {"ok": report.ok, **content, "verified": len(report.verified), **of_rows}
