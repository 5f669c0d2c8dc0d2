"""Boxes of saved tensors, read from the files of a checkpoint into memory that is there already."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from tensorizer import _C
from tensorizer._format.dtypes import stored_for_tensor
from tensorizer._format.entries import HashType
from tensorizer._format.payloads import can_be_filled
from tensorizer._io.access import Access
from tensorizer._io.sources import OpenedSource, close_between_reads, files_at_once
from tensorizer._load.open_file import OpenFile, file_of
from tensorizer._load.parts import WantedPart, read_parts
from tensorizer._load.reader import ReadOptions, missing_hashes
from tensorizer._system import cuda_engine
from tensorizer._system.sizes import runs
from tensorizer.distributed._checkpoint.arrays import unpack
from tensorizer.distributed._checkpoint.folder import Folder
from tensorizer.distributed._checkpoint.json_values import from_json
from tensorizer.distributed._checkpoint.marker import ARRAYS, SavedFile, Stored, StoredParts
from tensorizer.errors import AuthenticationError, FormatError, HashMismatchError, StreamNotFoundError, TruncatedError

# Bytes of records that are read and then copied from, at a time.
_STAGED_NBYTES = 128 << 20
_LOCAL_FILES_AT_ONCE = 2
_NETWORK_FILES_AT_ONCE = 4


class Saved(NamedTuple):
    """A saved box, or a leaf as its bytes."""

    name: str  # of the tensor or leaf
    stored: Stored
    dtype: torch.dtype


def saved_parts(name: str, parts: StoredParts) -> list[Saved]:
    """The inner tensors of a box that is made of others."""
    return [Saved(f"{name}.{part.path}", part.stored, part.dtype) for part in parts.parts]


class WantedBox(NamedTuple):
    """A part of a saved box, and where it goes."""

    saved: Saved
    part: tuple[slice, ...]  # of the box
    target: torch.Tensor  # of the part's shape, on any device

    @property
    def is_whole(self) -> bool:
        return all(p.start == 0 and p.stop == size for p, size in zip(self.part, self.saved.stored.shape))

    @property
    def fills_memory(self) -> bool:
        """Whether the elements of the part, one after the other, are the target's memory."""
        target = self.target
        return (
            target.dtype == self.saved.dtype
            and can_be_filled(target)
            and (target.device.type == "cpu" or cuda_engine.is_fast_device(target.device))
        )


class CheckpointFiles(contextlib.AbstractContextManager["CheckpointFiles"]):
    """The files of one checkpoint, opened when they are needed. A context manager that closes them."""

    def __init__(self, folder: Folder, access: Access, *, verify: bool) -> None:
        self._folder, self._access, self._verify = folder, access, verify
        self._open: dict[SavedFile, OpenFile] = {}
        self._closing = contextlib.ExitStack()
        self.bytes_read = 0  # by files that are closed

    def __exit__(self, *_: Any) -> None:
        self.bytes_read += sum(file.bytes_read or 0 for file in self._open.values())
        self._open.clear()
        self._closing.close()

    def file(self, file: SavedFile) -> OpenFile:
        """An open file of the checkpoint.

        Raises:
            StreamNotFoundError: It is not there.
            FormatError: It is not the file that was written: :class:`TruncatedError` where it is shorter.
            AuthenticationError: It is not the file that the marker is about.
        """
        if file not in self._open:
            opened = file_of(self._opened(file), self._access, ReadOptions(verify_hash=self._verify))
            try:
                _check_belongs(opened, file)
            except BaseException:
                opened.close()
                raise
            self._open[file] = self._closing.enter_context(opened)
        return self._open[file]

    def _opened(self, file: SavedFile) -> OpenedSource:
        try:
            opened = self._folder.open(file.name)
        except FileNotFoundError as error:
            raise StreamNotFoundError(f"{self._folder.where}: file {file.name} of the checkpoint is missing") from error
        if len(self._open) >= files_at_once():
            close_between_reads(opened)
        nbytes = opened.source.size()
        if nbytes is not None and nbytes != file.nbytes:
            opened.close()
            kind = TruncatedError if nbytes < file.nbytes else FormatError
            raise kind(f"{opened.name}: expected {file.nbytes} bytes, as the marker says, got {nbytes}")
        return opened

    def check(self, saved: Saved) -> int:
        """The entry of a box in its file, which is the one that the marker means.

        Raises:
            FormatError: Another record is in its place.
        """
        name, stored, dtype = saved
        assert stored.file is not None
        file = self.file(stored.file)
        index = file.index
        i = stored.record
        found: Any = "no such record"
        if i < index.entry_count:
            found = (file.names[i], index.dtype(i).decode("utf-8", "replace"), tuple(index.shape(i)))
            as_named = isinstance(found[0], str) and (found[0] == name or found[0].startswith((f"{name}@", f"{name}'")))
            as_shaped = found[1:] == (stored_for_tensor(dtype), stored.shape)
            if as_named and as_shaped and index.data_nbytes(i) == stored.nbytes:
                return i
        raise FormatError(
            f"{file.source_name}: record {i}: expected {name!r}, {dtype}, {list(stored.shape)}, got {found}: "
            "not the file that belongs to this checkpoint"
        )

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read_bytes(self, name: str, stored: Stored) -> bytes:
        """The bytes of a leaf."""
        saved = Saved(name, stored, torch.uint8)
        (tensor,) = self._raw([(self.check(saved), saved)])
        return bytes(tensor.numpy().tobytes())

    def read_value(self, name: str, stored: Stored) -> Any:
        """The value of a leaf that is JSON or has arrays, from the marker where that has it."""
        content = self.read_bytes(name, stored) if stored.text is None else stored.text
        try:
            return unpack(content) if isinstance(content, bytes) and stored.kind == ARRAYS else from_json(content)
        except FormatError as error:
            raise FormatError(f"{self._folder.where}: {name!r:.200}: {error}") from None

    def read(self, wanted: Iterable[WantedBox]) -> None:
        """Fills the targets: in the order of the files, several files at a time, with few and large requests.

        Raises:
            HashMismatchError: A box is not what was written, where that is verified.
            FormatError, OSError: A file is damaged, or cannot be read.
        """
        direct: dict[SavedFile, dict[tuple[torch.device, int], WantedBox]] = {}
        others: list[tuple[int, WantedBox]] = []
        for want in wanted:
            entry = self.check(want.saved)
            assert want.saved.stored.file is not None
            of_file = direct.setdefault(want.saved.stored.file, {})
            if want.is_whole and want.fills_memory and (want.target.device, entry) not in of_file:
                of_file[want.target.device, entry] = want
            else:
                others.append((entry, want))
        self._read_direct(direct)
        self._read_parts(others)

    def verify(self, records: Sequence[Saved]) -> None:
        """Reads records of one file and compares them with their digests. Raises as :meth:`read`."""
        self._raw([(self.check(record), record) for record in records])

    def _read_direct(self, direct: dict[SavedFile, dict[tuple[torch.device, int], WantedBox]]) -> None:
        batches = []
        for file, of_file in direct.items():
            (reader,) = self.file(file).readers
            for device in {device for device, _ in of_file}:
                entries = sorted(entry for on, entry in of_file if on == device)
                parts = [of_file[device, entry] for entry in entries]
                batch = reader.batch(entries, self._verify, device, [part.target for part in parts])
                batches.append((file, parts, batch))
        network = any(file.network for file in self._open.values())
        _C.run_batches([batch for *_, batch in batches], _NETWORK_FILES_AT_ONCE if network else _LOCAL_FILES_AT_ONCE)
        for file, parts, batch in batches:
            self._check_digests(file, [part.saved for part in parts], batch.headers)

    def _read_parts(self, others: list[tuple[int, WantedBox]]) -> None:
        """Boxes of which a part is wanted, or another dtype, or memory that is not contiguous."""
        by_file: dict[SavedFile, list[tuple[int, WantedBox]]] = {}
        for entry, want in others:
            assert want.saved.stored.file is not None
            by_file.setdefault(want.saved.stored.file, []).append((entry, want))
        read = self._read_and_verify if self._verify else self._read_ranges
        if not any(self.file(file).network for file in by_file):
            for file, items in by_file.items():
                read(file, items)
            return
        read = cuda_engine.on_current_streams(read, {want.target.device for _, want in others})
        with ThreadPoolExecutor(_NETWORK_FILES_AT_ONCE, "tensorizer-load") as threads:
            list(threads.map(read, by_file, by_file.values()))

    def _read_ranges(self, file: SavedFile, items: list[tuple[int, WantedBox]]) -> None:
        """Only the bytes that are wanted, joined where they are close; to their places, or by way of bounded copies."""
        opened = self.file(file)
        run: list[WantedPart] = []
        nbytes = 0
        for entry, want in sorted(items, key=lambda item: item[0]):
            copied = 0 if want.fills_memory else want.target.numel() * want.saved.dtype.itemsize
            if run and nbytes + copied > _STAGED_NBYTES:
                read_parts(opened, run, False)
                run, nbytes = [], 0
            run.append(WantedPart(entry, want.part, want.target.device, want.target))
            nbytes += copied
        read_parts(opened, run, False)

    def _read_and_verify(self, file: SavedFile, items: list[tuple[int, WantedBox]]) -> None:
        """Whole records, whose digests cover all of their bytes, and from them what is wanted."""
        by_entry: dict[int, list[WantedBox]] = {}
        for entry, want in items:
            by_entry.setdefault(entry, []).append(want)
        nbytes_of = self.file(file).index.loaded_nbytes
        for run in runs(sorted(by_entry), nbytes_of, _STAGED_NBYTES):
            for entry, tensor in zip(run, self._raw([(entry, by_entry[entry][0].saved) for entry in run])):
                for want in by_entry[entry]:
                    want.target.copy_(tensor[want.part])

    def _raw(self, items: Sequence[tuple[int, Saved]]) -> Sequence[torch.Tensor]:
        """Whole records of one file, by their entries."""
        file = items[0][1].stored.file
        assert file is not None
        (reader,) = self.file(file).readers
        loaded = reader.read_raw([entry for entry, _ in items], self._verify)
        self._check_digests(file, [saved for _, saved in items], loaded.headers)
        return loaded.tensors

    def _check_digests(self, file: SavedFile, items: Sequence[Saved], headers: _C.LoadedHeaders) -> None:
        """The digests of the records, with which the data agree, are those that the marker states."""
        if not self._verify:
            return
        source = self.file(file).source_name
        stated = [{HashType(kind): value for kind, value in headers.hashes(i)} for i in range(len(items))]
        bare = [saved.name for saved, found in zip(items, stated) if saved.stored.nbytes and not found]
        if bare:
            raise missing_hashes(source, bare)
        for (name, stored, _), found in zip(items, stated):
            crc32 = None if stored.crc32 is None else stored.crc32.to_bytes(4, "little")
            sha256 = None if stored.sha256 is None else bytes.fromhex(stored.sha256)
            if (found.get(HashType.CRC32), found.get(HashType.SHA256)) != (crc32, sha256):
                raise HashMismatchError(
                    f"{source}: tensor {name!r}: the digests of the file are not those of the checkpoint's marker"
                )


def _check_belongs(opened: OpenFile, file: SavedFile) -> None:
    """Whether an authenticated file is the one that an authenticated marker names."""
    by_key = opened.authenticated in ("key", "both")
    if file.index_digest is not None and (not by_key or opened.index_digest != file.index_digest):
        raise AuthenticationError(
            f"{opened.source_name}: not the file that the checkpoint's marker was authenticated with"
        )
    if file.index_digest is None and by_key:
        raise AuthenticationError(
            f"{opened.source_name}: the file is authenticated and the checkpoint's marker is not: altered, or it "
            "belongs to another checkpoint"
        )
