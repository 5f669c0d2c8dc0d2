"""Parts of the tensors of a container, read together: one plan, one load for each file and device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch

from tensorizer import _C
from tensorizer._format.dtypes import torch_dtype
from tensorizer._format.names import Name
from tensorizer._load.container import Container, ReadOptions
from tensorizer._load.indices import cover, is_basic
from tensorizer._load.loaded_tensors import LoadedTensors
from tensorizer._load.reader import converts, no_collections
from tensorizer._system import cuda_engine
from tensorizer._system.devices import empty, ordinary_tensors, resolve_cuda_device
from tensorizer.errors import FormatError

__all__ = ["PartReader", "TensorFacts", "Wanted"]

# Files read at a time, as for whole tensors.
_FILES_AT_ONCE = 4


class TensorFacts(NamedTuple):
    """What parts of a tensor are parts of."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # as stored
    loaded_dtype: torch.dtype  # as it is given out


class Wanted(NamedTuple):
    """A part of one tensor."""

    entry: int
    index: Any
    device: torch.device
    into: Optional[torch.Tensor] = None  # of its shape: where it goes


class _Read(NamedTuple):
    """A basic part, and the flat bytes that it goes to; ``None``: to memory that the load allocates."""

    position: int  # among all that was asked for
    entry: int
    index: Any
    into: Optional[torch.Tensor]


class PartReader:
    """Reads parts of one container. Safe from several threads at once: every read is independent of the others."""

    def __init__(self, container: Container, loaded: LoadedTensors, options: ReadOptions) -> None:
        self._container, self._loaded = container, loaded
        self._max_workers, self._dtype = options.max_workers, options.dtype

    # ---- facts ------------------------------------------------------------------------------------------------------

    def facts(self, entry: int) -> TensorFacts:
        """Shape and dtypes of a tensor. No I/O, except for old files whose index shows them only roughly."""
        container = self._container
        entry = container.targets.get(entry, entry)
        stored, shape = container.stored_dtype(entry), container.shape(entry)
        if stored is None and container.index.format == "safetensors":
            raise FormatError(
                f"{container.source_name}: tensor {container.names[entry]!r}: torch has no dtype for "
                f"{container.index.container_dtype(entry)}"
            )
        if stored is None or container.may_be_scalar(entry):
            if not container.has_header(entry):
                container.read_headers([entry])
            headers, position = container.header(entry)
            stored = torch_dtype(headers.dtype(position).decode("utf-8", "replace"))
            shape = headers.shape(position)
        return TensorFacts(tuple(shape), stored, self._given(stored))

    def _given(self, stored: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and converts(stored, self._dtype) else stored

    def device_of(self, entry: int) -> torch.device:
        """Where the deserializer puts a tensor."""
        return self._container.device_of(self._container.names[entry])

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read_basic(
        self, entries: Sequence[int], indices: Sequence[Any], device: torch.device
    ) -> Optional[Sequence[torch.Tensor]]:
        """Parts of many tensors of one plain file, as :meth:`read`, with as little work for each as there can be.

        ``None`` where it takes more than that.
        """
        container = self._container
        if container.checks_whole:
            return None
        simple = device.type == "cpu" and self._dtype is None and container.source is not None
        if not simple or container.targets or not container.shows_all or not all(map(is_basic, indices)):
            return None
        reader = container.reader
        with no_collections(), ordinary_tensors():
            batch = _C.LoadBatch.of_parts(reader.source, reader.index, entries, indices)
            reader.direct_io.expect(lambda: _nbytes([batch]))
            batch.plan(keys=reader.keys, max_workers=self._max_workers)
            batch.run()
            return batch.tensors(reader.factory)

    def read(self, wanted: Sequence[Wanted], verify: bool) -> list[torch.Tensor]:
        """The parts, in order; those that name a place are written to it, and it is what comes back.

        Raises:
            IndexError, TypeError, ValueError: As torch words what is wrong with an index.
            ValueError: A part is to be verified; a place of another shape.
        """
        container = self._container
        whole = container.closed or container.checks_whole  # a signed tensor is read and hashed as a whole
        verify = verify and not container.checks_whole
        results: list[Optional[torch.Tensor]] = [None] * len(wanted)
        plain: dict[torch.device, list[int]] = {}
        for position, want in enumerate(wanted):
            entry = container.targets.get(want.entry, want.entry)
            if verify or whole or not self._is_plain(entry):
                results[position] = self._from_whole(entry, want, verify)
            else:
                plain.setdefault(resolve_cuda_device(want.device), []).append(position)
        with ordinary_tensors():
            for device, positions in plain.items():
                self._read_plain(device, positions, wanted, results)
        return [tensor for tensor in results if tensor is not None]

    def _is_plain(self, entry: int) -> bool:
        if self._container.shows_all:
            return True
        return self._container.stored_dtype(entry) is not None and not self._container.may_be_scalar(entry)

    def _from_whole(self, entry: int, want: Wanted, verify: bool) -> torch.Tensor:
        """By way of the whole tensor: verified, of a closed file, or described by its record header alone."""
        container = self._container
        if verify:
            self._refuse_part(want)
        kept = self._loaded.kept.get(entry) if container.closed else None
        if kept is not None:
            if verify:
                (kept,) = self._loaded.load([entry], True)
            tensor = kept.detach()
            part = tensor[want.index].to(want.device, copy=True)
        else:
            (tensor,) = container.read_raw([entry], verify)
            part = tensor[want.index]
            if want.into is None:
                part = part.to(self._given(tensor.dtype)).to(want.device)
        return _placed(part.contiguous(), want, container.names[want.entry])

    def _refuse_part(self, want: Wanted) -> None:
        name, facts = self._container.names[want.entry], self.facts(want.entry)
        whole = math.prod(facts.shape)
        if not is_basic(want.index) or empty(facts.shape, device="meta")[want.index].numel() != whole:
            raise ValueError(
                f"tensor {name!r:.200}: a part cannot be verified, since the hashes of the file are of whole tensors; "
                "wanted all of it, or verify_hash=False"
            )

    def _read_plain(
        self,
        device: torch.device,
        positions: Sequence[int],
        wanted: Sequence[Wanted],
        results: list[Optional[torch.Tensor]],
    ) -> None:
        container = self._container
        fast = device.type == "cpu" or cuda_engine.is_fast_device(device)
        placed: dict[int, torch.Tensor] = {}  # what comes to a buffer first, and how
        rest: dict[int, tuple[Any, ...]] = {}
        reads: list[_Read] = []
        for position in positions:
            want = wanted[position]
            entry = container.targets.get(want.entry, want.entry)
            if is_basic(want.index):
                reads.append(_Read(position, entry, want.index, self._straight(entry, want, device, fast)))
                continue
            covered = cover(want.index, container.shape(entry))
            rest[position] = covered.rest
            if len(covered.boxes) == 1:
                reads.append(_Read(position, entry, covered.boxes[0], None))
                continue
            placed[position], rows = self._rows(entry, covered.boxes, device if fast else torch.device("cpu"))
            reads += [_Read(position, entry, box, part) for box, part in zip(covered.boxes, rows)]
        for read, tensor in self._load(reads, device if fast else torch.device("cpu")):
            placed.setdefault(read.position, tensor)
        for position in positions:
            want, tensor = wanted[position], placed[position]
            if position in rest:
                tensor = tensor[
                    tuple(i.to(tensor.device) if isinstance(i, torch.Tensor) else i for i in rest[position])
                ]
            if want.into is None:
                tensor = tensor.to(device=device, dtype=self._given(tensor.dtype))
            results[position] = _placed(tensor, want, container.names[want.entry])

    def _straight(self, entry: int, want: Wanted, device: torch.device, fast: bool) -> Optional[torch.Tensor]:
        """The place that a part names, where it can be read to it as it is stored."""
        into = want.into
        if into is None or not fast or not into.is_contiguous() or into.is_conj() or into.is_neg():
            return None
        stored = self._container.stored_dtype(entry)
        if into.dtype != stored or resolve_cuda_device(into.device) != device:
            return None
        return into

    def _rows(
        self, entry: int, boxes: Sequence[tuple[Any, ...]], device: torch.device
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A buffer for boxes that follow each other along dimension 0, and the part of it that each takes."""
        shape, dtype = self._container.shape(entry), self._container.stored_dtype(entry)
        rows = [box[0].stop - box[0].start for box in boxes]
        inner = empty(shape[1:], device="meta")[boxes[0][1:]].shape if len(shape) > 1 else ()
        buffer = empty((sum(rows), *inner), dtype=dtype, device=device)
        ends = [0]
        for count in rows:
            ends.append(ends[-1] + count)
        return buffer, [buffer[a:b] for a, b in zip(ends, ends[1:])]

    def _load(self, reads: Sequence[_Read], device: torch.device) -> list[tuple[_Read, torch.Tensor]]:
        """Reads basic parts to one device, as they are stored; those of one file together."""
        groups: dict[tuple[int, bool], list[tuple[_Read, int]]] = {}
        containers: dict[int, Container] = {}
        for read in reads:
            container, local = self._container.part(read.entry)
            containers[id(container)] = container
            groups.setdefault((id(container), read.into is not None), []).append((read, local))
        batches = []
        for (number, to_places), members in groups.items():
            container = containers[number]
            reader = container.reader
            batch = _C.LoadBatch.of_parts(
                reader.source, reader.index, [local for _, local in members], [read.index for read, _ in members]
            )
            batches.append((batch, members, container, to_places))
        for _, _, container, _ in batches:
            container.reader.direct_io.expect(lambda: _nbytes([batch for batch, *_ in batches]))
        planned = [self._plan(container, batch, members, device, to) for batch, members, container, to in batches]
        if len(batches) == 1:
            batches[0][0].run()
        elif batches:
            _C.run_batches([batch for batch, *_ in batches], _FILES_AT_ONCE)
        found = []
        for (batch, members, container, _), tensors in zip(batches, planned):
            delivered = batch.tensors(container.reader.factory) if tensors is None else tensors
            found += [(read, tensor) for (read, _), tensor in zip(members, delivered)]
        return found

    def _plan(
        self,
        container: Container,
        batch: _C.LoadBatch,
        members: Sequence[tuple[_Read, int]],
        device: torch.device,
        to_places: bool,
    ) -> Optional[list[torch.Tensor]]:
        """Gives a batch its memory; the tensors over it, or ``None`` where the batch makes them."""
        reader = container.reader
        common: dict[str, Any] = {"keys": reader.keys, "max_workers": self._max_workers}
        if device.type == "cpu" and not to_places:
            batch.plan(**common)
            return None
        tensors = []
        for i, (read, _) in enumerate(members):
            into = read.into
            if into is None:
                stored = self._container.stored_dtype(read.entry)
                flat = empty(batch.part_nbytes(i), dtype=torch.uint8, device=device)
                into = flat.view(stored).view(batch.part_shape(i)) if stored is not None else flat
            elif tuple(into.shape) != batch.part_shape(i):
                name = self._container.names[read.entry]
                raise ValueError(
                    f"tensor {name!r:.200}: out= wanted the shape {list(batch.part_shape(i))}, found {list(into.shape)}"
                )
            tensors.append(into)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if device.type == "cpu":
            batch.plan(addresses=addresses, **common)
            return tensors
        for tensor, (read, _) in zip(tensors, members):
            if self._container.index.data_nbytes(read.entry) == 0:  # written without data: zeros
                tensor.zero_()
        batch.plan(addresses=addresses, engine=cuda_engine.engine_for(device), **common)
        return tensors


def _nbytes(batches: Sequence[_C.LoadBatch]) -> int:
    return sum(batch.part_nbytes(i) for batch in batches for i in range(len(batch)))


def _placed(part: torch.Tensor, want: Wanted, name: Name) -> torch.Tensor:
    """A part at the place that was named for it."""
    if want.into is None or want.into is part:
        return part
    if want.into.shape != part.shape:
        raise ValueError(
            f"tensor {name!r:.200}: out= wanted the shape {list(part.shape)}, found {list(want.into.shape)}"
        )
    return want.into.copy_(part)
