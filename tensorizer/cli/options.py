"""Options that several commands share."""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

from tensorizer._io.uri import LOCAL_SCHEMES, scheme_of, split_query, split_uri
from tensorizer._system.redaction import shown_uri
from tensorizer.cli.output import UsageError

if TYPE_CHECKING:
    from tensorizer._format.names import Name


NO_SUCH_NAME = "--filter {}: no tensor has such a name"


def add_common(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every command has."""
    group = parser.add_argument_group("output")
    loudness = group.add_mutually_exclusive_group()
    loudness.add_argument("-q", "--quiet", action="store_true", help="errors only")
    loudness.add_argument("-v", "--verbose", action="store_true", help="describe each step")
    group.add_argument("--json", action="store_true", help="one JSON document on standard output")
    group.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="colours; auto: on a terminal"
    )
    group.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show a bar on standard error; default: on a terminal, after a second",
    )
    group = parser.add_argument_group("reading and writing")
    group.add_argument("--num-readers", type=_positive, metavar="N", help="upper bound of reading threads")
    group.add_argument("--s3-endpoint", metavar="HOST", help="host of the object store; http://HOST for plain HTTP")
    group.add_argument("--s3-profile", metavar="NAME", help="profile of the AWS configuration files")


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace an existing target")


def add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verify",
        metavar="WITH",
        type=verify_value,
        default="auto",
        help="compare whole files with a SHA256SUMS file or a signature of the model (OpenSSF), a path or URI; hub: "
        "with what the hub states; auto, the default: digests in the file; "
        '\'{"signature": PATH, "public_key": PATH}\': with a signature that this key must have made',
    )
    parser.add_argument("--hub", action="store_const", const="hub", dest="verify", help="short for --verify hub")


def verify_value(text: str) -> Any:
    """A mapping where JSON is given, else the text."""
    try:
        return json.loads(text) if text.startswith("{") else text
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a path, a URI, a word or JSON: {error}") from None


def add_filter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--filter", metavar="GLOB", help="only names that match the pattern (* ? [])")


def name_filter(arguments: argparse.Namespace) -> Optional[Callable[[Name], bool]]:
    """A function that says whether a name matches ``--filter``; ``None`` if all names match."""
    from tensorizer._format.names import name_text

    pattern = arguments.filter
    return None if pattern is None else lambda name: fnmatch.fnmatchcase(name_text(name), pattern)


def stream_options(arguments: argparse.Namespace, *uris: str) -> Optional[dict[str, Any]]:
    """The ``stream_options`` for opening `uris`; ``None`` if all of them are local.

    Raises:
        UsageError: A URI is ``-``, which other programs take for a standard stream, or it names no object.
    """
    if "-" in uris:
        raise UsageError(
            "files of tensors are not read from standard input or written to standard output: for a file "
            "of the name -, write ./-"
        )
    for uri in uris:
        _check_names_something(uri)
    if not any(uri.lower().startswith("s3://") for uri in uris):
        return None
    chosen: dict[str, Any] = {"s3_endpoint": arguments.s3_endpoint, "s3_profile": arguments.s3_profile}
    if (arguments.s3_endpoint or "").lower().startswith("http://"):
        chosen["force_http"] = True  # by typing the scheme, the user has allowed plain HTTP
    return {name: value for name, value in chosen.items() if value is not None} or None


def check_names_object(*uris: str) -> None:
    """Refuses S3 URIs of whole buckets for commands that need an object.

    Raises:
        UsageError: The URI has no key.
    """
    for uri in uris:
        parts = split_uri(uri)
        if parts.scheme == "s3" and not parts.path.strip("/"):
            raise UsageError(f"{shown_uri(uri)}: an s3 URI needs a bucket and a key: s3://bucket/key")


def _check_names_something(uri: str) -> None:
    """Refuses URIs that end after the scheme: joined with a name, they would become local paths."""
    scheme, location = scheme_of(uri), split_query(uri)[0].partition("://")[2]
    if scheme is not None and not (location if scheme in LOCAL_SCHEMES else location.strip("/")):
        raise UsageError(f"{shown_uri(uri)}: malformed URI: nothing follows {scheme}://")
    if not uri.endswith("/"):  # else it may be a folder
        check_names_object(uri)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return value
