"""What is written: the tensors of a file, a state dict or a module, in one order, a batch at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from tensorizer import _C
from tensorizer._format import extra_state, foreign
from tensorizer._format.dtypes import stored_for_tensor
from tensorizer._format.names import Path, path_of
from tensorizer._format.payloads import stored_dtype
from tensorizer._io.model_files import is_pickled_index, is_pickled_name, only_pickled
from tensorizer._io.shards import MAX_INDEX_NBYTES, parse_index
from tensorizer._io.sources import HEAD_NBYTES, begins_as_tensors, nothing, open_source
from tensorizer._io.uri import local_path
from tensorizer._load.compare import shown
from tensorizer._load.digests import Verification, check_digest, missing_digest, name_of
from tensorizer._load.open_file import OpenFile
from tensorizer._save.records import Record, extra_states, place_of, record_of, ties_of, walk_module
from tensorizer._save.session import check_metadata
from tensorizer._system.archives import check_zip
from tensorizer._system.redaction import torch_refusal
from tensorizer.errors import FormatError, StreamNotFoundError, UnsupportedContentError

logger = logging.getLogger("tensorizer.serialization")


class Contents(NamedTuple):
    """A source of tensors."""

    records: Sequence[Record]
    metadata: Optional[Mapping[str, str]]
    ties: Mapping[Path, Path]
    """From each name that shares its tensor with another one to that, whose record it may do without."""
    read: Callable[[Sequence[Record]], list[torch.Tensor]]
    """The tensors of some of the records, of the stored dtype; those of files are in host memory, in C order."""
    finish: Callable[[], None] = nothing
    """Called when all have been read, before what was written appears. What it raises ends the work."""


def contents_of_file(file: OpenFile, verify: bool) -> Contents:
    """The tensors of a file of tensors.

    Raises:
        CryptographyError: The file is encrypted and there is no key.
    """

    def record(i: int) -> Record:
        without_data = file.index.data_nbytes(i) == 0 and file.index.loaded_nbytes(i) > 0
        stored, shape, module_idx = file.described(i)
        return Record(
            path_of(file.names[i]), file.dtype_of(i, stored), shape, file.type(i), module_idx, without_data, i
        )

    def read(records: Sequence[Record]) -> list[torch.Tensor]:
        entries = sorted({record.source for record in records})  # names of one tensor that are stored apart have one
        tensors = dict(zip(entries, file.read(entries, verify)))
        return [tensors[record.source] for record in records]

    file.announce(file.stored)
    metadata = file.metadata()
    ties = {path_of(alias): path_of(kept) for alias, kept in file.ties().items()}
    if file.index.stores_hashes:
        file.read_headers(file.stored)
    return Contents([record(i) for i in file.stored], metadata, ties, read, file.check_files)


def _in_memory(records: Sequence[Record], metadata: Optional[Mapping[str, str]], ties: Mapping[Path, Path]) -> Contents:
    """Tensors in memory, or mapped from a pickled file."""
    return Contents(records, metadata, ties, lambda chosen: [record.source for record in chosen])


def check_state_dict(tensors: Any) -> Mapping[str, torch.Tensor]:
    """The mapping itself.

    Raises:
        ValueError: No mapping of names to tensors, or tensors that no file can hold (sparse, quantised), by name.
    """
    if not isinstance(tensors, Mapping):
        raise ValueError(f"tensors: expected a mapping of names to tensors, got {type(tensors).__name__}")
    wrong = [
        f"{name!r} ({type(tensor).__name__})"
        for name, tensor in tensors.items()
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor)
    ]
    if wrong:
        raise ValueError(f"tensors: expected names and tensors, got {', '.join(wrong)}")
    refused = not_storable(tensors)
    if refused:
        raise ValueError("; ".join(refused))
    return tensors


def not_storable(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """What is wrong with those that no file can hold."""
    refused = []
    for name, tensor in tensors.items():
        try:
            stored_dtype(name, tensor)
        except (NotImplementedError, ValueError) as error:
            refused.append(str(error))
            continue
        if tensor.is_meta:
            refused.append(f"tensor {name!r} is on the meta device and has no data")
    return refused


def state_dict_contents(tensors: Mapping[str, torch.Tensor], metadata: Optional[Mapping[str, str]]) -> Contents:
    """A state dict that was checked. Of the names of one tensor the alphabetically first one has the data; one warning
    names tensors that overlap without being the same."""
    texts = _texts(metadata)
    contents = contents_of_tensors(tensors, texts)
    overlapping = _overlapping({name: tensor for name, tensor in tensors.items() if (name,) not in contents.ties})
    if overlapping:
        warnings.warn(
            f"tensors that share parts of their memory are stored apart, and will share none when loaded: "
            f"{', '.join(overlapping)}",
            stacklevel=3,
        )
    return contents


def _texts(metadata: Optional[Mapping[str, str]]) -> Optional[dict[str, str]]:
    try:
        return None if metadata is None else check_metadata(metadata)
    except TypeError as error:
        raise UnsupportedContentError(str(error)) from None


def contents_of_tensors(tensors: Mapping[str, torch.Tensor], metadata: Optional[Mapping[str, str]] = None) -> Contents:
    """Named tensors, in their order; ties go to the alphabetically first name."""
    records = [Record.of_tensor((name,), one, stored_for_tensor(one.dtype)) for name, one in tensors.items()]
    ties = ties_of(sorted(records, key=lambda record: record.path))
    in_order = {record.path: ties[record.path] for record in records if record.path in ties}
    return _in_memory(records, metadata, in_order)


def module_contents(
    model: torch.nn.Module, metadata: Optional[Mapping[str, str]], include_non_persistent_buffers: bool
) -> Contents:
    """What the modules of a model hold; of a model whose class or hooks make something else of its state dict, that
    state dict. Both with the extra state.

    Raises:
        ValueError: Tensors that no file can hold, or without data, by name.
        UnsupportedContentError: Extra state that the format cannot hold.
    """
    state = state_of(model, include_non_persistent_buffers)
    paths = {extra_state.state_name(path): path for path in extra_state.modules_of(model)}
    tensors = {name: v for name, v in state.items() if name not in paths or isinstance(v, torch.Tensor)}
    check_state_dict(tensors)
    of_modules = _is_of_modules(model, tensors)
    states = {paths[name]: value for name, value in state.items() if name not in tensors}
    try:
        text = extra_state.to_text(extra_state.pack(extra_states(model) if of_modules else states))
    except TypeError as error:
        raise UnsupportedContentError(str(error)) from None
    texts = {**(_texts(metadata) or {}), **({extra_state.KEY: text} if text else {})}
    if not of_modules:
        return state_dict_contents(tensors, texts)
    records = [record_of(held) for held in walk_module(model, include_non_persistent_buffers, under_all_names=True)]
    return _in_memory(records, texts, ties_of(records))


def state_of(model: torch.nn.Module, include_non_persistent_buffers: bool = False) -> dict[str, Any]:
    """The state dict of a model, without extra states that are ``None``."""
    held = walk_module(model, True, under_all_names=True) if include_non_persistent_buffers else ()
    buffers = {shown(one.name): one.tensor for one in held if one.is_buffer}
    return {**buffers, **{name: value for name, value in model.state_dict().items() if value is not None}}


def _is_of_modules(model: torch.nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether a state dict is what the modules hold, and not something that a class or hook has made of it."""
    held, persistent = {}, set()
    for one in walk_module(model, True, under_all_names=True):
        held[shown(one.name)] = one.tensor
        if not (one.is_buffer and one.attribute in one.module._non_persistent_buffers_set):
            persistent.add(shown(one.name))
    extra = {extra_state.state_name(path) for path in extra_state.modules_of(model)}
    tensors = {name: value for name, value in state.items() if name not in extra}
    return persistent <= tensors.keys() <= held.keys() and all(
        isinstance(value, torch.Tensor) and place_of(value) == place_of(held[name]) for name, value in tensors.items()
    )


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors whose areas of one storage overlap, in the order of their addresses."""
    areas: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()  # some wrappers give the tensor that they stand for
        address = 0 if tensor.numel() == 0 else tensor.untyped_storage().data_ptr()
        if address == 0:
            continue
        begin = int(tensor.storage_offset()) * tensor.element_size()
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) * tensor.element_size()
        areas.setdefault((tensor.device, address), []).append((begin, begin + int(last) + tensor.element_size(), name))
    found: list[str] = []
    for runs in areas.values():
        runs.sort()
        end, owner = -1, ""
        for begin, stop, name in runs:
            if begin < end:
                found += [repr(other) for other in (owner, name) if repr(other) not in found]
            if stop > end:
                end, owner = stop, name
    return found


# --- state dicts in .pt and .bin files, read by torch without running what is in them -------------------------------

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
# Where training scripts keep the state dict of a checkpoint, in the order in which they are tried.
_USUAL_KEYS = ("state_dict", "model_state_dict", "model", "module")
_SAFE_TORCH = (2, 6)  # before, weights_only=True could be got around (CVE-2025-32434)


def pickled_files(source: Any) -> list[str]:
    """The files that a local path stands for, where they hold what ``torch.save`` writes; else none.

    Args:
        source: A file, an index of ``.bin`` files, or a folder with either and no other model file.

    Raises:
        FormatError: The index is damaged, or names files outside of its folder.
        StreamNotFoundError: A file that the index names is missing.
    """
    path = local_path(source) if isinstance(source, (str, os.PathLike)) else None
    if path is None:
        return []
    if os.path.isdir(path):
        found = only_pickled(os.listdir(path))
        return [] if found is None else pickled_files(os.path.join(path, found))
    if is_pickled_index(path) and os.path.isfile(path):
        return files_of_index(path)
    return [path] if _is_pickle(path) else []


def files_of_index(path: str) -> list[str]:
    """The files that a local index of pickled ones names. Raises as :func:`pickled_files`."""
    with open(path, "rb") as file:
        text = file.read(MAX_INDEX_NBYTES + 1)
    weight_map, _ = parse_index(path, text)
    files = list(dict.fromkeys(weight_map.values()))
    for name in files:
        if os.path.basename(name) != name or not is_pickled_name(name):
            raise FormatError(f"{path}: expected the name of a file in its folder, got {name!r:.200}")
        if not os.path.exists(os.path.join(os.path.dirname(path), name)):
            raise StreamNotFoundError(f"{path}: its shard {name!r:.200} is missing")
    return [os.path.join(os.path.dirname(path), name) for name in files]


def _is_pickle(source: str) -> bool:
    if not os.path.isfile(source):  # opening a pipe would wait for its writer
        return False
    try:
        head = _head(source)
    except OSError:
        return False
    # The size of a header of .safetensors may begin with the byte that pickles begin with.
    return head.startswith(_ZIP) or (head.startswith(_PICKLE) and not begins_as_tensors(head))


def _head(path: str, nbytes: int = HEAD_NBYTES) -> bytes:
    with open(path, "rb") as file:
        return file.read(nbytes)


def check_pickled(files: Sequence[str], verify: Verification) -> None:
    """Compares pickled files with the digests that they have to have, before anything in them is looked at.

    Raises:
        HashMismatchError: One of them is another file.
        MissingHashError: Nothing states the digest of one, or digests in the file are wanted, which a pickle has not.
    """
    for path in files if verify.reads else ():
        with contextlib.closing(open_source(path)) as opened:
            if verify.files is None:
                raise missing_digest(opened.name, "a pickle holds no digests")
            expected = verify.files.of(name_of(opened), opened)
            check_digest(opened.source, expected, _C.sha256_of(opened.source).hex(), verify.files.origin)


def read_pickled(files: Sequence[str], skip_non_tensors: bool = False) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a pickled state dict.

    Args:
        files: Local files, which are taken together. The state dict is the whole content of a file, or under the first
            of the keys where training scripts keep it.
        skip_non_tensors: Leaves out what is no tensor, instead of refusing it.

    Returns:
        The tensors by name, and the names that were left out. Strings among tensors, as quantised checkpoints hold
        them, are always left out.

    Raises:
        FormatError: Not readable without running code from it, or no state dict in it.
        UnsupportedContentError: Leaves that are no tensors, or tensors that no file can hold (sparse, quantised).
        ImportError: A torch in which such files cannot be read safely.
    """
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is None or (int(version[1]), int(version[2])) < _SAFE_TORCH:
        raise ImportError(
            f"reading .pt and .bin files safely needs torch 2.6 or later (CVE-2025-32434), this is {torch.__version__}"
        )
    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []
    for path in files:
        found, skipped = _read_one(path, skip_non_tensors)
        twice = tensors.keys() & found.keys()
        if twice:
            raise FormatError(f"{path}: tensor {min(twice)!r:.200} is in another file of the model, too")
        tensors.update(found)
        others += skipped
    return tensors, others


def _read_one(path: str, skip_non_tensors: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    is_zip = _head(path).startswith(_ZIP)
    if is_zip:
        _check_archive(path)
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        except RuntimeError as error:
            if not is_zip or "unable to mmap" not in str(error):
                raise
            content = torch.load(path, map_location="cpu", weights_only=True)  # its file system cannot map
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of damaged bytes pickle makes whatever its instructions come upon
        told = FormatError(f"{path}: cannot be read as plain weights: {torch_refusal(error)}")
        foreign.tell_foreign(told, _head(path, foreign.HEAD_NBYTES))
        raise told from None
    found = _state_dict(content)
    if found is None:
        raise FormatError(f"{path}: no state dict as a whole or under {', '.join(_USUAL_KEYS)}")
    tensors = {name: leaf for name, leaf in found.items() if isinstance(leaf, torch.Tensor)}
    others = [name for name, leaf in found.items() if not isinstance(leaf, torch.Tensor)]
    refused = [name for name in others if not isinstance(found[name], str)]
    if refused and not skip_non_tensors:
        raise UnsupportedContentError(
            f"{path}: no tensors: {', '.join(map(repr, refused))}; they can be left out (skip_non_tensors)"
        )
    for name in refused:
        if _holds_tensors(found[name]):  # perhaps the model, beside a counter of steps that is a tensor
            logger.warning("%s: %r is left out, although it holds tensors", path, name)
    unfit = not_storable(tensors)
    if unfit:
        raise UnsupportedContentError(f"{path}: {'; '.join(unfit)}")
    return tensors, others


def _check_archive(path: str) -> None:
    """Refuses one that would unpack to far more than its size; torch packs nothing."""
    try:
        with zipfile.ZipFile(path) as archive:
            check_zip(archive, path, os.path.getsize(path))
    except (zipfile.BadZipFile, NotImplementedError):
        pass  # torch says what is wrong


def _state_dict(content: Any) -> Optional[Mapping[str, Any]]:
    if _holds_tensors(content):
        return content  # type: ignore[no-any-return]
    for usual in _USUAL_KEYS:
        inner = content.get(usual) if isinstance(content, Mapping) else None
        if _holds_tensors(inner):
            return inner
    return None


def _holds_tensors(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and all(isinstance(name, str) for name in content)
        and any(isinstance(leaf, torch.Tensor) for leaf in content.values())
    )
