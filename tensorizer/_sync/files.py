"""Anchors and deltas: written from memory, read back checked, merged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from tensorizer import _C
from tensorizer._format.names import name_text
from tensorizer._io.call_options import CallOptions
from tensorizer._load.open_file import OpenFile, ReadOptions, open_file
from tensorizer._load.open_index import file_error, open_index, tensor_error
from tensorizer._save.records import Record
from tensorizer._save.session import memory_of, tensors_file
from tensorizer._sync.forms import Form, order, state_of, sums_of
from tensorizer._sync.pointer import KEYS, Pointer, anchor_name, delta_name
from tensorizer._sync.stores import Store
from tensorizer.errors import FormatError, HashMismatchError

Memory = tuple[int, int]

# --- writing ----------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """What the pointer says of a file."""

    nbytes: int
    index_digest: str


class FileToWrite(NamedTuple):
    """A file that is ready to be written.

    Attributes:
        name: In its place.
        records: What it holds.
        payloads: Where their bytes are.
        ties: As ``SaveSession.begin_call`` takes them.
        metadata: Its texts.
    """

    name: str
    records: Sequence[Record]
    payloads: Sequence[Memory]
    ties: Sequence[tuple[tuple[str, ...], tuple[str, ...], bool]]
    metadata: Mapping[str, str]


def anchor_to_write(
    version: int, form: Form, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> FileToWrite:
    """Whole tensors, those of ties under each of their names."""
    records, payloads = [], []
    for name in sorted({*form.names, *form.ties}, key=order):
        first = form.ties.get(name, name)
        records.append(Record((name,), *form.tensors[first]))
        payloads.append(memory_of(tensors[first]))
    ties = [((alias,), (first,), True) for alias, first in form.ties.items()]
    return FileToWrite(anchor_name(version), records, payloads, ties, metadata)


def delta_to_write(
    version: int,
    form: Form,
    deltas: Mapping[str, Optional[_C.Delta]],
    tensors: Mapping[str, torch.Tensor],
    sums: torch.Tensor,
    metadata: Mapping[str, str],
) -> FileToWrite:
    """What changed: positions and values of some tensors, all of others, of which `deltas` has ``None``."""
    pairs = {name: delta for name, delta in deltas.items() if delta is not None and delta.positions[1]}
    whole = [name for name, delta in deltas.items() if delta is None]
    records, payloads = [], []
    for name, delta in pairs.items():
        records.append(Record(("positions", name), torch.uint8, (delta.positions[1],)))
        payloads.append(delta.positions)
    for name, delta in pairs.items():
        dtype = form.tensors[name][0]
        records.append(Record(("values", name), dtype, (delta.values[1] // dtype.itemsize,)))
        payloads.append(delta.values)
    for name in whole:
        records.append(Record(("whole", name), *form.tensors[name]))
        payloads.append(memory_of(tensors[name]))
    records.append(Record(("sums",), torch.int64, tuple(sums.shape)))
    payloads.append(memory_of(sums))
    return FileToWrite(delta_name(version), records, payloads, (), metadata)


def write_file(
    file: FileToWrite, store: Store, hashes: frozenset[str], encryption: Any, signer: Optional[_C.Signer]
) -> Written:
    """Writes a file; it is durable when this returns.

    Raises:
        OSError: It cannot be written.
    """
    opened = tensors_file(
        store.place_of(file.name),
        file.records,
        file.ties,
        hashes=hashes,
        encryption=encryption,
        metadata=file.metadata,
        options=store.write_options,
        signer=signer,
        binds_records=True,
    )
    session: Optional[_C.SaveSession] = None
    try:
        with opened as session:
            session.write_payloads(list(file.payloads))
        digest = session.index_digest
    except OSError as error:
        digest = None if session is None else session.index_digest
        if digest is None or not store.refuses_existing(error):
            raise
        try:
            there = _written(file.name, store)
        except (FormatError, OSError):
            there = None
        if there is None or there.index_digest != digest.hex():
            raise
        return there  # the answer to an earlier try was lost
    assert digest is not None
    return Written(session.published_nbytes, digest.hex())


def _written(name: str, store: Store) -> Written:
    """What lies under a name."""
    with open_index(store.place_of(name), store.read_options) as file:
        return Written(file.readers[0].nbytes, str(file.index_digest))


# --- reading ----------------------------------------------------------------------------------------------------------


def user_metadata(file: OpenFile) -> dict[str, str]:
    """The texts of a file that its publisher was given."""
    return {key: value for key, value in (file.metadata() or {}).items() if key not in KEYS}


@contextlib.contextmanager
def checked_file(name: str, version: int, pointer: Pointer, store: Store, access: CallOptions) -> Iterator[OpenFile]:
    """Opens the file that a pointer names, of which index, record headers and metadata are those that it tells.

    Raises:
        HashMismatchError: It is another file.
        FormatError: It is of another run or version, or says nothing of its record headers.
        OSError, CryptographyError: As ``TensorDeserializer``.
    """
    with open_file(store.place_of(name), access, ReadOptions(verify_hash=True)) as file:
        found, expected = file.index_digest, pointer.index_digest[name]
        if found != expected:
            error = HashMismatchError(
                f"{file.source_name}: expected the index digest {expected}, got {found}: it is another file"
            )
            error.source = file.source_name
            raise error
        try:
            _C.bind_records(file.index)
        except FormatError as problem:
            raise file_error(file.source_name, problem) from None
        texts = file.metadata() or {}
        wanted = {"weight_sync": "1", "run": pointer.run, "version": str(version), "state": pointer.states[version]}
        for key, value in wanted.items():
            if texts.get(key) != value:
                raise file_error(file.source_name, f"{key}: expected {value!r}, got {texts.get(key)!r:.200}")
        yield file


class Pair(NamedTuple):
    """What changed in one tensor; keeps what it borrows."""

    delta: _C.CheckedDelta
    owner: Any


class ReadDelta(NamedTuple):
    """A delta in memory.

    Attributes:
        version: What it leads to.
        sums: Of all tensors, afterwards.
        pairs: Changes of elements, by name.
        whole: Tensors that changed as a whole, by name.
        metadata: The publisher's.
    """

    version: int
    sums: Sequence[int]
    pairs: Mapping[str, Pair]
    whole: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]


def read_delta(version: int, base: int, form: Form, pointer: Pointer, store: Store, access: CallOptions) -> ReadDelta:
    """Reads and checks every byte of a delta.

    Raises:
        FormatError: It is no delta of tensors of this form from version `base`. Besides, as :func:`checked_file`.
    """
    with checked_file(delta_name(version), version, pointer, store, access) as file:
        source, texts = file.source_name, file.metadata() or {}
        expected = {"base": str(base), "base_state": pointer.states.get(base)}
        for key, value in expected.items():
            if value is not None and texts.get(key) != value:
                raise file_error(source, f"{key}: expected {value!r}, got {texts.get(key)!r:.200}")
        tensors = dict(zip(file.names, file.read(range(len(file.names)), verify=True)))
        metadata = user_metadata(file)
    groups: dict[str, dict[str, torch.Tensor]] = {"positions": {}, "values": {}, "whole": {}}
    sums = tensors.pop("sums", None)
    if sums is None or sums.dtype != torch.int64 or tuple(sums.shape) != (len(form.names),):
        found = "none" if sums is None else f"{sums.dtype} of shape {list(sums.shape)}"
        raise file_error(source, f"sums: expected {len(form.names)} numbers of int64, got {found}")
    for path, tensor in tensors.items():
        if not isinstance(path, tuple) or len(path) != 2 or path[0] not in groups or path[1] not in form.tensors:
            raise file_error(source, f"tensor {name_text(path)!r:.200}: expected one of a delta, got another name")
        groups[str(path[0])][str(path[1])] = tensor
    if groups["positions"].keys() != groups["values"].keys():
        (name, *_) = groups["positions"].keys() ^ groups["values"].keys()
        raise tensor_error(source, name, "expected positions and values, got one of them")
    pairs = {
        name: _pair(source, name, positions, groups["values"][name], form)
        for name, positions in groups["positions"].items()
    }
    for name, tensor in groups["whole"].items():
        if name in pairs:
            raise tensor_error(source, name, "expected it once, got the whole tensor and positions")
        if (tensor.dtype, tuple(tensor.shape)) != form.tensors[name]:
            raise tensor_error(source, name, f"expected {_shown(form.tensors[name])}, got {_shown_tensor(tensor)}")
    values = [value & (1 << 64) - 1 for value in sums.tolist()]
    _check_sums(source, values, groups["whole"], form, pointer.states[version])
    return ReadDelta(version, values, pairs, groups["whole"], metadata)


def _check_sums(source: str, sums: Sequence[int], whole: Mapping[str, torch.Tensor], form: Form, state: str) -> None:
    found = state_of(sums)
    if found != state:
        raise file_error(source, f"sums: expected those of state {state}, got those of {found}")
    expected = dict(zip(form.names, sums))
    for name, value in zip(whole, sums_of(list(whole.values()))):
        if value != expected[name]:
            raise tensor_error(source, name, f"expected the sum {expected[name]:016x}, got {value:016x}")


def _pair(source: str, name: str, positions: torch.Tensor, values: torch.Tensor, form: Form) -> Pair:
    dtype, _ = form.tensors[name]
    if positions.dtype != torch.uint8 or positions.dim() != 1 or positions.numel() == 0:
        raise tensor_error(source, name, f"positions: expected bytes, got {_shown_tensor(positions)}")
    if values.dtype != dtype or values.dim() != 1:
        raise tensor_error(source, name, f"values: expected one dimension of {dtype}, got {_shown_tensor(values)}")
    try:
        delta = _C.CheckedDelta(memory_of(positions), memory_of(values), form.numel(name), dtype.itemsize, name)
    except FormatError as error:
        raise file_error(source, error) from None
    return Pair(delta, (positions, values))


def _shown(form: tuple[torch.dtype, tuple[int, ...]]) -> str:
    return f"{form[0]} of shape {list(form[1])}"


def _shown_tensor(tensor: torch.Tensor) -> str:
    return _shown((tensor.dtype, tuple(tensor.shape)))


# --- what is ready to be applied --------------------------------------------------------------------------------------


class Changes(NamedTuple):
    """What several deltas, or an anchor and deltas, change together: each element once."""

    pairs: Mapping[str, Pair]
    whole: Mapping[str, torch.Tensor]


def merged(deltas: Sequence[ReadDelta], form: Form, whole: Optional[Mapping[str, torch.Tensor]] = None) -> Changes:
    """Only the newest value of an element, of deltas in their order; `whole` are tensors of an anchor before them,
    which become what the deltas say."""
    tensors: dict[str, torch.Tensor] = dict(whole or {})
    pairs: dict[str, list[Pair]] = {}
    for delta in deltas:
        for name, tensor in delta.whole.items():
            tensors[name] = tensor
            pairs.pop(name, None)
        for name, pair in delta.pairs.items():
            pairs.setdefault(name, []).append(pair)
    onto_whole = [name for name in pairs if name in tensors]
    for name in onto_whole:
        for pair in pairs.pop(name):
            _C.write_deltas([(memory_of(tensors[name]), pair.delta)])
    return Changes({name: _one(name, parts, form) for name, parts in pairs.items()}, tensors)


def _one(name: str, parts: Sequence[Pair], form: Form) -> Pair:
    if len(parts) == 1:
        return parts[0]
    delta = _C.merge_deltas([part.delta for part in parts])
    checked = _C.CheckedDelta(delta.positions, delta.values, form.numel(name), form.tensors[name][0].itemsize, name)
    return Pair(checked, delta)
