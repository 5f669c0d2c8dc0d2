"""The indexes of several files as one, held against the map that names the files of a model."""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tensorizer import _C
from tensorizer._format.names import Name, name_of
from tensorizer._io.shards import OpenedShards
from tensorizer.errors import FormatError

if TYPE_CHECKING:
    from tensorizer._load.open_index import IndexReader

logger = logging.getLogger("tensorizer.serialization")


class JoinedIndex:
    """What ``_C.Index`` says of one file, of several: entries are numbered through, names of the map alone come last.

    Attributes:
        indexes: Of the files.
        begins: The number of each file's first entry, and of the first name of the map alone.
    """

    def __init__(self, indexes: Sequence[_C.Index], aliases: Sequence[int]) -> None:
        self.indexes = indexes
        self.begins = [0, *itertools.accumulate(map(len, indexes))]
        self._aliases = aliases  # what the names that only the map gives stand for
        self.entry_count = self.begins[-1]
        first = indexes[0]
        self.start = first.start
        self.version = max(index.version for index in indexes)
        self.flags = first.flags
        self.format = first.format
        self.encrypted = any(index.encrypted for index in indexes)
        self.stores_hashes = all(index.stores_hashes for index in indexes)
        self.metadata_is_sealed = any(index.metadata_is_sealed for index in indexes)
        self.tensor_size = sum(index.tensor_size for index in indexes)

    def __len__(self) -> int:
        return self.entry_count + len(self._aliases)

    def locate(self, i: int) -> tuple[int, int]:
        """The file of an entry, and its number there."""
        if i >= self.entry_count:
            i = self._aliases[i - self.entry_count]
        file = bisect.bisect_right(self.begins, i) - 1
        return file, i - self.begins[file]

    def _of_file(self, i: int) -> tuple[_C.Index, int]:
        file, local = self.locate(i)
        return self.indexes[file], local

    def container_dtype(self, i: int) -> str:
        index, local = self._of_file(i)
        return index.container_dtype(local)

    def data_nbytes(self, i: int) -> int:
        index, local = self._of_file(i)
        return index.data_nbytes(local)

    def data_offset(self, i: int) -> int:
        index, local = self._of_file(i)
        return index.data_offset(local)

    def dtype(self, i: int) -> bytes:
        index, local = self._of_file(i)
        return index.dtype(local)

    def entry_version(self, i: int) -> int:
        index, local = self._of_file(i)
        return index.entry_version(local)

    def loaded_nbytes(self, i: int) -> int:
        index, local = self._of_file(i)
        return index.loaded_nbytes(local)

    def offset(self, i: int) -> int:
        index, local = self._of_file(i)
        return index.offset(local)

    def shape(self, i: int) -> tuple[int, ...]:
        index, local = self._of_file(i)
        return index.shape(local)

    def stored_name(self, i: int) -> bytes:
        index, local = self._of_file(i)
        return index.stored_name(local)

    def type(self, i: int) -> int:
        index, local = self._of_file(i)
        return index.type(local)

    def total_loaded_nbytes(self, selection: Sequence[int]) -> int:
        """Bytes of the selected tensors in memory, each counted once."""
        local: dict[int, list[int]] = {}
        for i in selection:
            if i < self.entry_count:
                file, position = self.locate(i)
                local.setdefault(file, []).append(position)
        return sum(self.indexes[file].total_loaded_nbytes(entries) for file, entries in local.items())

    def targets(self) -> dict[int, int]:
        """Names to the entries that hold their data, where they differ."""
        found = {
            begin + alias: begin + target
            for begin, index in zip(self.begins, self.indexes)
            for alias, target in index.targets().items()
        }
        found.update({self.entry_count + k: found.get(target, target) for k, target in enumerate(self._aliases)})
        return found


def join(opened: OpenedShards, readers: Sequence[IndexReader]) -> tuple[JoinedIndex, list[Name]]:
    """The index of all files, and the names of its entries, those that only the map gives among them.

    Raises:
        FormatError: A file lacks a tensor which the map says it has, or has one of another file.
    """
    names: list[Name] = list(itertools.chain.from_iterable(reader.names for reader in readers))
    numbers = {name: i for i, name in enumerate(names)}
    # Names that only the metadata of the map give, as savers of modules note them, and what they stand for.
    aliases = {
        alias: numbers[target]
        for alias, target in opened.metadata.items()
        if target in numbers and alias not in numbers and _C.names_of_one_model(alias, target)
    }
    _check_map(opened, readers, aliases)
    index = JoinedIndex([reader.index for reader in readers], list(aliases.values()))
    return index, [*names, *aliases]


def _check_map(opened: OpenedShards, readers: Sequence[IndexReader], aliases: Collection[str]) -> None:
    home: dict[Name, str] = {}
    known: set[str] = set(aliases)  # as they are stored
    unmapped = 0
    for file, reader in zip(opened.files, readers):
        for i, name in enumerate(reader.names):
            if name in home:
                raise FormatError(f"{opened.name}: tensor {name!r:.200} is in two shards, {home[name]!r} and {file!r}")
            home[name] = file
            if isinstance(name, str) and name[:1] not in ("", "\x1e"):  # most are: asking the index takes longer
                stored = name
            else:
                stored = reader.index.stored_name(i).decode("utf-8", "replace")
            known.add(stored)
            wanted = opened.weight_map.get(stored)
            if wanted is None:
                unmapped += 1
            elif wanted != file:
                raise FormatError(
                    f"{opened.name}: tensor {stored!r:.200}: expected it in {wanted!r}, got it in {file!r}"
                )
    for stored, file in opened.weight_map.items():
        if stored not in known:
            raise FormatError(f"{opened.name}: tensor {stored!r:.200}: expected it in {file!r}, got no shard with it")
    for path in home:  # the paths of all files form one tree
        if isinstance(path, tuple) and any(name_of(path[:length]) in home for length in range(1, len(path))):
            raise FormatError(f"{opened.name}: tensor {path!r:.200} lies below another tensor")
    if unmapped:
        logger.warning("%s: %d tensors of its shards are not in its map; they are loaded too", opened.name, unmapped)
