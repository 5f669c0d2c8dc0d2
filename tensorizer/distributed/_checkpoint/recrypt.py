"""Copies a checkpoint with another key, or without one: file by file and record by record, with a new marker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tensorizer._encryption import DecryptionParams, EncryptionParams
from tensorizer._io.call_options import CallOptions
from tensorizer._load.open_file import BATCH_NBYTES
from tensorizer._progress import ProgressArgument, progress_reporter
from tensorizer._save.records import Record
from tensorizer._save.session import HASH_NAMES, tensors_file, write_tensors
from tensorizer._system.sizes import runs
from tensorizer.distributed._checkpoint.boxes import CheckpointFiles, Saved
from tensorizer.distributed._checkpoint.existing import read_markers, saved_in
from tensorizer.distributed._checkpoint.folder import Folder, data_file_name, marker_name
from tensorizer.distributed._checkpoint.marker import JSON, Marker, SavedFile, Stored, StoredParts, pack_marker
from tensorizer.distributed._checkpoint.parts import about_name
from tensorizer.errors import StreamExistsError


class _Value(NamedTuple):
    """A value that the marker holds in clear. In an encrypted checkpoint it becomes a record of a file."""

    name: str
    text: str

    @property
    def content(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.text.encode()), dtype=torch.uint8)


#: Maps the records of the old files, and the values of the old marker, to the records of the new files.
_Places = dict[Any, Stored]


def recrypt(
    source: Any,
    target: Any,
    *,
    encryption: Optional[EncryptionParams] = None,
    decryption: Optional[DecryptionParams] = None,
    force: bool = False,
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> dict[str, Any]:
    """Writes a copy of a checkpoint to another folder, with its files encrypted by `encryption`, or decrypted.

    The copy has the same number of files with the same records. Records with a digest are compared with it.

    Returns:
        A report with the names of :func:`tensorizer.convert`.

    Raises:
        ValueError: The target is the folder of the source.
        StreamExistsError: The target has a checkpoint, and `force` is not set.
        HashMismatchError, AuthenticationError, CryptographyError, FormatError: The source is damaged or was altered.
        OSError: The source cannot be read, or the target cannot be written.
    """
    begin = time.monotonic()
    call = CallOptions.to_read(decryption, stream_options)
    old, new = Folder.at(source, call), Folder.at(target, call)
    if old.where == new.where:
        raise ValueError(f"{new.where}: expected another folder as the target, got that of the checkpoint itself")
    markers = read_markers(old, decryption)
    names = [marker_name(marker.rank) for marker in markers]
    if not force and any(new.exists(name) for name in {marker_name(None), *names}):
        raise StreamExistsError(f"{new.where} has a checkpoint (force replaces it)")
    every = saved_in(markers)
    total = sum(saved.stored.nbytes for saved in every)
    has_digests = all(saved.stored.crc32 is not None or saved.stored.sha256 is not None for saved in every)
    contents, files = [], []
    with (
        CheckpointFiles(old, call, verify=has_digests) as opened,
        progress_reporter(progress, total, "converting") as report,
    ):
        done = 0

        def add(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if report is not None:
                report(done)

        for marker in markers:
            places = _copied(marker, opened, new, encryption, add)
            stored = {index: _moved(index.fqn, one, places) for index, one in marker.stored.items()}
            files += sorted({place.file.name for place in places.values() if place.file is not None})
            contents.append(pack_marker(marker.metadata, stored, marker.rank, marker.world_size, encryption))
    for name, content in zip(names, contents):
        new.write(name, content, fsync=True, replace=force)
    if names == [marker_name(None)]:
        new.remove_stale(new.names(), files)
    return {
        "source": old.where,
        "target": new.where,
        "format": "checkpoint",
        "files": tuple(map(new.join, files)),
        "tensors": len({name for marker in markers for name in _tensors(marker)}),
        "nbytes": total,
        "checked": False,
        "dry_run": False,
        "skipped": (),
        "copied": (),
        "seconds": time.monotonic() - begin,
    }


def _tensors(marker: Marker) -> Iterator[str]:
    for name, item in marker.metadata.state_dict_metadata.items():
        if isinstance(item, TensorStorageMetadata):
            yield name


def _copied(
    marker: Marker, opened: CheckpointFiles, new: Folder, encryption: Optional[EncryptionParams], add: Any
) -> _Places:
    """Writes the files of one marker. If they are encrypted, values that the marker held in clear become records at the
    end of the last file."""
    by_file: dict[Optional[SavedFile], list[Any]] = {file: [] for file in marker.files}
    for saved in saved_in([marker]):
        by_file[saved.stored.file].append(saved)
    values = _values(marker) if encryption is not None else []
    if values:
        by_file.setdefault(marker.files[-1] if marker.files else None, []).extend(values)
    places: _Places = {}
    for number, items in enumerate(by_file.values()):
        if items:
            places.update(_written(items, new, marker.rank or number, opened, encryption, add))
    return places


def _values(marker: Marker) -> list[_Value]:
    found = []
    for index, stored in marker.stored.items():
        if stored.text is not None:
            found.append(_Value(index.fqn, stored.text))
        if stored.parts is not None and stored.parts.about.text is not None:
            found.append(_Value(about_name(index.fqn), stored.parts.about.text))
    return list(dict.fromkeys(found))


def _written(
    items: Sequence[Any],
    new: Folder,
    rank: int,
    opened: CheckpointFiles,
    encryption: Optional[EncryptionParams],
    add: Any,
) -> _Places:
    """Writes one file, and returns the places of its records."""
    records, taken = [], set()
    for item in items:
        if isinstance(item, _Value):
            name = item.name
            while name in taken:
                name = f"{name}'"
            records.append(Record((name,), torch.uint8, tuple(item.content.shape), source=item))
        else:
            file = opened.file(item.stored.file)
            name = str(file.names[opened.check(item)])
            records.append(Record((name,), item.dtype, item.stored.shape, source=item))
        taken.add(name)
    stored_hashes = [item.stored for item in items if isinstance(item, Saved)]
    hashes = {kind for kind in HASH_NAMES if any(getattr(one, kind) is not None for one in stored_hashes)}
    if encryption is not None and "crc32" in hashes:
        hashes = {"sha256"}  # as TensorizerWriter does
    where = data_file_name(rank)
    with tensors_file(
        new.join(where),
        records,
        hashes=hashes or HASH_NAMES,
        encryption=encryption,
        options=new.options,
    ) as session:
        for run in runs(records, lambda record: record.nbytes, BATCH_NBYTES):
            write_tensors(session, _read(run, opened))
            add(sum(record.nbytes for record in run if isinstance(record.source, Saved)))
        facts = session.records()
    digest = session.index_digest
    file_written = SavedFile(where, session.published_nbytes, None if digest is None else digest.hex())
    places: _Places = {}
    for i, (record, (offset, crc32, sha256)) in enumerate(zip(records, facts)):
        item = record.source
        key = item if isinstance(item, _Value) else (item.stored.file, item.stored.record)
        sha = None if sha256 is None else sha256.hex()
        places[key] = Stored(JSON, file_written, i, offset, record.nbytes, crc32, sha, shape=record.shape)
    return places


def _read(run: Sequence[Record], opened: CheckpointFiles) -> list[torch.Tensor]:
    saved = [record.source for record in run if isinstance(record.source, Saved)]
    tensors = iter(opened.read_records(saved))
    return [r.source.content if isinstance(r.source, _Value) else next(tensors) for r in run]


def _moved(name: str, stored: Stored, places: _Places) -> Stored:
    """The new place of an item. Values stay in the marker if the copy is not encrypted."""
    new = places.get(_Value(name, stored.text) if stored.text is not None else (stored.file, stored.record))
    if new is None:
        return stored
    parts = stored.parts
    if parts is not None:
        about = _moved(about_name(name), parts.about, places)
        inner = tuple(part._replace(stored=_moved(name, part.stored, places)) for part in parts.parts)
        parts = StoredParts(about, inner)
    return new._replace(kind=stored.kind, shape=stored.shape or new.shape, parts=parts)
