"""``tensorizer sign``: signs files beside them, and makes keys for that."""

from __future__ import annotations

import argparse
from typing import Any

from tensorizer import cli
from tensorizer.cli.keys import add_key_options, check_keeps_keys, decryption, key_paths
from tensorizer.cli.options import add_common, add_force, stream_options
from tensorizer.cli.output import OK, Output, UsageError, escaped


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser(
        "sign",
        help="sign files, or create a signing key",
        description="Writes the signature of FILE to FILE.sig beside it. The file itself is not changed. "
        "Existing signatures of the same content are kept.",
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="a path or URI; a checkpoint folder: each of its files"
    )
    parser.add_argument("--key", metavar="PATH", help="the private key: a PEM file or 64 hexadecimal digits")
    parser.add_argument("--generate-key", metavar="PATH", help="create a key: PATH, and its public half PATH.pub")
    parser.add_argument("--no-check", action="store_true", help="skip comparing the tensors with their digests first")
    add_force(parser)
    add_key_options(parser, "an encrypted file, for the check", prefix="file-")
    add_common(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    if arguments.generate_key:
        if arguments.files or arguments.key:
            raise UsageError("--generate-key makes a key and signs nothing")
        return _generate(arguments.generate_key, output)
    if not arguments.files or not arguments.key:
        raise UsageError("expected FILE and --key, or --generate-key")
    with cli.imports():
        from tensorizer._files.sign import sign
    from tensorizer._io.uri import signature_place
    from tensorizer._signing import SigningKey

    places = [signature_place(file) for file in arguments.files]
    check_keeps_keys({"--key": arguments.key, **key_paths(arguments)}, places)

    key = SigningKey.from_file(arguments.key)
    documents = []
    for file in arguments.files:
        options = stream_options(arguments, file)
        report = sign(
            file,
            key,
            check=not arguments.no_check,
            force=arguments.force,
            encryption=decryption(arguments, output, False, prefix="file-", what=escaped(file)),
            num_readers=arguments.num_readers,
            progress=output.progress(),
            stream_options=options,
        )
        documents.append(report)
        if not output.json and not output.quiet:
            places = report["signature"]
            for place in [places] if isinstance(places, str) else places:
                output.line(f"{escaped(place)}: signed by {report['public_key']}")
            if not report["checked"] and not arguments.no_check:
                output.note("  encrypted, and no key: only its structure was checked")
    if output.json:
        output.document({"files": documents})
    return OK


def _generate(path: str, output: Output) -> int:
    import os

    from tensorizer._signing import SigningKey
    from tensorizer.errors import StreamExistsError

    public = f"{path}.pub"
    for place in (path, public):
        if os.path.lexists(place):
            raise StreamExistsError(f"{place} exists: a key is never replaced")
    key = SigningKey.generate()
    key.save(path)
    key.public_key.save(public)
    if output.json:
        output.document({"key": path, "public_key_file": public, "public_key": str(key.public_key)})
    elif not output.quiet:
        output.line(f"{escaped(path)}: a new private key; {escaped(public)}: {key.public_key}")
    return OK
