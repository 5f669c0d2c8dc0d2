"""Saving: :class:`TensorizerWriter`."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import pickle
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Optional, Union

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tensorizer import _C
from tensorizer._encryption import EncryptionParams
from tensorizer._format.names import listed
from tensorizer._format.payloads import contiguous, is_copied, stored_dtype
from tensorizer._io.call_options import CallOptions
from tensorizer._keys import check_encryption
from tensorizer._save.records import Record
from tensorizer._save.session import check_hashes, memory_of, on_fast_device, tensors_file
from tensorizer._system import cuda_engine
from tensorizer._system.config import thread_limit
from tensorizer.distributed._boxes import check_described
from tensorizer.distributed._checkpoint import arrays, parts
from tensorizer.distributed._checkpoint import marker as markers
from tensorizer.distributed._checkpoint.folder import MARKER, Folder, Located, PathLike, data_file_name, marker_name
from tensorizer.distributed._checkpoint.json_values import load_vetted, to_json
from tensorizer.distributed._checkpoint.marker import (
    SavedFile,
    Stored,
    StoredPart,
    StoredParts,
    pack_marker,
)
from tensorizer.errors import StreamExistsError

_logger = logging.getLogger("tensorizer.distributed")

# Most bytes of copies (of tensors on other devices, or not contiguous) at a time: one batch is written while the next
# one is copied.
_BATCH_NBYTES = 128 << 20

# Leaves of at most this size are decoded, to store them without a pickle; larger ones are stored unchanged.
_MAX_SIMPLE_NBYTES = 1 << 20
# JSON of at most this size is stored in the marker, so that no rank opens the files of others for a few numbers.
_MAX_INLINE_NBYTES = 4 << 10

EncryptionArgument = Union[EncryptionParams, Callable[[], EncryptionParams], None]


class TensorizerWriter(Located, StorageWriter):
    """Writes checkpoints of ``torch.distributed.checkpoint`` as ``.tensors`` files, one per rank, and a marker.

    For ``dcp.save(…, storage_writer=TensorizerWriter(path))`` and ``dcp.async_save``. A checkpoint is valid once it has
    its marker, the file ``.metadata``, which is written last and in one step. Files have names that were never
    used before. So an existing checkpoint in the folder stays whole until the new marker replaces its marker, and is
    deleted afterwards: overwriting needs room for both. If the processes end at any moment, the folder has the old
    checkpoint or the new one.

    Nothing in the files is a pickle, except for leaves that are neither tensors nor made of numbers, texts, bytes,
    NumPy arrays of numbers, lists, tuples and dicts.

    Of a tensor that is made of others (``__tensor_flatten__``), as in quantising libraries, these are stored. To load
    it, pass a tensor of its class in the state dict.

    You can pickle a writer, as ``async_save`` in a process does: it holds no open file, thread or connection. Its key
    is pickled too; to avoid that, pass a function that returns the key.

    Args:
        path: A local folder, which is created, or an ``s3://`` prefix; ``None`` takes the ``checkpoint_id`` of the
            save.
        hashes: Digests to store with each box: ``"crc32"`` (default), ``"sha256"``, both, or ``None``. The CRC-32
            is nearly free; SHA-256 takes much longer. Encrypted boxes get SHA-256 instead of CRC-32, which would
            reveal too much about short ones.
        fsync: Syncs files and folder, so that a crash of the machine does no harm either.
        overwrite: ``False`` raises on every rank, before anything is written, if the folder has a checkpoint.
        encryption: Encrypts tensors and leaves, and authenticates files and marker; names, shapes and placements stay
            readable in the marker. Parameters, or a function without arguments that returns them. All ranks need
            one key.
        limit_cpu_concurrency: Upper bound for threads, as for :class:`tensorizer.TensorSerializer`; ``None`` uses as
            many as are useful.
        allow_pickle: Stores leaves that are more than tensors and simple values as pickles. With ``False``, the
            default, they raise, as in the reader.
        stream_options: Keywords for opening ``s3://`` URIs, as for :func:`tensorizer.stream_io.open_stream`.

    Raises:
        ValueError: The scheme is not ``s3``, or the URI has no bucket; `hashes` are unknown; `limit_cpu_concurrency` is
            below 1.
        TypeError: An argument has a wrong type.

    Source: docs/training.md, "Distributed checkpoints".

    Examples:
        >>> import torch.distributed.checkpoint as dcp
        >>> from tensorizer.distributed import TensorizerWriter
        >>> _ = dcp.save({"weight": torch.ones(4), "step": 7}, storage_writer=TensorizerWriter("run"), no_dist=True)
    """

    def __init__(
        self,
        path: Optional[PathLike] = None,
        *,
        hashes: Union[str, Collection[str], None] = "crc32",
        fsync: bool = True,
        overwrite: bool = True,
        encryption: EncryptionArgument = None,
        limit_cpu_concurrency: Optional[int] = None,
        allow_pickle: bool = False,
        stream_options: Optional[Mapping[str, Any]] = None,
    ) -> None:
        Located.__init__(self, path, CallOptions.to_write(stream_options=stream_options))
        self._encryption = encryption
        if not callable(encryption):
            check_encryption(encryption)
        chosen = check_hashes(hashes, encrypted=False)
        if encryption is not None and "crc32" in chosen:
            chosen = frozenset(("sha256",))
        self._hashes = chosen
        self._max_workers = thread_limit("limit_cpu_concurrency", limit_cpu_concurrency)
        self._fsync = fsync
        self._overwrite = overwrite
        self._allow_pickle = allow_pickle
        self._rank: Optional[int] = None  # set by a save without collectives
        self._save_id = str(uuid.uuid4())

    # ---- what torch calls, in its order -----------------------------------------------------------------------------

    def reset(self, checkpoint_id: Optional[PathLike] = None) -> None:
        """Begins a save, at `checkpoint_id` if you pass one."""
        self._begin(checkpoint_id)
        self._save_id = str(uuid.uuid4())

    def storage_meta(self) -> Any:
        """Path and number of the save, as planners are told (torch 2.4 and later)."""
        return self._storage_meta(save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Looks for a checkpoint in the folder.

        Raises:
            FileExistsError: There is one, and ``overwrite=False`` or the save uses no collectives.
        """
        alone = not kwargs.get("use_collectives", True)
        self._rank = int(kwargs.get("rank") or 0) if alone else None
        folder = self._folder()
        names = [MARKER, marker_name(self._rank)] if alone else [] if self._overwrite else [MARKER]
        for name in names:
            if folder.exists(name):
                why = "a save without collectives cannot replace it in one step" if alone else "overwrite=False"
                raise StreamExistsError(17, f"a checkpoint is there already, and {why}", folder.join(name))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan unchanged; without collectives, with the rank."""
        return plan if self._rank is None else dataclasses.replace(plan, storage_data=self._rank)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tells each rank its number and changes nothing else, because torch keeps plans and reuses them."""
        return [
            plan if plan.storage_data is not None else dataclasses.replace(plan, storage_data=rank)
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the items of this rank to one file, which is complete and synced on return. Without items it writes
        none.

        Raises:
            OSError: The file could not be written; no part of it is left.
            TypeError: A leaf that readers reject, without ``allow_pickle``.
            UnsupportedContentError: A tensor that is made of others, whose class knows more of it than can be stored.
            NotImplementedError: A tensor that the format cannot hold.
        """
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(plan, planner))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the marker, then deletes the files of the replaced checkpoint. A warning lists files that stay.

        If it raises, the previous checkpoint stays valid, unless another save ended while the marker was written.

        Raises:
            FileExistsError: A checkpoint appeared meanwhile, and ``overwrite=False``.
            FileNotFoundError: Another save into the folder deleted files of this one.
            OSError: The marker could not be written.
        """
        stored = _by_index(results)
        world_size = len(results)
        if self._rank is not None and torch.distributed.is_initialized():
            world_size = torch.distributed.get_world_size()
        folder = self._folder()
        params = self._encryption() if callable(self._encryption) else self._encryption
        content = pack_marker(metadata, stored, self._rank, world_size, params)
        if self._fsync and not folder.remote:
            os.makedirs(folder.where, exist_ok=True)
            folder.sync()
        replace = self._overwrite and self._rank is None
        files = {item.file.name for item in stored.values() if item.file is not None}
        if replace:  # while the checkpoint of the other save is still whole
            _check_files(folder, files)
        folder.write(marker_name(self._rank), content, fsync=self._fsync, replace=replace)
        metadata.storage_data = stored
        if hasattr(metadata, "storage_meta"):
            metadata.storage_meta = self.storage_meta()
        if self._rank is None:
            names = _check_files(folder, files)
            try:
                folder.remove_stale(names, files)
            except OSError as error:  # the new checkpoint is complete anyway
                _logger.warning("%s: files of an earlier checkpoint could not be deleted: %s", folder.where, error)

    # ---- the file of a rank -----------------------------------------------------------------------------------------

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results: list[WriteResult] = []
        records: list[_Planned] = []
        names: set[str] = set()
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                leaf = self._leaf(item, planner.resolve_data(item))
                if isinstance(leaf, Stored):
                    results.append(WriteResult(item.index, len(leaf.text or ""), leaf))
                else:
                    kind, content = leaf
                    record = Record((_unused(item.index, names),), content.dtype, tuple(content.shape), source=content)
                    records.append(_Planned(item, kind, record))
                continue
            data = item.tensor_data
            assert data is not None
            shape = data.chunk.sizes
            check_described(planner, item.index.fqn, item.index.offset)
            if shape.numel() == 0:
                results.append(WriteResult(item.index, 0, Stored(markers.TENSOR)))
                continue
            tensor = _made_of_parts(item, planner)
            if tensor is not None:
                records += self._planned_parts(item, tensor, names)
                continue
            path = (_unused(item.index, names),)
            records.append(_Planned(item, markers.TENSOR, Record(path, data.properties.dtype, tuple(shape))))
        if records:
            results += self._write_file(int(plan.storage_data or 0), records, planner)
        return results

    def _planned_parts(self, item: WriteItem, tensor: torch.Tensor, names: set[str]) -> list[_Planned]:
        """The records of a tensor that is made of others. The first one holds its classes and contexts."""
        fqn, offset = item.index.fqn, item.index.offset
        text, inner = parts.take_apart(fqn, tensor)
        inline = len(text) <= _MAX_INLINE_NBYTES and self._encryption is None
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        planned = []
        for path, source in [*([] if inline else [("", content)]), *inner]:
            name = f"{fqn}.{path}" if path else parts.about_name(fqn)
            record = Record(
                (_unused(MetadataIndex(name, offset), names),), source.dtype, tuple(source.shape), source=source
            )
            planned.append(_Planned(item, markers.TENSOR, record, path, text if inline else None))
        return planned

    def _leaf(self, item: WriteItem, data: Any) -> Union[Stored, tuple[str, torch.Tensor]]:
        """A leaf that is not a tensor: its text for the marker, or its kind and bytes for a record."""
        # Errors keep this frame, and a stream cannot be closed while a view of it is left.
        with data.getbuffer() if isinstance(data, io.BytesIO) else memoryview(data) as view:
            is_small = view.nbytes <= _MAX_SIMPLE_NBYTES
            text, packed = self._without_pickle(item.index.fqn, view, is_small)
            if text is not None and len(text) <= _MAX_INLINE_NBYTES and self._encryption is None:
                return Stored(markers.JSON, text=text)
            if packed is not None:
                return markers.ARRAYS, packed
            kind = markers.TORCH_SAVE if text is None else markers.JSON
            return kind, torch.frombuffer(bytearray(view if text is None else text.encode()), dtype=torch.uint8)

    def _without_pickle(self, name: str, data: memoryview, is_small: bool) -> tuple[Optional[str], Any]:
        """Encodes a value, given as bytes of ``torch.save``, without a pickle: as JSON or, with arrays, as a record.

        Other values get neither. A value that readers would refuse is refused now: when somebody reads the checkpoint,
        the program that could save it in another way has ended.
        """
        if self._allow_pickle and not is_small:
            return None, None
        try:
            value = load_vetted(name, io.BytesIO(data))
        except pickle.UnpicklingError as error:
            if self._allow_pickle:  # a planner may write anything: its bytes are kept unchanged
                return None, None
            raise TypeError(
                f"{name!r}: a leaf that is more than tensors and simple values, which TensorizerReader refuses "
                f"unless it has allow_pickle=True; with allow_pickle=True the writer stores it ({error.__cause__})"
            ) from None
        text = to_json(value) if is_small else None
        return text, None if text is not None else arrays.pack(value)

    def _write_file(self, rank: int, records: Sequence[_Planned], planner: SavePlanner) -> list[WriteResult]:
        folder, name = self._folder(), data_file_name(rank)
        params = self._encryption() if callable(self._encryption) else self._encryption
        with tensors_file(
            folder.join(name),
            [planned.record for planned in records],
            hashes=self._hashes,
            encryption=params,
            max_workers=self._max_workers,
            fsync=self._fsync,
            options=self._options,
        ) as session:
            _write_batches(session, records, planner)
            facts = session.records()
        digest = session.index_digest
        file = SavedFile(
            name,
            session.published_nbytes,
            None if digest is None else digest.hex(),
        )
        results: list[WriteResult] = []
        of_parts: dict[MetadataIndex, list[tuple[_Planned, Stored]]] = {}
        for i, (planned, (offset, crc32, sha256)) in enumerate(zip(records, facts)):
            record = planned.record
            digest_text = None if sha256 is None else sha256.hex()
            stored = Stored(planned.kind, file, i, offset, record.nbytes, crc32, digest_text, shape=record.shape)
            if planned.part is None:
                results.append(WriteResult(planned.item.index, record.nbytes, stored))
            else:
                of_parts.setdefault(planned.item.index, []).append((planned, stored))
        return results + [_result_of_parts(index, found) for index, found in of_parts.items()]


class _Planned(NamedTuple):
    """One record in the file of a rank, for an item of the plan."""

    item: WriteItem
    kind: str
    record: Record  # its source is the content of a leaf, or a part; the planner is asked for tensors later
    part: Optional[str] = None  # the path of an inner tensor of the item; empty for the record of its classes
    about: Optional[str] = None  # for an inner tensor: the JSON text of its classes, if it goes into the marker

    def tensor(self, planner: SavePlanner) -> torch.Tensor:
        """The tensor with the data, after a comparison with the plan.

        Raises:
            ValueError: The tensor differs from the plan.
        """
        record = self.record
        if isinstance(record.source, torch.Tensor):
            return record.source
        tensor: Any = planner.resolve_data(self.item)
        wait = getattr(tensor, "trigger_wait", None)  # waits for a collective that may still run
        tensor = tensor if wait is None else wait()
        if tensor.is_meta or tensor.dtype != record.dtype or tuple(tensor.shape) != record.shape:
            raise ValueError(
                f"tensor {record.name!r}: expected {record.dtype} {record.shape} with data, "
                f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            )
        stored_dtype(record.name, tensor)
        return torch.Tensor.detach(tensor)


def _made_of_parts(item: WriteItem, planner: SavePlanner) -> Optional[torch.Tensor]:
    """The tensor of an item if it is made of others. The planner is asked only if the state dict has such a tensor."""
    value = (getattr(planner, "state_dict", None) or {}).get(item.index.fqn)
    local = getattr(value, "_local_tensor", value)  # the local part of a DTensor
    if not hasattr(type(local), "__tensor_flatten__"):
        return None
    tensor: Any = planner.resolve_data(item)
    return tensor if parts.is_made_of_parts(tensor) else None


def _result_of_parts(index: MetadataIndex, found: Sequence[tuple[_Planned, Stored]]) -> WriteResult:
    """The result for one item that is made of others."""
    (first, about), *_ = found
    inner = [(planned, stored) for planned, stored in found if planned.part]
    known = Stored(markers.JSON, text=first.about) if first.part else about._replace(kind=markers.JSON)
    of_parts = tuple(StoredPart(str(planned.part), planned.record.dtype, stored) for planned, stored in inner)
    whole = inner[0][1]._replace(parts=StoredParts(known, of_parts))
    return WriteResult(index, sum(stored.nbytes for _, stored in inner), whole)


def _unused(index: MetadataIndex, names: set[str]) -> str:
    """A new name for the record of an item: the name of its tensor, with the offsets for further boxes."""
    name = index.fqn
    if name in names:
        name = f"{index.fqn}@{','.join(map(str, index.offset or ()))}"
    while name in names:
        name += "'"
    names.add(name)
    return name


def _write_batches(session: _C.SaveSession, records: Sequence[_Planned], planner: SavePlanner) -> None:
    """Writes all records. If tensors have to be copied, a thread writes one batch while the next one is copied."""
    batch: list[torch.Tensor] = []
    copied = 0  # bytes of copies in it
    pending: Any = None  # the previous batch, which the thread writes
    pending_copied = 0

    def wait() -> None:
        nonlocal pending, pending_copied
        if pending is not None:
            pending.result()
        pending, pending_copied = None, 0

    with ThreadPoolExecutor(1, "tensorizer-save") as thread:
        for record in records:
            tensor = record.tensor(planner)
            on_device = on_fast_device(tensor)
            device = tensor.device if on_device else torch.device("cpu")
            size = tensor.nbytes if is_copied(tensor, on_device) else 0
            if batch and (copied + size > _BATCH_NBYTES or batch[0].device != device):
                write = _prepared(session, batch)
                wait()
                if copied:
                    pending, pending_copied = thread.submit(write), copied
                else:
                    write()
                batch, copied = [], 0
            if pending_copied + copied + size > 2 * _BATCH_NBYTES:
                wait()
            batch.append(contiguous(tensor, on_device))
            copied += size
            del tensor  # before the next batch is copied
        write = _prepared(session, batch)
        wait()
        write()


def _prepared(session: _C.SaveSession, batch: list[torch.Tensor]) -> Callable[[], None]:
    """A function that writes a batch. Its copies on the device run after the work that the caller has enqueued."""
    payloads = [memory_of(tensor) for tensor in batch]
    device = batch[0].device
    engine = None if device.type == "cpu" else cuda_engine.engine_for(device)

    def write() -> None:
        session.write_payloads(payloads, engine=engine)
        batch.clear()  # the copies live until here

    return write


def _check_files(folder: Folder, files: set[str]) -> list[str]:
    """Raises if files of this save are gone, because another save deletes files that its own marker does not name.

    Returns the names in the folder; empty if the folder cannot be listed.
    """
    try:
        names = folder.names()
        # a listing may not yet show the files of other machines
        gone = sorted(name for name in files.difference(names) if _is_gone(folder, name))
    except OSError as error:  # a save needs no right to list the folder
        _logger.warning("%s: could not be listed, to find files of other saves: %s", folder.where, error)
        return []
    if gone:
        raise FileNotFoundError(
            f"{folder.where}: another save into this folder deleted files of this one, {listed(gone)}; "
            "write one checkpoint at a time into a folder"
        )
    return names


def _is_gone(folder: Folder, name: str) -> bool:
    """Whether a file that is missing in the listing does not exist."""
    try:
        folder.open(name).close()
    except FileNotFoundError:
        return True
    return False


def _by_index(results: Sequence[Sequence[WriteResult]]) -> dict[MetadataIndex, Stored]:
    """The places that all ranks wrote. A box without elements never replaces a box with the same offsets."""
    stored: dict[MetadataIndex, Stored] = {}
    for result in (result for of_rank in results for result in of_rank):
        found = stored.get(result.index)
        if found is None or found.file is None:
            stored[result.index] = result.storage_data
    return stored
