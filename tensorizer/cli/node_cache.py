"""``tensorizer cache``: shows and changes the content of the node's cache."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from tensorizer import cli
from tensorizer._system.sizes import counted, size_text
from tensorizer.cli.options import add_common, stream_options
from tensorizer.cli.output import DIFFERS, OK, Output, UsageError, escaped, table

if TYPE_CHECKING:
    from tensorizer.cache import Entry


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        help="manage the cache of remote objects",
        description="Lists, fills, prunes and verifies the cache of remote objects on the local disk.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_action(actions, "ls", "list the entries")
    add = _add_action(actions, "add", "download whole objects and wait until they are on the disk")
    add.add_argument("uris", nargs="+", metavar="URI", help="the objects to download")
    prune = _add_action(
        actions, "prune", "remove entries, least recently used first; without options, until the limits are met"
    )
    prune.add_argument("--max-size", metavar="SIZE", help="until all entries take at most this, such as 500GB")
    prune.add_argument("--older-than", type=float, metavar="DAYS", help="entries that were not used for this long")
    prune.add_argument("--location", metavar="GLOB", help="entries whose location matches the pattern (* ? [])")
    prune.add_argument("--all", action="store_true", help="all entries")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    verify = _add_action(actions, "verify", "compare the tensors with their digests; remove damaged entries")
    verify.add_argument("--location", metavar="GLOB", help="entries whose location matches the pattern (* ? [])")


def _add_action(actions: Any, name: str, text: str) -> Any:
    parser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--cache", metavar="DIR", help="the folder; default: TENSORIZER_CACHE")
    add_common(parser)
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace, output: Output) -> int:
    from tensorizer._system.config import env_text

    if arguments.cache is None and env_text("TENSORIZER_CACHE") is None:
        raise UsageError("no cache: pass --cache DIR or set TENSORIZER_CACHE")
    action = {"ls": _list, "add": _add, "prune": _prune, "verify": _verify}[arguments.action]
    return action(arguments, output)


def _list(arguments: argparse.Namespace, output: Output) -> int:
    from tensorizer import cache

    found = cache.entries(arguments.cache)
    totals = {"count": len(found), **{name: sum(getattr(e, name) for e in found) for name in ("cached", "disk")}}
    if output.json:
        output.document({**totals, "entries": [_document(entry) for entry in found]})
        return OK
    rows = [
        (
            escaped(entry.location),
            escaped(entry.version)[:24],
            size_text(entry.size),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used)),
            entry.state,
        )
        for entry in found
    ]
    header = ("LOCATION", "VERSION", "SIZE", "LAST USED", "STATE")
    for line in table(header, rows, frozenset({2}), output.width()):
        output.line(line)
    cached, disk = size_text(totals["cached"]), size_text(totals["disk"])
    output.line(f"{counted(totals['count'], 'entry', 'entries')}, {cached} cached, {disk} on the disk")
    return OK


def _add(arguments: argparse.Namespace, output: Output) -> int:
    from tensorizer import cache

    added = []
    for uri in arguments.uris:
        for entry in cache.add(uri, cache=arguments.cache, stream_options=stream_options(arguments, uri)):
            added.append(_document(entry))
            output.note(f"{escaped(entry.location)}: {size_text(entry.cached)}")
    if output.json:
        output.document({"entries": added})
    return OK


def _prune(arguments: argparse.Namespace, output: Output) -> int:
    from tensorizer import cache

    names = ("max_size", "older_than", "location", "all", "dry_run")
    pruned = cache.prune(arguments.cache, **{name: getattr(arguments, name) for name in names})
    if output.json:
        rows = {name: [_document(entry) for entry in found] for name, found in pruned._asdict().items()}
        output.document({"dry_run": arguments.dry_run, **rows})
        return OK
    did = "would remove" if arguments.dry_run else "removed"
    for entry in pruned.removed:
        output.line(f"{did} {escaped(entry.location)} ({size_text(entry.disk)})")
    for entry in pruned.skipped:
        output.note(f"in use, not removed: {escaped(entry.location)} ({size_text(entry.disk)})")
    return OK


def _verify(arguments: argparse.Namespace, output: Output) -> int:
    from tensorizer import cache

    with cli.imports():
        import torch  # noqa: F401 - before a damaged entry is removed

    results = cache.verify(arguments.cache, location=arguments.location)
    is_ok = all(result.problem is None for result in results)
    if output.json:
        rows = [{**_document(r.entry), "problem": r.problem, "checked": r.checked} for r in results]
        output.document({"ok": is_ok, "entries": rows})
    else:
        for entry, problem, checked in results:
            if problem is not None:
                output.line(f"{escaped(entry.location)}: FAILED, removed: {escaped(problem)}")
            elif not output.quiet:
                output.line(f"{escaped(entry.location)}: ok: {counted(checked, 'tensor')}")
    return OK if is_ok else DIFFERS


def _document(entry: Entry) -> dict[str, Any]:
    more = {"path": str(entry.path), "state": entry.state, "complete": entry.complete}
    return {**dataclasses.asdict(entry), **more}
