"""One file of a checkpoint: :func:`consolidate`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tensorizer._crypto.keys import check_decryption
from tensorizer._files.write import WriteOptions, write_contents
from tensorizer._format.names import Path
from tensorizer._io.access import Access
from tensorizer._io.sources import TargetArgument
from tensorizer._save.records import Record
from tensorizer._save.session import HASH_NAMES, check_hashes
from tensorizer._system.checks import thread_limit
from tensorizer._system.devices import empty
from tensorizer.distributed._boxes import check_cover
from tensorizer.distributed._checkpoint.boxes import CheckpointFiles, WantedBox
from tensorizer.distributed._checkpoint.existing import read_markers
from tensorizer.distributed._checkpoint.folder import Folder, PathLike
from tensorizer.distributed._checkpoint.json_values import encoded, from_json
from tensorizer.distributed._checkpoint.marker import JSON, Marker
from tensorizer.encryption import DecryptionParams, EncryptionParams
from tensorizer.errors import UnsupportedContentError

__all__ = ["ConsolidationReport", "consolidate"]

#: Key of the file's metadata under which the simple values of the checkpoint are, as JSON by name.
VALUES_KEY = "checkpoint.values"


class ConsolidationReport(NamedTuple):
    """What :func:`consolidate` did."""

    tensors: int
    """Tensors in the new file."""
    nbytes: int
    """Their bytes."""
    left_out: tuple[str, ...]
    """Names of leaves that are neither tensors nor simple values, which the file does not hold."""


def consolidate(
    checkpoint: PathLike,
    target: TargetArgument,
    *,
    verify_hash: bool = False,
    hashes: Union[str, Collection[str], None] = HASH_NAMES,
    decryption: Optional[DecryptionParams] = None,
    encryption: Optional[EncryptionParams] = None,
    threads: Optional[int] = None,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> ConsolidationReport:
    """Puts the boxes of a checkpoint together, into one ``.tensors`` file of whole tensors under their names.

    It runs in one process, without the ranks that saved the checkpoint. Memory is bounded: tensors are put together
    64 MiB at a time (or one larger tensor) while the previous ones are written. Numbers and texts become JSON in
    the file's metadata, under ``checkpoint.values``; other leaves are left out. Nothing is unpickled.

    Args:
        checkpoint: The folder or ``s3://`` prefix.
        target: Where the file goes, as for :class:`tensorizer.TensorSerializer`.
        verify_hash: Compares every box with its digest.
        hashes: Digests to store in the new file, as for :class:`tensorizer.TensorSerializer`.
        decryption: The key of an encrypted checkpoint.
        encryption: Encrypts the new file.
        threads: Upper bound for threads.
        stream_options: Keywords for opening ``s3://`` URIs, for checkpoint and target.

    Returns:
        What was written.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
        UnsupportedContentError: It has no tensor with elements; nothing was written.
        FormatError: Boxes do not cover a tensor, or the checkpoint is damaged.
        HashMismatchError: With `verify_hash`, a box differs from what was written.
        OSError: A file cannot be read or written. The target is unchanged.
    """
    folder = Folder.at(checkpoint, stream_options)
    check_decryption(decryption)
    access = Access.to_write(encryption, stream_options)
    max_workers = thread_limit("threads", threads)
    check_hashes(hashes, encrypted=encryption is not None)
    markers = read_markers(folder, decryption)
    records = _records(markers)
    if not records:
        raise UnsupportedContentError(f"{folder.where}: wanted a checkpoint with tensors, found one without")
    with CheckpointFiles(folder, verify=verify_hash, encryption=decryption, max_workers=max_workers) as files:
        values, left_out = _values(markers, files)
        contents = _CheckpointContents(files, records, {VALUES_KEY: json.dumps(values)} if values else {})
        options = WriteOptions(format="tensors", hashes=hashes, max_workers=max_workers)
        plan, _ = write_contents(contents, target, options, access)
    return ConsolidationReport(len(records), plan.nbytes, tuple(left_out))


class _CheckpointContents:
    """Tensors that are put together from the boxes of a checkpoint; the source of each record is its boxes."""

    label = "a checkpoint"

    def __init__(self, files: CheckpointFiles, records: Sequence[Record], metadata: Mapping[str, str]) -> None:
        self._files, self.records, self.metadata = files, records, metadata
        self.ties: Mapping[Path, Path] = {}

    def read(self, records: Sequence[Record]) -> list[torch.Tensor]:
        wholes = [empty(record.shape, dtype=record.dtype, device="cpu") for record in records]
        self._files.read(want for record, whole in zip(records, wholes) for want in _parts_of(record, whole))
        return wholes


def _parts_of(record: Record, whole: torch.Tensor) -> Iterator[WantedBox]:
    for offsets, stored in record.source:
        part = tuple(slice(begin, begin + n) for begin, n in zip(offsets, stored.shape))
        all_of_it = tuple(slice(0, n) for n in stored.shape)
        yield WantedBox(str(record.name), stored, record.dtype, stored.shape, all_of_it, whole[part])


def _records(markers: Sequence[Marker]) -> list[Record]:
    """The tensors by name, each with its boxes: their offsets, and where they are stored.

    Those that ranks saved without collectives have their boxes in several markers.
    """
    found: dict[str, Record] = {}
    for marker in markers:
        for name, item in marker.metadata.state_dict_metadata.items():
            if not isinstance(item, TensorStorageMetadata):
                continue
            whole = found.setdefault(name, Record((name,), item.properties.dtype, tuple(item.size), source=[]))
            taken = {offsets for offsets, _ in whole.source}
            boxes = [(tuple(chunk.offsets), chunk.offsets) for chunk in item.chunks if chunk.sizes.numel()]
            whole.source.extend((o, marker.stored[MetadataIndex(name, at)]) for o, at in boxes if o not in taken)
    for name, whole in found.items():
        covered = [tuple((at, at + n) for at, n in zip(offsets, stored.shape)) for offsets, stored in whole.source]
        check_cover(name, whole.shape, covered)
    return list(found.values())


def _values(markers: Sequence[Marker], files: CheckpointFiles) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    left_out = []
    for marker in markers:
        for name, item in marker.metadata.state_dict_metadata.items():
            if isinstance(item, TensorStorageMetadata):
                continue
            stored = marker.stored[MetadataIndex(name)]
            if stored.kind != JSON:
                left_out.append(name)
                continue
            text = stored.text if stored.text is not None else files.read_bytes(name, stored).decode()
            values[name] = encoded(from_json(text))
    return values, left_out
