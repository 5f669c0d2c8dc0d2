"""Detached signatures of existing files."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from tensorizer import _C
from tensorizer._files.verify import check_all
from tensorizer._format.names import listed
from tensorizer._io.access import Access
from tensorizer._io.sinks import WholeFile
from tensorizer._io.sources import read_checked
from tensorizer._io.uri import local_path, scheme_of
from tensorizer._keys import signer_of
from tensorizer._load.authenticity import MAX_SIGNATURE_NBYTES, signature_place
from tensorizer._load.open_file import OpenFile, open_whole
from tensorizer._system.redaction import shown_location
from tensorizer._system.sizes import counted
from tensorizer.errors import AuthenticationError, StreamExistsError, StreamNotFoundError, is_denied, named
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
    check: bool = True,
    force: bool = False,
    encryption: Any = None,
    num_readers: Optional[int] = None,
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> SignReport:
    """Signs an existing ``.tensors`` file: writes the signature beside it and does not change the file.

    Args:
        source: A path or URI. The signature goes beside it, under its name with ``.sig`` appended. Existing signatures
            of the same content are kept if they are right.
        key: A :class:`SigningKey`, or the path of one.
        check: Reads every tensor first and compares it with its digests.
        force: Replaces a signature of another content, and other files.
        encryption: The key of an encrypted file; without it `check` checks only its structure.
        num_readers: Upper bound for reading threads.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening URIs.

    Raises:
        ValueError: Tensors with data and without a SHA-256, which no signature would cover; a ``.safetensors`` file;
            shards; an open file, which has no name; a URI that cannot be written to.
        StreamExistsError: Without `force`, the file of the signature exists and is not a signature of the same content:
            of other weights, say, with the same names and shapes.
        HashMismatchError, CryptographyError: With `check`, the data disagree with the digests of the file.
        OSError: The file cannot be read, or the signature cannot be written.
    """
    signer = signer_of(SigningKey.from_file(key) if isinstance(key, (str, os.PathLike)) else key)
    target = _target(source)
    with open_whole(source, Access.to_read(encryption, stream_options, num_readers)) as file:
        if file.index.format == "safetensors":
            raise ValueError(f"{file.source_name}: .safetensors files have no signatures of ours (docs/signing.md)")
        if file.source is None:
            raise ValueError(f"{file.source_name}: expected one file, got shards: sign each of them")
        existing = _existing(file, target, force, stream_options)
        checked = check and file.readable
        if checked:
            check_all(file, progress)
        content, unbound = named(file.source_name, _C.sign_detached, file.source, file.index, signer, existing)
        if unbound:
            names = listed([file.names[i] for i in unbound])
            raise ValueError(
                f"{file.source_name}: {counted(len(unbound), 'tensor')} without a SHA-256, so nothing can be signed: "
                f"{names}"
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


def _target(source: Any) -> Any:
    if not isinstance(source, (str, bytes, os.PathLike)):
        raise ValueError(
            f"source: expected a path or URI, beside which the signature goes, got {type(source).__name__}"
        )
    place = signature_place(source)
    return place if scheme_of(place) is not None else os.fsdecode(place)


def _existing(file: OpenFile, target: Any, force: bool, stream_options: Optional[Mapping[str, Any]]) -> Optional[bytes]:
    """The detached signatures at the target that are signatures of this content, to be kept."""
    try:
        content = read_checked(target, stream_options, bytes, MAX_SIGNATURE_NBYTES)
    except OSError as error:
        if not (isinstance(error, StreamNotFoundError) or (is_denied(error) and local_path(target) is None)):
            raise
        return None
    except ValueError:
        content = b""  # too large for signatures
    kept = _valid(file, content)
    if kept is None and not force:
        raise StreamExistsError(f"{shown_location(target)} exists and is no signature of this file (force replaces it)")
    return kept


# A detached signature is an annex of the format (docs/format.md, "Annex"): magic, length, sections, checksum.
_FRAME = struct.Struct("<8sI")
_SECTION = struct.Struct("<BBI")
_CHECKSUM = struct.Struct("<I")
_RECORDS, _SIGNATURES = 5, 7
_PUBLIC_KEY_NBYTES, _SIGNATURE_NBYTES = 32, 96


def _valid(file: OpenFile, content: bytes) -> Optional[bytes]:
    """A detached signature with only those of its signatures that are right for the file as it is now; ``None`` where
    none is."""
    assert file.source is not None
    try:
        if not _C.signers_of_detached(file.index, content):
            return None
    except ValueError:
        return None  # no signature, but something
    # The digests of the records are computed from the file: those in the signature are of what it was made for.
    ours, unbound = _C.sign_detached(file.source, file.index, signer_of(SigningKey.generate()))
    sections = _sections(content)
    if unbound or _sections(ours)[_RECORDS] != sections.get(_RECORDS):
        return None
    signatures = sections[_SIGNATURES]
    each = [signatures[i : i + _SIGNATURE_NBYTES] for i in range(0, len(signatures), _SIGNATURE_NBYTES)]
    right = [one for one in each if _is_right(file, one[:_PUBLIC_KEY_NBYTES], content)]
    return _annex({**sections, _SIGNATURES: b"".join(right)}) if right else None


def _is_right(file: OpenFile, public_key: bytes, content: bytes) -> bool:
    assert file.source is not None
    index = _C.open_index(file.source, file.index.start, bool(file.index.encrypted))  # it notes what vouches
    try:
        return bool(_C.check_signatures(index, [public_key], content))
    except (AuthenticationError, ValueError):
        return False


def _sections(annex: bytes) -> dict[int, bytes]:
    """The sections of an annex that was parsed before, by type, in their order."""
    found, at = {}, _FRAME.size
    while at < len(annex) - _CHECKSUM.size:
        kind, _, nbytes = _SECTION.unpack_from(annex, at)
        found[kind] = annex[at + _SECTION.size : at + _SECTION.size + nbytes]
        at += _SECTION.size + nbytes
    return found


def _annex(sections: Mapping[int, bytes]) -> bytes:
    body = b"".join(_SECTION.pack(kind, 0, len(content)) + content for kind, content in sections.items())
    covered = _FRAME.pack(b"TZRANNX1", len(body)) + body
    return covered + _CHECKSUM.pack(zlib.crc32(covered))
