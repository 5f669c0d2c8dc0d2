"""An open file, or the shards of a model as one: names and facts of its tensors, and those that were loaded of it.

Whatever reads files stands on this: ``TensorDeserializer`` is its face; ``tensorizer.torch``, inspect, verify, diff,
convert and the loads of several ranks use it as it is. How the bytes lie, and in how many files, is decided here.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import gc
import itertools
import logging
import mmap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Optional, Union, cast

import torch

from tensorizer import _C
from tensorizer._format import dtypes, extra_state
from tensorizer._format.dtypes import as_dtype, casts, known_dtype
from tensorizer._format.entries import FilterFuncType, HashType, TensorEntry, TensorHash, check_filter, flat_name
from tensorizer._format.names import Key, Name, Path, double_name, listed, path_of
from tensorizer._format.payloads import check_memory, contiguous, same_bits
from tensorizer._format.tree import Node, branch, build_tree
from tensorizer._io.call_options import CallOptions
from tensorizer._io.shards import OpenedFiles, OpenedShards
from tensorizer._io.sources import OpenedSource
from tensorizer._load.digests import Verification, check_digest, name_of
from tensorizer._load.joined import JoinedIndex
from tensorizer._load.open_index import (
    FilePart,
    LoadedBatch,
    OpenIndex,
    file_error,
    missing_hashes,
    open_files,
    read_index,
    tensor_error,
)
from tensorizer._load.page_cache import DirectIO, check_direct_io, keep_memory
from tensorizer._progress import progress_reporter
from tensorizer._system import cuda_engine, perf
from tensorizer._system.devices import DeviceChooser, ordinary_tensors, resolve_cuda_device
from tensorizer._system.sizes import counted, runs
from tensorizer.errors import CryptographyError, FormatError, HashMismatchError, VerificationError

logger = logging.getLogger("tensorizer.serialization")

#: Memory for payloads that are on their way from file to file, unless one tensor alone is larger.
BATCH_NBYTES = 64 << 20

# Files read at a time: one keeps a disk busy, and its end should not leave it idle; a network takes more.
_LOCAL_FILES_AT_ONCE = 2
_NETWORK_FILES_AT_ONCE = 4
_MOST_HASHED_AT_ONCE = 8  # a file is hashed by one thread at a time

# Reading ahead over a network: after so many tensors in a row, and how much.
_ROW = 3
_FIRST_AHEAD_NBYTES = 1 << 20
_MAX_AHEAD_NBYTES = 16 << 20

# Host memory that a load which cannot stay where it lands (cast, moved, streamed) holds at a time.
_MOVED_NBYTES = 256 << 20

# Zeros from here on are not written out unless a caller asks for their memory.
_UNTOUCHED_NBYTES = 1 << 20

# Where every request costs a round trip.
_NETWORK_SOURCES = (_C.HttpSource, _C.RedisSource, _C.PyRangeSource)

_HOST = torch.device("cpu")

# Magic to metadata length (docs/format.md, "Prologue").
_PROLOGUE_NBYTES = 73

Progress = Optional[Callable[[int], object]]

_AUTHENTICATED = {(False, False): None, (True, False): "key", (False, True): "signature", (True, True): "both"}


class ReadOptions(NamedTuple):
    """How tensors are read; the meanings are those of ``TensorDeserializer``'s arguments."""

    device: Union[torch.device, DeviceChooser] = _HOST
    dtype: Optional[torch.dtype] = None
    mmap: Optional[bool] = False  # None: where nothing speaks against it, see _may_map
    verify_hash: Optional[bool] = None
    allow_missing_hashes: bool = False
    verification: Verification = Verification()
    without_key: bool = False  # opens the index of an encrypted file without one; its tensors cannot be read then
    direct_io: Optional[str] = None

    def verifying(self, verify: Verification) -> ReadOptions:
        """The same, for an argument ``verify=``."""
        return self._replace(
            verify_hash=verify.stored,
            allow_missing_hashes=self.allow_missing_hashes or verify.where_stored,
            verification=verify,
        )


#: To the host, as plain copies of what the file has.
AS_STORED = ReadOptions()


class Handle(NamedTuple):
    """What a read needs of an open file. It is forgotten with the key when the file is closed."""

    source: _C.RangeSource  # a HashedSource over the file's own, where its digest is to be compared
    keys: Optional[_C.KeyRing]
    mapping: Optional[_C.FileMapping]
    close: Callable[[], None]


#: A load that is ready to run, and what makes tensors of it afterwards.
PendingBatch = tuple[_C.LoadBatch, Callable[[], LoadedBatch]]


#: How a file is read for work on the whole of it, see :func:`open_whole`.
WHOLE = ReadOptions(allow_missing_hashes=True, without_key=True)


class OpenFile(OpenIndex):
    """The readers of one file, or of the shards of one model, under one numbering of their entries.

    May be used from several threads; every read is independent of the others, and everybody gets the same parameters.
    Facts, record headers and loaded tensors stay when it is closed.

    Attributes:
        readers: One for each file, in the order of their entries.
        selection: The entries that exist for the user, ascending.
        options: How its tensors are read.
        kept: Loaded parameters, by the entry that holds the data.
    """

    readers: Sequence[FileReader]

    def __init__(
        self,
        opened: OpenedFiles,
        readers: list[FileReader],
        call: CallOptions,
        options: ReadOptions,
        filter_func: Optional[FilterFuncType],
    ) -> None:
        super().__init__(opened, readers, call)
        self.options = options
        self.selection: Sequence[int]
        if not isinstance(self.index, JoinedIndex):
            self.selection = readers[0].selection
        else:
            chosen = [begin + i for begin, c in zip(self.index.begins, readers) for i in c.selection]
            further = range(self.index.entry_count, len(self.names))
            self.selection = chosen + [i for i in further if filter_func is None or filter_func(self.names[i])]
        self.network = any(reader.network for reader in readers)
        self.kept: dict[int, torch.nn.Parameter] = {}
        self._verified: set[int] = set()  # those of `kept` that were compared with their digests
        self._verify = False
        self._ahead = _ReadAhead(self.index, self.selection) if self.network else None
        self._waiting: dict[int, torch.Tensor] = {}  # what was read ahead for `read_one`
        self._announced: dict[int, int] = {}  # bytes that several calls are going to read, by the id of the reader

    @property
    def source(self) -> Optional[_C.RangeSource]:
        """The bytes of a single file; ``None`` for shards, and once it is closed."""
        return None if self.closed or self.shard_names else self.readers[0].handle.source

    @property
    def bytes_read(self) -> Optional[int]:
        """Bytes that came from the sources so far; ``None`` once it is closed."""
        return None if self.closed else sum(c.handle.source.bytes_read for c in self.readers if not c.closed)

    @property
    def total_bytes_read(self) -> int:
        """Bytes that came from the sources so far, as the stream counts them where it does; those of a mapping too."""
        counter = getattr(self.stream, "bytes_read", None)
        if isinstance(counter, int):
            return counter
        nbytes = self.bytes_read
        if nbytes is None:
            return self.total_tensor_bytes
        mapped = sum(map(self.index.data_nbytes, self.kept)) if self.readers[0].mapped else 0
        return nbytes + mapped

    @property
    def cached_bytes_read(self) -> int:
        """Bytes that came from the cache of the node so far, also when the file is closed."""
        return sum(reader.cached_bytes_read for reader in self.readers)

    # ---- facts of the file ------------------------------------------------------------------------------------------

    @functools.cached_property
    def total_tensor_bytes(self) -> int:
        """Bytes of the selected tensors once they are loaded."""
        return int(self.index.total_loaded_nbytes(list(self.selection)))

    def extra_states(self) -> dict[str, Any]:
        """Extra states of modules by module path, their new tensors on the device of the load."""
        states: dict[str, Any] = {}
        for reader in self.readers:
            text = (reader.metadata or {}).get(extra_state.KEY, "") if reader.index.has_annex else ""
            if text:
                try:
                    states.update(extra_state.unpack(text))
                except FormatError as error:
                    raise file_error(reader.source_name, error) from None
        with ordinary_tensors():
            return {path: _moved(state, self.device_of(extra_state.state_name(path))) for path, state in states.items()}

    @property
    def index_matches(self) -> Optional[bool]:
        """Whether the indexes agree with their digests; ``None`` where there are none."""
        found = {reader.index.index_matches for reader in self.readers}
        return False if False in found else True if True in found else None

    def verify_index(self) -> None:
        """Compares the indexes with their digests, where the files have some.

        Raises:
            HashMismatchError: They disagree.
        """
        for reader in self.readers:
            if reader.index.index_matches is False:
                wrong = "the index does not match its digest: entries or metadata were changed"
                error = HashMismatchError(f"{reader.source_name}: {wrong}")
                error.source = reader.source_name
                raise error

    @property
    def authenticated(self) -> Optional[str]:
        """What authenticates all of it: ``"key"``, ``"signature"``, ``"both"``, or ``None``."""
        found = [_C.authenticated_by(reader.index) for reader in self.readers]
        return _AUTHENTICATED[all(key for key, _ in found), all(bool(signers) for _, signers in found)]

    @property
    def signers(self) -> list[bytes]:
        """The public keys of the signatures that were found right, in every file."""
        first, *others = (_C.authenticated_by(reader.index)[1] for reader in self.readers)
        return [signer for signer in first if all(signer in found for found in others)]

    @functools.cached_property
    def checks_whole(self) -> bool:
        """Whether only whole tensors can be read: their data are bound to a signature by nothing but hashes."""
        return any(bool(_C.authenticated_by(c.index)[1]) and not c.index.encrypted for c in self.readers)

    @functools.cached_property
    def shows_all(self) -> bool:
        """Whether the index gives the dtype and the shape of every tensor, so that no record header has to."""
        return all(reader.shows_all for reader in self.readers)

    def prologue(self, source: _C.RangeSource) -> bytes:
        """The bytes from the magic to the end of the index, in `source`, this single file."""
        return source.read(self.index.start, _PROLOGUE_NBYTES + self.index.metadata_nbytes)

    def stored_records(self, entries: Sequence[int]) -> list[tuple[bytes, int, int, int]]:
        """(name as stored, header offset, payload offset, payload bytes) of the records that `entries` need."""
        index = self.index
        wanted = {i for i in entries if i < index.entry_count} | {self.aliases.get(i, i) for i in entries}
        return [
            (index.stored_name(i), index.offset(i), index.data_offset(i), index.data_nbytes(i)) for i in sorted(wanted)
        ]

    # ---- facts of one entry -----------------------------------------------------------------------------------------

    def accepted_by(self, filter_func: Optional[FilterFuncType]) -> list[int]:
        """The entries that a filter (``None``: every entry) wants."""
        return [i for i in self.selection if filter_func is None or filter_func(self.names[i])]

    @functools.cached_property
    def numbers(self) -> dict[Name, int]:
        """From the names of the selection to their entries."""
        return {self.names[i]: i for i in self.selection}

    @functools.cached_property
    def root(self) -> Node:
        """The names of the selection as a tree, whose leaves are entries."""
        return build_tree(self.names, self.selection)

    def part(self, i: int) -> tuple[FileReader, int]:
        """The reader of the file that holds the data of an entry, and the number of those data there."""
        file, local = self._locate(self.aliases.get(i, i))
        return self.readers[file], local

    def device_of(self, name: Name) -> torch.device:
        """Where the tensor of a name is put."""
        device = self.options.device
        return device if isinstance(device, torch.device) else device(name)

    def stored_dtype(self, i: int) -> Optional[torch.dtype]:
        """The dtype that the index shows; ``None`` where only the record header names it, or torch does not know it."""
        return known_dtype(self.index.dtype(i))

    def may_be_scalar(self, i: int) -> bool:
        """Whether the index shows a scalar without data, whose shape it writes as ``(1,)``."""
        return bool(self.index.data_nbytes(i) == 0 and self.index.shape(i) == (1,))

    def casts(self, stored: Optional[torch.dtype]) -> bool:
        """Whether ``dtype=`` converts tensors of a stored dtype, or may where that is not known."""
        return dtypes.casts(stored, self.options.dtype)

    # ---- names of state dicts ---------------------------------------------------------------------------------------

    def flat_names(self) -> dict[str, int]:
        """The chosen entries by the names that state dicts and ``.safetensors`` have for them.

        Raises:
            FormatError: Two tensors would have one name.
        """
        found: dict[str, int] = {}
        for i in self.selection:
            name = self.names[i]
            found[name if isinstance(name, str) and name[:1] != "." else flat_name(name, self.type(i))] = i
        if len(found) < len(self.selection):
            named = [(self.names[i], flat_name(self.names[i], self.type(i))) for i in self.selection]
            raise file_error(self.source_name, double_name(named))
        return found

    def as_state_dict(self, tensors: Sequence[torch.Tensor]) -> dict[Any, Any]:
        """The tensors of the chosen entries as a state dict: nested names as dicts, integer keys below the top as
        lists.

        Raises:
            FormatError: Two tensors would have one name.
        """
        names = [self.names[i] for i in self.selection]
        if all(isinstance(name, str) for name in names):
            return dict(zip(self.flat_names(), tensors))
        below: dict[Key, list[tuple[Path, torch.Tensor]]] = {}  # by what the file calls what is on the top
        keys: dict[Key, Key] = {}
        for i, name, tensor in zip(self.selection, names, tensors):
            top, *path = path_of(name)
            keys[top] = flat_name(name, self.type(i)) if isinstance(name, str) else top
            below.setdefault(top, []).append((tuple(path), tensor))
        double = double_name(keys.items())
        if double is not None:
            raise file_error(self.source_name, double)
        return {keys[top]: branch(pairs) for top, pairs in below.items()}

    # ---- facts of record headers ------------------------------------------------------------------------------------

    def dtype_of(self, i: int, stored: Optional[bytes] = None) -> torch.dtype:
        """The stored dtype, of the record header where that was read.

        Args:
            i: The entry.
            stored: What :meth:`described` says of it, where the caller has asked already.

        Raises:
            FormatError: This torch has no such dtype; the message names the tensor.
        """
        stored = self.described(i)[0] if stored is None else stored
        try:
            return dtypes.torch_dtype(stored.decode("utf-8", "replace") or str(self.index.container_dtype(i)))
        except FormatError as error:
            raise tensor_error(self.source_name, self.names[i], error) from None

    def hashes(self, i: int) -> list[TensorHash]:
        """The digests of a tensor whose record header was read; none of others."""
        if not self.index.stores_hashes or not self.has_header(i):
            return []
        headers, position = self.header(i)
        return [TensorHash(HashType(kind), value) for kind, value in headers.hashes(position)]

    def lacks_hashes(self, i: int) -> bool:
        """Whether a tensor that was read has data, and neither a digest nor a tag."""
        return self.index.data_nbytes(i) > 0 and not self.hashes(i)

    def entry(self, i: int) -> TensorEntry:
        """What the file says about one tensor; digests are known once it was read."""
        index = self.index
        known = index.stores_hashes and self.has_header(i)
        dtype, shape, _ = self.described(i) if known else (index.dtype(i), index.shape(i), 0)
        return TensorEntry(
            metadata_version=index.entry_version(i),
            name=self.names[i],
            type=self.type(i),
            dtype=dtype.decode("utf-8", "replace"),
            shape=shape,
            offset=index.offset(i),
            data_offset=index.data_offset(i),
            data_length=index.data_nbytes(i),
            hashes=self.hashes(i) if known else None,
            header_hashes=None,
        )

    def holds(self, i: int, tensor: torch.Tensor) -> Optional[bool]:
        """Whether the bytes of a tensor, wherever they are, match the digests of the file.

        ``None``: the tensor was stored with data and without a digest, so nothing can be said.
        """
        check_memory(self.names[i], tensor, "verified")
        data = contiguous(tensor, on_device=False)
        nbytes = data.numel() * data.element_size()
        if self.index.data_nbytes(i) == 0 and self.index.loaded_nbytes(i) > 0:  # written without data: zeros
            flat = data.reshape(-1).view(torch.uint8)
            return nbytes == self.index.loaded_nbytes(i) and not bool(flat.any())
        if self.lacks_hashes(i):
            return None
        headers, position = self.header(i)
        return bool(headers.matches(position, data.data_ptr() if nbytes else 0, nbytes))

    # ---- reading ----------------------------------------------------------------------------------------------------

    def announce(self, entries: Sequence[int]) -> None:
        """Notes that several calls are going to read `entries`, for the cache of the node, which keeps files that are
        read whole."""
        parts = self.parts(entries)
        self._announced = {id(part.reader): sum(map(part.reader.index.data_nbytes, part.entries)) for part in parts}

    def begin_announced(self, reader: FileReader, progress: Progress = None) -> None:
        """Tells the cache what was announced of a file.

        Call it before the first tensor of the file is read. It waits for another process that is fetching the file, and
        calls ``progress(0)`` meanwhile.
        """
        if id(reader) in self._announced:
            reader.begin_cached(self._announced[id(reader)], progress)

    def read_batches(
        self, entries: Sequence[int], verify: bool, progress: Progress = None, *, plain: bool = False
    ) -> Iterator[LoadedBatch]:
        """Batches of the entries (ascending) on their device, in the wanted dtype, as Parameters or plain tensors."""
        parts = self.parts(entries)
        _expect(parts)
        pending = [part.reader.begin(part.entries, verify, plain=plain) for part in parts]
        if all(batches is not None for batches in pending):
            flat = [(part, *each) for part, batches in zip(parts, pending) for each in batches or ()]
            at_once = len(flat) if len(parts) == 1 else self.files_at_once
            nbytes = sum(map(self.index.data_nbytes, entries)) if perf.enabled else 0
            with perf.measured("file_readinto", nbytes) if perf.enabled else contextlib.nullcontext():
                _C.run_batches([batch for _, batch, _ in flat], at_once, progress)
            for part, _, finish in flat:
                yield self._noted(part.of_all(finish()))
            return
        del pending
        done = 0
        for part in parts:
            report = None if progress is None else (lambda n, before=done: progress(before + n))
            part.reader.begin_cached(sum(map(part.reader.index.data_nbytes, part.entries)))
            for loaded in part.reader.read(part.entries, verify, report, plain=plain):
                yield self._noted(part.of_all(loaded))
            done += sum(map(part.reader.index.data_nbytes, part.entries)) if len(parts) > 1 else 0

    def read(self, entries: Sequence[int], verify: bool) -> list[torch.Tensor]:
        """Plain tensors of the stored dtype in host memory.

        Raises:
            CryptographyError: The file is encrypted and there is no key.
        """
        self._check_readable()
        records = [i if self.is_stored(i) else self.aliases[i] for i in entries] if self.aliases else entries
        tensors: dict[int, torch.Tensor] = {}
        parts = self.parts(sorted(set(records)))
        for part in parts:
            self.begin_announced(part.reader)
        _expect(parts)
        pending = [(part, *part.reader.begin_raw(part.entries, verify)) for part in parts]
        _C.run_batches([batch for _, batch, _ in pending], self.files_at_once)
        for part, _, finish in pending:
            loaded = self._noted(part.of_all(finish()))
            tensors.update(zip(loaded.entries, loaded.tensors))
        return [tensors[i] for i in records]

    def read_plain(self, entries: Sequence[int]) -> list[torch.Tensor]:
        """Plain tensors of `entries` (ascending) on their device, in the wanted dtype, as users are given them.

        Names that stand for one tensor get one tensor. Nothing is kept.
        """
        wanted = [self.aliases.get(i, i) for i in entries] if self.aliases else entries
        distinct = sorted(set(wanted)) if self.aliases else entries
        tensors: dict[int, torch.Tensor] = {}
        with self._reporting(distinct) as report:
            for batch in self.read_batches(distinct, self._verify, report, plain=True):
                tensors.update(zip(batch.entries, batch.tensors))
        return [tensors[i] for i in wanted]

    def read_whole(self) -> list[torch.Tensor]:
        """All that is selected, as :meth:`read_plain`; and what its files have to be is compared."""
        tensors = self.read_plain(self.selection)
        self.check_files()
        return tensors

    def runs(self, entries: Sequence[int]) -> Iterator[Sequence[int]]:
        """Runs of `entries` whose payloads fit :data:`BATCH_NBYTES`, or single larger ones."""
        return runs(entries, self.index.loaded_nbytes, BATCH_NBYTES)

    def runs_of_files(self, entries: Sequence[int]) -> Iterator[Sequence[int]]:
        """As :meth:`runs`, in the order of each file, with entries of several files together if these are hashed."""
        parts = collections.deque(self.parts(entries))
        at_once = min(len(parts), self.files_at_once)
        if at_once < 2 or self.options.verification.files is None:
            yield from self.runs(entries)
            return
        of_files: list[Iterator[Sequence[int]]] = []
        while parts or of_files:
            while parts and len(of_files) < at_once:
                part = parts.popleft()
                of_file = [part.begin + i for i in part.entries]
                of_files.append(runs(of_file, self.index.loaded_nbytes, BATCH_NBYTES // at_once))
            found = [next(each, None) for each in of_files]
            together = list(itertools.chain.from_iterable(filter(None, found)))
            if together:
                yield together
            of_files = [each for each, run in zip(of_files, found) if run is not None]

    @property
    def files_at_once(self) -> int:
        """How many files a load reads at a time."""
        if self.network:
            return _NETWORK_FILES_AT_ONCE
        hashes = self.options.verification.files is not None
        return max(_LOCAL_FILES_AT_ONCE, min(_C.cpu_quota(), _MOST_HASHED_AT_ONCE if hashes else 0))

    # ---- tensors that are kept --------------------------------------------------------------------------------------

    def verify_by(self, verify_hash: Optional[bool]) -> None:
        """Decides whether loads verify: ``None`` means where hashes are what binds data to a checked signature.

        Raises:
            ValueError: That is the case, and `verify_hash` is false.
            HashMismatchError: Loads verify, and the index does not agree with its digest.
        """
        if self.checks_whole and verify_hash is not None and not verify_hash:
            raise ValueError("verify_hash=False: in a file in clear, hashes are what binds the data to its signature")
        self._verify = self.checks_whole if verify_hash is None else bool(verify_hash)
        if not self._verify:
            return
        try:
            self.verify_index()
        except HashMismatchError:
            if self.index.encrypted and self.readable:  # a record tells whether the tag of its file was removed
                self.read(self.selection[:1], verify=True)
            raise

    def check_files(self, readers: Optional[Sequence[FileReader]] = None) -> None:
        """Compares whole files, all by default, with the digests that they have to have, where the load says so.

        What no load has read of them is read now.

        Raises:
            HashMismatchError: One of them is another file.
            OSError: The rest cannot be read.
        """
        for error in self.differing_files(readers):
            raise error

    def differing_files(self, readers: Optional[Sequence[FileReader]] = None) -> list[HashMismatchError]:
        """As :meth:`check_files`, the errors of all files that differ. A file is compared once."""
        chosen = [each for each in self.readers if readers is None or each in readers]
        chosen = [reader for reader in chosen if reader.expected_sha256 is not None]
        found = _C.finish_hashes([reader.hashed_source for reader in chosen], self.files_at_once) if chosen else []
        errors = []
        for reader, sha256 in zip(chosen, found):
            try:
                reader.compare_sha256(sha256)
            except HashMismatchError as error:
                errors.append(error)
        return errors

    @property
    def verified_by(self) -> Optional[str]:
        """What the data are compared with when they are read; ``None`` for nothing."""
        files = self.options.verification.files
        if files is not None:
            return files.origin
        return "the digests in it" if self._verify else None

    def must_verify(self, verify_hash: Optional[bool]) -> bool:
        """What a call's ``verify_hash`` means; ``None`` is what :meth:`verify_by` was told."""
        return self._verify if verify_hash is None else bool(verify_hash)

    def load(self, entries: Sequence[int], verify_hash: Optional[bool] = None) -> list[torch.nn.Parameter]:
        """The parameters of `entries`, in any order, read where they are not kept, kept from then on.

        Names that stand for one tensor get one parameter.
        Those that are kept are verified as well where they were not verified when they were read, or where the caller
        asks for it: ``verify_hash=True``.

        Raises:
            VerificationError: A tensor, read now or before, does not match the digests of the file.
            ValueError: A tensor that is kept, and was not verified when it was read, cannot be verified any more.
        """
        if self.aliases:
            wanted = [self.aliases.get(i, i) for i in entries]
            self._load(sorted(set(wanted)), verify_hash)
            if wanted != list(entries) and not self.closed:
                self.read_headers([i for i in entries if i in self.aliases])
            return [self.kept[i] for i in wanted]
        self._load(entries, verify_hash)
        return [self.kept[i] for i in entries]

    def load_one(self, i: int) -> torch.nn.Parameter:
        """One tensor; over a network, those that a loop will ask for next come along."""
        i = self.aliases.get(i, i)
        if self._ahead is None and i in self.kept and (i in self._verified or not self._verify):
            return self.kept[i]
        together = [i] if self._ahead is None else self._ahead.together_with(i, self.kept)
        if len(together) > 1:
            try:
                return self.load(together)[0]
            except (FormatError, VerificationError, CryptographyError):
                self._ahead = None  # it may be another one that is damaged: from now on each for itself
        return self.load([i])[0]

    def read_one(self, i: int) -> torch.Tensor:
        """One plain tensor, read now, of which nothing is kept.

        Over a network, those that a loop will ask for next come along: the last of them, 16 MiB at most, wait for it.
        """
        i = self.aliases.get(i, i)
        if self._ahead is None:
            return self.read_plain([i])[0]
        with self._lock:
            together = self._ahead.together_with(i, self._waiting)
            waiting = self._waiting.pop(i, None)
        if waiting is not None:
            return waiting
        if len(together) > 1:
            try:
                first, *others = self.read_plain(together)
            except (FormatError, VerificationError, CryptographyError):
                self._ahead = None  # it may be another one that is damaged: from now on each for itself
            else:
                with self._lock:
                    self._waiting = dict(zip(together[1:], others))
                return first
        return self.read_plain([i])[0]

    def _load(self, entries: Sequence[int], verify_hash: Optional[bool]) -> None:
        verify = self.must_verify(verify_hash)
        missing = sorted([i for i in entries if i not in self.kept])  # a batch takes them in the order of the file
        asked_again = set(entries).difference(missing) if verify_hash else ()
        if missing:
            with self._reporting(missing) as report:
                self._read_and_keep(missing, verify, report)
        if verify:
            self._verify_kept([i for i in entries if i in asked_again or i not in self._verified])

    def _reporting(self, entries: Sequence[int]) -> AbstractContextManager[Progress]:
        """The function that gets the progress of reading `entries`; ``None`` without a caller that asked for it."""
        progress = self.call.progress
        if progress is None or progress is False:
            return contextlib.nullcontext()
        return progress_reporter(progress, sum(map(self.index.data_nbytes, entries)), "loading")

    def _read_and_keep(self, entries: Sequence[int], verify: bool, report: Progress) -> None:
        for batch in self.read_batches(entries, verify, report):
            tensors = cast("Sequence[torch.nn.Parameter]", batch.tensors)
            with self._lock:
                if self.kept.keys().isdisjoint(batch.entries):
                    self.kept.update(zip(batch.entries, tensors))
                    mine = batch.entries
                else:  # another thread has read some of them: all threads get the first
                    mine = [i for i, t in zip(batch.entries, tensors) if self.kept.setdefault(i, t) is t]
                if verify:
                    self._verified.update(mine)

    def _verify_kept(self, entries: Sequence[int]) -> None:
        """Compares tensors that were read before with the digests of the file."""
        if not entries:
            return
        converted = [i for i in entries if not self._is_as_stored(i)]
        wrong, bare = [], []
        for i in sorted(set(entries).difference(converted)):
            matches = self.holds(i, self.kept[i])
            if matches is None:
                bare.append(i)
            elif not matches:
                wrong.append(i)
        wrong += self._read_differently(converted)
        if wrong:
            names = listed([self.names[i] for i in wrong])
            error = HashMismatchError(
                f"{self.source_name}: {len(wrong)} loaded tensors are not what their hashes say: {names}"
            )
            error.source = self.source_name
            raise error
        if bare and not self.options.allow_missing_hashes:
            raise missing_hashes(self.source_name, [self.names[i] for i in bare])
        self._verified.update(entries)

    def _is_as_stored(self, i: int) -> bool:
        """Whether a kept tensor has the bytes that the digests are about: not after a conversion, not without data."""
        return self.kept[i].dtype == self.dtype_of(i) and not self.kept[i].is_meta

    def _read_differently(self, entries: Sequence[int]) -> list[int]:
        """Reads tensors again, verified; those that differ from what is kept."""
        if self.closed:  # those that were verified when they were read passed then, before the conversion
            entries = [i for i in entries if i not in self._verified]
        if not entries:
            return []
        if self.closed:
            raise ValueError(
                f"{self.source_name} is closed: {counted(len(entries), 'tensor')} that the load converted "
                f"cannot be verified any more: {listed([self.names[i] for i in entries])}; give verify_hash=True "
                "to the constructor"
            )
        return [
            i
            for batch in self.read_batches(entries, True)
            for i, tensor in zip(batch.entries, batch.tensors)
            if not same_bits(tensor, self.kept[i])
        ]


def _expect(parts: Sequence[FilePart]) -> None:
    """Tells each file how large the load is that is about to read it."""
    for part in parts:
        direct_io = part.reader.direct_io
        if direct_io is not None:
            direct_io.expect(lambda: sum(p.reader.index.total_loaded_nbytes(list(p.entries)) for p in parts))


# --- one of its files -------------------------------------------------------------------------------------------------


class FileReader:
    """One of the files of an :class:`OpenFile`, and the way from its entries to tensors on a device.

    Entries are numbered by their position in its index. Nothing that was read is kept here. May be used from several
    threads: every read is independent of the others.

    Attributes:
        index: What the file says of its tensors.
        names: Of all entries.
        selection: The entries that the filter accepted, ascending.
        network: Whether every request costs a round trip.
        mapped: Whether tensors are views of the file.
        max_workers: Upper bound for reading threads; 0: as many as are useful.
        direct_io: Whether the file is read past the page cache; ``None`` if it is not a local file.
        factory: Makes tensors of loaded memory.
        own_source: The source of the file itself; ``None`` once it is closed.
        expected_sha256: What the whole file has to have; ``None`` where it is not compared, or not any more.
        sha256: What the whole file has, once that was compared.
    """

    def __init__(
        self,
        handle: Handle,
        index: _C.Index,
        names: list[Name],
        selection: Sequence[int],
        max_workers: int,
        direct_io: Optional[DirectIO],
        options: ReadOptions,
        own_source: _C.RangeSource,
    ) -> None:
        self.index, self.names, self.selection = index, names, selection
        self.source_name = own_source.name
        self.own_source: Optional[_C.RangeSource] = own_source
        self.network = (
            not own_source.was_complete
            if isinstance(own_source, _C.CacheSource)
            else isinstance(own_source, _NETWORK_SOURCES)
        )
        self.expected_sha256: Optional[str] = None
        self.sha256: Optional[str] = None
        self.mapped = handle.mapping is not None
        self.max_workers = max_workers
        self.direct_io = direct_io
        self.factory = _C.TensorFactory(dtypes.resolve)
        self._handle: Optional[Handle] = handle
        self._options = options
        self._cached_bytes_read = 0
        keep_memory()

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the file and forgets its key."""
        self._cached_bytes_read = self.cached_bytes_read
        handle, self._handle, self.own_source = self._handle, None, None
        if handle is not None:
            handle.close()

    @property
    def closed(self) -> bool:
        return self._handle is None

    @property
    def handle(self) -> Handle:
        """The way to the data.

        Raises:
            RuntimeError: The file is closed.
        """
        handle = self._handle
        if handle is None:
            raise RuntimeError("the file is closed: load tensors before close(), or keep it open with lazy_load")
        return handle

    @property
    def cached_bytes_read(self) -> int:
        """Bytes that came from the cache of the node so far, also when the file is closed."""
        source = self.own_source
        return source.cached_bytes_read if isinstance(source, _C.CacheSource) else self._cached_bytes_read

    def map_again(self) -> Optional[_C.FileMapping]:
        """A mapping of its own for some tensors: its memory goes with them. ``None`` where the file is not mapped."""
        source = self.own_source
        return source.map() if self.mapped and isinstance(source, _C.FileSource) else None

    @property
    def was_cached(self) -> bool:
        """Whether it was in the page cache when it was opened, as far as that was looked at."""
        return isinstance(self.own_source, _C.FileSource) and self.own_source.was_cached

    def begin_cached(self, nbytes: int, progress: Progress = None) -> None:
        """Tells the cache of the node how much of the file several loads are going to read, see
        :meth:`OpenFile.begin_announced`."""
        if isinstance(self.own_source, _C.CacheSource):
            self.own_source.begin_load(nbytes, progress)

    # ---- facts ------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> Optional[int]:
        """Of the file; ``None`` where the source does not say."""
        return self.handle.source.size()

    @functools.cached_property
    def metadata(self) -> Optional[Mapping[str, str]]:
        """What the writer noted, ``None`` where that is nothing at all or encrypted and there is no key.

        Decrypted when it is first asked for, which has to be while the file is open.

        Raises:
            RuntimeError: It is encrypted, and the file is closed.
        """
        return self.index.metadata(self.handle.keys if self.index.metadata_is_sealed else None)

    @functools.cached_property
    def shows_all(self) -> bool:
        """Whether the index gives the dtype and the shape of every tensor, so that no record header has to."""
        stored, scalars = self.index.kinds()
        return not scalars and all(known_dtype(dtype) is not None for dtype in stored)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def begin(self, entries: Sequence[int], verify: bool, *, plain: bool = False) -> Optional[list[PendingBatch]]:
        """Loads of `entries` (ascending) to their devices, in the wanted dtype, as Parameters or plain tensors.

        ``None`` where tensors do not stay where they land (host or CUDA, no cast): then :meth:`read` loads them.
        """
        parts = list(self._by_device(entries))
        if not all(self._lands(device, part) for device, part in parts):
            return None
        if len(parts) > 1 and self.expected_sha256 is not None:  # they would wait for each other's bytes
            return None
        return [self._begin(device, part, verify, plain) for device, part in parts]

    def begin_group(
        self, entries: Sequence[int], verify: bool, mapping: Optional[_C.FileMapping] = None, request_nbytes: int = 0
    ) -> Optional[list[PendingBatch]]:
        """As :meth:`begin`, plain, and also of what is converted or moved once it is there, for callers that limit how
        much is loaded at a time: views of `mapping`, or memory of the tensors' own. A request over a network asks for
        `request_nbytes` at most (0: as much as :meth:`begin` does).

        ``None`` where the parts for several devices have to be read one after the other.
        """
        parts = list(self._by_device(entries))
        if len(parts) > 1 and self.expected_sha256 is not None:
            return None
        return [self._begin_any(device, part, verify, mapping, request_nbytes) for device, part in parts]

    def _begin_any(
        self,
        device: torch.device,
        entries: Sequence[int],
        verify: bool,
        mapping: Optional[_C.FileMapping],
        request_nbytes: int,
    ) -> PendingBatch:
        lands_on = device if self._stays(device) else _HOST
        batch, finish = self._begin(
            lands_on, entries, verify, plain=True, mapping=mapping, request_nbytes=request_nbytes
        )
        if self._lands(device, entries):
            return batch, finish

        def moved() -> LoadedBatch:
            raw = finish()
            with ordinary_tensors():
                tensors = [self._moved(entry, tensor, device, True) for entry, tensor in zip(entries, raw.tensors)]
            return LoadedBatch(entries, tensors, raw.headers)

        return batch, moved

    @property
    def hashed_source(self) -> _C.HashedSource:
        """Its source, if its digest is to be compared."""
        source = self.handle.source
        assert isinstance(source, _C.HashedSource)
        return source

    def compare_sha256(self, found: bytes) -> None:
        """Compares the digest of the whole file with the one that it has to have.

        Raises:
            HashMismatchError: It is another file.
        """
        wanted, files = self.expected_sha256, self._options.verification.files
        assert wanted is not None
        assert files is not None
        self.sha256, self.expected_sha256 = found.hex(), None
        check_digest(self.handle.source, wanted, self.sha256, files.origin)

    def read(
        self, entries: Sequence[int], verify: bool, progress: Progress = None, *, plain: bool = False
    ) -> Iterator[LoadedBatch]:
        """Loads `entries` as :meth:`begin` says, one device after the other.

        Those that are converted or moved are loaded in batches of at most 256 MiB, or of one larger tensor.
        """
        done = 0
        for device, part in self._by_device(entries):
            report = None if progress is None else (lambda n, before=done: progress(before + n))
            if self._lands(device, part):
                batch, finish = self._begin(device, part, verify, plain)
                self._run(batch, part, report)
                yield finish()
            else:
                yield from self._read_and_move(device, part, verify, report, plain)
            done += sum(map(self.index.data_nbytes, part))

    def read_raw(
        self, entries: Sequence[int], verify: bool, progress: Progress = None, device: torch.device = _HOST
    ) -> LoadedBatch:
        """Loads `entries` as plain tensors of their stored dtype, to the host or a device with a fast way."""
        batch, finish = self.begin_raw(entries, verify, device)
        self._run(batch, entries, progress)
        return finish()

    def begin_raw(self, entries: Sequence[int], verify: bool, device: torch.device = _HOST) -> PendingBatch:
        """What :meth:`read_raw` runs."""
        return self._begin(device, entries, verify, plain=True)

    def read_into(self, entries: Sequence[int], tensors: Sequence[torch.Tensor], device: torch.device) -> LoadedBatch:
        """Loads `entries`, verified, to the memory of `tensors` on `device`, to which there is a fast way."""
        batch = self.batch(entries, True, device, tensors)
        self._run(batch, entries, None)
        self._check_hashes_are_there(entries, batch.headers, True)
        return LoadedBatch(entries, tensors, batch.headers)

    def read_headers(self, entries: Sequence[int]) -> LoadedBatch:
        """The record headers of `entries`, without any data."""
        batch = self.batch(entries, False, headers_only=True)
        batch.run()
        return LoadedBatch(entries, [], batch.headers)

    def batch(
        self,
        entries: Sequence[int],
        verify: bool,
        device: torch.device = _HOST,
        into: Optional[Sequence[torch.Tensor]] = None,
        *,
        headers_only: bool = False,
        mapping: Optional[_C.FileMapping] = None,
        request_nbytes: int = 0,
    ) -> _C.LoadBatch:
        """A load of `entries`, not run yet: into memory of its own, or to the addresses of `into`, on `device`.

        Of a mapped file they are views of `mapping`; ``None`` is the one that all loads of the file share.
        """
        source, keys, shared, _ = self.handle
        mapping = shared if mapping is None else mapping
        on_host = device.type == "cpu"
        allocates = not on_host and into is None
        if self.direct_io is not None:
            self.direct_io.load_to(device)
        with ordinary_tensors():
            return _C.LoadBatch(
                source,
                self.index,
                list(entries),
                verify=verify,
                max_workers=self.max_workers,
                keys=keys,
                mapping=mapping if on_host and into is None and not headers_only else None,
                allocate=functools.partial(cuda_engine.allocate, device) if allocates else None,
                addresses=None if into is None else [tensor.data_ptr() for tensor in into],
                engine=None if on_host else cuda_engine.engine_for(device),
                headers_only=headers_only,
                request_nbytes=request_nbytes,
            )

    def _by_device(self, entries: Sequence[int]) -> Iterator[tuple[torch.device, Sequence[int]]]:
        """The entries of each device; more than one only where the caller spread them."""
        device = self._options.device
        if isinstance(device, torch.device):
            yield resolve_cuda_device(device), entries
            return
        groups: dict[torch.device, list[int]] = {}
        for entry in entries:
            groups.setdefault(resolve_cuda_device(device(self.names[entry])), []).append(entry)
        yield from groups.items()

    def _stays(self, device: torch.device) -> bool:
        """Whether tensors for this device are loaded to their final addresses."""
        return device.type == "cpu" or cuda_engine.is_fast_device(device)

    def _casts_any(self, entries: Sequence[int]) -> bool:
        dtype = self._options.dtype
        return dtype is not None and any(casts(known_dtype(s), dtype) for s in set(map(self.index.dtype, entries)))

    def _lands(self, device: torch.device, entries: Sequence[int]) -> bool:
        """Whether tensors are loaded to their final addresses as they are wanted."""
        return self._stays(device) and not self._casts_any(entries)

    def _begin(
        self,
        device: torch.device,
        entries: Sequence[int],
        verify: bool,
        plain: bool,
        mapping: Optional[_C.FileMapping] = None,
        request_nbytes: int = 0,
    ) -> PendingBatch:
        """A load of what lands on a device, as it is stored."""
        batch = self.batch(entries, verify, device, mapping=mapping, request_nbytes=request_nbytes)

        def finish() -> LoadedBatch:
            self._check_hashes_are_there(entries, batch.headers, verify)
            # Function modes (torch.device contexts are some) would be asked about each tensor that gets a gradient.
            with no_collections(), ordinary_tensors(), torch._C.DisableTorchFunction():
                try:
                    tensors = batch.tensors(self.factory) if plain else batch.parameters(self.factory)
                except FormatError:
                    self._check_dtypes(entries, batch.headers)
                    raise
            return LoadedBatch(entries, tensors, batch.headers)

        return batch, finish

    def _check_dtypes(self, entries: Sequence[int], headers: _C.LoadedHeaders) -> None:
        """Names the first tensor that this torch has no dtype for; the factory knows only the dtype."""
        for position, entry in enumerate(entries):
            try:
                dtypes.torch_dtype(headers.dtype(position).decode("utf-8", "replace"))
            except FormatError as error:
                raise tensor_error(self.source_name, self.names[entry], error) from None

    def _run(self, batch: _C.LoadBatch, entries: Sequence[int], progress: Progress) -> None:
        if not perf.enabled:
            batch.run(progress)
            return
        with perf.measured("file_readinto", sum(map(self.index.data_nbytes, entries))):
            batch.run(progress)

    def _read_and_move(
        self, device: torch.device, entries: Sequence[int], verify: bool, progress: Progress, plain: bool
    ) -> Iterator[LoadedBatch]:
        lands_on = device if self._stays(device) else _HOST
        if self.direct_io is not None:
            self.direct_io.load_to(device)
        done = 0
        for part in runs(entries, self.index.loaded_nbytes, _MOVED_NBYTES):
            report = None if progress is None else (lambda n, before=done: progress(before + n))
            raw = self.read_raw(part, verify, report, lands_on)
            done += sum(map(self.index.data_nbytes, part))
            nbytes = sum(map(self.index.loaded_nbytes, part))
            with perf.measured("tensor_to_device", nbytes), ordinary_tensors():
                moved = [self._moved(entry, tensor, device, plain) for entry, tensor in zip(part, raw.tensors)]
            headers = raw.headers
            del raw  # before the next batch gets its memory
            yield LoadedBatch(part, moved, headers)
            del moved

    def _moved(self, entry: int, tensor: torch.Tensor, device: torch.device, plain: bool) -> torch.Tensor:
        wanted = self._options.dtype
        dtype = wanted if casts(tensor.dtype, wanted) else None
        if dtype is not None and device.type == "cpu" and self.index.data_nbytes(entry) == 0:
            try:
                tensor = _zeros(tensor.shape, dtype)
            except FormatError as error:
                raise tensor_error(self.source_name, self.names[entry], error) from None
        # Off the CPU a cast happens on the target: less to transfer, or the same.
        moved = tensor.to(device=device).to(dtype=dtype) if dtype is not None else tensor.to(device=device)
        if plain:
            return moved
        return torch.nn.Parameter(moved, requires_grad=tensor.is_floating_point() or tensor.is_complex())

    def _check_hashes_are_there(self, entries: Sequence[int], headers: _C.LoadedHeaders, verify: bool) -> None:
        """A tensor that has data and no digest is never passed on as verified."""
        if not verify or self._options.allow_missing_hashes:
            return
        bare = [
            entry
            for position, entry in enumerate(entries)
            if self.index.data_nbytes(entry) > 0 and not headers.hashes(position)
        ]
        if bare:
            raise missing_hashes(self.source_name, [self.names[entry] for entry in bare])


def _zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU that take memory where they are written to: files may claim any number of them."""
    nbytes = shape.numel() * dtype.itemsize
    if nbytes < _UNTOUCHED_NBYTES:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    try:
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    except (OSError, OverflowError, ValueError):
        raise FormatError(f"claims {nbytes} bytes of zeros, more than memory can be") from None
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Holds back the cyclic garbage collector, which thousands of new objects would set off again and again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# --- opening ----------------------------------------------------------------------------------------------------------


def open_file(
    source: Any,
    call: CallOptions,
    options: ReadOptions = AS_STORED,
    filter_func: Optional[FilterFuncType] = None,
) -> OpenFile:
    """Opens one file, or the shards that a folder or an index stands for; no payload is read.

    Raises:
        FormatError: Not a file of tensors, an unknown version, a damaged index; shards that are not those of their map.
        CryptographyError: The file is encrypted and there is no key, or the other way round.
        AuthenticationError: Its index is not the one that its key or a signature authenticates.
        ValueError: A mapping is wanted of what cannot be mapped; `num_readers` below 1.
        TypeError: An argument of another type.
        OSError: It cannot be opened.
    """
    return file_of(open_files(source, call), call, options, filter_func)


def file_of(
    opened: OpenedFiles,
    call: CallOptions,
    options: ReadOptions = AS_STORED,
    filter_func: Optional[FilterFuncType] = None,
) -> OpenFile:
    """What :func:`open_file` gives, of sources that are open already, which are closed after an error."""
    try:
        if filter_func is not None:
            check_filter(filter_func)
        if not isinstance(options.dtype, (torch.dtype, type(None))):
            options = options._replace(dtype=as_dtype(options.dtype))
        if isinstance(opened, OpenedShards):
            call = _of_each(call, len(opened.files))
            readers = [open_reader(shard, call, options, filter_func, name) for name, shard in opened.files.items()]
        else:
            readers = [open_reader(opened, call, options, filter_func)]
        file = OpenFile(opened, readers, call, options, filter_func)
        if not options.without_key:
            file.verify_by(options.verify_hash)
            if options.verification.where_stored and file.index.stores_hashes:
                file.verify_by(True)
    except BaseException:
        opened.close()
        raise
    index = file.index
    logger.debug(
        "opened %s: %d tensors, %s, encrypted %s", opened.name, len(file.selection), file.kind_text, index.encrypted
    )
    return file


def open_whole(source: Any, call: CallOptions) -> OpenFile:
    """Opens a file for work on the whole of it; without its key, the index can be read all the same.

    Reads verify where they say so, and take tensors without a digest.
    """
    return open_file(source, call, WHOLE)


def open_reader(
    opened: OpenedSource,
    call: CallOptions,
    options: ReadOptions,
    filter_func: Optional[FilterFuncType] = None,
    name: Optional[str] = None,
) -> FileReader:
    """Parses the index of an opened file; checks its tag and its signatures. `name` is its own in the folder.

    Raises:
        FormatError: Not a ``.tensors`` file, an unknown version, a damaged index.
        CryptographyError: The file is encrypted and there is no key, or the other way round.
        AuthenticationError: Its index is not the one that its key or a signature authenticates.
        ValueError: A mapping is wanted of what cannot be mapped; `num_readers` below 1.
        MissingHashError: Nothing states the digest of the file that it is to be compared with.
    """
    max_workers = call.max_workers
    choice = "auto" if options.direct_io is None else check_direct_io(options.direct_io)
    own_source, files = opened.source, options.verification.files
    direct_io = DirectIO(own_source, choice) if isinstance(own_source, _C.FileSource) else None
    sha256 = None if files is None else files.of(name_of(opened) if name is None else name, opened)
    if sha256 is not None:
        opened = opened._replace(source=_C.HashedSource(own_source))
    index, keys = read_index(opened, call, options.without_key)
    names: list[Name] = index.names()
    selection: Sequence[int] = range(len(names))
    if filter_func is not None:
        selection = [i for i, name in enumerate(names) if filter_func(name)]
    maps = options.mmap
    if maps is None:
        checked = sha256 is not None or (options.verification.where_stored and index.stores_hashes)
        maps = not checked and choice != "always" and _may_map(own_source, index, names, selection, options)
    mapping: Optional[_C.FileMapping] = None
    if maps:
        if not isinstance(own_source, _C.FileSource):
            raise ValueError(f"mmap=True: {opened.name} cannot be mapped; only local files can")
        try:
            mapping = own_source.map()
        except OSError as error:  # some file systems cannot, and there is no list of them
            if options.mmap:
                raise
            logger.debug("%s: read, since it cannot be mapped: %s", opened.name, error)
    handle = Handle(opened.source, keys, mapping, opened.close)
    reader = FileReader(handle, index, names, selection, max_workers, direct_io, options, own_source)
    reader.expected_sha256 = sha256
    return reader


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
    return not any(casts(known_dtype(stored), dtype) for stored in set(map(index.dtype, selection)))


def _of_each(call: CallOptions, files: int) -> CallOptions:
    """How each of several files is read, some of them at once: the bound for threads holds for all of them."""
    if not call.max_workers:
        return call
    return call._replace(num_readers=max(1, call.max_workers // min(files, _LOCAL_FILES_AT_ONCE)))


def _moved(state: Any, device: torch.device) -> Any:
    if isinstance(state, torch.Tensor):
        return state.to(device)
    return {key: _moved(value, device) for key, value in state.items()}


class _ReadAhead:
    """Which tensors a loop over single ones should read together, where each request costs a round trip.

    Tensors that are asked for in file order are read ahead from the fourth on, 1 MiB at first and up to 16 MiB. Others
    are read alone. May be used from several threads: at worst too little or too much is read ahead.
    """

    def __init__(self, index: Any, selection: Sequence[int]) -> None:
        self._index, self._selection = index, selection
        self._next = -1  # position in the selection that would go on with the row
        self._row = 0
        self._window_nbytes = _FIRST_AHEAD_NBYTES

    def together_with(self, entry: int, kept: Collection[int]) -> list[int]:
        """`entry`, and what to read with it."""
        position = bisect.bisect_left(self._selection, entry)
        self._row = self._row + 1 if position == self._next else 0
        self._next = position + 1
        if self._row < _ROW:
            self._window_nbytes = _FIRST_AHEAD_NBYTES
        if self._row < _ROW or entry in kept:
            return [entry]
        chosen, nbytes = [entry], self._index.data_nbytes(entry)
        for following in itertools.islice(self._selection, position + 1, None):
            nbytes += self._index.data_nbytes(following)
            if nbytes > self._window_nbytes or following in kept:
                break
            chosen.append(following)
        self._window_nbytes = min(2 * self._window_nbytes, _MAX_AHEAD_NBYTES)
        return chosen
