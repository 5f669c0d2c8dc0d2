"""``tensorizer encrypt`` and ``decrypt``."""

from __future__ import annotations

import argparse
import functools
from typing import Any, Optional

from tensorizer import cli
from tensorizer._system.redaction import shown_uri
from tensorizer.cli.convert import print_report
from tensorizer.cli.keys import add_key_options, check_keeps_keys, decryption, encryption, key_paths, names_key
from tensorizer.cli.options import add_common, add_force, check_names_object, stream_options
from tensorizer.cli.output import OK, Output, UsageError, escaped

_PRESETS = ("min", "interactive", "moderate", "sensitive")


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser(
        "encrypt",
        help="write an encrypted copy",
        description="Writes an encrypted copy of a file or of a checkpoint folder, with a key or a passphrase. With "
        "the key of an encrypted source, writes a copy under another key; decrypted data are never written.",
    )
    _add_files(parser)
    add_key_options(parser, "the target", generate=True)
    add_key_options(parser, "an encrypted source", prefix="in-")
    group = parser.add_argument_group("cost of a passphrase")
    group.add_argument("--opslimit", metavar="LIMIT", help=f"passes: a number, or {', '.join(_PRESETS)}")
    group.add_argument("--memlimit", metavar="LIMIT", help=f"memory: bytes, or {', '.join(_PRESETS)}")
    add_force(parser)
    add_common(parser)
    parser.set_defaults(run=run_encrypt)
    parser = commands.add_parser(
        "decrypt",
        help="write a decrypted copy",
        description="Writes a decrypted copy of an encrypted file or checkpoint folder.",
    )
    _add_files(parser)
    add_key_options(parser, "the source")
    add_force(parser)
    add_common(parser)
    parser.set_defaults(run=run_decrypt)


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a path or URI; a checkpoint folder")
    parser.add_argument("target", metavar="DST", help="a path or URI; of a checkpoint, another folder")


def run_encrypt(arguments: argparse.Namespace, output: Output) -> int:
    from tensorizer._encryption import EncryptionParams
    from tensorizer.errors import CryptographyError

    _check_target(arguments)
    with cli.imports():
        from tensorizer._files.inspect import is_encrypted
    source = escaped(shown_uri(arguments.source))
    encrypted = is_encrypted(arguments.source, stream_options(arguments, arguments.source))
    if encrypted and not names_key(arguments, "in-"):
        raise CryptographyError(
            f"{source} is encrypted already: to write it under another key, pass its own (--in-key-file PATH)"
        )
    old = decryption(arguments, output, encrypted, prefix="in-", what=source)
    new = encryption(
        arguments,
        output,
        opslimit=_limit(arguments.opslimit, EncryptionParams.OpsLimit, "--opslimit"),
        memlimit=_limit(arguments.memlimit, EncryptionParams.MemLimit, "--memlimit"),
        required=True,
    )
    return _recrypt(arguments, output, old, new)


def run_decrypt(arguments: argparse.Namespace, output: Output) -> int:
    _check_target(arguments)
    key = decryption(arguments, output, encrypted=True, what=escaped(shown_uri(arguments.source)))
    return _recrypt(arguments, output, key, None)


def _check_target(arguments: argparse.Namespace) -> None:
    """Refuses a target that exists, before a key is derived from a passphrase, which takes a while."""
    from tensorizer._files.copy import check_target
    from tensorizer._io.call_options import CallOptions
    from tensorizer._io.model_files import is_checkpoint

    options = stream_options(arguments, arguments.source, arguments.target)
    if is_checkpoint(arguments.source, CallOptions.to_read(stream_options=options)):
        return
    check_names_object(arguments.target)
    with cli.imports():
        from tensorizer._files.write import file_in_folder
    check_keeps_keys(key_paths(arguments), [file_in_folder(arguments.target, "tensors")])
    check_target(arguments.target, arguments.force, CallOptions.to_write(stream_options=options))


def _limit(text: Optional[str], presets: Any, option: str) -> Any:
    if text is None:
        return None
    if text.lower() in _PRESETS:
        return presets[text.upper()]
    if not text.isdigit():
        raise UsageError(f"{option}: expected a number or one of {', '.join(_PRESETS)}, got {text!r}")
    return int(text)


def _recrypt(arguments: argparse.Namespace, output: Output, decryption: Any, encryption: Any) -> int:
    from tensorizer._io.call_options import CallOptions
    from tensorizer._io.model_files import is_checkpoint

    options = stream_options(arguments, arguments.source, arguments.target)
    common: dict[str, Any] = {"force": arguments.force, "progress": output.progress(), "stream_options": options}
    with cli.imports():
        if is_checkpoint(arguments.source, CallOptions.to_read(stream_options=options)):
            from tensorizer.distributed._checkpoint.recrypt import recrypt as write
        else:
            from tensorizer._files.convert import convert

            write = functools.partial(convert, format="tensors")
    report = write(
        arguments.source,
        arguments.target,
        encryption=encryption,
        decryption=decryption,
        **common,
    )
    print_report(report, output)
    return OK
