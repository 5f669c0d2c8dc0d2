"""Detached signatures of existing files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from tensorizer import _C
from tensorizer._files.verify import check_all
from tensorizer._format.names import listed
from tensorizer._io.access import Access
from tensorizer._io.sinks import WholeFile
from tensorizer._io.sources import read_checked
from tensorizer._io.uri import LOCAL_SCHEMES, scheme_of
from tensorizer._keys import signer_of
from tensorizer._load.authenticity import MAX_SIGNATURE_NBYTES, signature_place
from tensorizer._load.open_file import OpenFile, open_whole
from tensorizer._system.redaction import shown_location
from tensorizer.errors import StreamExistsError, StreamNotFoundError, named
from tensorizer.progress import ProgressArgument
from tensorizer.signing import SigningKey


@dataclass(frozen=True)
class SignReport:
    """What was signed, and what was checked before."""

    source: str
    signature: str
    """Where the signature was written."""
    public_key: str
    """Of the key that signed, as hexadecimal digits."""
    signers: tuple[str, ...]
    """Of all signatures in that file."""
    checked: bool
    """Whether every tensor was read and agrees with its digests. Never for encrypted files without their key."""


def sign(
    source: Any,
    key: Any,
    *,
    signature: Any = None,
    check: bool = True,
    force: bool = False,
    encryption: Any = None,
    num_readers: Optional[int] = None,
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> SignReport:
    """Signs an existing ``.tensors`` file: writes the signature beside it and does not change the file.

    Args:
        source: A path, URI, descriptor or open binary file object.
        key: A :class:`SigningKey`, or the path of one.
        signature: Where to write the signature, a path or URI; ``None``: beside a local file, under its name with
            ``.sig`` appended. Existing signatures of the same content are kept.
        check: Reads every tensor first and compares it with its digests.
        force: Replaces a signature of another content.
        encryption: The key of an encrypted file; without it `check` checks only its structure.
        num_readers: Upper bound for reading threads.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening URIs.

    Raises:
        ValueError: Tensors with data and without a SHA-256, which no signature would cover; a ``.safetensors`` file;
            shards; the source is remote or an open file and `signature` is missing.
        StreamExistsError: Without `force`, the file of the signature exists and is not a signature of the same content.
        HashMismatchError, CryptographyError: With `check`, the data disagree with the digests of the file.
        OSError: The file cannot be read, or the signature cannot be written.
    """
    signer = signer_of(SigningKey.from_file(key) if isinstance(key, (str, os.PathLike)) else key)
    target = _target(source, signature)
    with open_whole(source, Access.to_read(encryption, stream_options, num_readers)) as file:
        if file.index.format == "safetensors":
            raise ValueError(f"{file.source_name}: .safetensors files have no signatures of ours (docs/signing.md)")
        if file.source is None:
            raise ValueError(f"{file.source_name}: wanted one file, found shards: sign each of them")
        existing = _existing(file, target, force, stream_options)
        checked = check and file.readable
        if checked:
            check_all(file, progress)
        content, unbound = named(file.source_name, _C.sign_detached, file.source, file.index, signer, existing)
        if unbound:
            names = listed([file.names[i] for i in unbound])
            raise ValueError(
                f"{file.source_name}: {len(unbound)} tensors have no SHA-256, so nothing could be signed: {names}"
            )
        signers = _C.signers_of_detached(file.index, content)
        label = file.source_name
    with WholeFile(target, stream_options) as out:
        out.append(content)
    return SignReport(
        label,
        str(shown_location(target)),
        signer.public_key.hex(),
        tuple(one.hex() for one in signers),
        checked,
    )


def _target(source: Any, signature: Any) -> Any:
    if signature is not None:
        return signature
    is_local = isinstance(source, (str, bytes, os.PathLike)) and scheme_of(source) in (None, *LOCAL_SCHEMES)
    if not is_local:
        raise ValueError("signature: say where it goes, since the source is no local path")
    return os.fsdecode(signature_place(source))


def _existing(file: OpenFile, target: Any, force: bool, stream_options: Optional[Mapping[str, Any]]) -> Optional[bytes]:
    """Signatures of the same content that are at the target, to be kept."""
    try:
        content = read_checked(target, stream_options, bytes, MAX_SIGNATURE_NBYTES)
        if _C.signers_of_detached(file.index, content):
            return content
    except StreamNotFoundError:
        return None
    except ValueError:
        pass  # no signature, but something
    if not force:
        raise StreamExistsError(f"{shown_location(target)} exists and is no signature of this file (force replaces it)")
    return None
