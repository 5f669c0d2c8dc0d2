"""Turns a checkpoint into files of whole tensors: :func:`dcp_to_files`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

from tensorizer._encryption import DecryptionParams, EncryptionParams
from tensorizer._files.contents import Contents
from tensorizer._files.write import Plan, WriteOptions, Writers, file_in_folder, format_of, write_contents
from tensorizer._format.names import listed
from tensorizer._io.call_options import CallOptions
from tensorizer._io.sources import TargetArgument, is_path
from tensorizer._save.records import Record
from tensorizer._system.redaction import shown_location
from tensorizer.distributed._checkpoint.boxes import CheckpointFiles
from tensorizer.distributed._checkpoint.existing import read_markers
from tensorizer.distributed._checkpoint.folder import Folder, PathLike
from tensorizer.distributed._checkpoint.marker import Marker
from tensorizer.distributed._checkpoint.whole import read_whole, values_of, whole_tensors, without_prefix
from tensorizer.distributed._ranks import Ranks
from tensorizer.errors import UnsupportedContentError

#: The key in the metadata for the simple values of the checkpoint, as JSON by name.
VALUES_KEY = "checkpoint.values"


def dcp_to_files(
    checkpoint: PathLike,
    target: TargetArgument,
    *,
    prefix: str = "",
    max_shard_size: Union[str, int, None] = None,
    format: Optional[str] = None,
    verify_hash: bool = False,
    decryption: Optional[DecryptionParams] = None,
    encryption: Optional[EncryptionParams] = None,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> list[int]:
    """Writes the whole tensors of a checkpoint of :class:`TensorizerWriter` to one file, or to shards and their index.

    If ``torch.distributed`` is not initialised, this process writes everything. Otherwise every rank of the default
    group must call this function with the same arguments: each of N ranks writes every N-th shard, and rank 0 the index
    (a single file is written by rank 0). Memory is bounded: a rank puts tensors together 64 MiB at a time (or one
    larger tensor) while the previous ones are written. Nothing is unpickled.

    Numbers and texts become JSON in the metadata, under ``checkpoint.values`` (of several files: of the index of
    ``.safetensors``, of the first ``.tensors`` file). A warning names other leaves and tensors that are made of others,
    which are left out.

    Args:
        checkpoint: The folder or ``s3://`` prefix.
        target: As for :func:`tensorizer.torch.save_file`. A folder that exists, or a name that ends with a slash, means
            ``model.safetensors`` or ``model.tensors`` in it.
        prefix: Selects the tensors and values whose names begin with this text, and removes it from their names:
            ``"training.model."`` turns ``training.model.layer.weight`` into ``layer.weight``. It is not a pattern.
        max_shard_size: Bytes of a shard, or a text like ``"5GB"``; ``None``, the default, writes one file.
        format: ``"tensors"`` or ``"safetensors"``; ``None`` is ``"tensors"`` for a name that ends in ``.tensors``,
            otherwise ``"safetensors"``.
        verify_hash: Compares every box with its digest.
        decryption: The key of an encrypted checkpoint.
        encryption: Encrypts the new files (``.tensors`` only).
        stream_options: Keywords for opening URIs, for checkpoint and target.

    Returns:
        The bytes of tensors that each rank wrote, by rank.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
        ValueError: No tensor has a name with `prefix`; the message lists the prefixes in the checkpoint. Or ranks
            passed different arguments.
        UnsupportedContentError: The format cannot hold something, or there is no tensor; nothing was written.
        FormatError: Boxes do not cover a tensor, or the checkpoint is damaged.
        HashMismatchError: With `verify_hash`, a box differs from what was written.
        OSError: A file cannot be read or written. The target is unchanged. If that is so on one rank, all raise.

    Examples:
        >>> import torch, torch.distributed.checkpoint as dcp
        >>> from tensorizer.distributed import TensorizerWriter, dcp_to_files
        >>> model = torch.nn.Linear(4, 2)
        >>> _ = dcp.save({"model": model.state_dict(), "step": 7}, storage_writer=TensorizerWriter("run"), no_dist=True)
        >>> dcp_to_files("run", "model.safetensors", prefix="model.")
        [40]
    """
    ranks = Ranks(None)
    shown_target = str(target) if is_path(target) else type(target).__name__
    with ranks.together((str(checkpoint), shown_target, prefix, max_shard_size, format)):
        writing = CallOptions.to_write(encryption, stream_options)
        reading = writing.reading(decryption)
        folder = Folder.at(checkpoint, reading)
        format = format_of(target, format, default="safetensors")
        target = file_in_folder(target, format)
        markers = read_markers(folder, decryption)
        records = selected(folder, whole_tensors(folder, markers), prefix)
        options = WriteOptions(
            format=format,
            max_shard_size=max_shard_size,
            writers=Writers(ranks.rank, ranks.size, ranks.together),
        )
    with CheckpointFiles(folder, reading, verify=verify_hash) as files:
        with ranks.together():
            contents, left_out = contents_of(markers, files, records, prefix, format)
        plan, _ = write_contents(contents, target, options, writing)
    if left_out and ranks.rank == 0:
        warnings.warn(
            f"{folder.where}: neither tensors nor simple values, so not in {shown_location(target)}: "
            f"{listed(left_out)}",
            stacklevel=2,
        )
    return [_nbytes_of_rank(plan, rank, ranks.size) for rank in range(ranks.size)]


def _nbytes_of_rank(plan: Plan, rank: int, ranks: int) -> int:
    return sum(plan.records[i].nbytes for run in plan.shards[rank::ranks] for i in run)


def contents_of(
    markers: Sequence[Marker], files: CheckpointFiles, records: Sequence[Record], prefix: str, format: str
) -> tuple[Contents, list[str]]:
    """The tensors and simple values for a file of this format, and the names of items that it cannot hold."""
    values, left_out = values_of(markers, files, prefix)
    metadata = {VALUES_KEY: json.dumps(values)} if values else {}
    if format == "safetensors":
        metadata["format"] = "pt"  # transformers requires this key
    return Contents(records, metadata, {}, lambda chosen: read_whole(files, chosen)), left_out


def selected(folder: Folder, records: Sequence[Record], prefix: str) -> list[Record]:
    """The tensors whose names begin with the prefix, under names without it."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: expected a str, got {type(prefix).__name__}")
    if not records:
        raise UnsupportedContentError(f"{folder.where}: expected a checkpoint with tensors, got one without")
    found = [record for record in records if without_prefix(prefix, str(record.name)) is not None]
    if not found:
        there = listed(_prefixes([str(record.name) for record in records]))
        raise ValueError(f"{folder.where}: prefix={prefix!r:.200} selects no tensor; their names begin with {there}")
    for record in found:
        record.path = (without_prefix(prefix, str(record.name)),)  # type: ignore[assignment]
    return found


def _prefixes(names: Sequence[str]) -> list[str]:
    """The prefixes of the names, up to the first step that differs."""
    steps = [name.split(".") for name in names]
    depth = 0
    while all(len(path) > depth + 1 and path[depth] == steps[0][depth] for path in steps):
        depth += 1
    return list(
        dict.fromkeys(".".join([*path[: depth + 1], ""]) if len(path) > depth + 1 else ".".join(path) for path in steps)
    )
