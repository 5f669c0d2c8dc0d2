"""One file of a checkpoint: :func:`consolidate`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tensorizer._crypto.keys import check_decryption, check_encryption
from tensorizer._format.dtypes import stored_for_tensor
from tensorizer._format.entries import TensorType
from tensorizer._io.file_types import TargetArgument
from tensorizer._save.hashes import HASH_NAMES, check_hashes
from tensorizer._save.one_call import written_in_one_call
from tensorizer._system.devices import empty
from tensorizer._system.threads import thread_limit
from tensorizer.distributed._boxes import check_cover
from tensorizer.distributed._checkpoint.boxes import CheckpointFiles, Wanted
from tensorizer.distributed._checkpoint.folder import Folder, PathLike
from tensorizer.distributed._checkpoint.marker import JSON, Marker
from tensorizer.distributed._checkpoint.upkeep import read_markers
from tensorizer.distributed._checkpoint.values import encoded, from_json
from tensorizer.encryption import DecryptionParams, EncryptionParams
from tensorizer.errors import UnsupportedContentError

__all__ = ["ConsolidationReport", "consolidate"]

#: Key of the file's metadata under which the simple values of the checkpoint are, as JSON by name.
VALUES_KEY = "checkpoint.values"

# Tensors that are put together at a time, unless one alone is larger.
_BATCH_NBYTES = 256 << 20


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

    In one process, without the ranks that saved it. Memory is bounded: tensors are put together 256 MiB at a time, or
    one at a time where it alone is larger. Numbers, texts and the like become JSON in the file's metadata, under
    ``checkpoint.values``; other leaves are left out. Nothing is unpickled.

    Args:
        checkpoint: The folder or ``s3://`` prefix.
        target: Where the file goes, as for :class:`tensorizer.TensorSerializer`.
        verify_hash: Compares every box with its digest.
        hashes: Digests to store in the new file.
        decryption: The key of an encrypted checkpoint.
        encryption: Encrypts the new file.
        threads: Upper bound for threads.
        stream_options: Keywords for opening ``s3://`` URIs, of both.

    Returns:
        What was written.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
        UnsupportedContentError: It has no tensor with elements; nothing was written.
        FormatError: Boxes do not cover a tensor, or the checkpoint is damaged.
        HashMismatchError: A box is not what was written, with `verify_hash`.
        OSError: A file cannot be read or written. The target is as it was.
    """
    folder = Folder.at(checkpoint, stream_options)
    check_decryption(decryption)
    check_encryption(encryption)
    max_workers = thread_limit("threads", threads)
    markers = read_markers(folder, decryption)
    tensors = _tensors(markers)
    if not tensors:
        raise UnsupportedContentError(f"{folder.where}: wanted a checkpoint with tensors, found one without")
    chosen = check_hashes(hashes, encrypted=encryption is not None)
    with CheckpointFiles(folder, verify=verify_hash, encryption=decryption, max_workers=max_workers) as files:
        values, left_out = _values(markers, files)
        with written_in_one_call(
            target,
            [tensor.describe() for tensor in tensors],
            hashes=chosen,
            encryption=encryption,
            metadata={VALUES_KEY: json.dumps(values)} if values else {},
            max_workers=max_workers,
            stream_options=stream_options,
        ) as session:
            for batch in _batches(tensors):
                data = [empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in batch]
                files.read(want for tensor, whole in zip(batch, data) for want in tensor.parts_of(whole))
                session.write_payloads([(t.data_ptr() if t.numel() else 0, t.nbytes) for t in data])
    return ConsolidationReport(len(tensors), sum(tensor.nbytes for tensor in tensors), tuple(left_out))


class _Whole(NamedTuple):
    """One tensor, and the boxes that cover it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Sequence[tuple[tuple[int, ...], Any]]  # offsets, Stored

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def describe(self) -> tuple[Any, ...]:
        """What the extension plans with."""
        kind = int(TensorType.STATE_DICT)
        return ((self.name,), stored_for_tensor(self.dtype).encode(), self.shape, kind, 0, self.nbytes, False)

    def parts_of(self, whole: torch.Tensor) -> Iterator[Wanted]:
        for offsets, stored in self.boxes:
            part = tuple(slice(begin, begin + n) for begin, n in zip(offsets, stored.shape))
            all_of_it = tuple(slice(0, n) for n in stored.shape)
            yield Wanted(self.name, stored, self.dtype, stored.shape, all_of_it, whole[part])


def _tensors(markers: Sequence[Marker]) -> list[_Whole]:
    """The tensors by name. Those that ranks saved without collectives have their boxes in several markers."""
    found: dict[str, _Whole] = {}
    for marker in markers:
        for name, item in marker.metadata.state_dict_metadata.items():
            if not isinstance(item, TensorStorageMetadata):
                continue
            whole = found.setdefault(name, _Whole(name, item.properties.dtype, tuple(item.size), []))
            taken = {offsets for offsets, _ in whole.boxes}
            boxes = [(tuple(chunk.offsets), chunk.offsets) for chunk in item.chunks if chunk.sizes.numel()]
            new = [(o, marker.stored[MetadataIndex(name, at)]) for o, at in boxes if o not in taken]
            found[name] = whole._replace(boxes=[*whole.boxes, *new])
    for whole in found.values():
        covered = [tuple((at, at + n) for at, n in zip(offsets, stored.shape)) for offsets, stored in whole.boxes]
        check_cover(whole.name, whole.shape, covered)
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


def _batches(tensors: Sequence[_Whole]) -> Iterator[list[_Whole]]:
    batch: list[_Whole] = []
    nbytes = 0
    for tensor in tensors:
        if batch and nbytes + tensor.nbytes > _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(tensor)
        nbytes += tensor.nbytes
    if batch:
        yield batch
