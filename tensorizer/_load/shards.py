"""Several files as one container: the entries of all shards under one numbering, read concurrently."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch

from tensorizer import _C
from tensorizer._format.entries import FilterFuncType
from tensorizer._format.names import Name, path_of
from tensorizer._io.shards import OpenedFiles, OpenedShards
from tensorizer._load.container import AUTHENTICATED, Container, ReadOptions, open_container
from tensorizer._load.reader import LoadedBatch, Progress
from tensorizer.errors import FormatError

__all__ = ["ShardedContainer", "ShardedIndex", "open_files_as_one", "open_shards"]

logger = logging.getLogger("tensorizer.serialization")

# Shards read at a time: one keeps a disk busy, and its end should not leave it idle; a network takes more.
_LOCAL_SHARDS_AT_ONCE = 2
_NETWORK_SHARDS_AT_ONCE = 4


class ShardedIndex:
    """The indexes of all shards as one: entries are numbered through, names that only the map gives come last."""

    def __init__(self, shards: Sequence[_C.Index], aliases: Sequence[int]) -> None:
        self._shards = shards
        self._begins = [0, *itertools.accumulate(map(len, shards))]
        self._aliases = aliases  # targets of the names that only the map gives
        self.entry_count = self._begins[-1]
        first = shards[0]
        self.start = first.start
        self.version = max(index.version for index in shards)
        self.flags = first.flags
        self.format = first.format
        self.encrypted = any(index.encrypted for index in shards)
        self.stores_hashes = all(index.stores_hashes for index in shards)
        self.metadata_is_sealed = any(index.metadata_is_sealed for index in shards)
        self.tensor_size = sum(index.tensor_size for index in shards)

    def __len__(self) -> int:
        return self.entry_count + len(self._aliases)

    def place(self, i: int) -> tuple[int, int]:
        """The shard of an entry, and its number there."""
        if i >= self.entry_count:
            i = self._aliases[i - self.entry_count]
        shard = bisect.bisect_right(self._begins, i) - 1
        return shard, i - self._begins[shard]

    def begin(self, shard: int) -> int:
        """The number of a shard's first entry."""
        return self._begins[shard]

    # ---- facts of one entry, from its shard -------------------------------------------------------------------------

    def container_dtype(self, i: int) -> str:
        shard, local = self.place(i)
        return self._shards[shard].container_dtype(local)

    def data_nbytes(self, i: int) -> int:
        shard, local = self.place(i)
        return self._shards[shard].data_nbytes(local)

    def data_offset(self, i: int) -> int:
        shard, local = self.place(i)
        return self._shards[shard].data_offset(local)

    def dtype(self, i: int) -> bytes:
        shard, local = self.place(i)
        return self._shards[shard].dtype(local)

    def entry_version(self, i: int) -> int:
        shard, local = self.place(i)
        return self._shards[shard].entry_version(local)

    def loaded_nbytes(self, i: int) -> int:
        shard, local = self.place(i)
        return self._shards[shard].loaded_nbytes(local)

    def offset(self, i: int) -> int:
        shard, local = self.place(i)
        return self._shards[shard].offset(local)

    def shape(self, i: int) -> tuple[int, ...]:
        shard, local = self.place(i)
        return self._shards[shard].shape(local)

    def stored_name(self, i: int) -> bytes:
        shard, local = self.place(i)
        return self._shards[shard].stored_name(local)

    def type(self, i: int) -> int:
        shard, local = self.place(i)
        return self._shards[shard].type(local)

    def total_loaded_nbytes(self, selection: Sequence[int]) -> int:
        """Bytes of the selected tensors in memory, each counted once."""
        local: dict[int, list[int]] = {}
        for i in selection:
            if i < self.entry_count:
                shard, position = self.place(i)
                local.setdefault(shard, []).append(position)
        return sum(self._shards[shard].total_loaded_nbytes(entries) for shard, entries in local.items())

    def targets(self) -> dict[int, int]:
        """Names to the entries that hold their data, where they differ."""
        found = {
            begin + alias: begin + target
            for begin, index in zip(self._begins, self._shards)
            for alias, target in index.targets().items()
        }
        found.update({self.entry_count + k: found.get(target, target) for k, target in enumerate(self._aliases)})
        return found


class _Part(NamedTuple):
    """The entries of a read that one shard holds."""

    container: Container
    begin: int
    entries: list[int]  # numbered as in the shard

    def of_all(self, batch: LoadedBatch) -> LoadedBatch:
        return batch._replace(entries=[self.begin + i for i in batch.entries])


class ShardedContainer(Container):
    """The shards of one model as a container. May be used from several threads, like any."""

    def __init__(
        self,
        shards: list[Container],
        index: ShardedIndex,
        names: list[Name],
        selection: list[int],
        opened: OpenedShards,
    ) -> None:
        self._shards = shards
        self._shard_index = index
        self._files = opened
        self.index: Any = index
        self.names = names
        self.targets = index.targets()
        self.selection = selection
        self.mapped = shards[0].mapped
        self.converts = shards[0].converts
        self.allow_missing_hashes = shards[0].allow_missing_hashes
        self.source_name = opened.name
        self.network = any(shard.network for shard in shards)
        self._metadata = None

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    @property
    def closed(self) -> bool:
        return all(shard.closed for shard in self._shards)

    @property
    def source(self) -> Optional[_C.RangeSource]:
        """None: there is no single one."""
        return None

    @property
    def bytes_read(self) -> Optional[int]:
        return None if self.closed else sum(shard.bytes_read or 0 for shard in self._shards)

    @property
    def cached_bytes_read(self) -> int:
        return sum(shard.cached_bytes_read for shard in self._shards)

    @property
    def shards(self) -> list[Container]:
        """The files, in the order of their entries."""
        return self._shards

    @functools.cached_property
    def shows_all(self) -> bool:
        return all(shard.shows_all for shard in self._shards)

    def converts_dtype(self, stored: Optional[torch.dtype]) -> bool:
        return self._shards[0].converts_dtype(stored)

    def device_of(self, name: Name) -> torch.device:
        return self._shards[0].device_of(name)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _parts(self, entries: Iterable[int]) -> list[_Part]:
        by_shard: dict[int, list[int]] = {}
        for i in entries:
            shard, local = self._shard_index.place(i)
            by_shard.setdefault(shard, []).append(local)
        return [
            _Part(self._shards[shard], self._shard_index.begin(shard), sorted(local))
            for shard, local in sorted(by_shard.items())
        ]

    def read(self, entries: Sequence[int], verify: bool, progress: Progress = None) -> Iterator[LoadedBatch]:
        parts = self._parts(entries)
        for part in parts:
            part.container.reader.direct_io.expect(
                lambda: sum(part.container.nbytes_of(part.entries) for part in parts)
            )
        pending = [part.container.reader.begin(part.entries, verify) for part in parts]
        if all(batches is not None for batches in pending):
            flat = [(part, batch) for part, batches in zip(parts, pending) for batch in batches or ()]
            at_once = _NETWORK_SHARDS_AT_ONCE if self.network else _LOCAL_SHARDS_AT_ONCE
            _C.run_batches([batch.batch for _, batch in flat], at_once, progress)
            for part, batch in flat:
                loaded = batch.finish()
                part.container.note(loaded)
                yield part.of_all(loaded)
            return
        done = 0
        for part in parts:
            before = done
            report = None if progress is None else (lambda n, before=before: progress(before + n))
            for loaded in part.container.read(part.entries, verify, report):
                yield part.of_all(loaded)
            done += sum(map(part.container.index.data_nbytes, part.entries))

    def read_headers(self, entries: Sequence[int]) -> None:
        for part in self._parts(i for i in entries if i < self._shard_index.entry_count):
            part.container.read_headers(part.entries)

    def read_raw(self, entries: Sequence[int], verify: bool) -> list[torch.Tensor]:
        tensors: dict[tuple[int, int], torch.Tensor] = {}
        for part in self._parts(entries):
            loaded = part.container.read_raw(part.entries, verify)
            tensors.update(zip(((part.begin, i) for i in part.entries), loaded))
        places = [self._shard_index.place(i) for i in entries]
        return [tensors[self._shard_index.begin(shard), local] for shard, local in places]

    def may_cast(self, i: int) -> bool:
        shard, local = self._shard_index.place(i)
        return self._shards[shard].may_cast(local)

    # ---- facts ------------------------------------------------------------------------------------------------------

    def has_header(self, i: int) -> bool:
        shard, local = self._shard_index.place(i)
        return self._shards[shard].has_header(local)

    def header(self, i: int) -> tuple[_C.LoadedHeaders, int]:
        shard, local = self._shard_index.place(i)
        return self._shards[shard].header(local)

    def metadata(self) -> Optional[dict[str, str]]:
        """That of the index, and of the shards, the first of which decides where they differ."""
        found = dict(self._files.metadata)
        for shard in self._shards:
            for key, value in (shard.metadata() or {}).items():
                found.setdefault(key, value)
        return found or None

    def extra_states(self) -> dict[str, Any]:
        return {path: state for shard in self._shards for path, state in shard.extra_states().items()}

    def is_stored(self, i: int) -> bool:
        shard, local = self._shard_index.place(i)
        return i < self._shard_index.entry_count and self._shards[shard].is_stored(local)

    @property
    def nbytes(self) -> Optional[int]:
        sizes = [shard.nbytes for shard in self._shards]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def file_names(self) -> list[str]:
        return list(self._files.files)

    def part(self, i: int) -> tuple[Container, int]:
        shard, local = self._shard_index.place(self.targets.get(i, i))
        return self._shards[shard].part(local)

    def file_of(self, i: int) -> Optional[str]:
        return self.file_names[self._shard_index.place(i)[0]]

    def ties(self) -> dict[Name, Name]:
        return {self.names[alias]: self.names[target] for alias, target in self.targets.items()}

    @property
    def authenticated(self) -> Optional[str]:
        vouched = [_C.vouched(shard.index) for shard in self._shards]
        return AUTHENTICATED[all(key for key, _ in vouched), all(bool(signers) for _, signers in vouched)]

    @property
    def signers(self) -> list[bytes]:
        """Those that every shard has."""
        first, *others = (shard.signers for shard in self._shards)
        return [signer for signer in first if all(signer in found for found in others)]

    @property
    def index_digest(self) -> Optional[str]:
        """None: each shard has its own."""
        return None

    @functools.cached_property
    def checks_whole(self) -> bool:
        return any(shard.checks_whole for shard in self._shards)

    @property
    def index_matches(self) -> Optional[bool]:
        found = {shard.index_matches for shard in self._shards}
        return False if False in found else True if True in found else None


def open_files_as_one(opened: OpenedFiles, filter_func: Optional[FilterFuncType], options: ReadOptions) -> Container:
    """One file or the shards of one model; errors as :func:`open_container` and :func:`open_shards`."""
    if isinstance(opened, OpenedShards):
        return open_shards(opened, filter_func, options)
    return open_container(opened, filter_func, options)


def open_shards(opened: OpenedShards, filter_func: Optional[FilterFuncType], options: ReadOptions) -> ShardedContainer:
    """Parses the indexes of all shards and holds them against the map; no payload is read.

    Raises:
        FormatError: A shard that is none, that lacks a tensor which the map says it has, or has one of another shard.
        CryptographyError, ValueError: As for a single file.
    """
    files = list(opened.files)
    if options.trust.signature is not None:
        raise ValueError(f"signature: wanted one file, found the shards of {opened.name}, each with its own beside it")
    if options.max_workers:
        options = options._replace(max_workers=max(1, options.max_workers // min(len(files), _LOCAL_SHARDS_AT_ONCE)))
    with contextlib.ExitStack() as undo:
        undo.callback(opened.close)
        shards = [open_container(opened.files[file], filter_func, options) for file in files]
        names: list[Name] = list(itertools.chain.from_iterable(shard.names for shard in shards))
        aliases = _aliases(opened.metadata, names)
        _check_map(opened, files, shards, aliases)
        index = ShardedIndex([shard.index for shard in shards], list(aliases.values()))
        selection = [index.begin(s) + i for s, shard in enumerate(shards) for i in shard.selection]
        for alias in aliases:
            if filter_func is None or filter_func(alias):
                selection.append(len(names))
            names.append(alias)
        undo.pop_all()
    return ShardedContainer(shards, index, names, selection, opened)


def _check_map(opened: OpenedShards, files: list[str], shards: list[Container], aliases: Collection[str]) -> None:
    home: dict[Name, str] = {}
    unmapped = 0
    for file, shard in zip(files, shards):
        for i, name in enumerate(shard.names):
            if name in home:
                raise FormatError(f"{opened.name}: tensor {name!r:.200} is in two shards, {home[name]!r} and {file!r}")
            home[name] = file
            stored = name if isinstance(name, str) else shard.index.stored_name(i).decode("utf-8", "replace")
            wanted = opened.weight_map.get(stored)
            if wanted is None:
                unmapped += 1
            elif wanted != file:
                raise FormatError(f"{opened.name}: tensor {stored!r:.200}: wanted in {wanted!r}, found in {file!r}")
    known = {name for name in home if isinstance(name, str)}
    structured = {
        shard.index.stored_name(i).decode("utf-8", "replace")
        for shard in shards
        for i, name in enumerate(shard.names)
        if not isinstance(name, str)
    }
    for stored, file in opened.weight_map.items():
        if stored not in known and stored not in structured and stored not in aliases:
            raise FormatError(f"{opened.name}: tensor {stored!r:.200}: wanted in {file!r}, found in no shard")
    _check_paths(opened.name, home)
    if unmapped:
        logger.warning("%s: %d tensors of its shards are not in its map; they are loaded too", opened.name, unmapped)


def _check_paths(index: str, home: dict[Name, str]) -> None:
    """Paths of several files form one tree: no tensor lies below another one."""
    if all(isinstance(name, str) for name in home):
        return
    paths = {path_of(name) for name in home}
    for path in paths:
        for length in range(1, len(path)):
            if path[:length] in paths:
                raise FormatError(f"{index}: tensor {path!r:.200} lies below another tensor")


def _aliases(metadata: dict[str, str], names: list[Name]) -> dict[str, int]:
    """Names that only the index's metadata gives, as savers of modules note them, and what they stand for."""
    numbers = {name: i for i, name in enumerate(names)}
    return {
        alias: numbers[target]
        for alias, target in metadata.items()
        if target in numbers and alias not in numbers and _C.names_of_one_model(alias, target)
    }
