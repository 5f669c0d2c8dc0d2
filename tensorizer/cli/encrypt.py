"""``tensorizer encrypt``, ``decrypt`` and ``rekey``."""

from __future__ import annotations

import argparse
from typing import Any, Optional

from tensorizer import cli
from tensorizer._system.redaction import shown_uri
from tensorizer.cli.convert import print_report
from tensorizer.cli.keys import add_key_options, check_keeps_keys, decryption, encryption, key_paths
from tensorizer.cli.options import add_common, add_force, check_names_object, stream_options
from tensorizer.cli.output import OK, Output, escaped

_PRESETS = ("min", "interactive", "moderate", "sensitive")


def add_parsers(commands: Any) -> None:
    _add(
        commands,
        "encrypt",
        "write an encrypted copy",
        "Writes an encrypted copy of a file, with a key or a passphrase.",
        run_encrypt,
        [("", "the target", True)],
        derives=True,
    )
    _add(
        commands,
        "decrypt",
        "write a decrypted copy",
        "Writes a decrypted copy of an encrypted file.",
        run_decrypt,
        [("", "the source", False)],
        derives=False,
    )
    _add(
        commands,
        "rekey",
        "write a copy under another key",
        "Writes a copy of an encrypted file under another key. Decrypted data are never written.",
        run_rekey,
        [("", "the source", False), ("new-", "the target", True)],
        derives=True,
    )


def _add(
    commands: Any, name: str, summary: str, description: str, run: Any, keys: list[tuple[str, str, bool]], derives: bool
) -> None:
    parser = commands.add_parser(name, help=summary, description=description)
    parser.add_argument("source", metavar="SRC", help="a path or URI")
    parser.add_argument("target", metavar="DST", help="a path or URI")
    for prefix, what, generate in keys:
        add_key_options(parser, what, prefix, generate)
    if derives:
        group = parser.add_argument_group("cost of a passphrase")
        group.add_argument("--opslimit", metavar="LIMIT", help=f"passes: a number, or {', '.join(_PRESETS)}")
        group.add_argument("--memlimit", metavar="LIMIT", help=f"memory: bytes, or {', '.join(_PRESETS)}")
    add_force(parser)
    add_common(parser)
    parser.set_defaults(run=run)


def run_encrypt(arguments: argparse.Namespace, output: Output) -> int:
    from tensorizer.errors import CryptographyError

    _check_target(arguments)
    with cli.imports():
        from tensorizer._files.inspect import is_encrypted
    if is_encrypted(arguments.source, stream_options(arguments, arguments.source)):
        raise CryptographyError(f"{shown_uri(arguments.source)} is encrypted already: rekey changes its key")
    with _new_key(arguments, output, "") as key:
        return _recrypt(arguments, output, None, key)


def run_decrypt(arguments: argparse.Namespace, output: Output) -> int:
    _check_target(arguments)
    return _recrypt(arguments, output, _old_key(arguments, output), None)


def run_rekey(arguments: argparse.Namespace, output: Output) -> int:
    _check_target(arguments)
    old = _old_key(arguments, output)
    with _new_key(arguments, output, "new-") as new:
        return _recrypt(arguments, output, old, new)


def _check_target(arguments: argparse.Namespace) -> None:
    """Before a passphrase is asked for and a key derived from it, which takes a while."""
    from tensorizer._files.copy import check_target

    options = stream_options(arguments, arguments.source, arguments.target)
    check_names_object(arguments.target)
    with cli.imports():
        from tensorizer._files.write import file_in_folder
    check_keeps_keys(key_paths(arguments), [file_in_folder(arguments.target, "tensors")])
    check_target(arguments.target, arguments.force, options)


def _old_key(arguments: argparse.Namespace, output: Output) -> Any:
    return decryption(arguments, output, encrypted=True, what=escaped(shown_uri(arguments.source)))


def _new_key(arguments: argparse.Namespace, output: Output, prefix: str) -> Any:
    from tensorizer.encryption import EncryptionParams

    return encryption(
        arguments,
        output,
        prefix,
        opslimit=_limit(arguments.opslimit, EncryptionParams.OpsLimit, "--opslimit"),
        memlimit=_limit(arguments.memlimit, EncryptionParams.MemLimit, "--memlimit"),
        required=True,
    )


def _limit(text: Optional[str], presets: Any, option: str) -> Any:
    from tensorizer.cli.output import UsageError

    if text is None:
        return None
    if text.lower() in _PRESETS:
        return presets[text.upper()]
    if not text.isdigit():
        raise UsageError(f"{option}: wanted a number or one of {', '.join(_PRESETS)}, found {text!r}")
    return int(text)


def _recrypt(arguments: argparse.Namespace, output: Output, decryption: Any, encryption: Any) -> int:
    with cli.imports():
        from tensorizer._files.convert import convert

    report = convert(
        arguments.source,
        arguments.target,
        format="tensors",
        encryption=encryption,
        decryption=decryption,
        force=arguments.force,
        progress=output.progress(),
        stream_options=stream_options(arguments, arguments.source, arguments.target),
    )
    print_report(report, output)
    return OK
