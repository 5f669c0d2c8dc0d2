"""Writing tensors to one file or to shards: planned as a whole, then written in bounded memory, then read back."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import operator
import os
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch

from tensorizer import _C
from tensorizer._files.contents import Contents
from tensorizer._files.copy import check_target, remove_files
from tensorizer._format.dtypes import CASTABLE, as_dtype
from tensorizer._format.entries import flat_name
from tensorizer._format.names import Path, double_name, name_of, name_text
from tensorizer._format.payloads import contiguous, is_copied
from tensorizer._format.safetensors import canonical_order, check_entries, header_bytes
from tensorizer._io import model_files, shards
from tensorizer._io.call_options import CallOptions
from tensorizer._io.new_files import NewFile, place_of_new_file
from tensorizer._io.sinks import WholeFile
from tensorizer._io.sources import files_at_once, is_path
from tensorizer._io.uri import check_is_path, folder_uri, identity_of, scheme_of, split_query
from tensorizer._load.open_file import BATCH_NBYTES, open_whole
from tensorizer._progress import progress_reporter
from tensorizer._save.records import Record
from tensorizer._save.session import (
    HASH_NAMES,
    check_hashes,
    memory_of,
    on_fast_device,
    tensors_file,
    write_tensors,
)
from tensorizer._system.redaction import shown_location
from tensorizer._system.sizes import counted, runs
from tensorizer.errors import HashMismatchError, StreamExistsError, UnsupportedContentError

FORMATS = ("tensors", "safetensors")

TIES = ("once", "twice", "error")

#: A batch is read while the one before is written as long as both need no more: four times the usual batch, since
#: single tensors of large models are larger than a batch.
_AHEAD_NBYTES = 256 << 20

_NOTHING = torch.empty(0, device="cpu")


class Writers(NamedTuple):
    """The processes that write the files of a model together: each of them writes every `size`-th file."""

    rank: int = 0
    size: int = 1
    together: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """A block that ends when all of them have come to its end; if it fails in one, all of them raise."""


class WriteOptions(NamedTuple):
    """How tensors are written; the meanings are those of the arguments of :func:`tensorizer.convert`."""

    format: Optional[str] = None
    dtype: Optional[torch.dtype] = None
    max_shard_size: Union[str, int, None] = None
    ties: str = "once"
    hashes: Union[str, Collection[str], None] = HASH_NAMES
    check: bool = False
    keep_order: bool = False
    flatten: bool = False
    force: bool = True
    dry_run: bool = False
    max_workers: int = 0
    reads: Collection[Hashable] = ()
    """The files that the contents come from, as :func:`~tensorizer._io.uri.identity_of` tells them apart: they stay."""
    replaces_forms: bool = True
    """With `max_shard_size`: whether other files of the model of that name are removed, instead of refused."""
    writers: Writers = Writers()


def write_contents(contents: Contents, target: Any, options: WriteOptions, call: CallOptions) -> tuple[Plan, list[Any]]:
    """Writes tensors to one file or several; errors as :func:`tensorizer.convert`.

    Returns:
        What was planned, and the files in the order in which they were written.
    """
    if options.dtype is not None:
        options = options._replace(dtype=as_dtype(options.dtype))
    hashes = check_hashes(options.hashes, encrypted=call.encryption is not None)
    plan = _plan(contents, format_of(target, options.format), options, call)
    names: list[Any] = [target]
    if is_path(target) and not isinstance(target, int):
        check_is_path(target)  # as it was given: the names of shards are texts
    if isinstance(target, (str, os.PathLike)) and model_files.is_index_name(os.fsdecode(target)):
        raise ValueError(f"target: expected the name of a file of tensors, got {shown_location(target)}")
    if len(plan.shards) > 1:
        if not isinstance(target, (str, os.PathLike)):
            raise ValueError(f"max_shard_size: expected a path or URI as target, got {type(target).__name__}")
        if not format_of(target, None, default=""):  # readers tell indexes and shards by the extension
            raise ValueError(
                "max_shard_size: expected a name that ends in .tensors or .safetensors for several files, "
                f"got {shown_location(target)}"
            )
        names = list(model_files.shard_names(os.fspath(target), len(plan.shards)))
    files = names if len(names) == 1 else [*names, model_files.index_name(os.fspath(target))]
    with options.writers.together():
        for file in files:
            check_target(file, options.force, call)
        # Who writes one named file has said nothing of others. Who lets a model have shards means all of its files.
        old = [] if options.max_shard_size is None else model_files.other_forms(target, files, call)
        old = [path for path in old if identity_of(path) not in options.reads]
        if old and not options.replaces_forms:
            raise StreamExistsError(
                f"{shown_location(old[0])} exists, another form of {shown_location(target)}, and readers could not "
                "tell which of the two is meant: remove it first"
            )
    if not options.dry_run:
        total = plan.nbytes * (2 if options.check else 1)
        told = progress_reporter(call.progress, total, "writing") if call.progress else contextlib.nullcontext()
        with told as report:
            _Writing(contents, plan, options, call, hashes, report).write(names, files[-1])
        with options.writers.together():
            if options.writers.rank == 0:
                remove_files(old, call)
    return plan, files


def file_in_folder(target: Any, format: Optional[str]) -> Any:
    """A target that is a folder, or ends with a slash, as the file ``model`` in it; any other as it is."""
    if not isinstance(target, (str, os.PathLike)) or isinstance(text := os.fspath(target), bytes):
        return target
    check_is_path(target)
    if text.endswith("/") or ("://" not in text and os.path.isdir(text)):
        folder = text.rstrip("/") if scheme_of(text) is None else folder_uri(text)
        return f"{folder}/model.{format_of('', format)}"
    return target


def format_of(target: Any, format: Optional[str], default: str = "tensors") -> str:
    """The format of a target: what was asked for, else what its extension says, else `default`."""
    if format is not None:
        if format not in FORMATS:
            raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
        return format
    name = str(os.fspath(target)) if isinstance(target, (str, os.PathLike)) else ""
    return next((known for known in FORMATS if split_query(name)[0].endswith(f".{known}")), default)


# --- what will be written -------------------------------------------------------------------------------------------


_source_of = operator.attrgetter("source")
_nbytes_of = operator.attrgetter("nbytes")


class Plan(NamedTuple):
    """Tensors in the order of the target, by file."""

    format: str
    records: Sequence[Record]
    names: Sequence[str]
    """As users see them: of ``.safetensors`` those in the file."""
    shards: list[range]
    metadata: Optional[Mapping[str, str]]
    ties: Mapping[Path, Path]
    stored_ties: Mapping[Path, Path]

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes_of, self.records))

    def names_in(self, run: range) -> Sequence[str]:
        """What an index of shards maps to the shard of `run`: stored names, as far as they are in it."""
        if self.format == "safetensors":
            return self.names[run.start : run.stop]
        here = [record.path for record in self.records[run.start : run.stop]]
        kept = set(here)
        here += [alias for alias, other in self.ties.items() if other in kept]
        return [_C.stored_name(path).decode() for path in here]


def _plan(contents: Contents, format: str, options: WriteOptions, call: CallOptions) -> Plan:
    ties = options.ties
    if ties not in TIES:
        raise ValueError(f"ties: expected one of {', '.join(TIES)}, got {ties!r}")
    if format == "safetensors" and call.encryption is not None:
        raise UnsupportedContentError("a .safetensors file cannot be encrypted")
    limit = math.inf if options.max_shard_size is None else shards.nbytes_of(options.max_shard_size)
    all_records = contents.records
    if options.dtype is not None:
        all_records = [_cast(record, options.dtype) for record in all_records]
    own = {record.path: record for record in all_records}
    stored_twice: Mapping[Path, Path] = {}
    aliases = contents.ties
    if aliases and ties == "error":
        texts = [f"{name_text(alias)} = {name_text(kept)}" for alias, kept in aliases.items()]
        raise UnsupportedContentError(f"tensors share memory: {', '.join(texts)}")
    if ties == "twice":
        second = {record.path for record in all_records if record.is_second_name}
        stored_twice = {alias: kept for alias, kept in aliases.items() if alias not in second}
        aliases = {alias: kept for alias, kept in aliases.items() if alias in second}
    records = [record for record in all_records if record.path not in aliases]
    records += _stored_apart({alias: kept for alias, kept in stored_twice.items() if alias not in own}, own)
    names = [name_text(record.path) for record in records]
    if format == "safetensors":
        flat = _flat_names(records, aliases, options.flatten)
        # Ties are told in the metadata alone, where readers have to recognise them.
        noted = contents.metadata or {}
        untold = {a: kept for a, kept in aliases.items() if not _is_told(flat[a], flat[kept], noted)}
        records += _stored_apart(untold, own)
        aliases = {(flat[alias],): (flat[kept],) for alias, kept in aliases.items() if alias not in untold}
        entries = [(flat[record.path], record.dtype, record.shape) for record in records]
        check_entries(entries)
        # Cut before they are sorted: what the model has together lies in one shard, as with the hub's own function.
        cuts = _cuts(records, limit)
        if not options.keep_order:
            order = [cut[i] for cut in cuts for i in canonical_order([entries[j] for j in cut])]
            records = [records[i] for i in order]
        names = [flat[record.path] for record in records]
    elif not records:
        raise UnsupportedContentError("a .tensors file holds at least one tensor, and there is none to write")
    else:
        cuts = _cuts(records, limit)
    return Plan(format, records, names, cuts, contents.metadata, aliases, stored_twice)


def _cast(record: Record, dtype: torch.dtype) -> Record:
    """The record as ``dtype=`` changes it: floating point of 16 bits and more only."""
    if record.dtype not in CASTABLE or dtype not in CASTABLE:
        return record
    return dataclasses.replace(record, dtype=dtype, stored=None)


def _stored_apart(aliases: Mapping[Path, Path], own: Mapping[Path, Record]) -> list[Record]:
    """The aliases as tensors of their own: as their source has them, or else as the tensor that they stand for."""
    return [
        own[alias] if alias in own else dataclasses.replace(own[kept], path=alias) for alias, kept in aliases.items()
    ]


def _cuts(records: Sequence[Record], limit: float) -> list[range]:
    """What lies in each file: at most `limit` bytes, or one larger tensor."""
    begin, cuts = 0, []
    for run in runs(records, _nbytes_of, limit):
        cuts.append(range(begin, begin + len(run)))
        begin += len(run)
    return cuts or [range(0)]


def _is_told(alias: str, kept: str, metadata: Mapping[str, str]) -> bool:
    """Whether ``metadata[alias] = kept`` is read as a tie, and says nothing else already."""
    if not (alias.isascii() and kept.isascii()):
        return False
    return metadata.get(alias, kept) == kept and _C.names_of_one_model(alias, kept)


def _flat_names(records: Sequence[Record], aliases: Mapping[Path, Path], flatten: bool) -> dict[Path, str]:
    """What ``.safetensors`` calls tensors and aliases."""
    nested = [
        name_text(record.path) for record in records if len(record.path) > 1 or not isinstance(record.path[0], str)
    ]
    if nested and not flatten:
        raise UnsupportedContentError(
            f".safetensors holds no nested names: {', '.join(nested[:10])}{' …' if len(nested) > 10 else ''}; "
            "flatten joins their steps with dots"
        )
    types = {record.path: record.type for record in records}
    types.update({alias: types[kept] for alias, kept in aliases.items()})
    flat = {path: flat_name(path, type) for path, type in types.items()}
    double = double_name((name_of(path), text) for path, text in flat.items())
    if double is not None:
        raise UnsupportedContentError(double)
    return flat


# --- writing --------------------------------------------------------------------------------------------------------

Write = Callable[[Sequence[torch.Tensor]], None]


class _Writing:
    """One file or set of shards on its way."""

    def __init__(
        self,
        contents: Contents,
        plan: Plan,
        options: WriteOptions,
        call: CallOptions,
        hashes: frozenset[str],
        report: Any,
    ) -> None:
        self._contents, self._plan, self._options, self._call = contents, plan, options, call
        self._hashes, self._report = hashes, report
        self._done = 0

    def write(self, names: Sequence[Any], index: Any) -> None:
        """Writes all files, and the index of several; local ones get their names when all are complete and checked.

        In a store an object appears when it was written, and its check comes then; shards mean nothing without the
        index, which comes last.
        """
        # Files that are written together keep a descriptor each; very many have hidden names until they appear.
        many = len(names) > files_at_once()
        files: dict[str, str] = {}
        writers = self._options.writers
        with contextlib.ExitStack() as stack:
            unpublished = []
            with writers.together():
                for number, (name, run) in enumerate(zip(names, self._plan.shards)):
                    if len(names) > 1:
                        files.update(dict.fromkeys(self._plan.names_in(run), os.path.basename(name)))
                    if number % writers.size != writers.rank:
                        continue
                    place = place_of_new_file(name) if self._options.check or len(names) > 1 else None
                    if place is None:
                        self._read_back(name, run, self._write_one(name, run))
                    else:
                        new = stack.enter_context(NewFile(*place, many))
                        with new.open("wb+") as stream:
                            crcs = self._write_one(stream, run)
                        with new.open("rb") as stream:
                            self._read_back(stream, run, crcs)
                        new.complete()
                        unpublished.append(new)
            with writers.together():
                for new in unpublished:
                    new.publish()
        with writers.together():
            if files and writers.rank == 0:
                # An encrypted model keeps its metadata and ties in the annexes of its shards.
                texts = {} if self._plan.format == "tensors" else self._texts()
                with WholeFile(index, self._call) as file:
                    file.append(shards.index_bytes(files, self._plan.nbytes, texts))

    def _write_one(self, target: Any, run: range) -> list[int]:
        open_target = self._tensors_target if self._plan.format == "tensors" else self._safetensors_target
        with open_target(target, run) as write:
            crcs = self._copy(self._plan.records[run.start : run.stop], write)
            if run.stop == len(self._plan.records):
                self._contents.finish()
            return crcs

    @contextlib.contextmanager
    def _tensors_target(self, target: Any, run: range) -> Iterator[Write]:
        plan = self._plan
        records = plan.records[run.start : run.stop]
        here = {record.path for record in records}
        ties = [(alias, kept, False) for alias, kept in plan.ties.items() if kept in here]
        ties += [(alias, kept, True) for alias, kept in plan.stored_ties.items() if kept in here and alias in here]
        before = self._done
        with tensors_file(
            target,
            records,
            ties,
            hashes=self._hashes,
            metadata=plan.metadata if run.start == 0 else None,
            max_workers=self._options.max_workers,
            encryption=self._call.encryption,
            options=self._call,
        ) as session:
            report = self._report
            yield lambda tensors: write_tensors(
                session, tensors, None if report is None else lambda done: report(before + done)
            )

    @contextlib.contextmanager
    def _safetensors_target(self, target: Any, run: range) -> Iterator[Write]:
        plan = self._plan
        metadata: Optional[Mapping[str, str]] = {"format": "pt"}  # what transformers insists on in shards
        if len(plan.shards) == 1:
            metadata = None if plan.metadata is None and not plan.ties else self._texts()
        records = plan.records[run.start : run.stop]
        names = plan.names[run.start : run.stop]
        header = header_bytes([(name, r.dtype, r.shape) for name, r in zip(names, records)], metadata)
        with WholeFile(target, self._call) as file:
            file.reserve(len(header) + sum(record.tensor_nbytes for record in records))
            file.append(header)

            def write(tensors: Sequence[torch.Tensor]) -> None:
                data = [contiguous(tensor, on_device=False) for tensor in tensors]  # alive until the call returns
                file.append_memory([memory_of(tensor) for tensor in data])

            yield write

    def _texts(self) -> dict[str, str]:
        """The metadata of ``.safetensors``: what the source had, and aliases as ``save_model`` notes them."""
        aliases = {name_text(alias): name_text(kept) for alias, kept in self._plan.ties.items()}
        return {**(self._plan.metadata or {}), **aliases}

    def _copy(self, records: Sequence[Record], write: Write) -> list[int]:
        """Writes all payloads of one file; the CRC-32 of each, where they are wanted."""
        crcs: list[int] = []
        for batch, tensors in self._read_ahead(records):
            if self._options.check:
                crcs += _C.crc32_of([memory_of(tensor) for tensor in tensors])
            write(tensors)
            del tensors  # before the next ones are waited for
            self._add(sum(map(_nbytes_of, batch)))
        return crcs

    def _batches(self, records: Sequence[Record]) -> Iterator[Sequence[Record]]:
        """What is read at once: for tensors in memory what has to be copied counts, and they are on one device."""
        to_file = self._plan.format == "tensors" and not self._options.check

        def nbytes(record: Record) -> int:
            tensor = record.source
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != record.dtype or not to_file:
                return record.nbytes
            return record.nbytes if is_copied(tensor, on_fast_device(tensor)) else 0

        def device(record: Record) -> Optional[torch.device]:
            return record.source.device if isinstance(record.source, torch.Tensor) else None

        if not any(map(torch.is_tensor, map(_source_of, records))):
            return runs(records, _nbytes_of, BATCH_NBYTES)
        return runs(records, nbytes, BATCH_NBYTES, device)

    def _read_ahead(self, records: Sequence[Record]) -> Iterator[tuple[Sequence[Record], list[torch.Tensor]]]:
        """Batches with their tensors; as long as memory allows it, one is read while the one before is written."""
        Read = tuple[Sequence[Record], list[torch.Tensor]]

        def read(batch: Sequence[Record]) -> Read:
            # Zeros that a .tensors file need not hold are not made either.
            real = [r for r in batch if self._plan.format != "tensors" or not (r.without_data and r.shape)]
            tensors = dict(zip((record.path for record in real), self._contents.read(real)))
            found = [tensors.get(r.path, _NOTHING).to(r.dtype) for r in batch]
            return batch, [contiguous(tensor, on_device=False) for tensor in found] if self._options.check else found

        with concurrent.futures.ThreadPoolExecutor(1, "tensorizer-convert") as reader:
            ahead: collections.deque[concurrent.futures.Future[Read]]
            ahead = collections.deque()  # a future that is taken out keeps no tensors of the caller's alive
            nbytes_ahead = 0
            for batch in self._batches(records):
                nbytes = sum(map(_nbytes_of, batch))
                if ahead and nbytes_ahead + nbytes > _AHEAD_NBYTES:
                    yield ahead.popleft().result()
                ahead.append(reader.submit(read, batch))
                nbytes_ahead = nbytes
                if len(ahead) > 1:
                    yield ahead.popleft().result()
            if ahead:
                yield ahead.popleft().result()

    def _read_back(self, target: Any, run: range, crcs: Sequence[int]) -> None:
        """Reads the target back, where that is wanted, and compares it with what was read from the source."""
        if not self._options.check:
            return
        records = self._plan.records[run.start : run.stop]
        decryption = None
        if self._call.encryption is not None:
            from tensorizer._encryption import DecryptionParams

            decryption = DecryptionParams.from_key(self._call.encryption.key)
        with open_whole(target, self._call.reading(decryption)) as file:
            if len(file.stored) != len(records):
                raise HashMismatchError(
                    f"{file.source_name}: expected {counted(len(records), 'tensor')}, got {len(file.stored)}"
                )
            for entries in file.runs(range(len(records))):
                tensors = file.read(entries, verify=file.index.stores_hashes)
                found = _C.crc32_of([memory_of(tensor) for tensor in tensors])
                for i, crc in zip(entries, found):
                    if crc != crcs[i] and not records[i].without_data:
                        raise HashMismatchError(
                            f"{file.source_name}: tensor {name_text(records[i].path)!r}: "
                            f"expected CRC-32 {crcs[i]:08x}, as read from the source, got {crc:08x}"
                        )
                del tensors  # before the next ones are read
                self._add(sum(map(_nbytes_of, map(records.__getitem__, entries))))

    def _add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._report is not None:
            self._report(self._done)
