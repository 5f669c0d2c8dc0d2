"""One file for the ranks of a group: :func:`load`, :func:`load_sharded`."""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Optional, Union

import torch

from tensorizer._format.names import Name, listed
from tensorizer._io.access import Access, Trust
from tensorizer._io.sources import SourceArgument
from tensorizer._load.parts import get_slice, get_slices
from tensorizer._load.reader import missing_hashes
from tensorizer._load.report import LoadReport
from tensorizer._system.devices import empty
from tensorizer.distributed._boxes import Box, slices_of
from tensorizer.distributed._exchange import Part, gather_into, whole
from tensorizer.distributed._fill import ShardedFill
from tensorizer.distributed._ranks import GroupFile, Ranks, caught, open_for_all
from tensorizer.encryption import DecryptionParams
from tensorizer.errors import HashMismatchError
from tensorizer.signing import PublicKeyArgument

_EXCHANGES = ("auto", "none", "all_gather")


class LoadedDict(dict[Name, torch.Tensor]):
    """Tensors by name, and how they came."""

    report: LoadReport


def load(
    file: SourceArgument,
    group: Optional[Any] = None,
    device: Optional[Union[torch.device, str, int]] = None,
    exchange: str = "auto",
    *,
    dtype: Optional[torch.dtype] = None,
    verify_hash: bool = False,
    encryption: Optional[DecryptionParams] = None,
    stream_options: Optional[Mapping[str, Any]] = None,
    public_key: PublicKeyArgument = None,
    require_authenticated: Optional[bool] = None,
) -> LoadedDict:
    """Loads all tensors of a file on every rank of a group. Collective.

    Args:
        file: As for :class:`tensorizer.TensorDeserializer`; every rank passes the same content.
        group: A process group; ``None`` is the default one, or only this process if there is none.
        device: Where the tensors go; ``None`` is CUDA if available, else the CPU.
        exchange: ``"all_gather"``: every rank reads 1/N of the bytes and gathers the rest from the others, in windows
            of N times 16 MiB. ``"none"``: every rank reads all. ``"auto"``: ``"none"`` if the file is in this machine's
            memory and goes to the CPU, or if there is only one rank; otherwise ``"all_gather"``.
        dtype: As for :class:`tensorizer.TensorDeserializer`; the same on every rank.
        verify_hash: Compares the stored hashes with what has arrived; the ranks share this work, so all have to ask for
            it.
        encryption: The key of an encrypted file.
        stream_options: Keywords for opening a URI.
        public_key: Keys, of which one must have signed the file, as for :class:`tensorizer.TensorDeserializer`. Every
            rank then reads whole tensors of a plain file.
        require_authenticated: Whether the key or a signature must vouch for the file, likewise.

    Returns:
        A dict of plain tensors; its attribute ``report`` is a :class:`LoadReport`.

    Raises:
        StreamError: The ranks see different contents.
        Exception: As for :class:`tensorizer.TensorDeserializer`. If one rank fails, all raise an error of the
            same class, which names the rank.
    """
    begin = time.perf_counter()
    ranks = Ranks(group)

    def access() -> Access:
        _check_exchange(exchange)
        return Access.to_read(encryption, stream_options, trust=Trust.of(public_key, require_authenticated))

    with open_for_all(ranks, file, device, dtype, access) as opened:
        chosen = opened.choose(exchange, verify_hash, 0, [], shared=True)
        result = LoadedDict()
        firsts: dict[int, Name] = {}  # entries, and the first name of each
        for name in opened.file.numbers:
            firsts.setdefault(opened.entry(name), name)
        received = 0
        parts: dict[Name, Part] = {}
        with ranks.together():
            if chosen == "none":
                result.update(get_slices(opened.file, dict.fromkeys(firsts.values(), ...), verify_hash=False))
            else:
                for name in firsts.values():
                    stored = get_slice(opened.file, name)
                    result[name] = empty(stored.shape, dtype=stored.dtype, device=opened.device)
                    parts[name] = Part(whole(stored.shape), result[name])
        if chosen != "none":
            received = _fill(opened, chosen, parts)
        if verify_hash:
            _verify(opened, result, dtype)
        further = [name for name in opened.file.numbers if name not in result]
        result.update({name: result[firsts[opened.entry(name)]] for name in further})
        names = tuple(name if isinstance(name, str) else ".".join(map(str, name)) for name in result)
        nbytes = sum(result[name].nbytes for name in firsts.values())
        report = LoadReport("", opened.file.source_name, loaded=names, nbytes=nbytes)
        result.report = opened.report(report, chosen, received, begin)
    return result


def load_sharded(
    target: Union[torch.nn.Module, MutableMapping[str, Any]],
    file: SourceArgument,
    *,
    mesh: Optional[Any] = None,
    group: Optional[Any] = None,
    plan: Optional[Mapping[str, Any]] = None,
    exchange: str = "auto",
    device: Optional[Union[torch.device, str, int]] = None,
    strict: bool = True,
    verify_hash: bool = False,
    encryption: Optional[DecryptionParams] = None,
    stream_options: Optional[Mapping[str, Any]] = None,
    public_key: PublicKeyArgument = None,
    require_authenticated: Optional[bool] = None,
) -> LoadReport:
    """Fills a module or state dict with this rank's part of a file. Collective.

    The placements of the target's DTensors (FSDP2, tensor parallelism) decide what a rank gets. Other tensors follow
    `plan`; tensors that it does not match are loaded whole. Tensors are split as by ``torch.chunk``, as torch shards.

    Args:
        target: A module: tensors on the meta device are replaced, others are filled in place. Or a mapping of names:
            DTensors are filled in place; other values are replaced, by DTensors if you pass a mesh, otherwise by this
            rank's part as a plain tensor. After an error, tensors that were being filled hold arbitrary values.
        file: As for :class:`tensorizer.TensorDeserializer`; every rank passes the same content.
        mesh: A ``DeviceMesh`` for tensors that `plan` places.
        group: The ranks that call this; ``None`` is that of a mesh of one dimension, otherwise the default group.
        plan: From patterns of names (``"*.q_proj.weight"``; the first that matches counts) to a placement, or a
            sequence of placements, one for each dimension of the mesh. Without a mesh, the group counts as a mesh of
            one dimension.
        exchange: ``"none"``: every rank reads its part. ``"all_gather"``: every rank reads 1/N of the bytes that any
            rank needs, gathers the rest, and takes its part. ``"auto"``: ``"all_gather"`` if several ranks need the
            same bytes of a file that is not in memory, otherwise ``"none"``.
        device: Where new tensors go; ``None`` is the device of the mesh, or the default of
            :class:`tensorizer.TensorDeserializer`.
        strict: Raises if names are missing or, for modules, unexpected. A name is not missing if the file has its
            tensor under another name, or if state dicts leave its buffer out; such a buffer is filled if the file has
            it. Extra state goes to the modules that accept it; it is missing if a module has some and the file none,
            and unexpected if the module accepts none. In a mapping it is an ordinary name, whose value is replaced,
            whatever its shape.
        verify_hash: Only for loads in which every rank gets whole tensors, in the dtypes of the file. Extra state that
            a file holds apart from its tensors has no hash.
        encryption: The key of an encrypted file.
        stream_options: Keywords for opening a URI.
        public_key: Keys, of which one must have signed the file, as for :class:`tensorizer.TensorDeserializer`. Every
            rank then reads whole tensors of a plain file.
        require_authenticated: Whether the key or a signature must vouch for the file, likewise.

    Raises:
        LoadError: Shapes differ; with `strict`, names are missing or unexpected, or the file holds different contents
            for names of one tensor (otherwise the first name counts).
        ValueError: A placement that is no box (``Partial``); `verify_hash` with a part of a tensor or another dtype,
            for which the file has no hash.
        StreamError: The ranks see different contents.
        Exception: As for :func:`load`; if one rank fails, all raise.
    """
    begin = time.perf_counter()
    if mesh is not None:
        device = mesh.device_type if device is None else device
        group = mesh.get_group() if group is None and mesh.ndim == 1 else group
    ranks = Ranks(group)

    def access() -> Access:
        _check_exchange(exchange)
        return Access.to_read(encryption, stream_options, trust=Trust.of(public_key, require_authenticated))

    with open_for_all(ranks, file, device, None, access) as opened:
        filled, wanted = None, 0
        with caught() as errors:
            filled = ShardedFill(target, opened, mesh, plan or {}, ranks, strict)
            wanted = sum(part.into.numel() for part in filled.parts.values())
            if verify_hash:
                filled.refuse_parts()
        chosen = opened.choose(exchange, verify_hash, wanted, errors, shared=False)
        assert filled is not None
        received = _fill(opened, chosen, filled.parts)
        if verify_hash:
            _verify(opened, {name: part.into for name, part in filled.parts.items()}, None)
        with caught() as errors:
            filled.finish()
        return opened.report(filled.report, chosen, received, begin, errors)


def _check_exchange(exchange: str) -> None:
    if exchange not in _EXCHANGES:
        raise ValueError(f"exchange: expected one of {', '.join(_EXCHANGES)}, got {exchange!r}")


def _fill(opened: GroupFile, exchange: str, parts: dict[Name, Part]) -> int:
    """Collective: brings the tensors to where they go; bytes that came from other ranks."""
    file, ranks = opened.file, opened.ranks
    index = file.index
    empty = [name for name in parts if index.data_nbytes(opened.entry(name)) == 0]
    with caught() as errors, torch.no_grad():
        for name in empty:
            parts[name].into.zero_()
        if exchange == "none":
            boxes = {n: slices_of(part.box) for n, part in parts.items() if part.into.numel()}
            get_slices(file, boxes, out={name: parts[name].into for name in boxes}, verify_hash=False)
    if exchange == "none":
        ranks.agree(errors)
        return 0
    return _gather(opened, parts, errors)


def _gather(opened: GroupFile, parts: Mapping[Name, Part], errors: Sequence[BaseException]) -> int:
    """Collective: every rank reads its share of what anybody wants; bytes that came from other ranks."""
    file, ranks = opened.file, opened.ranks
    index = file.index
    # Names of one tensor may want one part of it, or several.
    parts_of: dict[int, dict[Box, Part]] = {}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, part in parts.items():
        first = parts_of.setdefault(opened.entry(name), {}).setdefault(part.box, part)
        if first is not part:
            copies.append((part.into, first.into))
    counts = {entry: len(of_entry) for entry, of_entry in parts_of.items() if index.data_nbytes(entry) > 0}
    most: collections.Counter[int] = collections.Counter()
    for of_rank in ranks.agree(errors, counts):
        most |= collections.Counter(of_rank)
    received = 0
    with torch.no_grad():
        for turn in range(max(most.values(), default=1)):
            names = [file.names[entry] for entry in sorted(most) if most[entry] > turn]
            by_data = {
                file.names[entry]: [*of_entry.values()][turn]
                for entry, of_entry in parts_of.items()
                if len(of_entry) > turn
            }
            received += gather_into(ranks, file, names, by_data, opened.device)
        with ranks.together():
            for into, same in copies:
                into.copy_(same)
    return received


def _verify(opened: GroupFile, tensors: Mapping[Name, torch.Tensor], dtype: Optional[torch.dtype]) -> None:
    """Collective: every rank compares its share of the tensors with their stored hashes."""
    file, ranks = opened.file, opened.ranks
    with ranks.together():
        if dtype is not None:
            raise ValueError("verify_hash: converted tensors have no stored hash; load them without dtype=")
        if not file.index.stores_hashes:
            raise missing_hashes(file.source_name, list(tensors))
        loads = [0] * ranks.size
        mine: list[Name] = []
        for name in sorted(tensors, key=lambda n: -tensors[n].numel()):
            rank = loads.index(min(loads))
            loads[rank] += tensors[name].numel() + 1
            if rank == ranks.rank:
                mine.append(name)
        entries = {name: opened.entry(name) for name in mine}
        file.read_headers(sorted(entries.values()))
        found = {name: file.holds(entry, tensors[name]) for name, entry in entries.items()}
        wrong = [name for name, matches in found.items() if matches is False]
        if wrong:
            raise HashMismatchError(
                f"{file.source_name}: loaded tensors are not what their hashes say: {listed(wrong)}"
            )
        bare = [name for name, matches in found.items() if matches is None]
        if bare:
            raise missing_hashes(file.source_name, bare)
