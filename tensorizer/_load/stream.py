"""The tensors of an open model one after the other, read ahead by other threads in bounded memory.

Tensors are loaded in groups of consecutive ones. While the caller works with those of one group, the next ones are
loaded; what is loaded and not handed out never takes more than the limit. The thread of the caller begins the loads
whenever it asks for a tensor, so no thread waits for a caller that does not come back.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Optional, Union

import torch

from tensorizer import _C
from tensorizer._load.open_file import FileReader, OpenFile, PendingBatch
from tensorizer._progress import progress_reporter
from tensorizer._system import cgroup
from tensorizer._system.cuda_engine import on_current_streams
from tensorizer._system.sizes import parse_size, runs

_SHARE_OF_MEMORY = 10
_LEAST_MEMORY_NBYTES = 1 << 30
_LEAST_DEVICE_NBYTES = 256 << 20
_GROUP_NBYTES = 128 << 20  # of a group, or one larger tensor
_GROUPS_IN_MEMORY = 4  # so many at least, where memory is short: one is handed out, the others are under way
_FILES_AT_ONCE = 4
# Over a network, the requests of so many groups keep all connections busy, and those of further ones wait for a place.
_GROUPS_OF_CONNECTIONS = 4
_NETWORK_GROUPS_AT_ONCE = 6
_LEAST_REQUEST_NBYTES, _REQUEST_NBYTES = 2 << 20, 8 << 20
_SECONDS_BETWEEN_REPORTS = 0.1


def check_memory_ahead(memory: Union[int, str, None]) -> Optional[int]:
    """Bytes that a caller allows to be loaded and not handed out.

    Raises:
        TypeError: Neither a number nor a text.
        ValueError: No size, or none above 0.
    """
    if memory is None:
        return None
    nbytes = parse_size("memory", memory)
    if nbytes < 1:
        raise ValueError(f"memory: expected a number of bytes above 0, or a text as '4GB', got {memory!r}")
    return nbytes


def default_memory_ahead(devices: Sequence[torch.device]) -> int:
    """A tenth of what the control group leaves, at least 1 GiB; and no more than a tenth of what each CUDA device has
    free, at least 256 MiB."""
    nbytes = max(cgroup.available_nbytes() // _SHARE_OF_MEMORY, _LEAST_MEMORY_NBYTES)
    free = [torch.cuda.mem_get_info(device)[0] for device in devices if device.type == "cuda"]
    return min([nbytes, *(max(each // _SHARE_OF_MEMORY, _LEAST_DEVICE_NBYTES) for each in free)])


class TensorStream(AbstractContextManager["TensorStream"], Iterator[tuple[str, torch.Tensor]]):
    """Names and tensors of a model, file by file, within a file in the order of its data. Several threads may share it.

    Attributes:
        file: The open file or files.
        nbytes: Of the tensors that were handed out.
    """

    def __init__(self, file: OpenFile, memory: Optional[int]) -> None:
        self.file, self.nbytes = file, 0
        self._turn = threading.RLock()
        self._opened = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.callback(file.close)
            self._names: dict[int, list[str]] = {}
            for name, i in file.flat_names().items():
                self._names.setdefault(file.aliases.get(i, i), []).append(name)
            if memory is None:
                memory = default_memory_ahead(_devices(file))
            self._loads = _Loads(file, sorted(self._names), memory)
            stack.callback(self._loads.close)
            total = sum(map(file.index.loaded_nbytes, self._names))
            self._report = stack.enter_context(progress_reporter(file.call.progress, total, "loading"))
            self._group: collections.deque[tuple[int, torch.Tensor]] = collections.deque()
            self._aliases: collections.deque[tuple[str, torch.Tensor]] = collections.deque()  # of the last tensor
            self._opened = stack.pop_all()

    def __next__(self) -> tuple[str, torch.Tensor]:
        with self._turn:
            try:
                return self._next()
            except _Cancelled:
                raise RuntimeError("another thread has closed the stream") from None
            except BaseException:
                self.close()
                raise

    def _next(self) -> tuple[str, torch.Tensor]:
        if self._aliases:
            return self._aliases.popleft()
        while not self._group:
            self._group = self._loads.next_group(self._report)
        i, tensor = self._group.popleft()
        self._loads.hand_out(i)
        self.nbytes += tensor.nbytes
        name, *others = self._names[i]
        self._aliases.extend((other, tensor) for other in others)
        return name, tensor

    def close(self) -> None:
        """Ends loads that are under way, and closes the files. Tensors that were handed out stay."""
        self._group.clear()
        self._aliases.clear()
        self._opened.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_opened"):
            self._opened.close()


class _Group(NamedTuple):
    """Consecutive tensors that are loaded together."""

    parts: Sequence[tuple[FileReader, int, Sequence[int]]]  # file, number of its first entry, entries of the file
    ends: Sequence[FileReader]  # files whose last tensors these are
    nbytes: int
    request_nbytes: int  # of requests over a network, at most; 0: as for other loads


class _Cancelled(Exception):
    """Ends a load whose tensors are no longer wanted."""


class _Loads:
    """The loads of a stream: those to come, under way and loaded, in the order in which they are handed out."""

    def __init__(self, file: OpenFile, entries: Sequence[int], memory: int) -> None:
        self._file, self._memory = file, memory
        self._limit = min(_GROUP_NBYTES, max(1, memory // _GROUPS_IN_MEMORY))
        self._connections = max(reader.handle.source.concurrency for reader in file.readers)
        self._to_come = collections.deque(self._groups(entries))
        file.announce(entries)
        self._begun: collections.deque[Future[list[Any]]] = collections.deque()
        self._ahead = 0
        self._done: dict[int, int] = {}  # bytes by group, of those that were begun
        self._stopped = threading.Event()
        self._process = os.getpid()
        self._numbers = itertools.count()
        self._announcing = threading.Lock()  # a file that another process is fetching is waited for by all loads
        self._lanes: dict[int, ThreadPoolExecutor] = {}
        self._number_of = {id(reader): number for number, reader in enumerate(file.readers)}
        # Objects of the caller are used on the thread of the caller.
        self._on_this_thread = any(isinstance(reader.own_source, _C.PyFileSource) for reader in file.readers)

    def close(self) -> None:
        """Ends those that are under way, and forgets all others."""
        self._stopped.set()
        self._to_come.clear()
        for lane in self._lanes.values():
            lane.shutdown(wait=True, cancel_futures=True)
        self._begun.clear()

    # ---- which ------------------------------------------------------------------------------------------------------

    def _groups(self, entries: Sequence[int]) -> Iterator[_Group]:
        parts = [part for part in self._file.parts(entries) if part.entries]
        parts.sort(key=lambda part: _natural(part.reader.source_name))
        last = {id(part.reader): part.entries[-1] for part in parts}
        empty = [reader for reader in self._file.readers if id(reader) not in last]
        flat = [(part, i) for part in parts for i in part.entries]

        def nbytes_of(item: Any) -> int:
            part, i = item
            return self._nbytes_of(part.begin + i)

        total, begin = sum(map(nbytes_of, flat)), 0

        def limit(before: int) -> int:
            if not self._file.network:
                return self._limit
            requests = -(-self._connections // _GROUPS_OF_CONNECTIONS)
            return min(self._limit, requests * self._request_nbytes(before, total))

        for run in runs(flat, nbytes_of, limit):
            nbytes = sum(map(nbytes_of, run))
            request_nbytes = self._request_nbytes(begin, total) if self._file.network else 0
            begin += nbytes
            found, ends = [], []
            for _, same in itertools.groupby(run, key=lambda item: id(item[0])):
                items = list(same)
                part, of_file = items[0][0], [i for _, i in items]
                found.append((part.reader, part.begin, of_file))
                if of_file[-1] == last[id(part.reader)]:
                    ends.append(part.reader)
            yield _Group(found, ends, nbytes, request_nbytes)
        if empty:  # of which nothing is wanted, and which may have to be compared all the same
            yield _Group([], empty, 0, 0)

    def _request_nbytes(self, begin: int, total: int) -> int:
        """How much each request of a group asks for that begins behind so many bytes.

        The first requests and the last ones are short, so that the caller has work soon, and little is left to do when
        all has come.
        """
        share = min(begin, total - begin) // (2 * self._connections)
        return min(_REQUEST_NBYTES, max(_LEAST_REQUEST_NBYTES, share))

    def _nbytes_of(self, i: int) -> int:
        """The memory that a tensor takes while it is loaded: that of both forms, where it is converted."""
        nbytes, stored = int(self._file.index.loaded_nbytes(i)), self._file.stored_dtype(i)
        wanted = self._file.options.dtype
        if stored is None or wanted is None or not self._file.casts(stored):
            return nbytes
        return nbytes + nbytes // stored.itemsize * wanted.itemsize

    # ---- when -------------------------------------------------------------------------------------------------------

    def next_group(self, report: Any) -> collections.deque[tuple[int, torch.Tensor]]:
        """(entry, tensor) of the next group. Raises ``StopIteration`` behind the last one."""
        self._begin_more()
        if not self._begun:
            raise StopIteration
        future = self._begun[0]
        while report is not None and not wait([future], _SECONDS_BETWEEN_REPORTS).done:
            report(sum(self._done.values()))
        tensors = future.result()
        self._begun.popleft()
        if report is not None:
            report(sum(self._done.values()))
        return collections.deque(tensors)

    def hand_out(self, i: int) -> None:
        """Notes that a tensor belongs to the caller from now on."""
        self._ahead -= self._nbytes_of(i)
        self._begin_more()

    def _begin_more(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError("a forked process cannot go on with the stream of its parent: call load_stream() in it")
        while self._to_come:
            group = self._to_come[0]
            if self._ahead and self._ahead + group.nbytes > self._memory:
                return
            if self._begun and self._on_this_thread:
                return
            self._to_come.popleft()
            self._ahead += group.nbytes
            self._begun.append(self._begin(group))

    def _begin(self, group: _Group) -> Future[list[Any]]:
        progress = self._progress_of(next(self._numbers))
        hashed = self._file.options.verification.files is not None
        # Files that are hashed want to know the order of their bytes; others get memory that was left meanwhile.
        load = _load_of(self._file, group, progress) if hashed else None
        future: Future[list[Any]] = Future()

        def work() -> None:
            try:
                with self._announcing:
                    for reader, *_ in group.parts:
                        self._file.begin_announced(reader, progress)
                future.set_result((load or _load_of(self._file, group, progress))())
            except BaseException as error:
                future.set_exception(error)

        if self._on_this_thread:
            work()
            return future
        lane = self._lane_of(group)
        if lane not in self._lanes:
            at_once = _NETWORK_GROUPS_AT_ONCE if self._file.network else 1
            self._lanes[lane] = ThreadPoolExecutor(at_once, "tensorizer-stream")
        self._lanes[lane].submit(on_current_streams(work, _devices(self._file)))
        return future

    def _lane_of(self, group: _Group) -> int:
        """The queue that a group waits in. Only one thread at a time hashes a file, so files that are hashed have
        several queues. Each works in the order of the plan, so the first group of the plan waits for no other."""
        if self._file.network or self._file.options.verification.files is None or not group.parts:
            return 0
        return self._number_of[id(group.parts[0][0])] % self._file.files_at_once

    def _progress_of(self, number: int) -> Any:
        def progress(done: int) -> None:
            if self._stopped.is_set():
                raise _Cancelled
            self._done[number] = done

        return progress


def _devices(file: OpenFile) -> list[torch.device]:
    device = file.options.device
    if isinstance(device, torch.device):
        return [device]
    return list({file.device_of(file.names[i]) for i in file.selection})


def _load_of(file: OpenFile, group: _Group, progress: Any) -> Any:
    """The load of a group, planned."""
    verify = file.must_verify(None)
    pending: list[tuple[int, PendingBatch]] = []
    mappings: list[tuple[_C.FileMapping, int, int]] = []
    in_turn: list[tuple[FileReader, int, Sequence[int]]] = []
    for reader, begin, entries in group.parts:
        mapping = reader.map_again()
        batches = reader.begin_group(entries, verify, mapping, group.request_nbytes)
        if batches is None:
            in_turn.append((reader, begin, entries))
            continue
        pending += [(begin, batch) for batch in batches]
        if mapping is not None and not reader.was_cached:  # what is in memory needs no thread to fetch it
            offset = reader.index.data_offset(entries[0])
            end = reader.index.data_offset(entries[-1]) + reader.index.data_nbytes(entries[-1])
            mappings.append((mapping, offset, end - offset))

    def load() -> list[tuple[int, torch.Tensor]]:
        progress(0)
        if pending:
            _C.run_batches([batch for _, (batch, _) in pending], max(_FILES_AT_ONCE, len(pending)), progress)
        for mapping, offset, nbytes in mappings:
            mapping.populate(offset, nbytes)
        found: list[tuple[int, torch.Tensor]] = []
        for begin, (_, finish) in pending:
            loaded = finish()
            found += zip((begin + i for i in loaded.entries), loaded.tensors)
        for reader, begin, entries in in_turn:
            for loaded in reader.read(entries, verify, plain=True):
                found += zip((begin + i for i in loaded.entries), loaded.tensors)
        places = {begin + i: n for n, (begin, i) in enumerate((b, i) for _, b, e in group.parts for i in e)}
        found.sort(key=lambda item: places[item[0]])
        file.check_files(group.ends)
        progress(sum(reader.index.loaded_nbytes(i) for reader, _, entries in group.parts for i in entries))
        return found

    return load


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts ``-10`` behind ``-9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
