"""Adds encryption to an existing tensor file, or removes it.

    encrypt_existing.py add    pwhash --keyfile F --opslimit L --memlimit L [--salt HEX] --infile A --outfile B [-q]
    encrypt_existing.py add    exact  --keyfile F --infile A --outfile B [-q]
    encrypt_existing.py add    random --keyfile F --infile A --outfile B [-q]
    encrypt_existing.py remove pwhash --keyfile F --infile A --outfile B [-q]
    encrypt_existing.py remove exact  --keyfile F --infile A --outfile B [-q]

``pwhash`` takes a passphrase from the key file, ``exact`` 32 secret bytes; ``random`` draws them and writes the key
file. A and B may be local paths or any URI that the library reads and writes. Tensors are copied one by one, so the
model may be larger than the memory. Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Callable, Optional, Union

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer, stream_io

KEY_NBYTES = 32
SALT_NBYTES = 16

Limit = Union[IntEnum, int]


def copy_tensors(
    infile: str,
    outfile: str,
    encryption: Optional[EncryptionParams],
    decryption: Optional[DecryptionParams],
    report: Callable[[str], None],
    before_end: Callable[[], None],
) -> int:
    """Writes every tensor of one file to another; returns how many.

    Hashes are verified on the way, and at most one tensor (or 64 MiB of small ones) is in memory. ``before_end`` is
    called when all are written and the target is not closed yet: if it raises, nothing is uploaded.
    """
    count = 0
    with (
        TensorDeserializer(
            infile, device="cpu", lazy_load=True, verify_hash=True, allow_missing_hashes=True, encryption=decryption
        ) as source,
        TensorSerializer(outfile, encryption=encryption) as target,
    ):
        for module_index, tensor_type, name, tensor in source.read_tensors(cache=False):
            target.write_tensor(module_index, name, tensor_type, tensor)
            count += 1
            shown = name if isinstance(name, str) else "/".join(map(str, name))
            report(f"{shown}: {tensor.dtype} {list(tensor.shape)}")
        before_end()
    return count


@contextlib.contextmanager
def complete_or_absent(outfile: str) -> Iterator[str]:
    """Where to write so that ``outfile`` appears when all of it is there. Remote stores see to that themselves."""
    scheme, separator, _ = outfile.partition("://")
    if separator and scheme.lower() not in stream_io.LOCAL_SCHEMES:
        yield outfile
        return
    target = Path(stream_io.path_of_file_uri(outfile) if separator else outfile).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        partial = Path(folder) / target.name
        yield str(partial)
        os.replace(partial, target)


def write_key(path: str, key: bytes) -> None:
    """Replaces ``path`` by a file that only its owner can read, and waits until it is on the disk."""
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        os.unlink(partial)
        raise


# --- arguments -------------------------------------------------------------------------------------------------


def limit(presets: type[IntEnum]) -> Callable[[str], Limit]:
    """Parses the name of a preset, in any case, or an integer."""

    def parse(text: str) -> Limit:
        with contextlib.suppress(KeyError):
            return presets[text.upper()]
        with contextlib.suppress(ValueError):
            return int(text)
        names = ", ".join(preset.name for preset in presets)
        raise argparse.ArgumentTypeError(f"wanted one of {names}, or an integer; found {text!r}")

    return parse


def salt(text: str) -> bytes:
    """Parses 32 hex digits."""
    with contextlib.suppress(ValueError):
        value = bytes.fromhex(text)
        if len(value) == SALT_NBYTES:
            return value
    raise argparse.ArgumentTypeError(f"wanted {2 * SALT_NBYTES} hex digits")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Add encryption to an existing tensor file, or remove it.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="{add,remove}")
    add = actions.add_parser("add", help="encrypt a file").add_subparsers(dest="kind", required=True)
    remove = actions.add_parser("remove", help="decrypt a file").add_subparsers(dest="kind", required=True)

    derived = add.add_parser("pwhash", help="with a key derived from a passphrase")
    derived.add_argument(
        "--opslimit",
        type=limit(EncryptionParams.OpsLimit),
        required=True,
        help="passes over the memory: MIN, INTERACTIVE, MODERATE, SENSITIVE or a number",
    )
    derived.add_argument(
        "--memlimit",
        type=limit(EncryptionParams.MemLimit),
        required=True,
        help="memory to use: MIN, INTERACTIVE, MODERATE, SENSITIVE or a number of bytes",
    )
    derived.add_argument("--salt", type=salt, help="32 hex digits (default: random)")
    exact = add.add_parser("exact", help="with a key of 32 bytes")
    drawn = add.add_parser("random", help="with a new random key, written to the key file")
    passphrase = remove.add_parser("pwhash", help="a file encrypted with a passphrase")
    key = remove.add_parser("exact", help="a file encrypted with a key of 32 bytes")

    for command in (derived, exact, drawn, passphrase, key):
        command.add_argument("--keyfile", required=True, help="holds the passphrase or the key")
        command.add_argument("--infile", required=True, help="the file to read: a path or URI")
        command.add_argument("--outfile", required=True, help="the file to write: a path or URI")
        command.add_argument("-q", "--quiet", action="store_true", help="do not list the tensors")
    for command in (derived, passphrase):
        command.add_argument(
            "--no-strip-trailing-newlines",
            dest="strip",
            action="store_false",
            help="line ends at the end of the key file belong to the passphrase",
        )
    return parser


def same_file(a: str, b: str) -> bool:
    if "://" in a or "://" in b:
        return a == b
    with contextlib.suppress(OSError):
        return os.path.samefile(a, b)
    return os.path.realpath(a) == os.path.realpath(b)


def check_paths(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if same_file(args.infile, args.outfile):
        parser.error("--infile and --outfile are the same file")
    for name in ("infile", "outfile"):
        if same_file(args.keyfile, getattr(args, name)):
            parser.error(f"--keyfile and --{name} are the same file")


def read_key_file(parser: argparse.ArgumentParser, args: argparse.Namespace) -> bytes:
    try:
        secret = Path(args.keyfile).read_bytes()
    except OSError as error:
        parser.error(f"--keyfile: {error}")
    if args.kind == "exact":
        if len(secret) != KEY_NBYTES:
            parser.error(f"--keyfile: wanted {KEY_NBYTES} bytes, found {len(secret)}")
        return secret
    if args.strip:
        secret = secret.rstrip(b"\r\n")
    if not secret:
        parser.error("--keyfile: the passphrase is empty")
    return secret


def encryption_for(parser: argparse.ArgumentParser, args: argparse.Namespace) -> EncryptionParams:
    if args.kind == "random":
        return EncryptionParams.random()
    secret = read_key_file(parser, args)
    if args.kind == "exact":
        return EncryptionParams(secret)
    try:
        return EncryptionParams.from_string(secret, args.opslimit, args.memlimit, args.salt)
    except ValueError as error:
        parser.error(str(error))


def decryption_for(parser: argparse.ArgumentParser, args: argparse.Namespace) -> DecryptionParams:
    secret = read_key_file(parser, args)
    return DecryptionParams.from_key(secret) if args.kind == "exact" else DecryptionParams.from_string(secret)


# --- the program -----------------------------------------------------------------------------------------------


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    encryption = encryption_for(parser, args) if args.action == "add" else None
    decryption = decryption_for(parser, args) if args.action == "remove" else None
    report: Callable[[str], None] = (lambda text: None) if args.quiet else print

    def keep_new_key() -> None:
        if encryption is not None and args.kind == "random":
            write_key(args.keyfile, encryption.key)  # before the encrypted file appears, which is useless without

    with complete_or_absent(args.outfile) as outfile:
        count = copy_tensors(args.infile, outfile, encryption, decryption, report, keep_new_key)
    if encryption is not None and args.kind == "pwhash":
        print(f"salt: {encryption.salt.hex()}")
    report(f"{'encrypted' if encryption else 'decrypted'} {count} tensors: {args.infile} -> {args.outfile}")


def main(argv: Optional[list[str]] = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    check_paths(parser, args)
    try:
        run(parser, args)
    except Exception as error:
        print(f"{parser.prog}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
