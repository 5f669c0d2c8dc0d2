"""Checkpoints that are there: is one complete, what does not belong to it, are its bytes those that were written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import distributed
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tensorizer._crypto.keys import check_decryption
from tensorizer._system.checks import thread_limit
from tensorizer._system.sizes import runs
from tensorizer.distributed._checkpoint.boxes import CheckpointFiles, Saved
from tensorizer.distributed._checkpoint.folder import (
    Folder,
    PathLike,
    is_data_file,
    is_unnamed,
    marker_name,
    rank_of_marker,
)
from tensorizer.distributed._checkpoint.marker import TENSOR, Marker, SavedFile, unpack_marker
from tensorizer.encryption import DecryptionParams
from tensorizer.errors import AuthenticationError, FormatError, TensorizerError, VerificationError

# Bytes that are read and compared at a time.
_RUN_NBYTES = 128 << 20

__all__ = ["VerifyReport", "is_complete", "prune", "read_markers", "remove_stale", "verify"]


def read_markers(folder: Folder, encryption: Optional[DecryptionParams] = None) -> list[Marker]:
    """The marker of all ranks, or one of each rank that saved without collectives.

    Raises:
        StreamNotFoundError: There is none, or one of a rank is missing.
        FormatError: A marker is damaged, or another program's.
        AuthenticationError: One is not what the key vouches for.
    """

    def read(rank: Optional[int]) -> Marker:
        name = marker_name(rank)
        return unpack_marker(folder.read(name), folder.join(name), encryption)

    try:
        return [read(None)]
    except FileNotFoundError:
        if not folder.exists(marker_name(0)):
            raise
    first = read(0)
    return [first, *folder.each(read, range(1, first.world_size))]


def is_complete(checkpoint: PathLike, *, stream_options: Optional[Mapping[str, Any]] = None) -> bool:
    """Returns whether a checkpoint has its marker, and every file that the marker lists with the size that it states.

    Args:
        checkpoint: The folder or ``s3://`` prefix.
        stream_options: Keywords for opening ``s3://`` URIs.

    Raises:
        OSError: The store cannot be asked.
    """
    folder = Folder.at(checkpoint, stream_options)

    def is_there(file: SavedFile) -> bool:
        return folder.nbytes(file.name) == file.nbytes

    try:
        files = [file for marker in read_markers(folder) for file in marker.files]
        return all(folder.each(is_there, files))
    except (FileNotFoundError, FormatError, VerificationError):
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
    return remove_stale(folder, files, {marker.rank for marker in markers})


def remove_stale(folder: Folder, files: Collection[str], ranks: Collection[Optional[int]] = (None,)) -> list[str]:
    """Deletes files and markers of earlier checkpoints beside the markers of `ranks`, which name `files`."""
    stale = [
        name
        for name in folder.names()
        if (is_data_file(name) and name not in files)
        or (rank_of_marker(name) is not None and rank_of_marker(name) not in ranks)
        or is_unnamed(name)
    ]
    folder.delete(stale)
    return sorted(stale)


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
    group: Optional[distributed.ProcessGroup] = None,
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
        group: The ranks that take part; ``None`` for all of them. Its backend must exchange objects: gloo, or
            NCCL with a device per rank.
        encryption: The key of an encrypted checkpoint.
        threads: Upper bound for reading threads.
        stream_options: Keywords for opening ``s3://`` URIs.

    Returns:
        The report. Damage is in the report and does not raise.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
        TypeError, ValueError: Wrong arguments.
    """
    folder = Folder.at(checkpoint, stream_options)
    check_decryption(encryption)
    max_workers = thread_limit("threads", threads)
    rank, ranks = 0, 1
    if distributed.is_available() and distributed.is_initialized():
        rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    try:
        own = _verify_share(folder, rank, ranks, encryption, max_workers)
    except Exception as error:  # the others wait for what comes of it
        if ranks == 1:
            raise
        own = VerifyReport(0, 0, (f"rank {rank}: {type(error).__name__}: {error}",))
    if ranks == 1:
        return own
    reports: list[Any] = [None] * ranks
    distributed.all_gather_object(reports, own, group=group)
    errors = dict.fromkeys(error for report in reports for error in report.errors)
    return VerifyReport(sum(r.boxes for r in reports), sum(r.nbytes for r in reports), tuple(errors))


def _verify_share(
    folder: Folder, rank: int, ranks: int, encryption: Optional[DecryptionParams], max_workers: int
) -> VerifyReport:
    try:
        markers = read_markers(folder, encryption)
    except (FormatError, VerificationError, AuthenticationError) as error:
        return VerifyReport(0, 0, (str(error),))
    share = _share(list(_records(markers)), rank, ranks)
    with CheckpointFiles(folder, verify=True, encryption=encryption, max_workers=max_workers) as files:
        together = runs(share, lambda record: record.stored.nbytes, _RUN_NBYTES, lambda record: record.stored.file)
        errors = [error for run in together for error in _errors(files, run)]
    return VerifyReport(len(share), sum(record.stored.nbytes for record in share), tuple(dict.fromkeys(errors)))


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


def _records(markers: list[Marker]) -> Iterator[Saved]:
    """Everything that has bytes in a file, in the order of files and records."""
    found: list[Saved] = []
    for marker in markers:
        for index, stored in marker.stored.items():
            if stored.file is None:
                continue
            item = marker.metadata.state_dict_metadata[index.fqn]
            if stored.kind == TENSOR and isinstance(item, TensorStorageMetadata):
                found.append(Saved(index.fqn, stored, item.properties.dtype, stored.shape))
            else:
                found.append(Saved(index.fqn, stored, torch.uint8, (stored.nbytes,)))
    return iter(sorted(found, key=lambda saved: (saved.stored.file, saved.stored.record)))
