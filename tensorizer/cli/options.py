"""Options that several commands share."""

from __future__ import annotations

import argparse
from typing import Any, Optional

from tensorizer.cli.exit_codes import UsageError

__all__ = ["add_common", "add_force", "add_source_options", "stream_options"]


def add_common(parser: argparse.ArgumentParser) -> None:
    """What every command takes."""
    group = parser.add_argument_group("output")
    loudness = group.add_mutually_exclusive_group()
    loudness.add_argument("-q", "--quiet", action="store_true", help="errors only")
    loudness.add_argument("-v", "--verbose", action="store_true", help="say what is done")
    group.add_argument("--json", action="store_true", help="one JSON document on standard output")
    group.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="colours; auto: on a terminal"
    )
    group.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="a bar on standard error; default: on a terminal, for work of more than a second",
    )
    group.add_argument("--no-input", action="store_true", help="never ask on the terminal")
    add_source_options(parser)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reading and writing")
    group.add_argument("--num-readers", type=_positive, metavar="N", help="most reading threads; default: as useful")
    group.add_argument("--s3-endpoint", metavar="HOST", help="host of the object store")
    group.add_argument("--s3-profile", metavar="NAME", help="profile of the AWS configuration files")


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace the target where it exists")


def stream_options(arguments: argparse.Namespace, *uris: str) -> Optional[dict[str, Any]]:
    """The keywords for opening `uris`; ``None`` where none of them is in a store.

    Raises:
        UsageError: One is ``-``, which only ``cp`` takes for a standard stream.
    """
    if "-" in uris and arguments.command != "cp":
        raise UsageError("- is standard input or output for cp alone; a file of that name is ./-")
    if not any(uri.lower().startswith("s3://") for uri in uris):
        return None
    chosen = {"s3_endpoint": arguments.s3_endpoint, "s3_profile": arguments.s3_profile}
    return {name: value for name, value in chosen.items() if value is not None} or None


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"wanted 1 or more, found {text!r}")
    return value
