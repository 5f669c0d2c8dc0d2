"""The indexes of one file, or of the shards of a model, as one: names, dtypes and shapes, without torch.

``inspect`` shows this. ``OpenFile`` is one whose tensors can be loaded.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, TypeVar

from tensorizer import _C
from tensorizer._format.dtype_names import dtype_text, lacks_name
from tensorizer._format.entries import TensorType
from tensorizer._format.names import Name, listed, name_text
from tensorizer._io import shards
from tensorizer._io.call_options import NOBODY, CallOptions
from tensorizer._io.shards import ORIGIN_KEY, Choose, OpenedFiles, OpenedShards
from tensorizer._io.sources import OpenedSource, is_one_file, open_source
from tensorizer._keys import key_ring
from tensorizer._load.authenticity import authenticate
from tensorizer._load.joined import JoinedIndex, join
from tensorizer._system import locks
from tensorizer._system.sizes import counted
from tensorizer.errors import CryptographyError, FormatError, MissingHashError

if TYPE_CHECKING:
    import torch

    from tensorizer._load.open_file import FileReader

logger = logging.getLogger("tensorizer.serialization")


_Opened = TypeVar("_Opened", bound="OpenIndex")


class LoadedBatch(NamedTuple):
    """Tensors that were loaded together; the same position in all three is the same tensor."""

    entries: Sequence[int]
    tensors: Sequence[torch.Tensor]
    headers: _C.LoadedHeaders


class IndexReader:
    """The index of one file, and its record headers. :class:`FileReader` loads its tensors, too.

    Attributes:
        index: What the file says of its tensors.
        names: Of all entries.
    """

    def __init__(self, opened: OpenedSource, call: CallOptions) -> None:
        self._opened = opened
        self.index, self._keys = read_index(opened, call, without_key=True)
        self.names: list[Name] = self.index.names()
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self._opened.close()

    @property
    def nbytes(self) -> Optional[int]:
        """Of the file; ``None`` where the source does not say."""
        return self._opened.source.size()

    @functools.cached_property
    def metadata(self) -> Optional[Mapping[str, str]]:
        """What the writer noted; ``None`` where that is nothing at all or encrypted and there is no key."""
        return self.index.metadata(self._keys if self.index.metadata_is_sealed else None)

    def read_headers(self, entries: Sequence[int]) -> LoadedBatch:
        """The record headers of `entries`, without any data."""
        source = self._opened.source
        batch = _C.LoadBatch(source, self.index, list(entries), keys=self._keys, headers_only=True)
        batch.run()
        return LoadedBatch(entries, [], batch.headers)


class FilePart(NamedTuple):
    """The entries of a read that one file holds."""

    reader: FileReader  # or an IndexReader, where no tensor is loaded
    begin: int  # the number of the file's first entry
    entries: Sequence[int]  # numbered as in the file

    def of_all(self, batch: LoadedBatch) -> LoadedBatch:
        return batch._replace(entries=[self.begin + i for i in batch.entries]) if self.begin else batch


class OpenIndex(AbstractContextManager[Any]):
    """The indexes of one file, or of the shards of one model, under one numbering of their entries.

    Facts and record headers stay when it is closed.

    Attributes:
        readers: One for each file, in the order of their entries.
        index: What all of them say of their tensors.
        names: Of all entries.
        aliases: From entries to those that hold their data, where these are others.
        opened: The sources.
        shard_names: Of the files of a sharded model, in order; none for a single file.
        stream: The caller's object, or the stream opened for a URI; ``None`` for local paths.
        call: How it was opened.
    """

    def __init__(self, opened: OpenedFiles, readers: Sequence[Any], call: CallOptions) -> None:
        shards = opened if isinstance(opened, OpenedShards) else None
        self.readers, self.call = readers, call
        self.opened, self.source_name, self.stream = opened, opened.name, opened.stream
        self.shard_names: list[str] = []
        self._map_metadata: Optional[dict[str, str]] = None
        self.index: Any
        self.names: list[Name]
        if shards is None:
            (only,) = readers
            self.index, self.names = only.index, only.names
        else:
            self.shard_names, self._map_metadata = list(shards.files), shards.metadata
            self.index, self.names = join(shards, readers)
        self.aliases: dict[int, int] = self.index.targets()
        self._headers: dict[int, tuple[Sequence[int], _C.LoadedHeaders]] = {}
        self._lock = threading.Lock()
        locks.makers[self] = threading.Lock

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the files and forgets keys."""
        for reader in self.readers:
            reader.close()

    def __enter__(self: _Opened) -> _Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return all(reader.closed for reader in self.readers)

    # ---- facts of the file ------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> Optional[int]:
        """Of all files; ``None`` where a source does not say."""
        sizes = [reader.nbytes for reader in self.readers]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def kind_text(self) -> str:
        """What it is, for messages."""
        return f"data version {self.index.version}" if self.index.format == "tensors" else str(self.index.format)

    @property
    def readable(self) -> bool:
        """Whether payloads can be read: there is a key, or none is needed."""
        return self.call.encryption is not None or not self.index.encrypted

    def metadata(self) -> Optional[dict[str, str]]:
        """What the writer noted: the map of shards first, then the files, the first of which decides where they differ.
        Without what :attr:`made_from` is.

        ``None`` where that is nothing, or encrypted and there is no key. Decrypted when it is first asked for.

        Raises:
            RuntimeError: It is encrypted, and the file is closed.
        """
        if self.index.metadata_is_sealed and self.call.encryption is None:
            return None
        if self._map_metadata is None:
            noted = self.readers[0].metadata
            found = dict(noted or {})
            is_only_origin = found.pop(ORIGIN_KEY, None) is not None and not found
            return None if noted is None or is_only_origin else found
        found = dict(self._map_metadata)
        for reader in self.readers:
            for key, value in (reader.metadata or {}).items():
                found.setdefault(key, value)
        found.pop(ORIGIN_KEY, None)
        return found or None

    @property
    def made_from(self) -> Optional[str]:
        """What the writer noted of the files that it was made from, which :meth:`metadata` leaves out."""
        if self.index.metadata_is_sealed and self.call.encryption is None:
            return None
        noted = ((reader.metadata or {}).get(ORIGIN_KEY) for reader in self.readers)
        return next(filter(None, noted), None)

    def ties(self) -> dict[Name, Name]:
        """Names that stand for another tensor of the file, and which one."""
        return {self.names[alias]: self.names[target] for alias, target in self.aliases.items()}

    @property
    def index_digest(self) -> Optional[str]:
        """Hexadecimal SHA-256 of the index, as computed; ``None`` for shards, and where the format has none."""
        if self.shard_names or self.index.format != "tensors":
            return None
        return _C.index_digest(self.index).hex()

    # ---- facts of one entry -----------------------------------------------------------------------------------------

    @functools.cached_property
    def stored(self) -> list[int]:
        """The entries that have data of their own in the file, be they those of another one once more."""
        if not self.shard_names:
            return list(range(self.index.entry_count))
        return [i for i in range(len(self.names)) if self.is_stored(i)]

    def is_stored(self, i: int) -> bool:
        """Whether a name has data of its own in the file."""
        file, local = self._locate(i)
        return bool(i < self.index.entry_count and local < self.readers[file].index.entry_count)

    def _locate(self, i: int) -> tuple[int, int]:
        return self.index.locate(i) if isinstance(self.index, JoinedIndex) else (0, i)

    def shard_of(self, i: int) -> Optional[str]:
        """Which of :attr:`shard_names` holds an entry; ``None`` in a single file."""
        return self.shard_names[self._locate(i)[0]] if self.shard_names else None

    def type(self, i: int) -> TensorType:
        return TensorType(self.index.type(i))

    # ---- facts of record headers ------------------------------------------------------------------------------------

    def has_header(self, i: int) -> bool:
        """Whether the record header of an entry was read, which holds its module index and digests."""
        return i in self._headers or self.aliases.get(i) in self._headers

    def header(self, i: int) -> tuple[_C.LoadedHeaders, int]:
        """The headers among which that of an entry is, and its position there."""
        if i not in self._headers:
            i = self.aliases[i]
        entries, headers = self._headers[i]
        return headers, bisect.bisect_left(entries, i)

    def described(self, i: int) -> tuple[bytes, tuple[int, ...], int]:
        """Dtype as stored, shape and module index: of the record header where it was read, else what the index shows.

        The index writes scalars without data as ``(1,)``, in old files no dtype, and never a module index (0 here).
        """
        if not self.has_header(i):
            return self.index.dtype(i), self.index.shape(i), 0
        headers, position = self.header(i)
        return headers.dtype(position), headers.shape(position), headers.module_idx(position)

    def dtype_text(self, i: int) -> str:
        """The dtype as torch calls it, without ``torch.``; as the file has it where this torch lacks it."""
        stored = self.described(i)[0].decode("utf-8", "replace")
        return dtype_text(stored or str(self.index.container_dtype(i)))

    def read_headers(self, entries: Sequence[int]) -> None:
        """Reads the record headers of `entries` (ascending), where the format has any and they were not read yet."""
        self._check_readable()
        if not self.index.stores_hashes:
            return
        for part in self.parts([i for i in entries if i < self.index.entry_count and i not in self._headers]):
            wanted = [i for i in part.entries if i < part.reader.index.entry_count]
            if wanted:
                self._noted(part.of_all(part.reader.read_headers(wanted)))

    def read_dtypes(self, entries: Sequence[int]) -> None:
        """Reads the record headers of those of `entries` (ascending) whose dtype the index does not show: of tensors
        without data whose dtype numpy lacks. Reads none where a key is needed and not given."""
        if self.readable:
            self.read_headers([i for i in entries if lacks_name(self.index.dtype(i))])

    def parts(self, entries: Iterable[int]) -> list[FilePart]:
        """What each file holds of `entries` (ascending)."""
        if not isinstance(self.index, JoinedIndex):
            return [FilePart(self.readers[0], 0, entries if isinstance(entries, Sequence) else list(entries))]
        by_file: dict[int, list[int]] = {}
        for i in entries:
            file, local = self.index.locate(i)
            by_file.setdefault(file, []).append(local)
        return [
            FilePart(self.readers[file], self.index.begins[file], sorted(local))
            for file, local in sorted(by_file.items())
        ]

    def _noted(self, batch: LoadedBatch) -> LoadedBatch:
        """A batch whose record headers are kept."""
        with self._lock:
            self._headers.update(dict.fromkeys(batch.entries, (batch.entries, batch.headers)))
        return batch

    def _check_readable(self) -> None:
        if not self.readable:
            raise CryptographyError(f"{self.source_name} is encrypted: a key is needed")


# --- opening ----------------------------------------------------------------------------------------------------------


def open_files(source: Any, call: CallOptions) -> OpenedFiles:
    """Opens one file, or the shards that a folder or an index stands for; nothing is read of a file."""
    if is_one_file(source):  # which needs nothing of folders (benchmarks.walks)
        return open_source(source, call)
    return shards.open_files(source, call, _chooser(call))


def open_index(source: Any, call: CallOptions) -> OpenIndex:
    """Opens the index of one file, or of the shards that a folder or an index stands for; without its key, too.

    Raises:
        FormatError: Not a file of tensors, an unknown version, a damaged index; shards that are not those of their map.
        OSError: It cannot be opened.
    """
    opened = open_files(source, call)
    try:
        files = list(opened.files.values()) if isinstance(opened, OpenedShards) else [opened]
        return OpenIndex(opened, [IndexReader(file, call) for file in files], call)
    except BaseException:
        opened.close()
        raise


def read_index(opened: OpenedSource, call: CallOptions, without_key: bool) -> tuple[_C.Index, Optional[_C.KeyRing]]:
    """The index of an opened file, whose tag and signatures were checked, and the key of its tensors, if given.

    Raises:
        FormatError: Not a file of tensors, an unknown version, a damaged index.
        CryptographyError: The file is encrypted and there is no key, unless `without_key`, or the other way round.
        AuthenticationError: Its index is not the one that its key or a signature authenticates.
    """
    index = _parsed(opened, call.encryption is not None, without_key)
    keys = key_ring(call.encryption) if index.encrypted and call.encryption is not None else None
    if keys is not None or call.trust != NOBODY:
        authenticate(opened, index, keys, call)
    return index, keys


def _parsed(opened: OpenedSource, has_key: bool, without_key: bool) -> _C.Index:
    try:
        return _C.open_index(opened.source, opened.start, has_key)
    except CryptographyError:
        if not without_key or has_key:
            raise
    except FormatError as error:
        _say_what_it_is(error, opened)
        raise
    return _C.open_index(opened.source, opened.start, True)  # it is in clear


def _say_what_it_is(error: FormatError, opened: OpenedSource) -> None:
    from tensorizer._format.foreign import HEAD_NBYTES, tell_foreign  # for errors only

    head = bytearray(HEAD_NBYTES)
    with contextlib.suppress(Exception):  # what came first says more
        nbytes = 0
        while nbytes < len(head) and (
            got := opened.source.read_up_to(opened.start + nbytes, memoryview(head)[nbytes:])
        ):
            nbytes += got
        tell_foreign(error, bytes(head[:nbytes]))


def _chooser(call: CallOptions) -> Choose:
    """What tells for :func:`tensorizer._io.shards.open_files` which of several sets of weights is read."""

    def choose(label: str, names: Sequence[str], locate: Callable[[str], Any]) -> str:
        from tensorizer._io import forms  # for few folders

        folder = forms.FolderOfForms(label, locate, functools.partial(note_of, call), call)
        return forms.choose(names, folder)

    return choose


def note_of(call: CallOptions, source: Any) -> Optional[str]:
    """What a file or index notes of its origin; ``None`` where that is nothing, or encrypted and there is no key."""
    with open_index(source, call._replace(trust=NOBODY)) as file:
        return file.made_from


# --- errors -----------------------------------------------------------------------------------------------------------


def file_error(source: str, problem: object) -> FormatError:
    """The error for what is wrong with a file."""
    error = FormatError(f"{source}: {problem}")
    error.source = source
    return error


def tensor_error(source: str, name: Name, problem: object) -> FormatError:
    """The error for what is wrong with one tensor of a file."""
    return file_error(source, f"tensor {name_text(name)!r:.200}: {problem}")


def missing_hashes(source: str, names: Sequence[Name], argument: str = "allow_missing_hashes=True") -> MissingHashError:
    """The error for tensors that were to be verified and have no digest; the argument takes them all the same."""
    error = MissingHashError(
        f"{source}: cannot verify {counted(len(names), 'tensor')} without a stored hash: {listed(names)}; "
        f"{argument} takes them unverified"
    )
    error.source = source
    return error
