"""From one format of tensor files to another, encrypted or decrypted on the way, in bounded memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch

from tensorizer import _C
from tensorizer._files.contents import Content, Contents, FileContents, StateDictContents, batches, cast
from tensorizer._files.copy import check_target
from tensorizer._files.opened import OpenedFile, name_text
from tensorizer._files.pickled import is_pickled, read_pickled
from tensorizer._files.targets import SafetensorsTarget, Target, TensorsTarget
from tensorizer._format.safetensors import HeaderEntry, canonical_order, check_entries
from tensorizer.errors import HashMismatchError, UnsupportedContentError
from tensorizer.progress import ProgressArgument, progress_reporter

__all__ = ["ConversionReport", "convert"]

FORMATS = ("tensors", "safetensors")
_HASHES = frozenset({"crc32", "sha256"})


@dataclass(frozen=True)
class ConversionReport:
    """What was converted."""

    source: str
    target: str
    format: str
    """Of the target."""
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
    encryption: Any = None,
    decryption: Any = None,
    check: bool = True,
    keep_order: bool = False,
    flatten: bool = False,
    key: Optional[str] = None,
    skip_non_tensors: bool = False,
    force: bool = True,
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
        encryption: Encrypts the target (``.tensors`` only).
        decryption: The key of an encrypted source.
        check: Reads the target back and compares every payload with what was read from the source.
        keep_order: Keeps the order of the source in a ``.safetensors`` target, instead of that of the reference's
            writer: a file that came from there is the same again, byte for byte.
        flatten: Joins the steps of nested names with dots, for a ``.safetensors`` target.
        key: Where the state dict is in a pickled file, in dots.
        skip_non_tensors: Leaves out what is no tensor in a pickled file.
        force: Replaces a target that exists.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening URIs.

    Returns:
        What was done.

    Raises:
        UnsupportedContentError: The target's format cannot hold something; nothing was written.
        TargetExistsError: The target exists, without `force`.
        HashMismatchError: The source does not agree with its digests, or the target with what was written.
        CryptographyError: A key is missing, wrong or not wanted.
        FormatError: The source is no file of tensors.
        OSError: It cannot be read or written.
    """
    chosen = _format_of(target, format)
    if chosen == "safetensors" and encryption is not None:
        raise UnsupportedContentError("a .safetensors file cannot be encrypted")
    check_target(target, force, stream_options)
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        contents, skipped = _open_contents(stack, source, decryption, key, skip_non_tensors, stream_options)
        items = [cast(item, dtype) for item in contents.items]
        total = sum(item.nbytes for item in items)
        if chosen == "safetensors":
            names = _flat_names(items, flatten)
            order = range(len(items)) if keep_order else _canonical(items, names)
            items, names = [items[i] for i in order], [names[i] for i in order]
            metadata = _safetensors_metadata(contents)
            opened: Target = SafetensorsTarget(target, items, names, metadata, stream_options)
        else:
            opened = TensorsTarget(target, items, encryption=encryption, hashes=_HASHES, stream_options=stream_options)
        with progress_reporter(progress, total * (2 if check else 1), "converting") as report:
            with opened:
                crcs = _copy(contents, items, opened, check, report)
            if check:
                _check(target, items, crcs, encryption, stream_options, report, total)
        return ConversionReport(
            source=contents.label,
            target=str(target),
            format=chosen,
            tensors=len(items),
            nbytes=total,
            ties=dict(contents.ties),
            skipped=tuple(skipped),
            checked=check,
            seconds=time.monotonic() - begin,
        )


def _format_of(target: Any, format: Optional[str]) -> str:
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
) -> tuple[Union[FileContents, StateDictContents], list[str]]:
    if is_pickled(source):
        tensors, skipped = read_pickled(source, key, skip_non_tensors)
        return StateDictContents(os.fspath(source), tensors), skipped
    file = stack.enter_context(OpenedFile(source, encryption=decryption, stream_options=stream_options))
    return FileContents(file, verify=True), []


def _copy(contents: Contents, items: Sequence[Content], target: Target, check: bool, report: Any) -> list[int]:
    """Writes all payloads; the CRC-32 of each, where they are wanted."""
    crcs: list[int] = []
    for tensors in _read_ahead(contents, items):
        if check:
            crcs += _C.crc32_of([(t.data_ptr() if t.numel() else 0, t.numel() * t.element_size()) for t in tensors])
        target.write(tensors, report)
    return crcs


def _read_ahead(contents: Contents, items: Sequence[Content]) -> Iterator[list[torch.Tensor]]:
    """The tensors of each batch; the next one is read while the caller has the one before."""

    def read(batch: list[Content]) -> list[torch.Tensor]:
        return [tensor.to(item.dtype) for item, tensor in zip(batch, contents.read(batch))]

    with concurrent.futures.ThreadPoolExecutor(1, "tensorizer-convert") as reader:
        ahead: Optional[concurrent.futures.Future[list[torch.Tensor]]] = None
        for batch in batches(items):
            following = reader.submit(read, batch)
            if ahead is not None:
                yield ahead.result()
            ahead = following
        if ahead is not None:
            yield ahead.result()


def _check(
    target: Any,
    items: Sequence[Content],
    crcs: Sequence[int],
    encryption: Any,
    stream_options: Optional[Mapping[str, Any]],
    report: Any,
    before: int,
) -> None:
    """Reads the target back."""
    decryption = None if encryption is None else _decryption_of(encryption)
    with OpenedFile(target, encryption=decryption, stream_options=stream_options) as file:
        if len(file.names) != len(items):
            raise HashMismatchError(f"{file.label}: wanted {len(items)} tensors, found {len(file.names)}")
        done = before
        for entries in file.batches(range(len(items))):
            tensors = file.read(entries, verify=True)
            found = _C.crc32_of([(t.data_ptr() if t.numel() else 0, t.numel() * t.element_size()) for t in tensors])
            for i, crc in zip(entries, found):
                if crc != crcs[i] and not items[i].without_data:
                    raise HashMismatchError(
                        f"{file.label}: tensor {name_text(items[i].name)!r}: "
                        f"wanted CRC-32 {crcs[i]:08x}, as read from the source, found {crc:08x}"
                    )
            done += sum(map(file.index.data_nbytes, entries))
            if report is not None:
                report(min(done, 2 * before))


def _decryption_of(encryption: Any) -> Any:
    from tensorizer.encryption import DecryptionParams

    return DecryptionParams.from_key(encryption.key)


def _flat_names(items: Sequence[Content], flatten: bool) -> list[str]:
    """One text per tensor, without the dot in front that names tensors of a root module."""
    nested = [name_text(item.name) for item in items if not isinstance(item.name, str)]
    if nested and not flatten:
        raise UnsupportedContentError(
            f".safetensors holds no nested names: {', '.join(nested[:10])}{' …' if len(nested) > 10 else ''}; "
            "flatten joins their steps with dots"
        )
    names = [_without_dot(item.name) if isinstance(item.name, str) else ".".join(map(str, item.name)) for item in items]
    seen: set[str] = set()
    double = sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if double:
        raise UnsupportedContentError(f"several tensors would be named {', '.join(map(repr, double))}")
    return names


def _without_dot(name: str) -> str:
    return name[1:] if name.startswith(".") and len(name) > 1 else name


def _canonical(items: Sequence[Content], names: Sequence[str]) -> list[int]:
    entries = [HeaderEntry(name, item.dtype, item.shape) for name, item in zip(names, items)]
    check_entries(entries)
    return canonical_order(entries)


def _safetensors_metadata(contents: Contents) -> Optional[dict[str, str]]:
    """The source's metadata, and each alias as ``safetensors.torch.save_model`` records it."""
    merged = dict(contents.metadata)
    for alias, kept in contents.ties.items():
        merged.setdefault(_without_dot(alias), _without_dot(kept))
    return merged or None
