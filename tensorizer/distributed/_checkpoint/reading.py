"""Reads parts of tensors from open files into existing memory, for checkpoints and models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from tensorizer import _C
from tensorizer._format.payloads import can_be_filled
from tensorizer._load.open_file import FileReader, OpenFile
from tensorizer._load.open_index import missing_hashes
from tensorizer._load.parts import WantedPart, read_parts
from tensorizer._system import cuda_engine
from tensorizer._system.sizes import runs

# How many bytes of records are read at a time, if their parts are copied afterwards.
_STAGED_NBYTES = 128 << 20
_LOCAL_FILES_AT_ONCE = 2
_NETWORK_FILES_AT_ONCE = 4

#: Called for whole records that match the digests of their file, with the reader, the entries and the headers.
Check = Callable[[FileReader, Sequence[int], _C.LoadedHeaders], None]


class Want(NamedTuple):
    """A part of one tensor in an open file, and its target."""

    file: OpenFile
    entry: int
    shape: tuple[int, ...]  # range of the whole tensor
    dtype: torch.dtype
    part: tuple[slice, ...]
    target: torch.Tensor  # has the part's shape, on any device

    @property
    def is_whole(self) -> bool:
        return all(p.start == 0 and p.stop == size for p, size in zip(self.part, self.shape))

    @property
    def fills_memory(self) -> bool:
        """Whether the elements of the part, one after the other, fill the target's memory."""
        target = self.target
        return (
            target.dtype == self.dtype
            and can_be_filled(target)
            and (target.device.type == "cpu" or cuda_engine.is_fast_device(target.device))
        )


def fill(wants: Iterable[Want], *, verify: bool, check: Check) -> None:
    """Fills the targets, in the order of the files, several files at a time, with few and large requests.

    Args:
        wants: The parts and their targets.
        verify: Reads whole records, even if a part is enough, and compares them with their digests.
        check: With `verify`, called for all records that were compared.

    Raises:
        MissingHashError: With `verify`, a tensor has no digest.
        HashMismatchError: With `verify`, a tensor differs from what was written.
        FormatError, OSError: A file is damaged or cannot be read.
    """
    direct: dict[tuple[FileReader, torch.device], dict[int, Want]] = {}
    others: dict[OpenFile, list[Want]] = {}
    hashed: dict[FileReader, torch.device] = {}
    for want in wants:
        reader, local = want.file.part(want.entry)
        if verify and not reader.index.stores_hashes:
            raise missing_hashes(reader.source_name, [reader.names[local]], "verify_hash=False")
        together = direct.setdefault((reader, want.target.device), {})
        # _read_parts makes the zeros of tensors for which a file holds no data.
        has_data = reader.index.data_nbytes(local) > 0
        device = hashed.setdefault(reader, want.target.device)  # loads to several would block each other
        is_alone = reader.expected_sha256 is None or device == want.target.device
        if has_data and want.is_whole and want.fills_memory and local not in together and is_alone:
            together[local] = want
        else:
            others.setdefault(want.file, []).append(want)
    _read_whole(direct, verify, check)
    _read_parts(others, verify, check)


def read_records(reader: FileReader, entries: Sequence[int], verify: bool, check: Check) -> Sequence[torch.Tensor]:
    """Reads whole records of one file into new memory. Raises the errors of :func:`fill`."""
    loaded = reader.read_raw(entries, verify)
    if verify:
        _check(reader, entries, loaded.headers, check)
    return loaded.tensors


def _read_whole(direct: dict[tuple[FileReader, torch.device], dict[int, Want]], verify: bool, check: Check) -> None:
    batches = []
    for (reader, device), together in direct.items():
        entries = sorted(together)
        if entries:
            batch = reader.batch(entries, verify, device, [together[entry].target for entry in entries])
            batches.append((reader, entries, batch))
    network = any(reader.network for reader, *_ in batches)
    _C.run_batches([batch for *_, batch in batches], _NETWORK_FILES_AT_ONCE if network else _LOCAL_FILES_AT_ONCE)
    for reader, entries, batch in batches if verify else ():
        _check(reader, entries, batch.headers, check)


def _read_parts(others: dict[OpenFile, list[Want]], verify: bool, check: Check) -> None:
    """Reads parts of tensors, and whole ones into targets of another dtype or that are not contiguous."""

    def read(wants: list[Want]) -> None:
        wants = sorted(wants, key=lambda want: want.entry)
        if verify:
            _read_and_verify(wants, check)
        else:
            _read_ranges(wants)

    if not any(file.network for file in others):
        for wants in others.values():
            read(wants)
        return
    read = cuda_engine.on_current_streams(read, {want.target.device for wants in others.values() for want in wants})
    with ThreadPoolExecutor(_NETWORK_FILES_AT_ONCE, "tensorizer-load") as threads:
        list(threads.map(read, others.values()))


def _read_ranges(wants: Sequence[Want]) -> None:
    """Reads only the wanted bytes of one file, straight into the targets or through bounded copies.

    Ranges that lie close together become one request.
    """

    def copied_nbytes(want: Want) -> int:
        return 0 if want.fills_memory else want.target.numel() * want.dtype.itemsize

    for run in runs(wants, copied_nbytes, _STAGED_NBYTES):
        parts = [WantedPart(want.entry, want.part, want.target.device, want.target) for want in run]
        read_parts(run[0].file, parts, False)


def _read_and_verify(wants: Sequence[Want], check: Check) -> None:
    """Reads whole records, since a digest covers all bytes of its record, and copies the wanted parts."""
    by_record: dict[FileReader, dict[int, list[Want]]] = {}
    for want in wants:
        reader, local = want.file.part(want.entry)
        by_record.setdefault(reader, {}).setdefault(local, []).append(want)
    for reader, of_reader in by_record.items():
        for run in runs(sorted(of_reader), reader.index.loaded_nbytes, _STAGED_NBYTES):
            for local, tensor in zip(run, read_records(reader, run, True, check)):
                for want in of_reader[local]:
                    want.target.copy_(tensor[want.part])


def _check(reader: FileReader, entries: Sequence[int], headers: _C.LoadedHeaders, check: Check) -> None:
    bare = [i for k, i in enumerate(entries) if reader.index.data_nbytes(i) and not headers.hashes(k)]
    if bare:
        raise missing_hashes(reader.source_name, [reader.names[i] for i in bare], "verify_hash=False")
    check(reader, entries, headers)
