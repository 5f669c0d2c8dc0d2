"""Writing tensors to one file or to shards: planned as a whole, then written in bounded memory, then read back."""

from __future__ import annotations

import collections
import concurrent.futures
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Optional, Union

import torch

from tensorizer import _C
from tensorizer._files.contents import Content, Contents, batches, cast
from tensorizer._files.copy import check_target
from tensorizer._files.names import double_name, flat_name
from tensorizer._files.older_forms import older_forms, remove_forms
from tensorizer._files.opened import OpenedFile, name_text
from tensorizer._files.targets import Write, safetensors_target, tensors_target
from tensorizer._files.together import TogetherOrNot
from tensorizer._format import shards
from tensorizer._format.names import Name, path_of
from tensorizer._format.safetensors import HeaderEntry, canonical_order, check_entries
from tensorizer._io.sinks import place_of_new_file
from tensorizer._io.unnamed_file import UnnamedFile
from tensorizer._load.arguments import check_dtype
from tensorizer._save.hashes import HASH_NAMES, check_hashes
from tensorizer._system.redaction import shown_location
from tensorizer.errors import HashMismatchError, StreamExistsError, UnsupportedContentError
from tensorizer.progress import ProgressArgument, progress_reporter

__all__ = ["Plan", "WriteOptions", "file_in_folder", "format_of", "write_contents"]

FORMATS = ("tensors", "safetensors")

TIES = ("once", "twice", "error")

#: A batch is read while the one before is written as long as both need no more: four times the usual batch, since
#: single tensors of large models are larger than a batch.
_AHEAD_NBYTES = 256 << 20


class WriteOptions(NamedTuple):
    """How tensors are written; the meanings are those of the arguments of :func:`tensorizer.convert`."""

    format: Optional[str] = None
    dtype: Optional[torch.dtype] = None
    max_shard_size: Union[str, int, None] = None
    ties: str = "once"
    encryption: Any = None
    hashes: Union[str, Collection[str], None] = HASH_NAMES
    check: bool = False
    keep_order: bool = False
    flatten: bool = False
    force: bool = True
    dry_run: bool = False
    progress: ProgressArgument = False
    stream_options: Optional[Mapping[str, Any]] = None
    reads: Collection[str] = ()
    """Absolute paths, or URIs, of the files that the contents come from: they are never removed."""


def write_contents(contents: Contents, target: Any, options: WriteOptions) -> tuple[Plan, list[Any]]:
    """Writes tensors to one file or several; errors as :func:`tensorizer.convert`.

    Returns:
        What was planned, and the files in the order in which they were written.
    """
    check_dtype(options.dtype)
    plan = _plan(contents, format_of(target, options.format), options)
    names: list[Any] = [target]
    if len(plan.shards) > 1:
        if not isinstance(target, (str, os.PathLike)):
            raise ValueError(f"max_shard_size: wanted a path or URI as target, found {type(target).__name__}")
        names = list(shards.shard_names(os.fspath(target), len(plan.shards)))
    files = names if len(names) == 1 else [*names, shards.index_name(os.fspath(target))]
    for file in files:
        check_target(file, options.force, options.stream_options)
    # Who writes one named file has said nothing of others. Who lets a model have shards means all of its files.
    old = [] if options.max_shard_size is None else older_forms(target, files, options.stream_options)
    old = [path for path in old if path not in options.reads]
    if old and not options.force:
        raise StreamExistsError(
            f"{shown_location(old[0])} exists, of an older form of {shown_location(target)} (force removes it)"
        )
    if not options.dry_run:
        total = plan.nbytes * (2 if options.check else 1)
        with progress_reporter(options.progress, total, "writing") as report:
            _Run(contents, plan, options, report).write(names)
        remove_forms(old, options.stream_options)
    return plan, files


def file_in_folder(target: Any, format: Optional[str]) -> Any:
    """A target that is a folder, or ends with a slash, as the file ``model`` in it; any other as it is."""
    if not isinstance(target, (str, os.PathLike)) or isinstance(text := os.fspath(target), bytes):
        return target
    if text.endswith("/") or ("://" not in text and os.path.isdir(text)):
        return f"{text.rstrip('/')}/model.{format_of('', format)}"
    return target


def format_of(target: Any, format: Optional[str], default: str = "tensors") -> str:
    """The format of a target: what was asked for, else what its extension says, else `default`."""
    if format is not None:
        if format not in FORMATS:
            raise ValueError(f"format: wanted one of {', '.join(FORMATS)}, found {format!r}")
        return format
    name = os.fspath(target).partition("?")[0] if isinstance(target, (str, os.PathLike)) else ""
    return next((known for known in FORMATS if str(name).endswith(f".{known}")), default)


# --- what will be written -------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Tensors in the order of the target, by file."""

    format: str
    items: list[Content]
    names: list[Name]  # as they will be stored
    shards: list[range]
    metadata: Optional[Mapping[str, str]]
    ties: Mapping[Name, Name]
    stored_ties: Mapping[Name, Name]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    def names_in(self, run: range) -> Iterator[str]:
        """What an index of shards maps to the shard of `run`: stored names, as far as they are in it."""
        here = [*self.names[run.start : run.stop]]
        if self.format == "tensors":
            kept = set(here)
            here += [alias for alias, other in self.ties.items() if other in kept]
        for name in here:
            yield _C.stored_name(path_of(name)).decode() if self.format == "tensors" else name_text(name)


def _plan(contents: Contents, format: str, options: WriteOptions) -> Plan:
    ties = options.ties
    if ties not in TIES:
        raise ValueError(f"ties: wanted one of {', '.join(TIES)}, found {ties!r}")
    if format == "safetensors" and options.encryption is not None:
        raise UnsupportedContentError("a .safetensors file cannot be encrypted")
    limit = None if options.max_shard_size is None else shards.nbytes_of(options.max_shard_size)
    items = [cast(item, options.dtype) for item in contents.items]
    aliases, stored_twice = dict(contents.ties), dict(contents.stored_ties)
    if (aliases or stored_twice) and ties == "error":
        shared = {**aliases, **stored_twice}
        texts = [f"{name_text(alias)} = {name_text(kept)}" for alias, kept in shared.items()]
        raise UnsupportedContentError(f"tensors share memory: {', '.join(texts)}")
    if ties == "once":
        items = [item for item in items if item.name not in stored_twice]
        aliases, stored_twice = {**aliases, **stored_twice}, {}
    if ties == "twice":
        items += _copies(items, aliases)
        aliases, stored_twice = {}, {**aliases, **stored_twice}
    names: list[Name] = [item.name for item in items]
    if format == "safetensors":
        flat = _flat_names(items, aliases, options.flatten)
        # Ties are told in the metadata alone, where readers have to recognise them.
        noted = contents.metadata or {}
        untold = {a: kept for a, kept in aliases.items() if not _is_told(flat[a], flat[kept], noted)}
        items += _copies(items, untold)
        aliases = {flat[alias]: flat[kept] for alias, kept in aliases.items() if alias not in untold}
        entries = [HeaderEntry(flat[item.name], item.dtype, item.shape) for item in items]
        check_entries(entries)
        # Cut before they are sorted: what the model has together lies in one shard, as with the hub's own function.
        runs = shards.split([item.nbytes for item in items], limit)
        if not options.keep_order:
            order = [run[i] for run in runs for i in canonical_order([entries[j] for j in run])]
            items = [items[i] for i in order]
        names = [flat[item.name] for item in items]
    elif not items:
        raise UnsupportedContentError("a .tensors file holds at least one tensor, and there is none to write")
    else:
        runs = shards.split([item.nbytes for item in items], limit)
    return Plan(format, items, names, runs, contents.metadata, aliases, stored_twice)


def _copies(items: Sequence[Content], aliases: Mapping[Name, Name]) -> list[Content]:
    """The aliases as tensors of their own."""
    stored = {item.name: item for item in items}
    return [stored[kept]._replace(name=alias) for alias, kept in aliases.items()]


def _is_told(alias: str, kept: str, metadata: Mapping[str, str]) -> bool:
    """Whether ``metadata[alias] = kept`` is read as a tie, and says nothing else already."""
    if not (alias.isascii() and kept.isascii()):
        return False
    return metadata.get(alias, kept) == kept and _C.names_of_one_model(alias, kept)


def _flat_names(items: Sequence[Content], aliases: Mapping[Name, Name], flatten: bool) -> dict[Name, str]:
    """What ``.safetensors`` calls tensors and aliases."""
    nested = [name_text(item.name) for item in items if not isinstance(item.name, str)]
    if nested and not flatten:
        raise UnsupportedContentError(
            f".safetensors holds no nested names: {', '.join(nested[:10])}{' …' if len(nested) > 10 else ''}; "
            "flatten joins their steps with dots"
        )
    types = {item.name: item.type for item in items}
    types.update({alias: types[kept] for alias, kept in aliases.items()})
    flat = {name: flat_name(name, type) for name, type in types.items()}
    double = double_name(flat.items())
    if double is not None:
        raise UnsupportedContentError(double)
    return flat


# --- writing --------------------------------------------------------------------------------------------------------


class _Run:
    """One file or set of shards on its way."""

    def __init__(self, contents: Contents, plan: Plan, options: WriteOptions, report: Any) -> None:
        self._contents, self._plan, self._options, self._report = contents, plan, options, report
        self._hashes = check_hashes(options.hashes, encrypted=options.encryption is not None)
        self._done = 0

    def write(self, names: Sequence[Any]) -> None:
        if len(names) == 1:
            self._write_single(names[0], self._plan.shards[0])
            return
        with TogetherOrNot(names, self._options.stream_options) as places:
            files: dict[str, str] = {}
            for place, name, run in zip(places, names, self._plan.shards):
                self._write_one(place, run)
                files.update(dict.fromkeys(self._plan.names_in(run), os.path.basename(name)))
            # An encrypted model keeps its metadata and ties in the annexes of its shards.
            texts = {} if self._plan.format == "tensors" else self._texts()
            index = shards.index_bytes(files, self._plan.nbytes, texts)
            places.finish(shards.index_name(shards.name_of_shard(names[0])), index)

    def _write_single(self, target: Any, run: range) -> None:
        place = place_of_new_file(target) if self._options.check else None
        if place is None:  # in a store the check can only come when the object is there
            self._write_one(target, run)
            return
        with UnnamedFile(place.path, place.mode) as file:
            with file.open("wb+") as stream:
                crcs = self._write_payloads(stream, run)
            with file.open("rb") as stream:
                self._check_target(stream, run, crcs)
            file.publish()

    def _write_one(self, target: Any, run: range) -> None:
        crcs = self._write_payloads(target, run)
        if self._options.check:
            self._check_target(target, run, crcs)

    def _write_payloads(self, target: Any, run: range) -> list[int]:
        with self._open(target, run) as write:
            return self._copy(self._plan.items[run.start : run.stop], write)

    def _open(self, target: Any, run: range) -> AbstractContextManager[Write]:
        plan, options = self._plan, self._options
        items = plan.items[run.start : run.stop]
        if plan.format == "tensors":
            here = {item.name for item in items}
            return tensors_target(
                target,
                items,
                encryption=options.encryption,
                hashes=self._hashes,
                metadata=(plan.metadata or {}) if run.start == 0 else {},
                ties={alias: kept for alias, kept in plan.ties.items() if kept in here},
                stored_ties={a: kept for a, kept in plan.stored_ties.items() if kept in here and a in here},
                stream_options=options.stream_options,
            )
        metadata: Optional[dict[str, str]] = {"format": "pt"}  # what transformers insists on in shards
        if len(plan.shards) == 1:
            metadata = None if plan.metadata is None and not plan.ties else self._texts()
        names = [name_text(name) for name in plan.names[run.start : run.stop]]
        return safetensors_target(target, items, names, metadata, options.stream_options)

    def _texts(self) -> dict[str, str]:
        """The metadata of ``.safetensors``: what the source had, and aliases as ``save_model`` notes them."""
        aliases = {name_text(alias): name_text(kept) for alias, kept in self._plan.ties.items()}
        return {**(self._plan.metadata or {}), **aliases}

    def _copy(self, items: Sequence[Content], write: Write) -> list[int]:
        """Writes all payloads of one file; the CRC-32 of each, where they are wanted."""
        crcs: list[int] = []
        for batch, tensors in self._read_ahead(items):
            if self._options.check:
                crcs += _C.crc32_of([_memory(tensor) for tensor in tensors])
            write(tensors)
            del tensors  # before the next ones are waited for
            self._note(sum(item.nbytes for item in batch))
        return crcs

    def _read_ahead(self, items: Sequence[Content]) -> Iterator[tuple[Sequence[Content], list[torch.Tensor]]]:
        """Batch by batch; the next one is read while the caller has the one before, where memory for both is little."""

        def read(batch: Sequence[Content]) -> tuple[Sequence[Content], list[torch.Tensor]]:
            return batch, [tensor.to(item.dtype) for item, tensor in zip(batch, self._contents.read(batch))]

        with concurrent.futures.ThreadPoolExecutor(1, "tensorizer-convert") as reader:
            ahead: collections.deque[concurrent.futures.Future[tuple[Sequence[Content], list[torch.Tensor]]]]
            ahead = collections.deque()  # a future that is taken out keeps no tensors of the caller's alive
            nbytes_ahead = 0
            for batch in batches(items):
                nbytes = sum(item.nbytes for item in batch)
                if ahead and nbytes_ahead + nbytes > _AHEAD_NBYTES:
                    yield ahead.popleft().result()
                ahead.append(reader.submit(read, batch))
                nbytes_ahead = nbytes
                if len(ahead) > 1:
                    yield ahead.popleft().result()
            if ahead:
                yield ahead.popleft().result()

    def _check_target(self, target: Any, run: range, crcs: Sequence[int]) -> None:
        """Reads the target back."""
        items = self._plan.items[run.start : run.stop]
        decryption = None if self._options.encryption is None else _decryption_of(self._options.encryption)
        with OpenedFile(target, encryption=decryption, stream_options=self._options.stream_options) as file:
            if len(file.entries) != len(items):
                raise HashMismatchError(f"{file.label}: wanted {len(items)} tensors, found {len(file.entries)}")
            for entries in file.batches(range(len(items))):
                tensors = file.read(entries, verify=file.index.stores_hashes)
                found = _C.crc32_of([_memory(tensor) for tensor in tensors])
                for i, crc in zip(entries, found):
                    if crc != crcs[i] and not items[i].without_data:
                        raise HashMismatchError(
                            f"{file.label}: tensor {name_text(items[i].name)!r}: "
                            f"wanted CRC-32 {crcs[i]:08x}, as read from the source, found {crc:08x}"
                        )
                del tensors  # before the next ones are read
                self._note(sum(items[i].nbytes for i in entries))

    def _note(self, nbytes: int) -> None:
        self._done += nbytes
        if self._report is not None:
            self._report(self._done)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    nbytes = tensor.numel() * tensor.element_size()
    return (tensor.data_ptr() if nbytes else 0, nbytes)


def _decryption_of(encryption: Any) -> Any:
    from tensorizer.encryption import DecryptionParams

    return DecryptionParams.from_key(encryption.key)
