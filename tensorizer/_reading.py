"""Entries of an opened container to tensors on a device: batches, casts, keys. Knows nothing about caching."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch

from . import _C, _dtypes
from ._devices import resolve_cuda_device
from .errors import FormatError

__all__ = ["BATCH_NBYTES", "Loaded", "TensorReader"]

# Host memory that a load which cannot stay where it lands (cast, moved, streamed) holds at a time.
BATCH_NBYTES = 256 << 20

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

Progress = Optional[Callable[[int], object]]


class Loaded(NamedTuple):
    """One loaded tensor and where its record header is kept."""

    entry: int
    tensor: torch.Tensor  # a Parameter, or a plain tensor where raw ones were asked for
    headers: _C.LoadedHeaders
    position: int  # in headers


class TensorReader:
    """Reads tensors of one container. Safe from several threads at once: every read is a session of its own."""

    def __init__(
        self,
        source: _C.RangeSource,
        index: _C.Index,
        *,
        device: torch.device,
        dtype: Optional[torch.dtype],
        max_workers: int,
        keys: Optional[_C.KeyRing],
        mapping: Optional[_C.FileMapping],
    ) -> None:
        self.source = source
        self.index = index
        self.device = device
        self.dtype = dtype
        self.keys = keys
        self._max_workers = max_workers
        self._mapping = mapping
        self._factory = _C.TensorFactory(_dtypes.resolve)

    def read(self, entries: Sequence[int], verify: bool, progress: Progress = None) -> Iterator[Loaded]:
        """Loads `entries` (ascending) to the target device and dtype, as Parameters, in order.

        On the CPU without a cast all of them are loaded at once; otherwise in batches of at most 256 MiB.
        """
        device = resolve_cuda_device(self.device)
        if device.type == "cpu" and not self._casts_any(entries):
            yield from self._read_batch(entries, verify, progress)
            return
        done = 0
        for batch in self.batches(entries, BATCH_NBYTES):
            report = None if progress is None else (lambda n, before=done: progress(before + n))
            for loaded in self.read_raw(batch, verify, report):
                yield loaded._replace(tensor=self._deliver(loaded.tensor, device))
                done += self.index.data_nbytes(loaded.entry)

    def read_raw(self, entries: Sequence[int], verify: bool, progress: Progress = None) -> Iterator[Loaded]:
        """Loads `entries` as plain host tensors of their stored dtype."""
        batch = self._run(entries, verify, progress)
        tensors = batch.tensors(self._factory)
        yield from self._pair(entries, tensors, batch.headers)

    def batches(self, entries: Sequence[int], limit: int) -> Iterator[Sequence[int]]:
        """Cuts `entries` into runs of at most `limit` bytes, or one entry where that alone is larger."""
        begin, nbytes = 0, 0
        for position, entry in enumerate(entries):
            size = self.index.loaded_nbytes(entry)
            if position > begin and nbytes + size > limit:
                yield entries[begin:position]
                begin, nbytes = position, 0
            nbytes += size
        if begin < len(entries):
            yield entries[begin:]

    def stored_dtype(self, entry: int) -> Optional[torch.dtype]:
        """The dtype that the index shows; ``None`` where only the record header names it."""
        try:
            return _dtypes.torch_dtype(self.index.dtype(entry).decode("utf-8", "replace"))
        except FormatError:
            return None

    def casts(self, stored: Optional[torch.dtype]) -> bool:
        """Whether the constructor's ``dtype=`` changes tensors of this stored dtype: floating point only."""
        return self.dtype in CASTABLE and stored in CASTABLE and stored != self.dtype

    def _casts_any(self, entries: Sequence[int]) -> bool:
        return self.dtype is not None and any(self.casts(self.stored_dtype(entry)) for entry in entries)

    def _run(self, entries: Sequence[int], verify: bool, progress: Progress) -> _C.LoadBatch:
        batch = _C.LoadBatch(
            self.source,
            self.index,
            list(entries),
            verify=verify,
            max_workers=self._max_workers,
            keys=self.keys,
            mapping=self._mapping,
        )
        batch.run(progress)
        return batch

    def _read_batch(self, entries: Sequence[int], verify: bool, progress: Progress) -> Iterator[Loaded]:
        batch = self._run(entries, verify, progress)
        return self._pair(entries, batch.parameters(self._factory), batch.headers)

    @staticmethod
    def _pair(entries: Sequence[int], tensors: Sequence[Any], headers: _C.LoadedHeaders) -> Iterator[Loaded]:
        for position, entry in enumerate(entries):
            yield Loaded(entry, tensors[position], headers, position)

    def _deliver(self, tensor: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        dtype = self.dtype if self.casts(tensor.dtype) else None
        moved = tensor.to(device=device, dtype=dtype)
        return torch.nn.Parameter(moved, requires_grad=differentiable)
