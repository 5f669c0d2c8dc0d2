"""Examines existing checkpoints: whether one is complete, whether its bytes are intact, and which tensors it has."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tensorizer._encryption import DecryptionParams
from tensorizer._files.verify import Mismatch, VerifyReport
from tensorizer._format.entries import FilterFuncType
from tensorizer._io.call_options import CallOptions
from tensorizer._progress import progress_reporter
from tensorizer._system.config import thread_limit
from tensorizer._system.sizes import runs
from tensorizer.distributed._checkpoint.boxes import CheckpointFiles, Saved, saved_parts
from tensorizer.distributed._checkpoint.folder import Folder, PathLike, marker_name
from tensorizer.distributed._checkpoint.marker import Marker, SavedFile, unpack_marker
from tensorizer.distributed._checkpoint.parts import about_name
from tensorizer.distributed._checkpoint.whole import whole_tensors
from tensorizer.distributed._ranks import Ranks, caught
from tensorizer.errors import (
    AuthenticationError,
    FormatError,
    TensorizerError,
    VerificationError,
)

# How many bytes are read and compared at a time.
_RUN_NBYTES = 128 << 20


def read_markers(
    folder: Folder, encryption: Optional[DecryptionParams] = None, require_authenticated: bool = False
) -> list[Marker]:
    """Reads the marker of all ranks, or the markers of ranks that saved without collectives.

    Raises:
        StreamNotFoundError: There is no marker, or the marker of one rank is missing.
        FormatError: A marker is damaged, or another program wrote it.
        AuthenticationError: The key does not authenticate a marker.
    """

    def read(rank: Optional[int]) -> Marker:
        name = marker_name(rank)
        return folder.read(
            name, lambda content: unpack_marker(content, folder.join(name), encryption, require_authenticated)
        )

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
        OSError: The store does not answer, or the keys are wrong. If the store answers 403 for a file, the file counts
            as missing, because stores answer so for missing files if the keys may not list.

    Examples:
        >>> from tensorizer.distributed import is_complete
        >>> is_complete("no such folder")
        False
    """
    options = CallOptions.to_read(stream_options=stream_options)
    folder = Folder.at(checkpoint, options)

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


def verify(
    checkpoint: PathLike,
    group: Optional[torch.distributed.ProcessGroup] = None,
    *,
    encryption: Optional[DecryptionParams] = None,
    num_readers: Optional[int] = None,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> VerifyReport:
    """Reads all bytes of a checkpoint and compares them with their digests, and the digests with the marker.

    If ``torch.distributed`` is not initialised, this process reads everything. Otherwise the ranks of the group share
    the work by bytes, and every rank must call this function. Nothing is unpickled.

    Args:
        checkpoint: The folder or ``s3://`` prefix.
        group: The ranks that take part; ``None`` for all of them.
        encryption: The key of an encrypted checkpoint.
        num_readers: Upper bound for reading threads.
        stream_options: Keywords for opening ``s3://`` URIs.

    Returns:
        The report. Damage is in the report and does not raise.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
        OSError: The marker cannot be read. If one rank cannot read it, all ranks raise.
        TypeError, ValueError: Wrong arguments.

    Examples:
        >>> import torch.distributed.checkpoint as dcp
        >>> from tensorizer.distributed import TensorizerWriter, verify
        >>> _ = dcp.save({"weight": torch.ones(4), "step": 7}, storage_writer=TensorizerWriter("run"), no_dist=True)
        >>> verify("run").verified
        ('weight',)
    """
    call = CallOptions.to_read(encryption, stream_options, num_readers)
    thread_limit("num_readers", num_readers)
    return verify_folder(Folder.at(checkpoint, call), call, group)


def verify_folder(
    folder: Folder,
    call: CallOptions,
    group: Optional[torch.distributed.ProcessGroup] = None,
    filter_func: Optional[FilterFuncType] = None,
    fail_fast: bool = False,
) -> VerifyReport:
    """Does the same as :func:`verify`, with all options that :func:`tensorizer.verify` has for a file.

    Raises:
        AuthenticationError: None of the keys in `call` has signed a file.
    """
    ranks = Ranks(group)
    begin = time.monotonic()
    own: Optional[_Share] = None
    with caught() as failures:
        own = _verify_share(folder, call, ranks, filter_func, fail_fast)
    shares: list[_Share] = ranks.agree(failures, own)
    wrong = dict.fromkeys(mismatch for share in shares for mismatch in share.mismatched)
    names = {mismatch.name for mismatch in wrong}
    authenticated_by = {found for share in shares for found in share.authenticated_by}
    ways = {by for by, _ in authenticated_by}
    signers = [set(signers) for _, signers in authenticated_by]
    return VerifyReport(
        source=folder.where,
        format="checkpoint",
        verified=tuple(name for share in shares for name in share.names if name not in names),
        mismatched=tuple(wrong),
        unverified=(),
        index_matches=None,
        sha256=None,
        sha256_matches=None,
        nbytes=sum(share.nbytes for share in shares),
        seconds=time.monotonic() - begin,
        sharded=True,
        authenticated=ways.pop() if len(ways) == 1 else None,
        signers=tuple(sorted(signers[0].intersection(*signers[1:]))) if signers else (),
    )


class _Share(NamedTuple):
    """The result of one rank: names of boxes and values that it compared, errors, bytes, and authentic files."""

    names: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    nbytes: int = 0
    authenticated_by: tuple[tuple[Optional[str], tuple[str, ...]], ...] = ()


def _verify_share(
    folder: Folder, call: CallOptions, ranks: Ranks, filter_func: Optional[FilterFuncType], fail_fast: bool
) -> _Share:
    try:
        markers = read_markers(folder, call.encryption, call.trust.required)
    except (FormatError, VerificationError, AuthenticationError) as error:
        return _Share(mismatched=(Mismatch("", str(error)),))
    chosen = [saved for saved in saved_in(markers) if filter_func is None or filter_func(saved.name)]
    share = _share(chosen, ranks.rank, ranks.size)
    wrong: list[Mismatch] = []
    nbytes = 0
    with (
        CheckpointFiles(folder, call, verify=True) as files,
        progress_reporter(call.progress, sum(record.stored.nbytes for record in share), "verifying") as report,
    ):
        if call.trust.public_keys:
            for file in dict.fromkeys(record.stored.file for record in share if record.stored.file is not None):
                files.file(file)  # raises if no key has signed it
        if ranks.rank == 0:
            wrong += [Mismatch("", text) for text in _errors_of_markers(folder, markers, files)]
        done = 0
        for run in runs(share, lambda record: record.stored.nbytes, _RUN_NBYTES, lambda record: record.stored.file):
            if fail_fast and wrong:
                break
            wrong += _errors(files, run)
            done += len(run)
            nbytes += sum(record.stored.nbytes for record in run)
            if report is not None:
                report(nbytes)
        authenticated_by = files.authenticated_by()
    names = tuple(record.name for record in share[:done])
    return _Share(names, tuple(dict.fromkeys(wrong)), nbytes, authenticated_by)


def _errors_of_markers(folder: Folder, markers: Sequence[Marker], files: CheckpointFiles) -> list[str]:
    """Errors in the markers themselves: boxes that do not form whole tensors, and damaged values."""
    errors = []
    try:
        whole_tensors(folder, markers)
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
    """The records that this rank compares: consecutive ones, with the same number of bytes on each rank."""
    total = max(1, sum(record.stored.nbytes for record in records))
    done = 0
    share = []
    for record in records:
        middle = done + record.stored.nbytes // 2
        done += record.stored.nbytes
        if min(ranks - 1, middle * ranks // total) == rank:
            share.append(record)
    return share


def _errors(files: CheckpointFiles, run: Sequence[Saved]) -> list[Mismatch]:
    """Errors in a run of records. If it has any, its records are read one by one, to name every damaged tensor."""
    try:
        files.read_records(run)
    except (TensorizerError, OSError) as error:
        if len(run) > 1:
            return [error for record in run for error in _errors(files, [record])]
        name = repr(run[0].name)
        return [Mismatch(run[0].name, str(error) if name in str(error) else f"{name}: {error}")]
    return []


def saved_in(markers: Sequence[Marker]) -> list[Saved]:
    """All boxes and leaves with bytes in a file, in the order of files and records."""
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
