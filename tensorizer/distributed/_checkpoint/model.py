"""Presents one file of tensors, or the shards of a model, to torch's planners: every tensor is one box."""

from __future__ import annotations

import io
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from tensorizer import _C
from tensorizer._format.entries import flat_name
from tensorizer._format.extra_state import state_name
from tensorizer._format.names import path_of
from tensorizer._io.call_options import CallOptions
from tensorizer._io.shards import OpenedShards
from tensorizer._io.sources import OpenedSource, version_of
from tensorizer._io.uri import local_path
from tensorizer._load.digests import Verification
from tensorizer._load.open_file import FileReader, OpenFile, ReadOptions, no_collections, open_file
from tensorizer._load.parts import TensorSlice
from tensorizer.distributed._checkpoint.json_values import torch_saved
from tensorizer.distributed._checkpoint.marker import check_planner_data
from tensorizer.distributed._checkpoint.reading import Want, fill
from tensorizer.errors import StreamError


class SeenFile(NamedTuple):
    """Identifies the file that a rank sees, for the comparison between ranks."""

    nbytes: Any
    machine: str  # the machine whose file system gave the version; empty for a store
    version: tuple[Any, ...]  # the ETag, or the time of the last change


#: Seen files by name. Ranks send them to the coordinator.
Seen = dict[str, SeenFile]


class ModelFiles:
    """The open file or shards. Names are those of :func:`tensorizer.torch.load_file`, joined with dots.

    Raises:
        OSError: A file cannot be opened.
        FormatError: A file is damaged, or has a dtype that this torch lacks.
        CryptographyError: The key is missing or wrong.
        AuthenticationError: A file does not match its key or its signature.
    """

    def __init__(self, place: Any, call: CallOptions, *, verify: bool, checks: Verification) -> None:
        options = ReadOptions(verify_hash=verify or None, allow_missing_hashes=True, verification=checks)
        self.file: OpenFile = open_file(place, call, options)
        self._verify = verify or bool(checks.stored) or (checks.where_stored and self.file.index.stores_hashes)
        try:
            if not self.file.shows_all:
                self.file.read_headers(self.file.stored)
            self._entries = self.file.flat_names()
            self._states: dict[str, tuple[tuple[str, ...], Any]] = {}
            for path, state in self.file.extra_states().items():
                self._add_state((state_name(path),), state)
            self._tensors = {name: TensorSlice(self.file, i) for name, i in self._entries.items()}
            self.seen = _seen(self.file)
        except BaseException:
            self.file.close()
            raise

    def _add_state(self, path: tuple[str, ...], state: Any) -> None:
        """Adds extra state as a whole, and the values in its dictionaries under the names that planners give them."""
        self._states[".".join(path)] = path, state
        for key, value in state.items() if isinstance(state, dict) else ():
            self._add_state((*path, key), value)

    def close(self) -> None:
        self.file.close()

    @property
    def bytes_read(self) -> int:
        """Bytes that the sources have delivered so far."""
        return self.file.bytes_read or 0

    def metadata(self) -> Metadata:
        """The metadata for planners."""
        items: dict[str, Any] = {name: BytesStorageMetadata() for name in self._states}
        with no_collections():
            for name, tensor in self._tensors.items():
                shape = tensor.shape
                chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
                items[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), shape, [chunk])
        file = self.file
        paths: dict[str, Any] = {
            flat_name(file.names[i], file.type(i)): path_of(file.names[i])
            for i in file.selection
            if not isinstance(file.names[i], str)
        }
        paths.update({name: path for name, (path, _) in self._states.items()})
        planner_data = {name: paths.get(name, (name,)) for name in items}
        check_planner_data(planner_data, items)
        return Metadata(state_dict_metadata=items, planner_data=planner_data, storage_data={})

    def want(self, name: str, part: tuple[slice, ...], target: torch.Tensor) -> Want:
        """A part of a tensor, and its target."""
        tensor = self._tensors[name]
        return Want(self.file, self._entries[name], tuple(tensor.shape), tensor.dtype, part, target)

    def leaf(self, name: str) -> io.BytesIO:
        """The extra state of a module, encoded with ``torch.save``."""
        return torch_saved(self._states[name][1])

    def read(self, wants: Sequence[Want]) -> None:
        """Fills the targets. Raises as :func:`~tensorizer.distributed._checkpoint.reading.fill`, and
        :class:`HashMismatchError` for a file that does not match its digest."""
        fill(wants, verify=self._verify or self.file.checks_whole, check=_agreed)
        self.file.check_files()


def _agreed(reader: FileReader, entries: Sequence[int], headers: _C.LoadedHeaders) -> None:
    """Accepts records whose data match the digests of the file. No marker states other digests for a model."""


def _seen(file: OpenFile) -> Seen:
    opened = file.opened
    files: Mapping[str, OpenedSource] = opened.files if isinstance(opened, OpenedShards) else {"": opened}
    seen: Seen = {}
    for name, source in files.items():
        local = source.location is not None and local_path(source.location) is not None
        version = version_of(source)
        seen[name] = SeenFile(source.source.size(), socket.gethostname() if local else "", version)
    return seen


def compare(where: str, views: Sequence[Any]) -> None:
    """Compares the files that ranks see.

    Raises:
        StreamError: Two ranks see different files.
    """
    first_on: dict[tuple[str, str], tuple[int, SeenFile]] = {}  # by file and machine
    for rank, view in enumerate(views):
        if view is None or views[0] is None:
            continue
        other = None if view.keys() == views[0].keys() else 0
        for name, found in view.items() if other is None else ():
            if found.nbytes != views[0][name].nbytes:
                other = 0
                break
            first, known = first_on.setdefault((name, found.machine), (rank, found))
            if known.version != found.version:
                other = first
                break
        if other is not None:
            error = StreamError(
                f"{where}: rank {rank} and rank {other} read different files (was the file replaced during the load?)"
            )
            error.source = where
            raise error
