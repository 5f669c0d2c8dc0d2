"""``tensorizer COMMAND …``: the parsers of all commands, and what becomes of errors."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Optional, TextIO

from tensorizer import cli
from tensorizer._system.redaction import shown_uri
from tensorizer._version import __version__
from tensorizer.cli import output as said
from tensorizer.cli.output import Output, UsageError, escaped

#: The commands, in the order of the help, and the modules of this package that implement them.
COMMANDS = {
    "inspect": "inspect",
    "ls": "inspect",
    "verify": "verify",
    "convert": "convert",
    "encrypt": "encrypt",
    "decrypt": "encrypt",
    "sign": "sign",
    "diff": "diff",
    "cache": "node_cache",
}

_POSITIONALS = ("a", "action", "b", "command", "file", "files", "source", "target", "uris")

_EPILOG = "Exit status: 0 done, 1 differs or does not verify, 2 usage, 3 not found or no access, 4 not a valid file, \
5 key or signature, 6 the target exists or cannot hold the content, 130 interrupted."


class _Parser(argparse.ArgumentParser):
    """argparse without abbreviations: a new option would change the meaning of an abbreviation."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]


class _Version(argparse.Action):
    """``--version``: prints the versions that a bug report should contain."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from tensorizer import _C

        libraries = ", ".join(f"{name} {version}" for name, version in _C.library_versions().items())
        print(f"tensorizer {__version__}\nwith {libraries}")
        parser.exit()


def make_parser(command: Optional[str] = None) -> argparse.ArgumentParser:
    """The parser of the whole command line, or only of `command`: then the other commands are not imported."""
    parser = _Parser(
        prog="tensorizer",
        description="Inspects, verifies, converts, encrypts, signs and compares files of tensors (.tensors, "
        ".safetensors).",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions of tensorizer and its libraries")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    modules = [COMMANDS[command]] if command in COMMANDS else dict.fromkeys(COMMANDS.values())
    for name in modules:
        importlib.import_module(f"tensorizer.cli.{name}").add_parsers(commands)
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments. ``None`` is for the program: it takes the arguments of the process, and interrupts end the
            process before and after the work of the command.

    Returns:
        The exit status (docs/cli.md, "Exit status").
    """
    if argv is None:
        cli.begin_program()
    _open_streams()
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except OSError as error:  # writing the output failed; _run has reported the command's own errors
        for stream in (sys.stdout, sys.stderr):
            _drop(stream)
        if isinstance(error, BrokenPipeError):  # the reader has closed the pipe
            return 128 + signal.SIGPIPE
        print(f"tensorizer: standard output: {error.strerror or error}", file=sys.stderr)
        return said.status_of(error)


def _run(argv: Optional[Sequence[str]]) -> int:
    given = sys.argv[1:] if argv is None else argv
    command = next((argument for argument in given if not argument.startswith("-")), None)
    arguments = make_parser(command).parse_args(argv)
    output = Output(arguments)
    try:
        _check_texts(arguments)
        cli.raise_error()
        try:
            status: int = arguments.run(arguments, output)
        finally:
            cli.end_process()
        return status
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and (_is_broken(sys.stdout) or _is_broken(sys.stderr)):
            raise  # else a target or a connection is broken
        status = said.status_of(error)
        if status < 0:
            raise
        if status != said.INTERRUPTED:
            output.error(escaped(_message(error)))
        return status


def _check_texts(arguments: argparse.Namespace) -> None:
    """Refuses empty texts, such as unset variables of a shell, which would count as options that were not given."""
    for name, value in vars(arguments).items():
        if name not in _POSITIONALS and (value == "" or (isinstance(value, list) and "" in value)):
            raise UsageError(f"{said.option_of(name)}: expected a text, got an empty one")


def _open_streams() -> None:
    """Opens the null device for streams that the caller has closed (``>&-``), and lets standard output escape
    characters that its encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):  # the locale C
        sys.stdout.reconfigure(errors="backslashreplace")


def _is_broken(stream: TextIO) -> bool:
    """Whether a stream has no reader any more."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # a stream in memory
        return False
    poll = select.poll()
    poll.register(descriptor, 0)  # poll reports errors without being asked for them
    return bool(poll.poll(0))


def _drop(stream: TextIO) -> None:
    """Discards the text that a stream still holds, so that Python prints no error about it at exit."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _message(error: BaseException) -> str:
    """The message of an error in the usual form of command lines: the file, then the error of the system."""
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        return f"{shown_uri(error.filename)}: {error.strerror}"
    text = str(error) or type(error).__name__
    for keyword, option in _OPTIONS_OF_KEYWORDS.items():
        text = text.replace(keyword, option)
    return text


# Advice in messages of the package, and the same advice for users of the command line.
_OPTIONS_OF_KEYWORDS = {
    "pass force_http=True for plain HTTP": "--s3-endpoint http://HOST asks for plain HTTP",
    "set s3_region_name or s3_endpoint": "set AWS_REGION or --s3-endpoint",
    "pass s3_access_key_id and s3_secret_access_key": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "(force replaces it)": "(--force replaces it)",
    "sha256: expected": "--sha256: expected",
    "(skip_non_tensors)": "(--skip-non-tensors)",
    "all_files: ": "--all: ",
    "max_shard_size: expected": "--max-shard-size: expected",
    "max_size: expected": "--max-size: expected",
    "older_than: expected": "--older-than: expected",
    "opslimit: expected": "--opslimit: expected",
    "memlimit: expected": "--memlimit: expected",
}
