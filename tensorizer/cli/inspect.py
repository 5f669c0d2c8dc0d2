"""``tensorizer inspect`` (``ls``): lists the content of a file, from its index."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tensorizer._format.names import name_text, natural_key
from tensorizer._system.sizes import counted, size_text
from tensorizer.cli.options import add_common, add_filter, name_filter, stream_options
from tensorizer.cli.output import OK, Output, escaped, table

if TYPE_CHECKING:
    from tensorizer._files.inspect import FileInfo, TensorInfo

_MOST_TIES = 10
_MOST_TEXT = 1000
_MANY_ROWS = 500
_NUMBER = re.compile(r"(?<![0-9A-Za-z])[0-9]+(?![0-9A-Za-z])")


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        aliases=["ls"],
        help="list the tensors of a file",
        description="Lists the tensors of files. Reads only the index; encrypted files need no key.",
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a path or URI: a file, folder or index of shards; a checkpoint folder"
    )
    parser.add_argument("--no-tensors", action="store_true", help="totals only")
    parser.add_argument("--metadata", action="store_true", help="show the metadata")
    parser.add_argument("--group", action="store_true", help="one row for names that differ only in numbers")
    parser.add_argument("--sort", choices=("name", "size", "offset"), default="name", help="default: name")
    add_filter(parser)
    parser.add_argument("--long", action="store_true", help="also show offsets and kinds")
    add_common(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    from tensorizer._files.inspect import inspect

    documents = []
    for position, file in enumerate(arguments.files):
        info = inspect(file, stream_options=stream_options(arguments, file))
        if output.json:
            documents.append(_document(info, arguments))
            continue
        if position:
            output.line()
        _print(info, arguments, output)
    if output.json:
        output.document({"files": documents})
    return OK


def _chosen(info: FileInfo, arguments: argparse.Namespace) -> list[TensorInfo]:
    wanted = name_filter(arguments)
    tensors = [tensor for tensor in info.tensors if wanted is None or wanted(tensor.name)]
    if arguments.sort == "name":
        return sorted(tensors, key=lambda tensor: natural_key(tensor.name))
    if arguments.sort == "size":
        return sorted(tensors, key=lambda tensor: tensor.nbytes, reverse=True)
    return sorted(tensors, key=lambda tensor: tensor.offset)


def _document(info: FileInfo, arguments: argparse.Namespace) -> dict[str, Any]:
    content = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    content.update(tensor_nbytes=info.tensor_nbytes, tensor_count=len(info.tensors))
    content["authentication"] = content.pop("has_tag")
    del content["tensors"]
    if not arguments.no_tensors:
        content["tensors"] = [dataclasses.asdict(tensor) for tensor in _chosen(info, arguments)]
    return content


def _print(info: FileInfo, arguments: argparse.Namespace, output: Output) -> None:
    tensors = _chosen(info, arguments)
    facts = info.facts()
    if len(tensors) != len(info.tensors):
        facts.append(f"{len(tensors):,} shown")
    output.line(f"{output.coloured(escaped(info.source), 'bold')}: {', '.join(facts)}")
    for signer in info.signers:
        output.line(f"signed by {signer} (not checked)")
    if info.has_tag:
        output.line("authenticated by its key (not checked)")
    for alias, kept in list(info.ties.items())[:_MOST_TIES]:
        output.line(f"tie: {escaped(alias)} = {escaped(kept)}")
    if len(info.ties) > _MOST_TIES:
        output.line(f"tie: {len(info.ties) - _MOST_TIES:,} more (--json lists all)")
    if info.metadata_encrypted:
        output.line("metadata: encrypted")
    elif arguments.metadata:
        for key, value in info.metadata.items():
            rest = len(value) - _MOST_TEXT
            cut = f"… ({rest:,} more characters; --json shows all)" if rest > 0 else ""
            output.line(f"metadata: {escaped(key)} = {escaped(value[:_MOST_TEXT])}{cut}")
    elif info.metadata:
        output.line(f"metadata: {counted(len(info.metadata), 'entry', 'entries')} (--metadata shows them)")
    if arguments.no_tensors:
        return
    where = "file" if info.format == "checkpoint" else "shard"
    columns = ["offset", "kind", *([where] if info.files else [])]
    header = ["name", "dtype", "shape", "size", *(columns if arguments.long else [])]
    shards = {name: number for number, name in enumerate(info.files, 1)}
    rows = list((_grouped if arguments.group else _single)(tensors, arguments.long, shards))
    right = frozenset({3, 4, 6} if arguments.long else {3})
    for number, line in enumerate(table(header, rows, right, output.width())):
        output.line(output.coloured(line, "dim") if number == 0 else line)
    if len(rows) > _MANY_ROWS and output.width() is not None and not arguments.group:
        output.note(f"{len(rows):,} rows: --group shows one for names that differ only in numbers")


def _single(tensors: Iterable[TensorInfo], long: bool, shards: Mapping[str, int]) -> Iterable[list[str]]:
    for tensor in tensors:
        yield _row(escaped(name_text(tensor.name)), tensor, tensor.nbytes, long, shards)


def _grouped(tensors: Iterable[TensorInfo], long: bool, shards: Mapping[str, int]) -> Iterable[list[str]]:
    """Puts names that differ only in numbers into one row, which shows the numbers as a range if they have no gap."""
    groups: dict[tuple[str, str, tuple[int, ...], str], list[TensorInfo]] = {}
    for tensor in tensors:
        pattern = _NUMBER.sub("*", name_text(tensor.name))
        groups.setdefault((pattern, tensor.dtype, tensor.shape, tensor.kind), []).append(tensor)
    for (pattern, *_), members in groups.items():
        numbers = [[int(number) for number in _NUMBER.findall(name_text(member.name))] for member in members]
        name = pattern
        for column in zip(*numbers):
            name = name.replace("*", _range_text(column), 1)
        count = f" x{len(members)}" if len(members) > 1 else ""
        yield _row(escaped(name) + count, members[0], sum(member.nbytes for member in members), long, shards)


def _row(name: str, tensor: TensorInfo, nbytes: int, long: bool, shards: Mapping[str, int]) -> list[str]:
    row = [name, escaped(tensor.dtype), str(list(tensor.shape)), size_text(nbytes)]
    if not long:
        return row
    shard = [f"{shards[tensor.file]} of {len(shards)}"] if tensor.file else [""] if shards else []
    return [*row, f"{tensor.offset:,}", tensor.kind, *shard]


def _range_text(numbers: tuple[int, ...]) -> str:
    distinct = sorted(set(numbers))
    if len(distinct) == 1:
        return str(distinct[0])
    whole = distinct[-1] - distinct[0] + 1 == len(distinct)
    return f"{{{distinct[0]}...{distinct[-1]}}}" if whole else f"{{{len(distinct)} numbers}}"
