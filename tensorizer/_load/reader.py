"""Entries of an opened container to tensors on a device: batches, casts, keys. Knows nothing about caching."""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import itertools
import mmap
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple, Optional, Union

import torch

from tensorizer import _C
from tensorizer._format import dtypes
from tensorizer._load.digests import missing_hashes
from tensorizer._system import cuda_engine, kept_memory, perf
from tensorizer._system.devices import ordinary_tensors, resolve_cuda_device
from tensorizer._system.runs import runs
from tensorizer.errors import FormatError

__all__ = [
    "BATCH_NBYTES",
    "LoadedBatch",
    "PendingBatch",
    "ReadAhead",
    "TensorReader",
    "converts",
    "known_dtype",
    "no_collections",
    "stored_dtype",
]

# Host memory that a load which cannot stay where it lands (cast, moved, streamed) holds at a time.
BATCH_NBYTES = 256 << 20

# Zeros from here on are not written out where nobody asks for their memory.
_UNTOUCHED_NBYTES = 1 << 20

# Reading ahead over a network: after so many tensors in a row, and how much.
_ROW = 3
_FIRST_AHEAD_NBYTES = 1 << 20
_MAX_AHEAD_NBYTES = 16 << 20

_HOST = torch.device("cpu")

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

Progress = Optional[Callable[[int], object]]
#: One device, or the device of each entry.
DeviceChoice = Union[torch.device, Callable[[int], torch.device]]


class LoadedBatch(NamedTuple):
    """Tensors that were loaded together; the same position in all three is the same tensor."""

    entries: Sequence[int]
    tensors: Sequence[torch.Tensor]  # Parameters, or plain tensors where raw ones were asked for
    headers: _C.LoadedHeaders


class PendingBatch(NamedTuple):
    """A load that is ready to run, and what makes tensors of it afterwards."""

    batch: _C.LoadBatch
    finish: Callable[[], LoadedBatch]


class TensorReader:
    """Reads tensors of one container. Safe from several threads at once: every read is a session of its own."""

    def __init__(
        self,
        source: _C.RangeSource,
        index: _C.Index,
        *,
        device: DeviceChoice,
        dtype: Optional[torch.dtype],
        max_workers: int,
        keys: Optional[_C.KeyRing],
        mapping: Optional[_C.FileMapping],
        allow_missing_hashes: bool = False,
    ) -> None:
        self.source = source
        self.index = index
        self.device = device
        self.dtype = dtype
        self.keys = keys
        kept_memory.configure()
        self._max_workers = max_workers
        self._mapping = mapping
        self._allow_missing_hashes = allow_missing_hashes
        self.factory = _C.TensorFactory(dtypes.resolve)

    def read(self, entries: Sequence[int], verify: bool, progress: Progress = None) -> Iterator[LoadedBatch]:
        """Loads `entries` (ascending) to the target device and dtype, as Parameters, in order.

        On the CPU without a cast all of them are one batch; otherwise batches hold at most 256 MiB.
        """
        together = None if isinstance(self.device, torch.device) else self.begin(entries, verify)
        if together is None:
            for device, part in self._by_device(entries):
                yield from self._read_to(device, part, verify, progress)
            return
        with perf.measured("file_readinto", sum(map(self.index.data_nbytes, entries)) if perf.enabled else 0):
            _C.run_batches([pending.batch for pending in together], len(together), progress)
        for pending in together:
            yield pending.finish()

    def _by_device(self, entries: Sequence[int]) -> Iterator[tuple[torch.device, Sequence[int]]]:
        """The entries of each device; more than one only where the caller spread them."""
        if isinstance(self.device, torch.device):
            yield resolve_cuda_device(self.device), entries
            return
        groups: dict[torch.device, list[int]] = {}
        for entry in entries:
            groups.setdefault(resolve_cuda_device(self.device(entry)), []).append(entry)
        yield from groups.items()

    def _read_to(
        self, device: torch.device, entries: Sequence[int], verify: bool, progress: Progress
    ) -> Iterator[LoadedBatch]:
        if self._stays(device) and not self._casts_any(entries):
            pending = self._begin(device, entries, verify)
            self._run(pending.batch, entries, progress)
            yield pending.finish()
            return
        lands_on = device if self._stays(device) else _HOST
        done = 0
        for part in runs(entries, self.index.loaded_nbytes, BATCH_NBYTES):
            report = None if progress is None else functools.partial(_report_from, progress, done)
            raw = self.read_raw(part, verify, report, lands_on)
            done += sum(map(self.index.data_nbytes, part))
            with perf.measured("tensor_to_device", sum(map(self.index.loaded_nbytes, part))):
                with ordinary_tensors():
                    delivered = [self._deliver(entry, tensor, device) for entry, tensor in zip(part, raw.tensors)]
                yield raw._replace(tensors=delivered)

    def begin(self, entries: Sequence[int], verify: bool) -> Optional[list[PendingBatch]]:
        """What :meth:`read` would run, for callers who run the batches of several readers together.

        ``None`` where tensors do not stay where they land (cast, or moved to a device without a fast way).
        """
        parts = list(self._by_device(entries))
        if self._casts_any(entries) or not all(self._stays(device) for device, _ in parts):
            return None
        return [self._begin(device, part, verify) for device, part in parts]

    def _stays(self, device: torch.device) -> bool:
        """Whether tensors for this device are loaded to their final addresses."""
        return device.type == "cpu" or cuda_engine.is_fast_device(device)

    def _begin(self, device: torch.device, entries: Sequence[int], verify: bool) -> PendingBatch:
        batch = self._batch(entries, verify, device)

        def finish() -> LoadedBatch:
            self._check_hashes_are_there(entries, batch.headers, verify)
            with no_collections(), ordinary_tensors():
                return LoadedBatch(entries, batch.parameters(self.factory), batch.headers)

        return PendingBatch(batch, finish)

    def read_raw(
        self, entries: Sequence[int], verify: bool, progress: Progress = None, device: torch.device = _HOST
    ) -> LoadedBatch:
        """Loads `entries` as plain tensors of their stored dtype, to the host or a device with a fast way."""
        batch = self._batch(entries, verify, device)
        self._run(batch, entries, progress)
        self._check_hashes_are_there(entries, batch.headers, verify)
        with ordinary_tensors():
            return LoadedBatch(entries, batch.tensors(self.factory), batch.headers)

    def read_headers(self, entries: Sequence[int]) -> LoadedBatch:
        """The record headers of `entries`, without any data."""
        batch = self._batch(entries, False, headers_only=True)
        batch.run()
        return LoadedBatch(entries, [], batch.headers)

    def casts(self, stored: torch.dtype) -> bool:
        """Whether the constructor's ``dtype=`` changes tensors of this stored dtype: floating point only."""
        return converts(stored, self.dtype)

    def _casts_any(self, entries: Sequence[int]) -> bool:
        if self.dtype is None:
            return False
        return any(converts(known_dtype(dtype), self.dtype) for dtype in set(map(self.index.dtype, entries)))

    def _batch(
        self, entries: Sequence[int], verify: bool, device: torch.device = _HOST, headers_only: bool = False
    ) -> _C.LoadBatch:
        on_host = device.type == "cpu"
        with ordinary_tensors():
            return _C.LoadBatch(
                self.source,
                self.index,
                list(entries),
                verify=verify,
                max_workers=self._max_workers,
                keys=self.keys,
                mapping=self._mapping if on_host and not headers_only else None,
                allocate=None if on_host else functools.partial(cuda_engine.allocate, device),
                engine=None if on_host else cuda_engine.engine_for(device),
                headers_only=headers_only,
            )

    def _run(self, batch: _C.LoadBatch, entries: Sequence[int], progress: Progress) -> None:
        with perf.measured("file_readinto", sum(map(self.index.data_nbytes, entries)) if perf.enabled else 0):
            batch.run(progress)

    def _check_hashes_are_there(self, entries: Sequence[int], headers: _C.LoadedHeaders, verify: bool) -> None:
        """Nothing is passed on as verified that nothing vouches for. Tensors without data have nothing to verify."""
        if not verify or self._allow_missing_hashes:
            return
        bare = [
            entry
            for position, entry in enumerate(entries)
            if self.index.data_nbytes(entry) > 0 and not headers.hashes(position)
        ]
        if bare:
            names = self.index.names()
            raise missing_hashes(self.source.name, [names[entry] for entry in bare])

    def _deliver(self, entry: int, tensor: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        dtype = self.dtype if self.casts(tensor.dtype) else None
        if dtype is not None and device.type == "cpu" and self.index.data_nbytes(entry) == 0:
            tensor = _zeros(tensor.shape, dtype)
        # Off the CPU a cast happens on the target: less to transfer, or the same.
        moved = tensor.to(device=device).to(dtype=dtype) if dtype is not None else tensor.to(device=device)
        return torch.nn.Parameter(moved, requires_grad=differentiable)


def stored_dtype(index: _C.Index, entry: int) -> Optional[torch.dtype]:
    """The dtype that the index shows; ``None`` where only the record header names it."""
    return known_dtype(index.dtype(entry))


@functools.lru_cache(maxsize=64)
def known_dtype(stored: bytes) -> Optional[torch.dtype]:
    try:
        return dtypes.torch_dtype(stored.decode("utf-8", "replace"))
    except FormatError:
        return None


@functools.lru_cache(maxsize=256)
def converts(stored: Optional[torch.dtype], wanted: Optional[torch.dtype]) -> bool:
    """Whether a load to the dtype `wanted` converts tensors of the dtype `stored`, or may where that is not known."""
    return wanted in CASTABLE and stored != wanted and (stored is None or stored in CASTABLE)


class ReadAhead:
    """Which tensors a loop over single ones should read together, where each request costs a round trip.

    Tensors that are asked for in file order are read ahead from the fourth on, 1 MiB at first and up to 16 MiB. Others
    are read alone. May be used from several threads: at worst too little or too much is read ahead.
    """

    def __init__(self, index: _C.Index, selection: Sequence[int]) -> None:
        self._index, self._selection = index, selection
        self._next = -1  # position in the selection that would go on with the row
        self._row = 0
        self._window_nbytes = _FIRST_AHEAD_NBYTES

    def together_with(self, entry: int, cached: Container[int]) -> list[int]:
        """`entry`, and what to read with it."""
        position = bisect.bisect_left(self._selection, entry)
        self._row = self._row + 1 if position == self._next else 0
        self._next = position + 1
        if self._row < _ROW:
            self._window_nbytes = _FIRST_AHEAD_NBYTES
        if self._row < _ROW or entry in cached:
            return [entry]
        chosen, nbytes = [entry], self._index.data_nbytes(entry)
        for following in itertools.islice(self._selection, position + 1, None):
            nbytes += self._index.data_nbytes(following)
            if nbytes > self._window_nbytes or following in cached:
                break
            chosen.append(following)
        self._window_nbytes = min(2 * self._window_nbytes, _MAX_AHEAD_NBYTES)
        return chosen


def _zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU that take memory where they are written to: files may claim any number of them."""
    nbytes = shape.numel() * dtype.itemsize
    if nbytes < _UNTOUCHED_NBYTES:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    try:
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    except (OSError, OverflowError, ValueError):
        raise FormatError(f"a tensor claims {nbytes} bytes of zeros, more than memory can be") from None
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _report_from(progress: Callable[[int], object], before: int, done: int) -> None:
    progress(before + done)


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
