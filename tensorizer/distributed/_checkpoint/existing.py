"""Checkpoints that are there: is one complete, what does not belong to it, are its bytes those that were written; one
file of it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tensorizer._files.contents import Contents
from tensorizer._files.write import WriteOptions, write_contents
from tensorizer._io.access import Access
from tensorizer._io.sources import TargetArgument
from tensorizer._save.records import Record
from tensorizer._save.session import HASH_NAMES, check_hashes
from tensorizer._system.checks import thread_limit
from tensorizer._system.devices import empty
from tensorizer._system.sizes import runs
from tensorizer.distributed._boxes import box_at, check_cover, slices_of
from tensorizer.distributed._checkpoint.boxes import CheckpointFiles, Saved, WantedBox, saved_parts
from tensorizer.distributed._checkpoint.folder import Folder, PathLike, marker_name
from tensorizer.distributed._checkpoint.json_values import encoded
from tensorizer.distributed._checkpoint.marker import JSON, Marker, SavedFile, unpack_marker
from tensorizer.distributed._checkpoint.parts import about_name
from tensorizer.distributed._ranks import Ranks, caught
from tensorizer.encryption import DecryptionParams, EncryptionParams
from tensorizer.errors import (
    AuthenticationError,
    FormatError,
    TensorizerError,
    UnsupportedContentError,
    VerificationError,
)

# Bytes that are read and compared at a time.
_RUN_NBYTES = 128 << 20

#: Key of the file's metadata under which the simple values of the checkpoint are, as JSON by name.
VALUES_KEY = "checkpoint.values"


def read_markers(folder: Folder, encryption: Optional[DecryptionParams] = None) -> list[Marker]:
    """The marker of all ranks, or one of each rank that saved without collectives.

    Raises:
        StreamNotFoundError: There is none, or one of a rank is missing.
        FormatError: A marker is damaged, or another program's.
        AuthenticationError: One is not what the key vouches for.
    """

    def read(rank: Optional[int]) -> Marker:
        name = marker_name(rank)
        return folder.read(name, lambda content: unpack_marker(content, folder.join(name), encryption))

    try:
        return [read(None)]
    except OSError as error:
        if not folder.is_absent(error) or not folder.exists(marker_name(0)):
            raise
    first = read(0)
    return [first, *folder.each(read, range(1, first.world_size))]


def is_complete(checkpoint: PathLike, *, stream_options: Optional[Mapping[str, Any]] = None) -> bool:
    """Returns whether a checkpoint has its marker, and every file that the marker lists with the size that it states.

    Args:
        checkpoint: The folder or ``s3://`` prefix.
        stream_options: Keywords for opening ``s3://`` URIs.

    Raises:
        OSError: The store cannot be asked, or the keys are wrong. A store that forbids to read a file (403) counts as
            one that does not have it, since that is its answer for missing files to keys that may not list.
    """
    folder = Folder.at(checkpoint, stream_options)

    def is_there(file: SavedFile) -> bool:
        return folder.nbytes(file.name) == file.nbytes

    try:
        files = [file for marker in read_markers(folder) for file in marker.files]
        return all(folder.each(is_there, files))
    except (FormatError, VerificationError):
        return False
    except OSError as error:
        if not folder.is_absent(error):
            raise
        return False


def prune(checkpoint: PathLike, *, stream_options: Optional[Mapping[str, Any]] = None) -> list[str]:
    """Deletes what killed saves left in the folder of a complete checkpoint, and nothing else.

    It deletes files that have names of :class:`TensorizerWriter` and that the marker does not list. Do not call it
    while a save into the folder is running.

    Args:
        checkpoint: The folder or ``s3://`` prefix.
        stream_options: Keywords for opening ``s3://`` URIs.

    Returns:
        The names of the deleted files.

    Raises:
        FileNotFoundError: There is no complete checkpoint. Nothing was deleted.
        FormatError: The marker is damaged. Nothing was deleted.
    """
    folder = Folder.at(checkpoint, stream_options)
    markers = read_markers(folder)
    files = {file.name for marker in markers for file in marker.files}
    return folder.remove_stale(folder.names(), files, {marker.rank for marker in markers})


class VerifyReport(NamedTuple):
    """What :func:`verify` found; the same on every rank."""

    boxes: int
    """Boxes and leaves that were compared with their digests."""
    nbytes: int
    """Their bytes."""
    errors: tuple[str, ...]
    """What is wrong: the file, the tensor, and why."""

    @property
    def ok(self) -> bool:
        """Whether all boxes are as they were written."""
        return not self.errors


def verify(
    checkpoint: PathLike,
    group: Optional[torch.distributed.ProcessGroup] = None,
    *,
    encryption: Optional[DecryptionParams] = None,
    threads: Optional[int] = None,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> VerifyReport:
    """Reads all bytes of a checkpoint and compares them with their digests, and the digests with the marker.

    If ``torch.distributed`` is not initialised, this process reads everything. Otherwise the ranks of the group share
    the work by bytes, and every rank must call this function. Nothing is unpickled.

    Args:
        checkpoint: The folder or ``s3://`` prefix.
        group: The ranks that take part; ``None`` for all of them.
        encryption: The key of an encrypted checkpoint.
        threads: Upper bound for reading threads.
        stream_options: Keywords for opening ``s3://`` URIs.

    Returns:
        The report. Damage is in the report and does not raise.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
        OSError: The marker cannot be read. If that is so on one rank, all raise.
        TypeError, ValueError: Wrong arguments.
    """
    folder = Folder.at(checkpoint, stream_options)
    access = Access.to_read(encryption, num_readers=threads)
    thread_limit("threads", threads)
    ranks = Ranks(group)
    own: Optional[VerifyReport] = None
    with caught() as failures:
        own = _verify_share(folder, access, ranks.rank, ranks.size)
    reports: list[VerifyReport] = ranks.agree(failures, own)
    errors = dict.fromkeys(error for report in reports for error in report.errors)
    return VerifyReport(sum(r.boxes for r in reports), sum(r.nbytes for r in reports), tuple(errors))


def _verify_share(folder: Folder, access: Access, rank: int, ranks: int) -> VerifyReport:
    try:
        markers = read_markers(folder, access.encryption)
    except (FormatError, VerificationError, AuthenticationError) as error:
        return VerifyReport(0, 0, (str(error),))
    share = _share(_saved_in(markers), rank, ranks)
    with CheckpointFiles(folder, access, verify=True) as files:
        errors = _errors_of_markers(folder, markers, files) if rank == 0 else []
        together = runs(share, lambda record: record.stored.nbytes, _RUN_NBYTES, lambda record: record.stored.file)
        errors += [error for run in together for error in _errors(files, run)]
    return VerifyReport(len(share), sum(record.stored.nbytes for record in share), tuple(dict.fromkeys(errors)))


def _errors_of_markers(folder: Folder, markers: Sequence[Marker], files: CheckpointFiles) -> list[str]:
    """What is wrong with what the markers themselves say: boxes that are no whole tensors, values that are none."""
    errors = []
    try:
        _records(folder, markers)
    except FormatError as error:
        errors.append(str(error))
    for marker in markers:
        for index, stored in marker.stored.items():
            if stored.text is None:
                continue
            try:
                files.read_value(index.fqn, stored)
            except FormatError as error:
                errors.append(str(error))
    return errors


def _share(records: list[Saved], rank: int, ranks: int) -> list[Saved]:
    """The records of one rank: a stretch of all of them, equal in bytes."""
    total = max(1, sum(record.stored.nbytes for record in records))
    done = 0
    share = []
    for record in records:
        middle = done + record.stored.nbytes // 2
        done += record.stored.nbytes
        if min(ranks - 1, middle * ranks // total) == rank:
            share.append(record)
    return share


def _errors(files: CheckpointFiles, run: Sequence[Saved]) -> list[str]:
    """What is wrong with a run; one by one where something is, so that every damaged tensor is named."""
    try:
        files.verify(run)
    except (TensorizerError, OSError) as error:
        if len(run) > 1:
            return [error for record in run for error in _errors(files, [record])]
        name = repr(run[0].name)
        return [str(error) if name in str(error) else f"{name}: {error}"]
    return []


def _saved_in(markers: list[Marker]) -> list[Saved]:
    """Everything that has bytes in a file, in the order of files and records."""
    found: list[Saved] = []
    for marker in markers:
        for index, stored in marker.stored.items():
            if stored.file is None:
                continue
            if stored.parts is not None:
                found += saved_parts(index.fqn, stored.parts)
                if stored.parts.about.file is not None:
                    found.append(Saved(about_name(index.fqn), stored.parts.about, torch.uint8))
                continue
            item = marker.metadata.state_dict_metadata[index.fqn]
            dtype = item.properties.dtype if isinstance(item, TensorStorageMetadata) else torch.uint8
            found.append(Saved(index.fqn, stored, dtype))
    return sorted(found, key=lambda saved: (saved.stored.file, saved.stored.record))


# --- one file of a checkpoint -----------------------------------------------------------------------------------------


class ConsolidationReport(NamedTuple):
    """What :func:`consolidate` did."""

    tensors: int
    """Tensors in the new file."""
    nbytes: int
    """Their bytes."""
    left_out: tuple[str, ...]
    """Names of leaves that are neither tensors nor simple values, and of tensors that are made of others, which the
    file does not hold."""


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
    reading = Access.to_read(decryption, num_readers=threads)
    writing = Access.to_write(encryption, stream_options)
    max_workers = thread_limit("threads", threads)
    check_hashes(hashes, encrypted=encryption is not None)
    markers = read_markers(folder, decryption)
    records = _records(folder, markers)
    if not records:
        raise UnsupportedContentError(f"{folder.where}: expected a checkpoint with tensors, got one without")
    with CheckpointFiles(folder, reading, verify=verify_hash) as files:
        values, left_out = _values(markers, files)
        metadata = {VALUES_KEY: json.dumps(values)} if values else {}

        def read(chosen: Sequence[Record]) -> list[torch.Tensor]:
            wholes = [empty(record.shape, dtype=record.dtype, device="cpu") for record in chosen]
            files.read(want for record, whole in zip(chosen, wholes) for want in _parts_of(record, whole))
            return wholes

        contents = Contents(records, metadata, {}, read)
        options = WriteOptions(format="tensors", hashes=hashes, max_workers=max_workers)
        plan, _ = write_contents(contents, target, options, writing)
    return ConsolidationReport(len(records), plan.nbytes, tuple(left_out))


def _parts_of(record: Record, whole: torch.Tensor) -> Iterator[WantedBox]:
    """The boxes of a tensor, which are the source of its record, each to its place in the whole."""
    for offsets, stored in record.source:
        part = slices_of(box_at(offsets, stored.shape))
        all_of_it = tuple(slice(0, n) for n in stored.shape)
        yield WantedBox(Saved(str(record.name), stored, record.dtype), all_of_it, whole[part])


def _records(folder: Folder, markers: Sequence[Marker]) -> list[Record]:
    """The tensors by name, each with its boxes: their offsets, and where they are stored.

    Those that ranks saved without collectives have their boxes in several markers.

    Raises:
        FormatError: The boxes of a tensor are not all of it, or overlap.
    """
    found: dict[str, Record] = {}
    taken: dict[str, set[torch.Size]] = {}  # the offsets of boxes that were found
    for marker in markers:
        for name, item in marker.metadata.state_dict_metadata.items():
            if not isinstance(item, TensorStorageMetadata) or _is_of_parts(marker, name, item):
                continue
            whole = found.setdefault(name, Record((name,), item.properties.dtype, tuple(item.size), source=[]))
            there = taken.setdefault(name, set())
            new = [c.offsets for c in item.chunks if c.sizes.numel() and c.offsets not in there]
            whole.source.extend((tuple(at), marker.stored[MetadataIndex(name, at)]) for at in new)
            there.update(new)
    for name, whole in found.items():
        check_cover(name, whole.shape, [box_at(at, stored.shape) for at, stored in whole.source], folder.where)
    return list(found.values())


def _is_of_parts(marker: Marker, name: str, item: TensorStorageMetadata) -> bool:
    """Whether a tensor is made of others, which are stored in its place."""
    boxes = [chunk.offsets for chunk in item.chunks if chunk.sizes.numel()]
    return bool(boxes) and marker.stored[MetadataIndex(name, boxes[0])].parts is not None


def _values(markers: Sequence[Marker], files: CheckpointFiles) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    left_out = []
    for marker in markers:
        for name, item in marker.metadata.state_dict_metadata.items():
            if isinstance(item, TensorStorageMetadata):
                if _is_of_parts(marker, name, item):
                    left_out.append(name)
                continue
            stored = marker.stored[MetadataIndex(name)]
            if stored.kind != JSON:
                left_out.append(name)
                continue
            values[name] = encoded(files.read_value(name, stored))
    return values, left_out
