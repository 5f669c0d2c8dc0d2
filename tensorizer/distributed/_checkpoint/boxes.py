"""Reads boxes of saved tensors from the files of a checkpoint into existing memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

import torch

from tensorizer import _C
from tensorizer._format.dtypes import stored_for_tensor
from tensorizer._format.entries import HashType
from tensorizer._io.call_options import CallOptions
from tensorizer._io.sources import OpenedSource, close_between_reads, files_at_once
from tensorizer._load.open_file import FileReader, OpenFile, ReadOptions, file_of
from tensorizer.distributed._checkpoint.arrays import unpack
from tensorizer.distributed._checkpoint.folder import Folder
from tensorizer.distributed._checkpoint.json_values import from_json
from tensorizer.distributed._checkpoint.marker import ARRAYS, SavedFile, Stored, StoredParts
from tensorizer.distributed._checkpoint.reading import Want, fill, read_records
from tensorizer.errors import AuthenticationError, FormatError, HashMismatchError, StreamNotFoundError, TruncatedError


class Saved(NamedTuple):
    """A saved box, or a leaf, which is saved as bytes."""

    name: str  # name of the tensor or leaf
    stored: Stored
    dtype: torch.dtype


def saved_parts(name: str, parts: StoredParts) -> list[Saved]:
    """The inner tensors of a box that is made of others."""
    return [Saved(f"{name}.{part.path}", part.stored, part.dtype) for part in parts.parts]


class WantedBox(NamedTuple):
    """A part of a saved box, and its target."""

    saved: Saved
    part: tuple[slice, ...]  # range of the box
    target: torch.Tensor  # has the part's shape, on any device


class CheckpointFiles(contextlib.AbstractContextManager["CheckpointFiles"]):
    """The files of one checkpoint, which are opened on first use. The context manager closes them."""

    def __init__(self, folder: Folder, call: CallOptions, *, verify: bool) -> None:
        self._folder, self._call, self._verify = folder, call, verify
        self._open: dict[SavedFile, OpenFile] = {}
        self._saved: dict[tuple[FileReader, int], Saved] = {}  # records that were compared with the marker
        self._closing = contextlib.ExitStack()
        self.bytes_read = 0  # bytes that came from files that are closed now

    def __exit__(self, *_: Any) -> None:
        self.bytes_read += sum(file.bytes_read or 0 for file in self._open.values())
        self._open.clear()
        self._saved.clear()
        self._closing.close()

    def file(self, file: SavedFile) -> OpenFile:
        """An open file of the checkpoint.

        Raises:
            StreamNotFoundError: The file does not exist.
            FormatError: The file is not the one that was written; :class:`TruncatedError` if it is shorter.
            AuthenticationError: The file is not the one that the marker names.
        """
        if file not in self._open:
            opened = file_of(
                self._opened(file), self._call, ReadOptions(verify_hash=self._verify, allow_missing_hashes=True)
            )
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
        """Returns the entry of a box in its file, after comparing it with the marker.

        Raises:
            FormatError: The file has another record at this place.
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
                self._saved[file.readers[0], i] = saved
                return i
        raise FormatError(
            f"{file.source_name}: record {i}: expected {name!r}, {dtype}, {list(stored.shape)}, got {found}: "
            "not the file that belongs to this checkpoint"
        )

    def authenticated_by(self) -> tuple[tuple[Optional[str], tuple[str, ...]], ...]:
        """For each open file: whether a key or a signature authenticates it, and the public keys of its signatures."""
        return tuple((file.authenticated, tuple(key.hex() for key in file.signers)) for file in self._open.values())

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read_bytes(self, name: str, stored: Stored) -> bytes:
        """Reads the bytes of a leaf."""
        (tensor,) = self.read_records([Saved(name, stored, torch.uint8)])
        return bytes(tensor.numpy().tobytes())

    def read_value(self, name: str, stored: Stored) -> Any:
        """The value of a leaf that is JSON or has arrays, from the marker if it is stored there."""
        content = self.read_bytes(name, stored) if stored.text is None else stored.text
        try:
            return unpack(content) if isinstance(content, bytes) and stored.kind == ARRAYS else from_json(content)
        except FormatError as error:
            raise FormatError(f"{self._folder.where}: {name!r:.200}: {error}") from None

    def read(self, wanted: Iterable[WantedBox]) -> None:
        """Fills the targets. Raises the errors of :func:`~tensorizer.distributed._checkpoint.reading.fill`."""
        fill(map(self._want, wanted), verify=self._verify, check=self._check_digests)

    def read_records(self, records: Sequence[Saved]) -> Sequence[torch.Tensor]:
        """Reads whole records of one file. Raises the errors of :meth:`read`."""
        if not records:
            return []
        file = records[0].stored.file
        assert file is not None
        entries = [self.check(record) for record in records]
        (reader,) = self.file(file).readers
        return read_records(reader, entries, self._verify, self._check_digests)

    def _want(self, box: WantedBox) -> Want:
        (_, stored, dtype), part, target = box
        entry = self.check(box.saved)
        assert stored.file is not None
        return Want(self.file(stored.file), entry, stored.shape, dtype, part, target)

    def _check_digests(self, reader: FileReader, entries: Sequence[int], headers: _C.LoadedHeaders) -> None:
        """Checks that the digests of the records, which match the data, are those of the marker."""
        for position, entry in enumerate(entries):
            name, stored, _ = self._saved[reader, entry]
            found = {HashType(kind): value for kind, value in headers.hashes(position)}
            crc32 = None if stored.crc32 is None else stored.crc32.to_bytes(4, "little")
            sha256 = None if stored.sha256 is None else bytes.fromhex(stored.sha256)
            if (found.get(HashType.CRC32), found.get(HashType.SHA256)) != (crc32, sha256):
                raise HashMismatchError(
                    f"{reader.source_name}: tensor {name!r}: the digests of the file are not those of the "
                    "checkpoint's marker"
                )


def _check_belongs(opened: OpenFile, file: SavedFile) -> None:
    """Checks that an authenticated file is the one that an authenticated marker names."""
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
