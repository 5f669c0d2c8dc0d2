"""Detached signatures of existing files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Optional

from tensorizer import _C
from tensorizer._files.checkpoints import reader
from tensorizer._files.verify import check_all
from tensorizer._format.names import listed
from tensorizer._io.call_options import CallOptions
from tensorizer._io.model_files import is_checkpoint
from tensorizer._io.sinks import WholeFile
from tensorizer._io.sources import read_checked
from tensorizer._io.uri import local_path, scheme_of, signature_place
from tensorizer._keys import signer_of
from tensorizer._load.authenticity import MAX_SIGNATURE_NBYTES
from tensorizer._load.open_file import OpenFile, open_whole
from tensorizer._progress import ProgressArgument
from tensorizer._signing import SigningKey
from tensorizer._system.redaction import shown_location
from tensorizer._system.sizes import counted
from tensorizer.errors import StreamExistsError, StreamNotFoundError, is_denied, named


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
) -> dict[str, Any]:
    """Signs an existing ``.tensors`` file: writes the signature beside it and does not change the file.

    Of a checkpoint, every file of tensors is signed, but not the marker with the values that are no tensors.

    Args:
        source: A path or URI. The signature goes beside it, under its name with ``.sig`` appended. Existing signatures
            of the same content are kept if they are right. Or a checkpoint folder that ``TensorizerWriter`` has written
            with ``hashes="sha256"``.
        key: A :class:`SigningKey`, or the path of one.
        check: Reads every tensor first and compares it with its digests.
        force: Replaces a signature of another content, and other files.
        encryption: The key of an encrypted file; without it `check` checks only its structure.
        num_readers: Upper bound for reading threads.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening URIs.

    Returns:
        By name: ``source``; ``signature``, where it was written, of a checkpoint all places; ``public_key`` of `key`,
        and ``signers``, the public keys of all signatures there, as hexadecimal digits; ``checked``, whether every
        tensor was read and agrees with its digests.

    Raises:
        ValueError: Tensors with data and without a SHA-256, which no signature would cover; a ``.safetensors`` file;
            shards; an open file, which has no name; a URI that cannot be written to.
        StreamExistsError: Without `force`, the file of the signature exists and is not a signature of the same content:
            of other weights, say, with the same names and shapes.
        HashMismatchError, CryptographyError: With `check`, the data disagree with the digests of the file.
        OSError: The file cannot be read, or the signature cannot be written.

    Examples:
        >>> key = tensorizer.SigningKey.generate()
        >>> tensorizer.sign("model.tensors", key)["signature"]
        'model.tensors.sig'
        >>> tensorizer.verify("model.tensors", public_key=key.public_key).ok
        True
    """
    signer = signer_of(SigningKey.from_file(key) if isinstance(key, (str, os.PathLike)) else key)
    call = CallOptions.to_read(encryption, stream_options, num_readers, progress)
    if is_checkpoint(source, call):
        reports = [_sign(file, signer, check, force, call) for file in reader().files_of(source, call)]
        return {
            "source": shown_location(source),
            "signature": tuple(report["signature"] for report in reports),
            "public_key": signer.public_key.hex(),
            "signers": tuple(one for one in reports[0]["signers"] if all(one in r["signers"] for r in reports)),
            "checked": all(report["checked"] for report in reports),
        }
    return _sign(source, signer, check, force, call)


def _sign(source: Any, signer: _C.Signer, check: bool, force: bool, call: CallOptions) -> dict[str, Any]:
    target = _target(source)
    with open_whole(source, call) as file:
        if file.index.format == "safetensors":
            raise ValueError(f"{file.source_name}: .safetensors files have no signatures of ours (docs/signing.md)")
        if file.source is None:
            raise ValueError(f"{file.source_name}: expected one file, got shards: sign each of them")
        records = named(file.source_name, _C.digest_records, file.source, file.index)
        if records.unbound:
            names = listed([file.names[i] for i in records.unbound])
            raise ValueError(
                f"{file.source_name}: {counted(len(records.unbound), 'tensor')} without a SHA-256, so nothing can be "
                f"signed: {names}"
            )
        kept = _kept(file, records, target, force, call)
        checked = check and file.readable
        if checked:
            check_all(file, call.progress)
        content = named(file.source_name, _C.sign_detached, file.index, records, signer, kept)
        signers = _C.signers_of_detached(file.index, content)
        label = file.source_name
    with WholeFile(target, call) as out:
        out.append(content)
    return {
        "source": label,
        "signature": str(shown_location(target)),
        "public_key": signer.public_key.hex(),
        "signers": tuple(one.hex() for one in signers),
        "checked": checked,
    }


def _target(source: Any) -> Any:
    if not isinstance(source, (str, bytes, os.PathLike)):
        raise ValueError(
            f"source: expected a path or URI, beside which the signature goes, got {type(source).__name__}"
        )
    place = signature_place(source)
    return place if scheme_of(place) is not None else os.fsdecode(place)


def _kept(
    file: OpenFile, records: _C.SignedRecords, target: Any, force: bool, options: CallOptions
) -> list[tuple[bytes, bytes]]:
    """The signatures at the target that are right for this content, to be kept: pairs of public key and signature."""
    try:
        content = read_checked(target, options, bytes, MAX_SIGNATURE_NBYTES)
    except OSError as error:
        if not (isinstance(error, StreamNotFoundError) or (is_denied(error) and local_path(target) is None)):
            raise
        return []
    except ValueError:
        content = b""  # too large for signatures
    kept = _C.valid_signatures(file.index, records, content)
    if not kept and not force:
        raise StreamExistsError(f"{shown_location(target)} exists and is no signature of this file (force replaces it)")
    return kept
