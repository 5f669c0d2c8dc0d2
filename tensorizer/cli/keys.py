"""Reads keys from files and environment variables; the arguments never contain a key."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Optional

from tensorizer._io.uri import local_path
from tensorizer._system.config import env_text
from tensorizer._system.redaction import shown_uri
from tensorizer.cli.output import Output, UsageError, escaped, option_of

if TYPE_CHECKING:
    from tensorizer._encryption import DecryptionParams, EncryptionParams


_KEY_NBYTES = 32
_MAX_PASSPHRASE_NBYTES = 65_536  # no passphrase is this long; devices and pipes may have no end
_EXISTS = "{} exists: a key is never replaced"
_FILES = ("key_file", "passphrase_file", "generate_key")  # the ends of the names of options with paths


_Secret = tuple[bytes, bool]  # a key or a passphrase, and whether it is a key


def add_key_options(parser: argparse.ArgumentParser, what: str, prefix: str = "", generate: bool = False) -> None:
    """Adds the options for a key. `prefix` is put before each name; `what` names the key in the help text."""
    group = parser.add_argument_group(f"key of {what}").add_mutually_exclusive_group()
    group.add_argument(f"--{prefix}key-file", metavar="PATH", help="a file of 32 bytes or 64 hexadecimal digits")
    group.add_argument(f"--{prefix}key-env", metavar="VAR", help="an environment variable with 64 hexadecimal digits")
    group.add_argument(
        f"--{prefix}passphrase-file", metavar="PATH", help="a file with a passphrase, - for standard input"
    )
    group.add_argument(f"--{prefix}passphrase-env", metavar="VAR", help="an environment variable with a passphrase")
    if generate:
        group.add_argument(f"--{prefix}generate-key", metavar="PATH", help="write a new random key to this new file")


def key_paths(arguments: argparse.Namespace) -> dict[str, str]:
    """The files of keys and passphrases, by the options that name them."""
    named = {option_of(name): value for name, value in vars(arguments).items() if name.endswith(_FILES)}
    return {name: path for name, path in named.items() if path not in (None, "-")}


def names_key(arguments: argparse.Namespace, prefix: str = "") -> bool:
    """Whether one of the options of :func:`add_key_options` names a key or passphrase."""
    kinds = ("key_file", "key_env", "passphrase_file", "passphrase_env")
    return any(_option(arguments, prefix, kind) is not None for kind in kinds)


def check_keeps_keys(paths: Mapping[str, str], outputs: Sequence[str], copied: Sequence[str] = ()) -> None:
    """Refuses outputs that would replace the file of a key, as :func:`key_paths` finds them, and copies of one.

    Args:
        paths: The files of keys, by the options that name them.
        outputs: Paths and URIs that the command will write.
        copied: Local files that the command will copy because they are in a folder.

    Raises:
        UsageError: An output or a file of `copied` is a file of a key, also under another name.
    """
    for option, path in paths.items():
        for output in outputs:
            place = local_path(output)
            if place is not None and _is_same_file(place, path):
                raise UsageError(f"{option} and the output {escaped(shown_uri(output))} name the same file")
        for file in copied:
            if _is_same_file(file, path):
                raise UsageError(f"{option} names {escaped(file)}, which --all would copy: move the key elsewhere")


def _is_same_file(one: str, other: str) -> bool:
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them does not exist
        return False


def decryption(
    arguments: argparse.Namespace, output: Output, encrypted: bool, prefix: str = "", what: str = "the file"
) -> Optional[DecryptionParams]:
    """The key for reading, from the arguments or from the default environment variable.

    Args:
        arguments: The parsed arguments, with the options of `prefix`.
        output: Prints notes.
        encrypted: Whether the file is encrypted. A plain file needs no key, and reading it with one is refused later.
        prefix: As for :func:`add_key_options`.
        what: The name of the file, for the message.

    Raises:
        CryptographyError: The file is encrypted and there is no key.
    """
    from tensorizer._encryption import DecryptionParams
    from tensorizer.errors import CryptographyError

    secret = _from_arguments(arguments, output, prefix)
    if secret is None and encrypted:
        raise CryptographyError(
            f"{what}: encrypted; pass --{prefix}key-file, --{prefix}key-env, --{prefix}passphrase-file or "
            f"--{prefix}passphrase-env"
        )
    if secret is None:
        return None
    value, is_key = secret
    return DecryptionParams.from_key(value) if is_key else DecryptionParams.from_string(value)


def encryption(
    arguments: argparse.Namespace,
    output: Output,
    opslimit: Optional[int] = None,
    memlimit: Optional[int] = None,
    required: bool = False,
) -> Optional[EncryptionParams]:
    """The key for writing; ``None`` if the arguments name none.

    A new key is made and written when the save first needs it, so an earlier error leaves no key file.

    Raises:
        UsageError: A key is `required`, but the arguments name none.
        StreamExistsError: The file for a new key exists.
    """
    from tensorizer._encryption import EncryptionParams
    from tensorizer.errors import StreamExistsError

    path = arguments.generate_key
    if path is None:
        return _named_for_writing(arguments, output, opslimit, memlimit, required)
    if os.path.lexists(path):
        raise StreamExistsError(_EXISTS.format(path))

    def draw() -> bytes:
        key = EncryptionParams.random().key
        write_new_key(path, key)
        output.note(f"wrote a new key to {escaped(path)}")
        return key

    return EncryptionParams.from_provider(draw)


def _named_for_writing(
    arguments: argparse.Namespace,
    output: Output,
    opslimit: Optional[int],
    memlimit: Optional[int],
    required: bool,
) -> Optional[EncryptionParams]:
    from tensorizer._encryption import EncryptionParams

    secret = _from_arguments(arguments, output, "")
    if secret is None and required:
        raise UsageError("no key: pass --key-file, --key-env, --passphrase-file, --passphrase-env or --generate-key")
    if secret is None:
        return None
    value, is_key = secret
    return EncryptionParams(value) if is_key else EncryptionParams.from_string(value, opslimit, memlimit)


def write_new_key(path: str, key: bytes) -> None:
    """Writes a file that only its owner can read. It gets its name when it is complete, and never replaces another."""
    from tensorizer._io.new_files import FileAccess, NewFile
    from tensorizer.errors import StreamExistsError

    with NewFile(os.path.abspath(path), FileAccess(0o600)) as file:
        file.write(key)
        try:
            file.publish(exclusive=True)
        except FileExistsError:
            raise StreamExistsError(_EXISTS.format(path)) from None


def _option(arguments: argparse.Namespace, prefix: str, kind: str) -> Optional[str]:
    value: Optional[str] = getattr(arguments, f"{prefix.replace('-', '_')}{kind}", None)
    return value


def _from_arguments(arguments: argparse.Namespace, output: Output, prefix: str) -> Optional[_Secret]:
    path = _option(arguments, prefix, "key_file")
    if path is not None:
        return _key_of_file(path, output), True
    path = _option(arguments, prefix, "passphrase_file")
    if path is not None:
        return _passphrase_of_file(path, output), False
    name = _option(arguments, prefix, "key_env")
    if name is not None:
        return _key_of_text(_variable(name), f"environment variable {name}"), True
    name = _option(arguments, prefix, "passphrase_env")
    return None if name is None else (os.fsencode(_variable(name)), False)


def _variable(name: str) -> str:
    value = env_text(name)
    if value is None:
        raise UsageError(f"environment variable {name} is not set")
    return value


def _key_of_file(path: str, output: Output) -> bytes:
    _warn_if_readable_by_others(path, output)
    with open(path, "rb") as file:
        content = file.read(4 * _KEY_NBYTES)
    if len(content) == _KEY_NBYTES:
        return content
    return _key_of_text(content.decode("ascii", "replace"), f"key file {path}")


def _key_of_text(text: str, what: str) -> bytes:
    from tensorizer.errors import CryptographyError

    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_NBYTES:
        raise CryptographyError(f"{what}: expected {_KEY_NBYTES} bytes or {2 * _KEY_NBYTES} hexadecimal digits")
    return key


def _passphrase_of_file(path: str, output: Output) -> bytes:
    from tensorizer.errors import CryptographyError

    where = "standard input" if path == "-" else path
    if path == "-":
        content = sys.stdin.buffer.read(_MAX_PASSPHRASE_NBYTES + 1)
    else:
        _warn_if_readable_by_others(path, output)
        with open(path, "rb") as file:
            content = file.read(_MAX_PASSPHRASE_NBYTES + 1)
    if len(content) > _MAX_PASSPHRASE_NBYTES:
        raise CryptographyError(f"{where}: expected a passphrase of at most {_MAX_PASSPHRASE_NBYTES} bytes, got more")
    for ending in (b"\r\n", b"\n"):
        if content.endswith(ending):
            content = content[: -len(ending)]
            break
    if not content:
        raise CryptographyError(f"{where}: the passphrase is empty")
    return content


def _warn_if_readable_by_others(path: str, output: Output) -> None:
    if os.stat(path).st_mode & stat.S_IROTH and os.path.isfile(path):
        output.note(f"warning: every user of this machine can read {path} (chmod 600 {path})")
