"""Lets inspect, verify, diff, convert and sign accept a checkpoint folder in place of a file."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Optional

from tensorizer._files.contents import Contents
from tensorizer._files.diff import Side
from tensorizer._files.inspect import FileInfo, TensorInfo
from tensorizer._files.verify import VerifyReport
from tensorizer._format.dtype_names import dtype_text
from tensorizer._format.dtypes import stored_for_tensor
from tensorizer._format.entries import FilterFuncType
from tensorizer._io.call_options import CallOptions
from tensorizer._load.open_index import open_index
from tensorizer._save.records import Record
from tensorizer.distributed._checkpoint.boxes import CheckpointFiles
from tensorizer.distributed._checkpoint.existing import read_markers, verify_folder
from tensorizer.distributed._checkpoint.folder import Folder
from tensorizer.distributed._checkpoint.marker import Marker
from tensorizer.distributed._checkpoint.to_files import contents_of, selected
from tensorizer.distributed._checkpoint.whole import inner_tensors, read_whole, whole_tensors
from tensorizer.errors import CryptographyError


def inspect(source: Any, options: CallOptions) -> FileInfo:
    """The report of the marker. Offset and file of a tensor are those of its first part."""
    folder = Folder.at(source, options)
    markers = read_markers(folder)
    files = _files(markers)
    values = {index.fqn: stored.text for marker in markers for index, stored in marker.stored.items() if stored.text}
    return FileInfo(
        source=folder.where,
        format="checkpoint",
        version=None,
        encrypted=_is_encrypted(folder, markers),
        file_nbytes=sum(files.values()),
        tensors=tuple(map(_info, _records(folder, markers))),
        metadata=values,
        ties={},
        files=tuple(files),
    )


def is_encrypted(source: Any, options: CallOptions) -> bool:
    """Whether its files need a key."""
    folder = Folder.at(source, options)
    return _is_encrypted(folder, read_markers(folder))


def verify(source: Any, call: CallOptions, filter_func: Optional[FilterFuncType], fail_fast: bool) -> VerifyReport:
    """Reads the whole checkpoint. Returns and raises the same as :func:`tensorizer.verify`."""
    folder = Folder.at(source, call)
    if call.encryption is None and _is_encrypted(folder, read_markers(folder)):
        raise CryptographyError(f"{folder.where} is encrypted: a key is needed")
    return verify_folder(folder, call, None, filter_func, fail_fast)


@contextlib.contextmanager
def side(source: Any, call: CallOptions, filter_func: Optional[FilterFuncType]) -> Iterator[Side]:
    """One side of a comparison."""
    folder = Folder.at(source, call)
    found = _records(folder, read_markers(folder, call.encryption))
    chosen = [record for record in found if filter_func is None or filter_func(str(record.name))]
    with CheckpointFiles(folder, call, verify=False) as files:
        yield Side(
            source_name=folder.where,
            names={str(record.name): i for i, record in enumerate(chosen)},
            form=lambda i: (_dtype_text(chosen[i]), chosen[i].shape),
            loaded_nbytes=lambda i: chosen[i].nbytes,
            data_nbytes=lambda i: chosen[i].nbytes,
            digests=lambda entries: {i: _digest(chosen[i]) for i in entries},
            read=lambda entries: read_whole(files, [chosen[i] for i in entries]),
        )


@contextlib.contextmanager
def contents(source: Any, call: CallOptions, format: str) -> Iterator[tuple[Contents, list[str], list[str]]]:
    """The content to write to a file of this format, the names of values that it leaves out, and the files to read."""
    folder = Folder.at(source, call)
    markers = read_markers(folder, call.encryption, call.trust.required)
    with CheckpointFiles(folder, call, verify=True) as files:
        found, left_out = contents_of(markers, files, selected(folder, whole_tensors(folder, markers), ""), "", format)
        yield found, left_out, [folder.join(name) for name in _files(markers)]


def files_of(source: Any, call: CallOptions) -> list[str]:
    """The paths or URIs of the files of tensors, each of which can be signed."""
    folder = Folder.at(source, call)
    found = [folder.join(name) for name in _files(read_markers(folder, call.encryption))]
    if not found:
        raise ValueError(f"{folder.where}: a checkpoint without tensors has no files to sign")
    return found


def _files(markers: Sequence[Marker]) -> dict[str, int]:
    """The size in bytes of each file, by name."""
    return {file.name: file.nbytes for marker in markers for file in marker.files}


def _is_encrypted(folder: Folder, markers: Sequence[Marker]) -> bool:
    name = next(iter(_files(markers)), None)
    if name is None:
        return False
    with open_index(folder.join(name), folder.options.reading()) as file:
        return bool(file.index.encrypted)


def _records(folder: Folder, markers: Sequence[Marker]) -> list[Record]:
    """The tensors, and the inner tensors that other tensors are made of, each under a name of its own."""
    found = {str(record.name): record for record in whole_tensors(folder, markers)}
    for record in inner_tensors(markers):
        name = str(record.name)
        while name in found:
            name += "'"
        record.path = (name,)
        found[name] = record
    return list(found.values())


def _dtype_text(record: Record) -> str:
    return dtype_text(stored_for_tensor(record.dtype))


def _info(record: Record) -> TensorInfo:
    boxes = [stored for _, stored in record.source.boxes]
    first = boxes[0] if boxes else None
    return TensorInfo(
        name=record.name,
        kind="state_dict",
        dtype=_dtype_text(record),
        shape=record.shape,
        nbytes=record.nbytes,
        offset=first.offset if first else 0,
        stored_nbytes=sum(stored.nbytes for stored in boxes),
        file=first.file.name if first and first.file else None,
    )


def _digest(record: Record) -> Optional[Hashable]:
    """The SHA-256 and the place of each box; only the SHA-256 if a tensor is one box, as a file stores it."""
    boxes = [(at, stored.shape, stored.sha256) for at, stored in record.source.boxes]
    if not boxes or any(digest is None for *_, digest in boxes):
        return None
    if len(boxes) == 1 and boxes[0][1] == record.shape:
        return bytes.fromhex(boxes[0][2])
    return frozenset(boxes)
