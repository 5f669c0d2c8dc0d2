"""A file that the ranks of a group have open, and hold to be the same."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional, Union

import torch

from tensorizer import _C
from tensorizer._format.names import Name
from tensorizer._io.access import Access
from tensorizer._io.sources import SourceArgument
from tensorizer._load.arguments import target_device
from tensorizer._load.open_file import OpenFile, open_file
from tensorizer._load.parts import PartReader
from tensorizer._load.reader import ReadOptions
from tensorizer._load.report import LoadReport, RankReport
from tensorizer._system.config import share_of_node
from tensorizer.distributed._ranks import Ranks
from tensorizer.errors import StreamError

__all__ = ["Opened", "open_for_all"]

# More than this share of the file is wanted by several ranks: reading once and gathering is less work for a store.
_WORTH_GATHERING = 1.3
# Readers of all ranks of a machine together: requests to a store, and threads that keep a disk busy.
_NETWORK_READERS, _LEAST_NETWORK_READERS = 64, 4
_LOCAL_READERS = 8
# Record headers whose hashes are compared between ranks.
_COMPARED_RECORDS = 8


class Opened:
    """The file as one rank has it open, and what all ranks have agreed on."""

    def __init__(self, ranks: Ranks, reader: PartReader, device: torch.device) -> None:
        self.ranks, self.reader, self.device = ranks, reader, device

    def entry(self, name: Name) -> int:
        """The entry that holds the data of a name."""
        file = self.reader.file
        return file.targets.get(file.numbers[name], file.numbers[name])

    def choose(self, exchange: str, wanted: int, failure: Optional[BaseException], *, shared: bool) -> str:
        """Collective: what rank 0 makes of ``"auto"``. Elements that ranks want tell whether several want the same."""
        file = self.reader.file
        in_memory = not file.network and all(r.handle.source.prompt for r in file.readers)
        everything = 0
        try:  # shapes may be in record headers, which have to be read
            everything = sum(part.shape.numel() for part in self.reader.slices().values())
        except BaseException as error:
            failure = failure or error
        cached_here = in_memory and self.device.type == "cpu"
        asked = self.ranks.agree(failure, (exchange, cached_here, file.checks_whole, wanted))
        first, cached, checks_whole, _ = asked[0]
        if self.ranks.size == 1 or checks_whole:  # the hash of a tensor is one of all of it
            return "none"
        overlapping = shared or sum(count for *_, count in asked) > _WORTH_GATHERING * everything
        chosen = str(first)
        if first == "auto":
            chosen = "all_gather" if overlapping and not cached else "none"
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
        failure: Optional[BaseException] = None,
    ) -> LoadReport:
        """Collective: the report with what all ranks did."""
        mine = RankReport(self.reader.file.total_bytes_read, received, time.perf_counter() - begin)
        every = tuple(self.ranks.agree(failure, mine))
        return dataclasses.replace(report, seconds=mine.seconds, rank=self.ranks.rank, exchange=exchange, ranks=every)


@contextlib.contextmanager
def open_for_all(
    ranks: Ranks,
    source: SourceArgument,
    device: Optional[Union[torch.device, str, int]],
    dtype: Optional[torch.dtype],
    make_access: Callable[[], Access],
) -> Iterator[Opened]:
    """Collective: opens the file on every rank, and holds what they see against what rank 0 sees.

    `make_access` checks what users gave. It is called here, where all ranks learn of what is wrong on one of them.
    """
    failure: Optional[BaseException] = None
    opened: Optional[Opened] = None
    seen: Any = None
    with contextlib.ExitStack() as stack:
        try:
            chosen = target_device(device)
            assert isinstance(chosen, torch.device)
            access = dataclasses.replace(make_access(), num_readers=_readers(source))
            file = stack.enter_context(open_file(source, access, ReadOptions(chosen, dtype)))
            opened = Opened(ranks, PartReader(file), chosen)
            seen = _identity(file)
        except BaseException as error:
            failure = error
        contents = ranks.agree(failure, seen)
        assert opened is not None
        _compare(opened.reader.file.source_name, contents)
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
            error = StreamError(
                f"{source}: rank {rank} sees another content than rank {other}: it was replaced meanwhile"
            )
            error.source = source
            raise error
