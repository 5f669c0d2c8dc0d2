"""``tensorizer convert``: from one format to another."""

from __future__ import annotations

import argparse
import os
from typing import Any, Optional

from tensorizer import cli
from tensorizer._system.redaction import shown_uri
from tensorizer._system.sizes import counted, size_text
from tensorizer.cli.keys import add_key_options, check_keeps_keys, decryption, encryption, key_paths
from tensorizer.cli.options import add_common, add_force, add_verify, stream_options
from tensorizer.cli.output import OK, Output, escaped

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="write the tensors of a file in another format",
        description="Writes the tensors of a .tensors, .safetensors, .pt or .bin file, of the shards in a folder or of "
        "a checkpoint folder in another format, dtype or encryption. The target is read back before it appears.",
    )
    parser.add_argument(
        "source", metavar="SRC", help="a path or URI: a file, folder or index of shards; a checkpoint folder"
    )
    parser.add_argument(
        "target", metavar="DST", help="a path or URI; its extension sets the format; / at the end: a folder"
    )
    parser.add_argument("--to", choices=("tensors", "safetensors"), help="format of the target")
    parser.add_argument(
        "--dtype",
        choices=sorted({*_DTYPES, *_DTYPES.values()}),
        help="convert floating-point tensors of 16 bits and more",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help="write shards of at most this size, for example 5GB")
    parser.add_argument(
        "--ties", choices=("once", "twice", "error"), default="once", help="how to store shared tensors; default: once"
    )
    parser.add_argument("--keep-order", action="store_true", help="write .safetensors in the order of the source")
    parser.add_argument("--flatten", action="store_true", help="join nested names with dots")
    parser.add_argument(
        "--skip-non-tensors", action="store_true", help="ignore values of a .pt file that are not tensors"
    )
    parser.add_argument(
        "--all", action="store_true", dest="all_files", help="also copy the other files of a local folder"
    )
    parser.add_argument("--no-check", action="store_true", help="do not read the target back")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be written")
    add_verify(parser)
    add_force(parser)
    add_key_options(parser, "the target", generate=True)
    add_key_options(parser, "the source", prefix="in-")
    add_common(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    with cli.imports():
        import torch

        from tensorizer._files.convert import convert
        from tensorizer._files.inspect import is_encrypted

    options = stream_options(arguments, arguments.source, arguments.target)
    encrypted = is_encrypted(arguments.source, options)
    _check_outputs(arguments, options)
    key = decryption(arguments, output, encrypted, prefix="in-", what=escaped(shown_uri(arguments.source)))
    new_key = None if arguments.dry_run else encryption(arguments, output)
    report = convert(
        arguments.source,
        arguments.target,
        format=arguments.to,
        dtype=arguments.dtype and getattr(torch, _DTYPES.get(arguments.dtype, arguments.dtype)),
        max_shard_size=arguments.max_shard_size,
        ties=arguments.ties,
        encryption=new_key,
        decryption=key,
        all_files=arguments.all_files,
        check=not arguments.no_check,
        keep_order=arguments.keep_order,
        flatten=arguments.flatten,
        skip_non_tensors=arguments.skip_non_tensors,
        dry_run=arguments.dry_run,
        force=arguments.force,
        progress=output.progress(),
        stream_options=options,
        verify=arguments.verify,
    )
    print_report(report, output)
    return OK


def _check_outputs(arguments: argparse.Namespace, options: Optional[dict[str, Any]]) -> None:
    from tensorizer._files.copy import copies_beside
    from tensorizer._files.write import file_in_folder
    from tensorizer._io.call_options import CallOptions
    from tensorizer._io.model_files import names_of_model

    keys = key_paths(arguments)
    target = file_in_folder(arguments.target, arguments.to)
    outputs = [target]
    if arguments.max_shard_size is not None:
        folder, name = os.path.split(target)
        outputs += [os.path.join(folder, other) for other in names_of_model(name, map(os.path.basename, keys.values()))]
    call = CallOptions.to_write(stream_options=options)
    beside = copies_beside(arguments.source, target, True, call) if arguments.all_files and keys else []
    outputs += [copy for _, copy in beside]
    check_keeps_keys(keys, outputs, [file for file, _ in beside])


def print_report(report: dict[str, Any], output: Output) -> None:
    """Prints in one line what was converted."""
    if output.json:
        output.document(report)
        return
    if output.quiet:
        return
    seconds, is_dry = report["seconds"], report["dry_run"]
    rate = f", {size_text(report['nbytes'] / seconds)}/s" if seconds and not is_dry else ""
    checked = ", read back and equal" if report["checked"] else ""
    files = f" in {len(report['files'])} files" if len(report["files"]) > 1 else ""
    would = "would write " if is_dry else ""
    size = f"{counted(report['tensors'], 'tensor')}, {size_text(report['nbytes'])}"
    output.line(f"{would}{escaped(report['target'])}: {size}{files}{rate}{checked}")
    for name in report["copied"]:
        output.detail(f"{'would copy' if is_dry else 'copied'}: {escaped(name)}")
    for name in report["skipped"]:
        output.note(f"left out, no tensor: {escaped(name)}")
