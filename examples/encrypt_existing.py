"""Adds encryption to an existing tensor file, or removes it.

    encrypt_existing.py add    pwhash --keyfile F --opslimit L --memlimit L [--salt HEX] --infile A --outfile B [-q]
    encrypt_existing.py add    exact  --keyfile F --infile A --outfile B [-q]
    encrypt_existing.py add    random --keyfile F --infile A --outfile B [-q]
    encrypt_existing.py remove pwhash --keyfile F --infile A --outfile B [-q]
    encrypt_existing.py remove exact  --keyfile F --infile A --outfile B [-q]

``pwhash`` reads a passphrase from the key file, ``exact`` a key of 32 bytes; ``random`` makes a key and writes the key
file. A and B are paths or URIs. The model may be larger than the memory. Exit status: 0 done, 1 failed, 2 wrong usage.
``tensorizer encrypt`` and ``tensorizer decrypt`` do the same and more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Callable, Optional

import tensorizer
from tensorizer import DecryptionParams, EncryptionParams


def limit(presets: type[IntEnum]) -> Callable[[str], int]:
    """Parses the name of a preset, in any case, or an integer."""

    def parse(text: str) -> int:
        return presets[text.upper()] if text.upper() in presets.__members__ else int(text)

    parse.__name__ = f"limit ({', '.join(presets.__members__)} or an integer)"
    return parse


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Add encryption to an existing tensor file, or remove it.")
    actions = parser.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add", help="encrypt a file").add_subparsers(dest="kind", required=True)
    remove = actions.add_parser("remove", help="decrypt a file").add_subparsers(dest="kind", required=True)
    derived = add.add_parser("pwhash", help="with a key derived from a passphrase")
    derived.add_argument("--opslimit", type=limit(EncryptionParams.OpsLimit), required=True, help="passes")
    derived.add_argument("--memlimit", type=limit(EncryptionParams.MemLimit), required=True, help="memory in bytes")
    derived.add_argument("--salt", type=bytes.fromhex, help="32 hex digits (default: random)")
    passphrase = remove.add_parser("pwhash", help="a file encrypted with a passphrase")
    others = (
        add.add_parser("exact", help="with a key of 32 bytes"),
        add.add_parser("random", help="with a new random key, written to the key file"),
        remove.add_parser("exact", help="a file encrypted with a key of 32 bytes"),
    )
    for command in (derived, passphrase, *others):
        command.add_argument("--keyfile", required=True, help="holds the passphrase or the key")
        command.add_argument("--infile", required=True, help="the file to read: a path or URI")
        command.add_argument("--outfile", required=True, help="the file to write: a path or URI")
        command.add_argument("-q", "--quiet", action="store_true", help="do not list the tensors")
    for command in (derived, passphrase):
        command.add_argument(
            "--no-strip-trailing-newlines", dest="strip", action="store_false", help="they belong to the passphrase"
        )
    return parser


def read_params(args: argparse.Namespace) -> tuple[Optional[EncryptionParams], Optional[DecryptionParams]]:
    """The parameters for writing and for reading, of which one is None.

    Raises:
        OSError: The key file cannot be read.
        ValueError: It holds no key or passphrase, or a limit or the salt is wrong.
    """
    if args.kind == "random":
        return EncryptionParams.random(), None
    secret = Path(args.keyfile).read_bytes()
    if args.kind == "exact":
        return (EncryptionParams(secret), None) if args.action == "add" else (None, DecryptionParams.from_key(secret))
    if args.strip:
        secret = secret.rstrip(b"\r\n")
    if args.action == "add":
        return EncryptionParams.from_string(secret, args.opslimit, args.memlimit, args.salt), None
    return None, DecryptionParams.from_string(secret)


@contextlib.contextmanager
def kept_key(path: str, key: bytes) -> Iterator[None]:
    """Writes the key beside `path` before the block, which encrypts with it, and moves it there afterwards."""
    new = Path(f"{path}.new")
    new.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    try:
        yield
    except BaseException:
        new.unlink()
        raise
    new.replace(path)


def run(
    args: argparse.Namespace, encryption: Optional[EncryptionParams], decryption: Optional[DecryptionParams]
) -> None:
    with kept_key(args.keyfile, encryption.key) if encryption and args.kind == "random" else contextlib.nullcontext():
        report = tensorizer.convert(
            args.infile, args.outfile, format="tensors", encryption=encryption, decryption=decryption
        )
    if encryption and args.kind == "pwhash":
        print(f"salt: {encryption.salt.hex()}")
    if not args.quiet:
        for tensor in tensorizer.inspect(args.outfile).tensors:
            name = tensor.name if isinstance(tensor.name, str) else "/".join(map(str, tensor.name))
            print(f"{name}: torch.{tensor.dtype} {list(tensor.shape)}")
        done = "encrypted" if encryption else "decrypted"
        print(f"{done} {report['tensors']} tensors: {report['source']} -> {report['target']}")


def main(argv: Optional[list[str]] = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if len({os.path.realpath(path) for path in (args.keyfile, args.infile, args.outfile)}) < 3:
        parser.error("--keyfile, --infile and --outfile must be three different files")
    try:
        params = read_params(args)
    except (OSError, ValueError, tensorizer.CryptographyError) as error:
        parser.error(f"{args.keyfile}: {error}")
    try:
        run(args, *params)
    except Exception as error:
        print(f"{parser.prog}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
