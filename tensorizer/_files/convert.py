"""From one format of tensor files to another, encrypted or decrypted on the way, in bounded memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Union

import torch

from tensorizer import _C
from tensorizer._files.contents import Content, Contents, FileContents, StateDictContents, batches, cast
from tensorizer._files.copy import check_target
from tensorizer._files.opened import OpenedFile, name_text
from tensorizer._files.pickled import is_pickled, read_pickled
from tensorizer._files.targets import SafetensorsTarget, Target, TensorsTarget
from tensorizer._files.together import TogetherOrNot
from tensorizer._format import shards
from tensorizer._format.names import Name
from tensorizer._format.safetensors import HeaderEntry, canonical_order, check_entries
from tensorizer._save.hashes import HASH_NAMES, check_hashes
from tensorizer.errors import HashMismatchError, UnsupportedContentError
from tensorizer.progress import ProgressArgument, progress_reporter

__all__ = ["ConversionReport", "Plan", "convert", "format_of", "write_contents"]

FORMATS = ("tensors", "safetensors")
TIES = ("once", "twice", "error")


@dataclass(frozen=True)
class ConversionReport:
    """What was converted."""

    source: str
    target: str
    format: str
    """Of the target."""
    files: tuple[str, ...]
    """What was written: one file, or shards and their index."""
    tensors: int
    nbytes: int
    """Of the payloads in the target."""
    ties: Mapping[str, str]
    """From the name of an alias to the name of the tensor that is stored."""
    skipped: tuple[str, ...]
    """Leaves of a pickled state dict that were left out because they are no tensors."""
    checked: bool
    """Whether the target was read back and its payloads compared with those that were read."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Always true: a conversion that fails raises."""
        return True

    def __bool__(self) -> bool:
        return self.ok


def convert(
    source: Any,
    target: Any,
    *,
    format: Optional[str] = None,
    dtype: Optional[torch.dtype] = None,
    max_shard_size: Union[str, int, None] = None,
    ties: str = "once",
    encryption: Any = None,
    decryption: Any = None,
    check: bool = True,
    keep_order: bool = False,
    flatten: bool = False,
    key: Optional[str] = None,
    skip_non_tensors: bool = False,
    force: bool = True,
    dry_run: bool = False,
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> ConversionReport:
    """Writes the tensors of one file to another, in another format, dtype or encryption.

    Payloads are read 64 MiB at a time (or one tensor, where that is larger) while the ones before are written, so that
    files larger than memory can be converted. The target appears when it is complete; a conversion that fails leaves
    what was there.

    Args:
        source: A ``.tensors``, ``.safetensors``, ``.pt`` or ``.bin`` file: a path, URI or open binary file object. The
            format is told by its content.
        target: A path or URI.
        format: ``"tensors"`` or ``"safetensors"``; ``None`` goes by the extension of `target`, ``"tensors"`` without
            one that is known.
        dtype: Converts floating-point tensors of 16 bits and more; others stay as they are.
        max_shard_size: Writes several files and an index beside the name of `target`, each of at most so many bytes,
            or a text like ``"5GB"``; ``None``, the default, writes one file.
        ties: What becomes of names that share one tensor: ``"once"`` stores it once and records the other names,
            ``"twice"`` stores it under each name, ``"error"`` refuses.
        encryption: Encrypts the target (``.tensors`` only).
        decryption: The key of an encrypted source.
        check: Reads the target back and compares every payload with what was read from the source.
        keep_order: Keeps the order of the source in a ``.safetensors`` target, instead of that of the reference's
            writer: a file that came from there is the same again, byte for byte.
        flatten: Joins the steps of nested names with dots, for a ``.safetensors`` target.
        key: Where the state dict is in a pickled file, in dots.
        skip_non_tensors: Leaves out what is no tensor in a pickled file.
        force: Replaces a target that exists.
        dry_run: Writes nothing, and reports what would be written.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening URIs.

    Returns:
        What was done.

    Raises:
        UnsupportedContentError: The target's format cannot hold something; nothing was written.
        StreamExistsError: The target exists, without `force`.
        HashMismatchError: The source does not agree with its digests, or the target with what was written.
        CryptographyError: A key is missing, wrong or not wanted.
        FormatError: The source is no file of tensors.
        OSError: It cannot be read or written.
    """
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        contents, skipped = _open_contents(stack, source, decryption, key, skip_non_tensors, stream_options)
        plan, files = write_contents(
            contents,
            target,
            format=format,
            dtype=dtype,
            max_shard_size=max_shard_size,
            ties=ties,
            encryption=encryption,
            check=check,
            keep_order=keep_order,
            flatten=flatten,
            force=force,
            dry_run=dry_run,
            progress=progress,
            stream_options=stream_options,
        )
        return ConversionReport(
            source=contents.label,
            target=str(target),
            format=plan.format,
            files=tuple(map(str, files)),
            tensors=len(plan.items),
            nbytes=plan.nbytes,
            ties={name_text(alias): name_text(kept) for alias, kept in plan.ties.items()},
            skipped=tuple(skipped),
            checked=check and not dry_run,
            seconds=time.monotonic() - begin,
        )


def write_contents(
    contents: Contents,
    target: Any,
    *,
    format: Optional[str] = None,
    dtype: Optional[torch.dtype] = None,
    max_shard_size: Union[str, int, None] = None,
    ties: str = "once",
    encryption: Any = None,
    hashes: Union[str, Collection[str], None] = HASH_NAMES,
    check: bool = False,
    keep_order: bool = False,
    flatten: bool = False,
    force: bool = True,
    dry_run: bool = False,
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> tuple[Plan, list[Any]]:
    """Writes tensors to one file or several; arguments and errors as :func:`convert`.

    Returns:
        What was planned, and the files in the order in which they were written.
    """
    chosen = format_of(target, format)
    if ties not in TIES:
        raise ValueError(f"ties: wanted one of {', '.join(TIES)}, found {ties!r}")
    limit = None if max_shard_size is None else shards.nbytes_of(max_shard_size)
    if chosen == "safetensors" and encryption is not None:
        raise UnsupportedContentError("a .safetensors file cannot be encrypted")
    plan = _plan(contents, chosen, dtype, ties, keep_order, flatten, limit)
    names: list[Any] = [target]
    if len(plan.shards) > 1:
        if not isinstance(target, (str, os.PathLike)):
            raise ValueError(f"max_shard_size: wanted a path or URI as target, found {type(target).__name__}")
        names = list(shards.shard_names(os.fspath(target), len(plan.shards)))
    for name in names:
        check_target(name, force, stream_options)
    if not dry_run:
        with progress_reporter(progress, plan.nbytes * (2 if check else 1), "writing") as report:
            chosen_hashes = check_hashes(hashes, encrypted=encryption is not None)
            _Run(contents, plan, encryption, chosen_hashes, check, stream_options, report).write(names)
    return plan, names if len(names) == 1 else [*names, shards.index_name(os.fspath(target))]


def format_of(target: Any, format: Optional[str]) -> str:
    """The format of a target: what was asked for, else what its extension says."""
    if format is not None:
        if format not in FORMATS:
            raise ValueError(f"format: wanted one of {', '.join(FORMATS)}, found {format!r}")
        return format
    name = os.fspath(target).partition("?")[0] if isinstance(target, (str, os.PathLike)) else ""
    return "safetensors" if str(name).endswith(".safetensors") else "tensors"


def _open_contents(
    stack: contextlib.ExitStack,
    source: Any,
    decryption: Any,
    key: Optional[str],
    skip_non_tensors: bool,
    stream_options: Optional[Mapping[str, Any]],
) -> tuple[Contents, list[str]]:
    contents: Contents
    if is_pickled(source):
        tensors, skipped = read_pickled(source, key, skip_non_tensors)
        contents = StateDictContents(os.fspath(source), tensors)
        return contents, skipped
    file = stack.enter_context(OpenedFile(source, encryption=decryption, stream_options=stream_options))
    contents = FileContents(file, verify=file.index.stores_hashes)
    return contents, []


# --- what will be written -------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Tensors in the order of the target, by file."""

    format: str
    items: list[Content]
    names: list[Name]  # as they will be stored
    shards: list[range]
    metadata: Mapping[str, str]
    ties: Mapping[Name, Name]
    stored_ties: Mapping[Name, Name]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


def _plan(
    contents: Contents,
    format: str,
    dtype: Optional[torch.dtype],
    ties: str,
    keep_order: bool,
    flatten: bool,
    limit: Optional[int],
) -> Plan:
    items = [cast(item, dtype) for item in contents.items]
    aliases, stored_twice = dict(contents.ties), dict(contents.stored_ties)
    if (aliases or stored_twice) and ties == "error":
        shared = {**aliases, **stored_twice}
        texts = [f"{name_text(alias)} = {name_text(kept)}" for alias, kept in shared.items()]
        raise UnsupportedContentError(f"tensors share memory: {', '.join(texts)}")
    if ties == "once":
        items = [item for item in items if item.name not in stored_twice]
        aliases, stored_twice = {**aliases, **stored_twice}, {}
    if ties == "twice":
        stored = {item.name: item for item in items}
        items += [stored[kept]._replace(name=alias) for alias, kept in aliases.items()]
        aliases, stored_twice = {}, {**aliases, **stored_twice}
    names: list[Name] = [item.name for item in items]
    if format == "safetensors":
        flat = _flat_names(items, flatten)
        entries = [HeaderEntry(name, item.dtype, item.shape) for name, item in zip(flat, items)]
        check_entries(entries)
        order = range(len(items)) if keep_order else canonical_order(entries)
        items, names = [items[i] for i in order], [flat[i] for i in order]
        aliases = {_flat(alias): _flat(kept) for alias, kept in aliases.items()}
    runs = shards.split([item.nbytes for item in items], limit)
    return Plan(format, items, names, runs, contents.metadata, aliases, stored_twice)


def _flat_names(items: Sequence[Content], flatten: bool) -> list[str]:
    """One text per tensor, without the dot in front that names tensors of a root module."""
    nested = [name_text(item.name) for item in items if not isinstance(item.name, str)]
    if nested and not flatten:
        raise UnsupportedContentError(
            f".safetensors holds no nested names: {', '.join(nested[:10])}{' …' if len(nested) > 10 else ''}; "
            "flatten joins their steps with dots"
        )
    names = [_flat(item.name) for item in items]
    seen: set[str] = set()
    double: set[str] = set()
    for name in names:
        (double if name in seen else seen).add(name)
    if double:
        raise UnsupportedContentError(f"several tensors would be named {', '.join(map(repr, sorted(double)))}")
    return names


def _flat(name: Name) -> str:
    text = name if isinstance(name, str) else ".".join(map(str, name))
    return text[1:] if text.startswith(".") and len(text) > 1 else text


# --- writing --------------------------------------------------------------------------------------------------------


class _Run:
    """One conversion."""

    def __init__(
        self,
        contents: Contents,
        plan: Plan,
        encryption: Any,
        hashes: frozenset[str],
        check: bool,
        stream_options: Optional[Mapping[str, Any]],
        report: Any,
    ) -> None:
        self._contents, self._plan, self._check = contents, plan, check
        self._encryption, self._hashes = encryption, hashes
        self._stream_options, self._report = stream_options, report
        self._done = 0

    def write(self, names: Sequence[Any]) -> None:
        if len(names) == 1:
            self._write_one(names[0], self._plan.shards[0], with_ties=True)
            return
        with TogetherOrNot(names, self._stream_options) as places:
            for place, run in zip(places, self._plan.shards):
                self._write_one(place, run, with_ties=False)
            files = {
                name_text(self._plan.names[i]): os.path.basename(name)
                for name, run in zip(names, self._plan.shards)
                for i in run
            }
            for alias, kept in self._plan.ties.items():
                files[name_text(alias)] = files[name_text(kept)]
            metadata = {**self._plan.metadata, **self._aliases()}
            index = shards.index_bytes(files, self._plan.nbytes, metadata)
            places.finish(shards.index_name(shards.name_of_shard(names[0])), index)

    def _write_one(self, target: Any, run: range, with_ties: bool) -> None:
        items = self._plan.items[run.start : run.stop]
        with self._open(target, run, with_ties) as opened:
            crcs = self._copy(items, opened)
        if self._check:
            self._check_target(target, items, crcs)

    def _open(self, target: Any, run: range, with_ties: bool) -> Target:
        plan = self._plan
        items = plan.items[run.start : run.stop]
        if plan.format == "tensors":
            return TensorsTarget(
                target,
                items,
                encryption=self._encryption,
                hashes=self._hashes,
                metadata=plan.metadata if with_ties else {},
                ties=plan.ties if with_ties else {},
                stored_ties=plan.stored_ties if with_ties else {},
                stream_options=self._stream_options,
            )
        # Shards carry what transformers insists on; one file carries what the source had, and aliases beside it.
        metadata = {**plan.metadata, **self._aliases()} or None if with_ties else {"format": "pt"}
        names = [name_text(name) for name in plan.names[run.start : run.stop]]
        return SafetensorsTarget(target, items, names, metadata, self._stream_options)

    def _aliases(self) -> dict[str, str]:
        """As ``safetensors.torch.save_model`` records them; what the source recorded already stays in its place."""
        return {name_text(alias): name_text(kept) for alias, kept in self._plan.ties.items()}

    def _copy(self, items: Sequence[Content], target: Target) -> list[int]:
        """Writes all payloads of one file; the CRC-32 of each, where they are wanted."""
        crcs: list[int] = []
        for batch, tensors in self._read_ahead(items):
            if self._check:
                crcs += _C.crc32_of([_memory(tensor) for tensor in tensors])
            target.write(tensors, None)
            self._note(sum(item.nbytes for item in batch))
        return crcs

    def _read_ahead(self, items: Sequence[Content]) -> Iterator[tuple[list[Content], list[torch.Tensor]]]:
        """Batch by batch; the next one is read while the caller has the one before."""

        def read(batch: list[Content]) -> tuple[list[Content], list[torch.Tensor]]:
            return batch, [tensor.to(item.dtype) for item, tensor in zip(batch, self._contents.read(batch))]

        with concurrent.futures.ThreadPoolExecutor(1, "tensorizer-convert") as reader:
            ahead: Optional[concurrent.futures.Future[tuple[list[Content], list[torch.Tensor]]]] = None
            for batch in batches(items):
                following = reader.submit(read, batch)
                if ahead is not None:
                    yield ahead.result()
                ahead = following
            if ahead is not None:
                yield ahead.result()

    def _check_target(self, target: str, items: Sequence[Content], crcs: Sequence[int]) -> None:
        """Reads the target back."""
        decryption = None if self._encryption is None else _decryption_of(self._encryption)
        with OpenedFile(target, encryption=decryption, stream_options=self._stream_options) as file:
            if len(file.names) != len(items):
                raise HashMismatchError(f"{file.label}: wanted {len(items)} tensors, found {len(file.names)}")
            for entries in file.batches(range(len(items))):
                tensors = file.read(entries, verify=file.index.stores_hashes)
                found = _C.crc32_of([_memory(tensor) for tensor in tensors])
                for i, crc in zip(entries, found):
                    if crc != crcs[i] and not items[i].without_data:
                        raise HashMismatchError(
                            f"{file.label}: tensor {name_text(items[i].name)!r}: "
                            f"wanted CRC-32 {crcs[i]:08x}, as read from the source, found {crc:08x}"
                        )
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
