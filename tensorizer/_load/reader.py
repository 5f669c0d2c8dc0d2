"""One file that is open: its index, and the way from its entries to tensors on a device.

Entries are numbered by their position in the index. Nothing that was read is kept here (``_load/open_file.py`` does).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional, Union

import torch

from tensorizer import _C
from tensorizer._format import dtypes
from tensorizer._format.dtypes import casts, known_dtype
from tensorizer._format.entries import FilterFuncType
from tensorizer._format.names import Name, listed, name_text
from tensorizer._io.call_options import CallOptions
from tensorizer._io.sources import OpenedSource
from tensorizer._load.arguments import DeviceChooser
from tensorizer._load.digests import Verification, check_digest, name_of
from tensorizer._load.open_index import LoadedBatch, read_index
from tensorizer._system import cgroup, cuda_engine, perf
from tensorizer._system.config import ranks_of_node
from tensorizer._system.devices import ordinary_tensors, resolve_cuda_device
from tensorizer._system.sizes import counted, runs
from tensorizer.errors import FormatError, MissingHashError

logger = logging.getLogger("tensorizer.serialization")

# Host memory that a load which cannot stay where it lands (cast, moved, streamed) holds at a time.
_BATCH_NBYTES = 256 << 20

# Zeros from here on are not written out where nobody asks for their memory.
_UNTOUCHED_NBYTES = 1 << 20

# Where every request costs a round trip.
_NETWORK_SOURCES = (_C.HttpSource, _C.RedisSource, _C.PyRangeSource)

_HOST = torch.device("cpu")

Progress = Optional[Callable[[int], object]]


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


class FileReader:
    """One open file. May be used from several threads: every read is independent of the others.

    Attributes:
        index: What the file says of its tensors.
        names: Of all entries.
        selection: The entries that the filter accepted, ascending.
        network: Whether every request costs a round trip.
        mapped: Whether tensors are views of the file.
        max_workers: Upper bound for reading threads; 0: as many as are useful.
        direct_io: Whether the file is read past the page cache.
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
        direct_io: DirectIO,
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
        _keep_memory()

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
        self, entries: Sequence[int], verify: bool, mapping: Optional[_C.FileMapping] = None
    ) -> Optional[list[PendingBatch]]:
        """As :meth:`begin`, plain, and also of what is converted or moved once it is there, for callers that limit how
        much is loaded at a time: views of `mapping`, or memory of the tensors' own.

        ``None`` where the parts for several devices have to be read one after the other.
        """
        parts = list(self._by_device(entries))
        if len(parts) > 1 and self.expected_sha256 is not None:
            return None
        return [self._begin_any(device, part, verify, mapping) for device, part in parts]

    def _begin_any(
        self, device: torch.device, entries: Sequence[int], verify: bool, mapping: Optional[_C.FileMapping]
    ) -> PendingBatch:
        lands_on = device if self._stays(device) else _HOST
        batch, finish = self._begin(lands_on, entries, verify, plain=True, mapping=mapping)
        if self._lands(device, entries):
            return batch, finish

        def moved() -> LoadedBatch:
            raw = finish()
            with ordinary_tensors():
                tensors = [self._moved(entry, tensor, device, True) for entry, tensor in zip(entries, raw.tensors)]
            return LoadedBatch(entries, tensors, raw.headers)

        return batch, moved

    def check_sha256(self, progress: Progress = None) -> None:
        """Compares the whole file with the digest that it has to have, if any; what no load has read is read now.

        Raises:
            HashMismatchError: It is another file.
            OSError: The rest cannot be read.
        """
        wanted = self.expected_sha256
        if wanted is None:
            return
        source = self.handle.source
        assert isinstance(source, _C.HashedSource)
        self.sha256, self.expected_sha256 = source.finish(progress).hex(), None
        assert self._options.verification.files is not None
        check_digest(source, wanted, self.sha256, self._options.verification.files.origin)

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
        batch, finish = self._begin(device, entries, verify, plain=True)
        self._run(batch, entries, progress)
        return finish()

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
    ) -> _C.LoadBatch:
        """A load of `entries`, not run yet: into memory of its own, or to the addresses of `into`, on `device`.

        Of a mapped file they are views of `mapping`; ``None`` is the one that all loads of the file share.
        """
        source, keys, shared, _ = self.handle
        mapping = shared if mapping is None else mapping
        on_host = device.type == "cpu"
        allocates = not on_host and into is None
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
    ) -> PendingBatch:
        """A load of what lands on a device, as it is stored."""
        batch = self.batch(entries, verify, device, mapping=mapping)

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
        self.direct_io.load_to(device)
        done = 0
        for part in runs(entries, self.index.loaded_nbytes, _BATCH_NBYTES):
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
        """Nothing is passed on as verified that nothing vouches for. Tensors without data have nothing to verify."""
        if not verify or self._options.allow_missing_hashes:
            return
        bare = [
            entry
            for position, entry in enumerate(entries)
            if self.index.data_nbytes(entry) > 0 and not headers.hashes(position)
        ]
        if bare:
            raise missing_hashes(self.source_name, [self.names[entry] for entry in bare])


def open_reader(
    opened: OpenedSource,
    call: CallOptions,
    options: ReadOptions,
    filter_func: Optional[FilterFuncType] = None,
    name: Optional[str] = None,
) -> FileReader:
    """Parses the index of an opened file, and checks what vouches for it. `name` is its own in the model's folder.

    Raises:
        FormatError: Not a ``.tensors`` file, an unknown version, a damaged index.
        CryptographyError: The file is encrypted and there is no key, or the other way round.
        AuthenticationError: Its index is not what its key or a signature vouches for.
        ValueError: A mapping is wanted of what cannot be mapped; `num_readers` below 1.
        MissingHashError: Nothing states the digest of the file that it is to be compared with.
    """
    max_workers = call.max_workers
    choice = check_direct_io(options.direct_io)
    direct_io = DirectIO(opened.source, choice)
    own_source, files = opened.source, options.verification.files
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
        except OSError as error:  # some file systems cannot, of which nobody has a list
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


# --- memory that is kept for the next load --------------------------------------------------------------------------

_KEPT_SECONDS = 3.0
_KEPT_SHARE = 4


@functools.cache
def _keep_memory() -> None:
    """Says how much memory of dropped tensors this process keeps for its next load; called before the first one.

    Memory of tensors that came from plain files stays with the process for its next load, and the kernel may take it at
    any time. What is older than three seconds goes when more is kept, since a process that loads again does so at once.
    At most a quarter of the memory that the machine or the container has is kept.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = min(physical, cgroup.memory_limit() or physical)
    _C.keep_memory(limit // _KEPT_SHARE, _KEPT_SECONDS)


# --- past the page cache --------------------------------------------------------------------------------------------

_DIRECT_IO = ("auto", "always", "never")

# ``auto`` reads past the cache what takes so much of it that it drives out what others have there, or itself.
_LARGE_NBYTES = 8 << 30
_SHARE_OF_MEMORY = 4


def check_direct_io(choice: Optional[str]) -> str:
    """The choice for a load: `choice`, or ``"auto"`` where it is ``None``.

    Raises:
        TypeError: Not a ``str`` or ``None``.
        ValueError: None of the three.
    """
    if choice is not None and not isinstance(choice, str):
        raise TypeError(f"direct_io: expected one of {', '.join(map(repr, _DIRECT_IO))}, got {type(choice).__name__}")
    if choice is None:
        return "auto"
    if choice not in _DIRECT_IO:
        raise ValueError(f"direct_io: expected one of {', '.join(map(repr, _DIRECT_IO))}, got {choice!r:.100}")
    return choice


class DirectIO:
    """Whether one open file is read past the page cache, straight from the disk to where its bytes go.

    May be used from several threads.
    """

    def __init__(self, source: _C.RangeSource, choice: str) -> None:
        self._undecided: Optional[_C.FileSource] = None
        self._alone = False
        self._kept: Optional[_C.FileSource] = None
        if not isinstance(source, _C.FileSource) or choice == "never":
            return
        self._kept = source
        if choice == "always":
            source.set_direct(True)
        elif not source.was_cached:
            self._undecided = source

    def expect(self, nbytes: Callable[[], int]) -> None:
        """To be called before a load, with what tells how many bytes it takes of this file and others together.

        A large load decides for all that follow: what it did not leave in the cache is not there for them either.
        """
        source = self._undecided
        if source is None or not (self._alone or ranks_of_node() == 1):  # others find in the cache what this one reads
            return
        wanted = nbytes()
        if wanted >= _LARGE_NBYTES or wanted >= cgroup.available_nbytes() // _SHARE_OF_MEMORY:
            source.set_direct(True)
            self._undecided = None

    def load_to(self, device: torch.device) -> None:
        """To be called before a load to `device`.

        Where that shares the memory of the host, the model would be there twice: what is read leaves the page cache,
        for this load and all that follow.
        """
        if self._kept is None or device.type != "cuda" or not (self._alone or ranks_of_node() == 1):
            return
        if cuda_engine.shares_host_memory(device):
            self._kept.let_go_behind()
            self._kept = None
