"""An open file as the loader sees it: names and facts of its tensors, the headers that were read, the way to the data.

Tensors are numbered by their position in the index ("entries"). What stands above asks for facts and for batches of
entries; how the bytes lie, and in how many files, is decided here.
"""

from __future__ import annotations

import bisect
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import torch

from tensorizer import _C
from tensorizer._crypto.keys import key_ring
from tensorizer._format import extra_state
from tensorizer._format.entries import FilterFuncType, HashType, TensorEntry, TensorHash, TensorType
from tensorizer._format.names import Name
from tensorizer._io.sources import OpenedSource
from tensorizer._load.authenticity import NOBODY, Trust, authenticate
from tensorizer._load.device_choice import DeviceChooser
from tensorizer._load.direct_io import DirectIO, check_direct_io
from tensorizer._load.reader import LoadedBatch, Progress, ReadAhead, TensorReader, converts, known_dtype, stored_dtype
from tensorizer._system.devices import ordinary_tensors
from tensorizer.errors import CryptographyError, HashMismatchError

if TYPE_CHECKING:
    from tensorizer.encryption import DecryptionParams

__all__ = ["AUTHENTICATED", "Container", "ReadOptions", "open_container"]

AUTHENTICATED = {(False, False): None, (True, False): "key", (False, True): "signature", (True, True): "both"}

# Magic to metadata length (docs/format.md, "Prologue").
_PROLOGUE_NBYTES = 73

# Where every request costs a round trip.
_NETWORK_SOURCES = (_C.HttpSource, _C.RedisSource, _C.PyRangeSource)

# Where the record header of a tensor that was read is kept: entries in ascending order, and their headers.
_BatchHeaders = tuple[Sequence[int], _C.LoadedHeaders]


class ReadOptions(NamedTuple):
    """How the tensors of a container are read; the meanings are those of ``TensorDeserializer``'s arguments."""

    device: Union[torch.device, DeviceChooser]
    dtype: Optional[torch.dtype]
    max_workers: int
    encryption: Optional[DecryptionParams]
    mmap: Optional[bool]  # None: where nothing speaks against it, see _may_map
    allow_missing_hashes: bool = False
    without_key: bool = False  # opens the index of an encrypted file without one; its tensors are out of reach then
    trust: Trust = NOBODY
    direct_io: Optional[str] = None


class Container:
    """One open file. May be used from several threads; every read is independent of the others."""

    def __init__(
        self,
        opened: OpenedSource,
        index: _C.Index,
        names: list[Name],
        selection: Sequence[int],
        reader: TensorReader,
        options: ReadOptions,
    ) -> None:
        self.index = index
        self.names = names
        self.targets: dict[int, int] = index.targets()  # names to the entries that hold their data, where they differ
        self.selection = selection  # the entries that exist for the user, ascending
        self.mapped = bool(options.mmap)
        self.allow_missing_hashes = options.allow_missing_hashes
        self.source_name = opened.source.name
        self.converts = options.dtype is not None  # loaded tensors may differ from the stored ones
        self._dtype = options.dtype
        self._device = options.device
        self.network = _is_network(opened.source)
        self._opened: Optional[OpenedSource] = opened
        self._reader: Optional[TensorReader] = reader
        self._headers: dict[int, _BatchHeaders] = {}
        self._metadata: Optional[dict[str, str]] = None
        self._metadata_is_known = False
        self._cached_bytes_read = 0
        self._lock = threading.Lock()

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the file and forgets keys; facts and headers stay."""
        self._cached_bytes_read = self.cached_bytes_read
        opened, self._opened, self._reader = self._opened, None, None
        if opened is not None:
            opened.close()

    @property
    def closed(self) -> bool:
        return self._opened is None

    @property
    def source(self) -> Optional[_C.RangeSource]:
        """The file's bytes; ``None`` once it is closed."""
        return None if self._opened is None else self._opened.source

    @property
    def bytes_read(self) -> Optional[int]:
        """Bytes that came from the source so far; ``None`` once it is closed."""
        return None if self._opened is None else int(self._opened.source.bytes_read)

    @property
    def cached_bytes_read(self) -> int:
        """Bytes that came from the cache of the node so far, also when the file is closed."""
        source = self.source
        return source.cached_bytes_read if isinstance(source, _C.CacheSource) else self._cached_bytes_read

    @property
    def reader(self) -> TensorReader:
        """The way to the data.

        Raises:
            RuntimeError: The file is closed.
        """
        reader = self._reader
        if reader is None:
            raise RuntimeError("the file is closed; tensors that were not loaded before are out of reach")
        return reader

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read(self, entries: Sequence[int], verify: bool, progress: Progress = None) -> Iterator[LoadedBatch]:
        """Batches of the entries (ascending) as Parameters on their device, in the wanted dtype."""
        reader = self.reader
        reader.direct_io.expect(lambda: self.nbytes_of(entries))
        for batch in reader.read(entries, verify, progress):
            self.note(batch)
            yield batch

    def nbytes_of(self, entries: Sequence[int]) -> int:
        """Bytes of tensors once they are loaded."""
        return self.index.total_loaded_nbytes(list(entries))

    def read_headers(self, entries: Sequence[int]) -> None:
        """Reads the headers of records whose data another record gave (ascending; those read before are left out)."""
        wanted = [i for i in entries if i not in self._headers and i < self.index.entry_count]
        if wanted and self.index.stores_hashes:
            self.note(self.reader.read_headers(wanted))

    def read_raw(self, entries: Sequence[int], verify: bool) -> list[torch.Tensor]:
        """The entries as plain host tensors of their stored dtype."""
        reader = self.reader
        reader.direct_io.expect(lambda: self.nbytes_of(entries))
        batch = reader.read_raw(entries, verify)
        self.note(batch)
        return list(batch.tensors)

    def note(self, batch: LoadedBatch) -> None:
        """Keeps the record headers of what was read."""
        with self._lock:
            self._headers.update(dict.fromkeys(batch.entries, (batch.entries, batch.headers)))

    def read_ahead(self) -> Optional[ReadAhead]:
        """What to read together with single tensors; ``None`` where a request costs next to nothing."""
        return ReadAhead(self.index, self.selection) if self.network else None

    def prologue(self, source: _C.RangeSource) -> bytes:
        """The bytes from the magic to the end of the index, in `source`, the file of this container."""
        return source.read(self.index.start, _PROLOGUE_NBYTES + self.index.metadata_nbytes)

    def stored_records(self, entries: Sequence[int]) -> list[tuple[bytes, int, int, int]]:
        """(name as stored, header offset, payload offset, payload bytes) of the records that `entries` need."""
        index = self.index
        wanted = {i for i in entries if i < index.entry_count} | {self.targets.get(i, i) for i in entries}
        return [
            (index.stored_name(i), index.offset(i), index.data_offset(i), index.data_nbytes(i)) for i in sorted(wanted)
        ]

    # ---- facts ------------------------------------------------------------------------------------------------------

    @property
    def format(self) -> str:
        """``"tensors"`` or ``"safetensors"``."""
        return self.index.format

    def metadata(self) -> Optional[dict[str, str]]:
        """What the writer noted, ``None`` where that is nothing at all or encrypted and there is no key.

        Decrypted when it is first asked for, which has to be while the file is open.

        Raises:
            RuntimeError: It is encrypted, and the file is closed.
        """
        if not self._metadata_is_known:
            keys = self.reader.keys if self.index.metadata_is_sealed else None
            self._metadata, self._metadata_is_known = self.index.metadata(keys), True
        return None if self._metadata is None else dict(self._metadata)

    def ties(self) -> dict[Name, Name]:
        """Names that stand for another tensor of the file, and which one."""
        return {alias: target for alias, target, _ in self.index.ties()}

    @property
    def index_matches(self) -> Optional[bool]:
        """Whether the index agrees with its digest; ``None`` where the file has none."""
        return self.index.index_matches

    def verify_index(self) -> None:
        """Compares the index with its digest, where the file has one.

        Raises:
            HashMismatchError: They disagree.
        """
        if self.index_matches is False:
            raise HashMismatchError("the index does not match its digest: entries or metadata were changed")

    @property
    def authenticated(self) -> Optional[str]:
        """What vouches for the file: ``"key"``, ``"signature"``, ``"both"``, or ``None``."""
        by_key, signers = _C.vouched(self.index)
        return AUTHENTICATED[by_key, bool(signers)]

    @property
    def signers(self) -> list[bytes]:
        """The public keys of the signatures that were found right."""
        return _C.vouched(self.index)[1]

    @property
    def index_digest(self) -> Optional[str]:
        """Hexadecimal SHA-256 of the index, as computed; ``None`` where the format has none."""
        return _C.index_digest(self.index).hex() if self.index.format == "tensors" else None

    @functools.cached_property
    def checks_whole(self) -> bool:
        """Whether only whole tensors can be read: their data are bound to a signature by nothing but hashes."""
        return bool(self.signers) and not self.index.encrypted

    def extra_states(self) -> dict[str, Any]:
        """Extra states of modules by module path, their new tensors on the device of the load."""
        text = (self.metadata() or {}).get(extra_state.KEY, "") if self.index.has_annex else ""
        if not text:
            return {}
        states = extra_state.unpack(text)
        with ordinary_tensors():
            return {path: _moved(state, self.device_of(extra_state.state_name(path))) for path, state in states.items()}

    def device_of(self, name: Name) -> torch.device:
        """Where the tensor of a name is put."""
        return self._device if isinstance(self._device, torch.device) else self._device(name)

    def is_stored(self, i: int) -> bool:
        """Whether a name has data of its own in the file, be they those of another one once more."""
        return i < self.index.entry_count

    @property
    def nbytes(self) -> Optional[int]:
        """Of the file; ``None`` where its source does not say."""
        return self.reader.source.size()

    @property
    def file_names(self) -> list[str]:
        """Names of the files of a sharded model, in order; none for a single file."""
        return []

    def part(self, i: int) -> tuple[Container, int]:
        """The single file that holds the data of an entry, and the number of those data there."""
        return self, self.targets.get(i, i)

    def file_of(self, i: int) -> Optional[str]:
        """Which of them holds an entry."""
        return None

    def type(self, i: int) -> TensorType:
        return TensorType(self.index.type(i))

    def shape(self, i: int) -> tuple[int, ...]:
        return self.index.shape(i)

    def may_be_scalar(self, i: int) -> bool:
        """Whether the index shows a scalar without data, whose shape it writes as ``(1,)``."""
        return self.index.data_nbytes(i) == 0 and self.index.shape(i) == (1,)

    @functools.cached_property
    def shows_all(self) -> bool:
        """Whether the index gives the dtype and the shape of every tensor, so that no record header has to."""
        dtypes, scalars = self.index.kinds()
        return not scalars and all(known_dtype(dtype) is not None for dtype in dtypes)

    def stored_dtype(self, i: int) -> Optional[torch.dtype]:
        """The dtype that the index shows; ``None`` where only the record header names it, or torch does not know it."""
        return stored_dtype(self.index, i)

    def may_cast(self, i: int) -> bool:
        """Whether the constructor's ``dtype`` converts this tensor, as far as the index tells."""
        return self.converts_dtype(known_dtype(self.index.dtype(i)))

    def converts_dtype(self, stored: Optional[torch.dtype]) -> bool:
        """Whether the constructor's ``dtype`` converts tensors of a stored dtype, or may where that is not known."""
        return self._dtype is not None and converts(stored, self._dtype)

    def has_header(self, i: int) -> bool:
        """Whether the record header of an entry was read, which holds its module index and digests."""
        return i in self._headers or self.targets.get(i) in self._headers

    def header(self, i: int) -> tuple[_C.LoadedHeaders, int]:
        """The headers among which that of an entry is, and its position there."""
        if i not in self._headers:
            i = self.targets[i]
        entries, headers = self._headers[i]
        return headers, bisect.bisect_left(entries, i)

    def lacks_hashes(self, i: int) -> bool:
        """Whether a tensor that was read has data and no digest, so that nothing vouches for it."""
        if not self.index.stores_hashes:
            return self.index.data_nbytes(i) > 0
        headers, position = self.header(i)
        return self.index.data_nbytes(i) > 0 and not headers.hashes(position)

    def entry(self, i: int) -> TensorEntry:
        """What the file says about one tensor; digests are known once it was read."""
        index = self.index
        dtype, shape, hashes = index.dtype(i), index.shape(i), None
        if index.stores_hashes and self.has_header(i):
            headers, position = self.header(i)
            dtype, shape = headers.dtype(position), headers.shape(position)
            hashes = [TensorHash(HashType(kind), value) for kind, value in headers.hashes(position)]
        return TensorEntry(
            metadata_version=index.entry_version(i),
            name=self.names[i],
            type=self.type(i),
            dtype=dtype.decode("utf-8", "replace"),
            shape=shape,
            offset=index.offset(i),
            data_offset=index.data_offset(i),
            data_length=index.data_nbytes(i),
            hashes=hashes,
            header_hashes=None,
        )

    def accepted_by(self, filter_func: Optional[FilterFuncType]) -> list[int]:
        """The entries that a filter (``None``: every entry) wants."""
        return [i for i in self.selection if filter_func is None or filter_func(self.names[i])]


def open_container(opened: OpenedSource, filter_func: Optional[FilterFuncType], options: ReadOptions) -> Container:
    """Parses the index of an opened file.

    Raises:
        FormatError: Not a ``.tensors`` file, an unknown version, a damaged index.
        CryptographyError: The file is encrypted and there is no key, or the other way round.
        AuthenticationError: Its index is not what its key or a signature vouches for.
        ValueError: A mapping is wanted of what cannot be mapped.
    """
    choice = check_direct_io(options.direct_io)
    direct_io = DirectIO(opened.source, choice)
    index = _open_index(opened, options)
    names: list[Name] = index.names()
    selection: Sequence[int] = range(len(names))
    if filter_func is not None:
        selection = [i for i, name in enumerate(names) if filter_func(name)]
    keys = key_ring(options.encryption) if index.encrypted and options.encryption is not None else None
    authenticate(opened, index, keys, options.trust)
    if options.mmap is None:
        may_map = choice != "always" and _may_map(opened.source, index, names, selection, options)
        options = options._replace(mmap=may_map)
    reader = TensorReader(
        opened.source,
        index,
        device=_device_of_entries(options.device, names),
        dtype=options.dtype,
        max_workers=options.max_workers,
        keys=keys,
        mapping=_map_source(opened.source) if options.mmap else None,
        direct_io=direct_io,
        allow_missing_hashes=options.allow_missing_hashes,
    )
    return Container(opened, index, names, selection, reader, options)


def _is_network(source: _C.RangeSource) -> bool:
    """Whether every request costs a round trip."""
    if isinstance(source, _C.CacheSource):
        return not source.was_complete
    return isinstance(source, _NETWORK_SOURCES)


def _open_index(opened: OpenedSource, options: ReadOptions) -> _C.Index:
    try:
        return _C.open_index(opened.source, opened.start, options.encryption is not None)
    except CryptographyError:
        if not options.without_key or options.encryption is not None:
            raise
    return _C.open_index(opened.source, opened.start, True)  # it is in clear


def _moved(state: Any, device: torch.device) -> Any:
    if isinstance(state, torch.Tensor):
        return state.to(device)
    return {key: _moved(value, device) for key, value in state.items()}


def _device_of_entries(
    device: Union[torch.device, DeviceChooser], names: Sequence[Name]
) -> Union[torch.device, Callable[[int], torch.device]]:
    if isinstance(device, torch.device):
        return device
    choose = device
    return lambda i: choose(names[i])


def _may_map(
    source: _C.RangeSource, index: _C.Index, names: Sequence[Name], selection: Sequence[int], options: ReadOptions
) -> bool:
    """Whether all tensors can be views of the file: a plain one on a disk of this machine, for the CPU, as stored.

    A page of a network file system that is missing later ends the process, so these files are read.
    """
    if not isinstance(source, _C.FileSource) or index.encrypted or source.on_network_file_system():
        return False
    device, dtype = options.device, options.dtype
    if isinstance(device, torch.device):
        on_host = device.type == "cpu"
    else:
        on_host = all(device(names[i]).type == "cpu" for i in selection)
    if not on_host or dtype is None:
        return on_host
    return not any(converts(known_dtype(stored), dtype) for stored in set(map(index.dtype, selection)))


def _map_source(source: _C.RangeSource) -> _C.FileMapping:
    if not isinstance(source, _C.FileSource):
        raise ValueError(f"mmap=True: {source.name} cannot be mapped; only local files can")
    return source.map()
