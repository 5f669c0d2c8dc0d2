"""Parts of tensors, read without the rest of them: one plan, one load for each file and device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch

from tensorizer import _C
from tensorizer._format.names import Name
from tensorizer._format.payloads import can_be_filled
from tensorizer._format.safetensors import safetensors_dtype
from tensorizer._load.indices import cover, is_basic
from tensorizer._load.open_file import FileReader, OpenFile, no_collections
from tensorizer._load.open_index import tensor_error
from tensorizer._system import cuda_engine
from tensorizer._system.devices import empty, ordinary_tensors, resolve_cuda_device, target_device

# Files read at a time, as for whole tensors.
_FILES_AT_ONCE = 4


class WantedPart(NamedTuple):
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


class TensorSlice:
    """One tensor of an open file; ``slice[index]`` reads only the part that `index` selects.

    Indexing accepts what ``torch.Tensor`` accepts: integers, slices with positive steps, ``...``, ``None``, lists and
    tensors of integers, masks, and tuples of these. For a list, tensor or mask in dimension 0, only the selected rows
    are read; in other dimensions, everything between the first and the last. The result is a plain tensor on the
    deserializer's device, in its ``dtype``. Parts of encrypted tensors are authenticated: they are read in chunks of
    the cipher (2 MiB). Thread-safe.

    Raises:
        IndexError: Out of range, or more dimensions than the tensor has.
        ValueError: A step below 1; a part of a tensor with `verify_hash`, because hashes cover whole tensors.
        OSError, FormatError, CryptographyError: As for whole tensors.
    """

    __slots__ = ("_entry", "_file", "_owner", "_whole")

    def __init__(self, file: OpenFile, entry: int, owner: Any = None) -> None:
        self._file, self._entry = file, entry
        self._owner = owner  # closes the file when no object refers to it any more
        self._whole: Optional[tuple[tuple[int, ...], torch.dtype]] = None

    def _form(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape of the tensor, and dtype of what is read; found when first asked for."""
        if self._whole is None:
            self._whole = _form_of(self._file, self._entry)
        return self._whole

    def _told_by_container(self) -> bool:
        """Whether the file says what torch has no dtype for."""
        return self._file.index.format == "safetensors" and self._file.stored_dtype(self._entry) is None

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size(self._form()[0])

    @property
    def dtype(self) -> torch.dtype:
        """Of what is read: as stored, or converted to the deserializer's ``dtype``."""
        return self._form()[1]

    @property
    def ndim(self) -> int:
        """Dimensions of the tensor."""
        return len(self._form()[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor once it is read."""
        shape, dtype = self._form()
        return math.prod(shape) * dtype.itemsize

    def get_shape(self) -> list[int]:
        """The shape as a list, as ``safetensors`` gives it; known even if torch lacks the dtype."""
        if self._told_by_container():
            return list(self._file.index.shape(self._entry))
        return list(self._form()[0])

    def get_dtype(self) -> str:
        """The dtype by its ``safetensors`` name (``"BF16"``), or by torch's if there is none."""
        if self._told_by_container():
            return str(self._file.index.container_dtype(self._entry))
        dtype = self.dtype
        return safetensors_dtype(dtype) or str(dtype).replace("torch.", "", 1)

    def is_floating_point(self) -> bool:
        """Whether it is, as ``torch.Tensor.is_floating_point`` tells."""
        return self.dtype.is_floating_point

    def __repr__(self) -> str:
        return f"<TensorSlice of {self._file.names[self._entry]!r}: {self.dtype}, {list(self.shape)}>"

    def __getitem__(self, index: Any) -> torch.Tensor:
        file = self._file
        wanted = WantedPart(self._entry, index, file.device_of(file.names[self._entry]))
        return read_parts(file, [wanted], file.must_verify(None))[0]


def _form_of(file: OpenFile, entry: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape of a tensor, and dtype of what is given out.

    No I/O, except for old files whose index shows them only roughly.
    """
    entry = file.aliases.get(entry, entry)
    if file.stored_dtype(entry) is None and file.index.format == "safetensors":
        problem = f"torch has no dtype for {file.index.container_dtype(entry)}"
        raise tensor_error(file.source_name, file.names[entry], problem)
    if not _is_plain(file, entry) and not file.has_header(entry):
        file.read_headers([entry])
    stored, shape, _ = file.described(entry)
    return tuple(shape), _given(file, file.dtype_of(entry, stored))


def _given(file: OpenFile, stored: torch.dtype) -> torch.dtype:
    wanted = file.options.dtype
    return wanted if wanted is not None and file.casts(stored) else stored


def _read_basic(
    file: OpenFile, entries: Sequence[int], indices: Sequence[Any], device: torch.device
) -> Optional[Sequence[torch.Tensor]]:
    """Parts of many tensors of one plain file, as :func:`read_parts`, with as little work for each as there can be.

    ``None`` where it takes more than that.
    """
    if file.checks_whole or file.source is None or file.aliases or not file.shows_all:
        return None
    if device.type != "cpu" or file.options.dtype is not None or not all(map(is_basic, indices)):
        return None
    (reader,) = file.readers
    source, keys, *_ = reader.handle
    with no_collections(), ordinary_tensors():
        batch = _C.LoadBatch.of_parts(source, reader.index, entries, indices)
        if reader.direct_io is not None:
            reader.direct_io.expect(lambda: _nbytes([batch]))
        batch.plan(keys=keys, max_workers=reader.max_workers)
        batch.run()
        return batch.tensors(reader.factory)


def read_parts(file: OpenFile, wanted: Sequence[WantedPart], verify: bool) -> list[torch.Tensor]:
    """The parts, in order; those that name a place are written to it, and it is what comes back.

    Raises:
        IndexError, TypeError, ValueError: As torch words what is wrong with an index.
        ValueError: A part is to be verified; a place of another shape.
    """
    whole = file.closed or file.checks_whole  # a signed tensor is read and hashed as a whole
    verify = verify and not file.checks_whole
    results: list[Optional[torch.Tensor]] = [None] * len(wanted)
    plain: dict[torch.device, list[int]] = {}
    for position, want in enumerate(wanted):
        entry = file.aliases.get(want.entry, want.entry)
        if verify or whole or not _is_plain(file, entry):
            results[position] = _from_whole(file, entry, want, verify)
        else:
            plain.setdefault(resolve_cuda_device(want.device), []).append(position)
    with ordinary_tensors():
        for device, positions in plain.items():
            _read_plain(file, device, positions, wanted, results)
    return [tensor for tensor in results if tensor is not None]


def _is_plain(file: OpenFile, entry: int) -> bool:
    if file.shows_all:
        return True
    return file.stored_dtype(entry) is not None and not file.may_be_scalar(entry)


def _from_whole(file: OpenFile, entry: int, want: WantedPart, verify: bool) -> torch.Tensor:
    """By way of the whole tensor: verified, of a closed file, or described by its record header alone."""
    if verify:
        _refuse_part(file, want)
    kept = file.kept.get(entry) if file.closed else None
    if kept is not None:
        if verify:
            (kept,) = file.load([entry], True)
        tensor = kept.detach()
        part = tensor[want.index].to(want.device, copy=True)
    else:
        (tensor,) = file.read([entry], verify)
        part = tensor[want.index]
        if want.into is None:
            part = part.to(_given(file, tensor.dtype)).to(want.device)
    return _placed(part.contiguous(), want, file.names[want.entry])


def _refuse_part(file: OpenFile, want: WantedPart) -> None:
    name, shape = file.names[want.entry], _form_of(file, want.entry)[0]
    if not is_basic(want.index) or empty(shape, device="meta")[want.index].numel() != math.prod(shape):
        raise ValueError(
            f"tensor {name!r:.200}: a part cannot be verified, since the hashes of the file are of whole tensors; "
            "read all of it, or pass verify_hash=False"
        )


def _read_plain(
    file: OpenFile,
    device: torch.device,
    positions: Sequence[int],
    wanted: Sequence[WantedPart],
    results: list[Optional[torch.Tensor]],
) -> None:
    fast = device.type == "cpu" or cuda_engine.is_fast_device(device)
    placed: dict[int, torch.Tensor] = {}  # what comes to a buffer first, and how
    rest: dict[int, tuple[Any, ...]] = {}
    reads: list[_Read] = []
    for position in positions:
        want = wanted[position]
        entry = file.aliases.get(want.entry, want.entry)
        if is_basic(want.index):
            reads.append(_Read(position, entry, want.index, _read_to(file, entry, want, device, fast)))
            continue
        boxes, rest[position] = cover(want.index, file.index.shape(entry))
        if len(boxes) == 1:
            reads.append(_Read(position, entry, boxes[0], None))
            continue
        placed[position], rows = _rows(file, entry, boxes, device if fast else torch.device("cpu"))
        reads += [_Read(position, entry, box, part) for box, part in zip(boxes, rows)]
    for read, tensor in _load(file, reads, device if fast else torch.device("cpu")):
        placed.setdefault(read.position, tensor)
    for position in positions:
        want, tensor = wanted[position], placed[position]
        if position in rest:
            tensor = tensor[tuple(i.to(tensor.device) if isinstance(i, torch.Tensor) else i for i in rest[position])]
        if want.into is None:
            tensor = tensor.to(device=device, dtype=_given(file, tensor.dtype))
        results[position] = _placed(tensor, want, file.names[want.entry])


def _read_to(file: OpenFile, entry: int, want: WantedPart, device: torch.device, fast: bool) -> Optional[torch.Tensor]:
    """The place that a part names, where it can be read to it as it is stored."""
    into = want.into
    if into is None or not fast or not can_be_filled(into):
        return None
    stored = file.stored_dtype(entry)
    if into.dtype != stored or resolve_cuda_device(into.device) != device:
        return None
    return into


def _rows(
    file: OpenFile, entry: int, boxes: Sequence[tuple[Any, ...]], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A buffer for boxes that follow each other along dimension 0, and the part of it that each takes."""
    shape, dtype = file.index.shape(entry), file.stored_dtype(entry)
    rows = [box[0].stop - box[0].start for box in boxes]
    inner = empty(shape[1:], device="meta")[boxes[0][1:]].shape if len(shape) > 1 else ()
    buffer = empty((sum(rows), *inner), dtype=dtype, device=device)
    ends = [0]
    for count in rows:
        ends.append(ends[-1] + count)
    return buffer, [buffer[a:b] for a, b in zip(ends, ends[1:])]


def _load(file: OpenFile, reads: Sequence[_Read], device: torch.device) -> list[tuple[_Read, torch.Tensor]]:
    """Reads basic parts to one device, as they are stored; those of one file together."""
    groups: dict[tuple[int, bool], tuple[FileReader, list[tuple[_Read, int]]]] = {}
    for read in reads:
        reader, local = file.part(read.entry)
        _, members = groups.setdefault((id(reader), read.into is not None), (reader, []))
        members.append((read, local))
    batches = []
    for (_, to_places), (reader, members) in groups.items():
        entries, indices = [local for _, local in members], [read.index for read, _ in members]
        batch = _C.LoadBatch.of_parts(reader.handle.source, reader.index, entries, indices)
        batches.append((batch, members, to_places, reader))
    for *_, reader in batches:
        if reader.direct_io is not None:
            reader.direct_io.expect(lambda: _nbytes([batch for batch, *_ in batches]))
    planned = [_plan(file, reader, batch, members, device, to) for batch, members, to, reader in batches]
    _C.run_batches([batch for batch, *_ in batches], _FILES_AT_ONCE)
    found = []
    for (batch, members, _, reader), tensors in zip(batches, planned):
        delivered = batch.tensors(reader.factory) if tensors is None else tensors
        found += [(read, tensor) for (read, _), tensor in zip(members, delivered)]
    return found


def _plan(
    file: OpenFile,
    reader: FileReader,
    batch: _C.LoadBatch,
    members: Sequence[tuple[_Read, int]],
    device: torch.device,
    to_places: bool,
) -> Optional[list[torch.Tensor]]:
    """Gives a batch its memory; the tensors over it, or ``None`` where the batch makes them."""
    common: dict[str, Any] = {"keys": reader.handle.keys, "max_workers": reader.max_workers}
    if device.type == "cpu" and not to_places:
        batch.plan(**common)
        return None
    tensors = []
    for i, (read, _) in enumerate(members):
        into = read.into
        if into is None:
            stored = file.stored_dtype(read.entry)
            flat = empty(batch.part_nbytes(i), dtype=torch.uint8, device=device)
            into = flat.view(stored).view(batch.part_shape(i)) if stored is not None else flat
        elif tuple(into.shape) != batch.part_shape(i):
            name = file.names[read.entry]
            raise ValueError(
                f"tensor {name!r:.200}: out= expected the shape {list(batch.part_shape(i))}, got {list(into.shape)}"
            )
        tensors.append(into)
    addresses = [tensor.data_ptr() for tensor in tensors]
    if device.type == "cpu":
        batch.plan(addresses=addresses, **common)
        return tensors
    for tensor, (read, _) in zip(tensors, members):
        if file.index.data_nbytes(read.entry) == 0:  # written without data: zeros
            tensor.zero_()
    if reader.direct_io is not None:
        reader.direct_io.load_to(device)
    batch.plan(addresses=addresses, engine=cuda_engine.engine_for(device), **common)
    return tensors


def get_slice(file: OpenFile, name: Name, owner: Any = None) -> TensorSlice:
    """As ``TensorDeserializer.get_slice``, which is the owner of its file."""
    return TensorSlice(file, file.numbers[name], owner)


def slices(file: OpenFile, owner: Any = None) -> dict[Name, TensorSlice]:
    """As ``TensorDeserializer.slices``, which is the owner of its file."""
    return {file.names[i]: TensorSlice(file, i, owner) for i in file.selection}


def get_slices(
    file: OpenFile,
    parts: Mapping[Name, Any],
    out: Optional[Mapping[Name, torch.Tensor]] = None,
    device: Optional[Union[torch.device, str, int]] = None,
    *,
    verify_hash: Optional[bool] = None,
) -> dict[Name, torch.Tensor]:
    """As ``TensorDeserializer.get_slices``."""
    entries = [file.numbers[name] for name in parts]
    verify = file.must_verify(verify_hash)
    if out is not None:
        places = [out[name].detach() for name in parts]
        rows = zip(entries, parts.values(), places)
        read_parts(file, [WantedPart(entry, index, place.device, place) for entry, index, place in rows], verify)
        return {name: out[name] for name in parts}
    chosen = file.options.device if device is None else target_device(device)
    found: Optional[Sequence[torch.Tensor]] = None
    if isinstance(chosen, torch.device) and not verify:
        found = _read_basic(file, entries, list(parts.values()), chosen)
    if found is None:
        wanted = [
            WantedPart(i, index, chosen if isinstance(chosen, torch.device) else file.device_of(file.names[i]))
            for i, index in zip(entries, parts.values())
        ]
        found = read_parts(file, wanted, verify)
    return dict(zip(parts, found))


def _nbytes(batches: Sequence[_C.LoadBatch]) -> int:
    return sum(batch.part_nbytes(i) for batch in batches for i in range(len(batch)))


def _placed(part: torch.Tensor, want: WantedPart, name: Name) -> torch.Tensor:
    """A part at the place that was named for it."""
    if want.into is None or want.into is part:
        return part
    if want.into.shape != part.shape:
        raise ValueError(
            f"tensor {name!r:.200}: out= expected the shape {list(part.shape)}, got {list(want.into.shape)}"
        )
    return want.into.copy_(part)
