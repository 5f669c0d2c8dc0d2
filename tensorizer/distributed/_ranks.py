"""The ranks of a group that load together: who they are, how all of them learn that one has failed, and the file that
they have open and hold to be the same."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import hashlib
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Optional, Union

import torch
import torch.distributed as dist

from tensorizer import _C, errors
from tensorizer._format.names import Name
from tensorizer._io.access import Access
from tensorizer._io.sources import SourceArgument
from tensorizer._load.arguments import target_device
from tensorizer._load.open_file import OpenFile, open_file
from tensorizer._load.parts import slices
from tensorizer._load.reader import ReadOptions
from tensorizer._load.report import LoadReport, RankReport
from tensorizer._system.config import share_of_node

# Groups on gloo for those of other backends, made once.
_STATUS_GROUPS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

# More than this share of the file is wanted by several ranks: reading once and gathering is less work for a store.
_WORTH_GATHERING = 1.3
# Readers of all ranks of a machine together: requests to a store, and threads that keep a disk busy.
_NETWORK_READERS, _LEAST_NETWORK_READERS = 64, 4
_LOCAL_READERS = 8
# Record headers whose hashes are compared between ranks.
_COMPARED_RECORDS = 8


@contextlib.contextmanager
def caught() -> Iterator[list[BaseException]]:
    """What the block raises, if anything, for :meth:`Ranks.agree` to tell: nothing leaves the block."""
    errors: list[BaseException] = []
    try:
        yield errors
    except BaseException as error:
        errors.append(error)


class Ranks:
    """The ranks of a process group; one rank where there is no group.

    Every method that says so is a collective: all ranks call it, in the same order. A rank that has failed takes part
    nevertheless, with its error, so that nobody waits for it.
    """

    def __init__(self, group: Optional[Any]) -> None:
        self.group: Optional[Any] = None
        self.rank, self.size = 0, 1
        if group is None and not dist.is_initialized():
            return
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("group: this process is not one of its ranks")
        self._status = _status_group(self.group) if self.size > 1 else None

    def agree(self, errors: Sequence[BaseException] = (), value: Any = None) -> list[Any]:
        """Collective: the values of all ranks, by rank; or, on all of them, the first error.

        Raises:
            Exception: Of the class of the error, naming the rank; the rank itself raises its own.
        """
        error = errors[0] if errors else None
        if self.size == 1:
            if error is not None:
                raise error
            return [value]
        mine = (None, value) if error is None else ((type(error).__name__, str(error)), None)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._status)
        if error is not None:
            raise error
        for rank, (failure, _) in enumerate(found):
            if failure is not None:
                _raise_as(rank, *failure)
        return [value for _, value in found]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Collective: where the block fails on one rank, all raise behind it, as :meth:`agree` does."""
        with caught() as errors:
            yield
        self.agree(errors)

    def gathers_on(self, device: torch.device) -> tuple[Any, torch.device]:
        """The group that gathers tensors bound for a device, and where its buffers are."""
        if device.type != "cpu" and "nccl" in str(dist.get_backend(self.group)):
            return self.group, device
        return self._status, torch.device("cpu")


def _status_group(group: Any) -> Any:
    """A group of the same ranks on the CPU. Collective among them where the group is of another backend."""
    if "gloo" in str(dist.get_backend(group)):
        return group
    if group not in _STATUS_GROUPS:
        ranks = dist.get_process_group_ranks(group)
        _STATUS_GROUPS[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _STATUS_GROUPS[group]


def _raise_as(rank: int, kind: str, text: str) -> NoReturn:
    """An error of another rank, as the class that it has there, where this process knows it."""
    found = getattr(errors, kind, None) or getattr(builtins, kind, None)
    message = f"rank {rank}: {text}"
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            error = found(message)
        except TypeError:  # it takes more than a text
            error = RuntimeError(f"rank {rank}: {kind}: {text}")
        raise error
    raise RuntimeError(f"rank {rank}: {kind}: {text}")


# --- the file that all of them have open ------------------------------------------------------------------------------


class GroupFile:
    """The file as one rank has it open, and what all ranks have agreed on."""

    def __init__(self, ranks: Ranks, file: OpenFile, device: torch.device) -> None:
        self.ranks, self.file, self.device = ranks, file, device

    def entry(self, name: Name) -> int:
        """The entry that holds the data of a name."""
        i = self.file.numbers[name]
        return self.file.aliases.get(i, i)

    def choose(
        self, exchange: str, verify_hash: bool, wanted: int, errors: Sequence[BaseException], *, shared: bool
    ) -> str:
        """Collective: what rank 0 makes of ``"auto"``. Elements that ranks want tell whether several want the same.

        Raises:
            ValueError: Ranks verify hashes, or convert, and others do not as they do: those would wait for these.
        """
        file = self.file
        in_memory = not file.network and all(r.handle.source.prompt for r in file.readers)
        with caught() as unread:  # shapes may be in record headers, which have to be read
            everything = sum(part.shape.numel() for part in slices(file).values())
        cached_here = in_memory and self.device.type == "cpu"
        common = {"verify_hash": bool(verify_hash), "dtype": file.options.dtype}
        mine = (common, exchange, cached_here, file.checks_whole, wanted)
        common_of, exchanges, cached, checks_whole, wanted_of = zip(*self.ranks.agree([*errors, *unread], mine))
        for argument in common:
            found = [given[argument] for given in common_of]
            if len(set(found)) > 1:
                raise ValueError(f"{argument}: expected the same on all ranks, got {found}")
        if self.ranks.size == 1 or any(checks_whole):  # the hash of a tensor is one of all of it
            return "none"
        overlapping = shared or sum(wanted_of) > _WORTH_GATHERING * everything
        chosen = str(exchanges[0])
        if chosen == "auto":
            chosen = "all_gather" if overlapping and not cached[0] else "none"
        if chosen == "all_gather" or not overlapping:
            for reader in file.readers:
                reader.direct_io.read_alone()
        return chosen

    def report(
        self,
        report: LoadReport,
        exchange: str,
        received: int,
        begin: float,
        errors: Sequence[BaseException] = (),
    ) -> LoadReport:
        """Collective: the report with what all ranks did."""
        mine = RankReport(self.file.total_bytes_read, received, time.perf_counter() - begin)
        every = tuple(self.ranks.agree(errors, mine))
        return dataclasses.replace(report, seconds=mine.seconds, rank=self.ranks.rank, exchange=exchange, ranks=every)


@contextlib.contextmanager
def open_for_all(
    ranks: Ranks,
    source: SourceArgument,
    device: Optional[Union[torch.device, str, int]],
    dtype: Optional[torch.dtype],
    make_access: Callable[[], Access],
) -> Iterator[GroupFile]:
    """Collective: opens the file on every rank, and holds what they see against what rank 0 sees.

    `make_access` checks what users gave. It is called here, where all ranks learn of what is wrong on one of them.
    """
    opened: Optional[GroupFile] = None
    seen: Any = None
    with contextlib.ExitStack() as stack:
        with caught() as errors:
            chosen = target_device(device)
            assert isinstance(chosen, torch.device)
            access = make_access()._replace(num_readers=_readers(source))
            file = stack.enter_context(open_file(source, access, ReadOptions(chosen, dtype)))
            opened = GroupFile(ranks, file, chosen)
            seen = _identity(file)
        contents = ranks.agree(errors, seen)
        assert opened is not None
        _compare(opened.file.source_name, contents)
        yield opened


def _readers(file: Any) -> Optional[int]:
    """Reading threads for this rank's share of the machine; ``None``, as many as are useful, where it has one rank."""
    remote = isinstance(file, str) and "://" in file
    most = _NETWORK_READERS if remote else max(_C.cpu_quota(), _LOCAL_READERS)
    share = share_of_node(most, _LEAST_NETWORK_READERS if remote else 1)
    return None if share == most else share


def _identity(file: OpenFile) -> tuple[str, dict[str, Any]]:
    """What tells contents apart: the index and some hashes, for all; the state of the file, for ranks of a machine."""
    index = file.index
    digest = hashlib.sha256()
    for i in range(index.entry_count):
        facts = (file.names[i], index.dtype(i), index.shape(i), index.data_offset(i), index.data_nbytes(i))
        digest.update(repr(facts).encode("utf-8", "replace"))
    if index.stores_hashes and index.entry_count:
        some = sorted({k * (index.entry_count - 1) // _COMPARED_RECORDS for k in range(_COMPARED_RECORDS + 1)})
        file.read_headers(some)
        for i in some:
            headers, position = file.header(i)
            digest.update(repr(headers.hashes(position)).encode())
    state: dict[str, Any] = {}
    etag = (getattr(file.stream, "response_headers", None) or {}).get("etag")
    if etag is not None:
        state["etag"] = etag
    source = file.source
    if isinstance(source, _C.FileSource):
        with contextlib.suppress(OSError):
            status = os.stat(source.name)
            state[socket.gethostname()] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return digest.hexdigest(), state


def _compare(source: str, contents: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """The same on every rank, so all raise."""
    states: dict[str, tuple[int, Any]] = {}
    for rank, (digest, state) in enumerate(contents):
        other = 0 if digest != contents[0][0] else None
        for key, value in state.items():
            first, known = states.setdefault(key, (rank, value))
            if known != value:
                other = first
        if other is not None:
            error = errors.StreamError(
                f"{source}: rank {rank} and rank {other} read different files (was the file replaced during the load?)"
            )
            error.source = source
            raise error
