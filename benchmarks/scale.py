"""Checkpoints of many ranks in a store, on paper: ``python -m benchmarks.scale`` makes the tables of docs/scale.md.

What each box, plan item and request costs is measured here, on the code that saves and loads. Speeds of links are
inputs. A small simulation adds both up: phases of a save and a load, and transfers that share connections, the link of
a node, and the store.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import pickle
import re
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.report import machine
from tensorizer import _C
from tensorizer._io.http_options import most_connections
from tensorizer._io.s3.objects import _DELETIONS
from tensorizer._io.s3.upload import DEFAULT_UPLOADS, MAX_PART_NBYTES, MIN_PART_NBYTES
from tensorizer.distributed import TensorizerReader, TensorizerWriter
from tensorizer.distributed._checkpoint.marker import TENSOR, SavedFile, Stored, pack_marker, unpack_marker
from tensorizer.distributed._checkpoint.writer import _BATCH_NBYTES

MIB = 1 << 20

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
BEGIN, END = "<!-- python -m benchmarks.scale --write: from here -->", "<!-- to here -->"


@dataclasses.dataclass(frozen=True)
class Links:
    """What is not measured here. Bytes and seconds."""

    ranks_per_node: int = 8
    connection: float = 80e6  # bytes per second of one connection to the store
    latency: float = 0.020  # until the store begins to answer
    node: float = 25e9  # bytes per second between a node and the store
    store: float = 1e12  # bytes per second of the store, all nodes together
    reads: float = 5500.0  # requests per second that the store answers below one prefix
    writes: float = 3500.0
    coordinator: float = 1.25e9  # bytes per second of rank 0's link for plans and results


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured: seconds and bytes per box (a part of a tensor that one rank has)."""

    pack: float  # seconds to write the marker
    marker: float  # its bytes
    unpack: float  # seconds to read it
    marker_memory: float  # bytes that it takes when it was read
    global_plan: float  # seconds of torch's planning on rank 0
    read_plan: float  # seconds of torch's planning on each rank
    plan: float  # pickled bytes that each rank sends to rank 0
    result: float  # likewise, after it has written
    metadata: float  # pickled bytes that rank 0 sends to each rank at the end
    save: float  # seconds of a rank, beside the transfer
    load: float


# ---- measuring -------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], object], tries: int = 3) -> float:
    """The best of some tries."""
    best = math.inf
    for _ in range(tries):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def _items(tensors: int, ranks: int) -> tuple[list[SavePlan], Metadata, dict[MetadataIndex, Stored]]:
    """Plans and results of `ranks` ranks that hold rows of each tensor."""
    properties = TensorProperties(torch.bfloat16)
    plans: list[list[WriteItem]] = [[] for _ in range(ranks)]
    stored: dict[MetadataIndex, Stored] = {}
    described: dict[str, Any] = {}
    files = [SavedFile(f"r{rank:05d}-{os.urandom(8).hex()}.tensors", 10**9) for rank in range(ranks)]
    for number in range(tensors):
        fqn = f"model.layers.{number // 9}.mlp.experts.{number % 9}.weight"
        size = torch.Size([8 * ranks, 4096])
        chunks = [ChunkStorageMetadata(torch.Size([8 * r, 0]), torch.Size([8, 4096])) for r in range(ranks)]
        described[fqn] = TensorStorageMetadata(properties, size, chunks)
        for rank, chunk in enumerate(chunks):
            index = MetadataIndex(fqn, chunk.offsets)
            data = TensorWriteData(chunk, properties, size)
            plans[rank].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            crc32 = int.from_bytes(os.urandom(4), "little")
            stored[index] = Stored(TENSOR, files[rank], number, number << 17, 1 << 16, crc32)
    paths = {fqn: tuple(fqn.split(".")) for fqn in described}
    return [SavePlan(plan, planner_data=paths) for plan in plans], Metadata(described, planner_data=paths), stored


def measured(tensors: int = 500, ranks: int = 64) -> Costs:
    """What a box costs, on this machine."""
    plans, metadata, stored = _items(tensors, ranks)
    boxes = tensors * ranks
    content = pack_marker(metadata, stored, None, ranks)
    results = [WriteResult(index, found.nbytes, found) for index, found in stored.items()]

    tracemalloc.start()
    kept = unpack_marker(content, "marker")
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    local = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([8, 4096]))
    tensors_of = [(fqn, found) for fqn, found in kept.metadata.state_dict_metadata.items()]

    planner = DefaultSavePlanner(flatten_state_dict=False)
    saving, loading = _small_tensors(4 * tensors)
    written = Metadata(metadata.state_dict_metadata, metadata.planner_data, stored)
    return Costs(
        pack=seconds(lambda: pack_marker(metadata, stored, None, ranks)) / boxes,
        marker=len(content) / boxes,
        unpack=seconds(lambda: unpack_marker(content, "marker")) / boxes,
        marker_memory=memory / boxes,
        global_plan=seconds(lambda: planner.create_global_plan(plans)) / boxes,
        read_plan=seconds(lambda: [create_read_items_for_chunk_list(*found, [local]) for found in tensors_of]) / boxes,
        plan=len(pickle.dumps(plans[0])) / tensors,
        result=len(pickle.dumps(results[:tensors])) / tensors,
        metadata=len(pickle.dumps(written)) / boxes,
        save=saving,
        load=loading,
    )


def _small_tensors(count: int) -> tuple[float, float]:
    """Seconds per tensor of a save and a load of tiny ones, which cost what each one costs."""
    state = {f"layers.{number}.weight": torch.zeros(16) for number in range(count)}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group

        def save() -> None:
            state_dict_saver.save(state, storage_writer=TensorizerWriter(folder, fsync=False), no_dist=True)

        def load() -> None:
            state_dict_loader.load(state, storage_reader=TensorizerReader(folder), no_dist=True)

        return seconds(save) / count, seconds(load) / count


# ---- requests --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ranks_of_a_node(ranks: int) -> Iterator[None]:
    """What torchrun says in each rank."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_WORLD_SIZE"]
        else:
            os.environ["LOCAL_WORLD_SIZE"] = before


def part_nbytes(nbytes: int) -> int:
    """The size of most parts of an upload (docs/remote_stores.md, "S3")."""
    wanted = -(-nbytes // 256 // MIB) * MIB
    if nbytes > 6000 * MAX_PART_NBYTES:
        return -(-nbytes // 6000 // MIB) * MIB
    return min(max(wanted, MIN_PART_NBYTES), MAX_PART_NBYTES)


def upload_requests(nbytes: int) -> int:
    """Of one object: an object that fits one part is one PUT; else its parts, a beginning and an end."""
    parts = -(-nbytes // part_nbytes(nbytes))
    return 1 if parts <= 1 else parts + 2


def download_requests(nbytes: int) -> int:
    """Of one object: the first request brings its beginning."""
    http = _C.HttpOptions()
    return 1 + -(-max(0, nbytes - http.head_nbytes) // http.unit_nbytes)


# ---- transfers -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stream:
    """How one rank talks to the store."""

    connections: int
    request: float  # bytes
    per_second: float  # requests that the store answers, of all ranks

    def rate(self, links: Links) -> float:
        """Bytes per second: each connection waits for an answer before every request."""
        return self.connections * self.request / (links.latency + self.request / links.connection)


def transfer(
    nbytes: Sequence[float], stream: Stream, links: Links, speed_of: Optional[Mapping[int, float]] = None
) -> tuple[list[float], str]:
    """When each rank is done, and what bounds them while all are at work.

    Args:
        nbytes: To move, by rank.
        stream: What each rank does.
        links: What they share.
        speed_of: Ranks that are slower than others, and the share of the speed that they reach.
    """
    left = list(nbytes)
    done = [0.0] * len(left)
    active = {rank for rank, amount in enumerate(left) if amount > 0}
    now, bound = 0.0, ""
    while active:
        on_node: dict[int, int] = {}
        for rank in active:
            node = rank // links.ranks_per_node
            on_node[node] = on_node.get(node, 0) + 1
        rates = {}
        for rank in active:
            bounds = {
                "connections": stream.rate(links),
                "link of the node": links.node / on_node[rank // links.ranks_per_node],
                "bytes of the store": links.store / len(active),
                "requests of the store": stream.per_second * stream.request / len(active),
            }
            least = min(bounds, key=lambda name: bounds[name])
            bound = bound or least
            rates[rank] = bounds[least] * (speed_of or {}).get(rank, 1.0)
        step = min(left[rank] / rates[rank] for rank in active)
        now += step
        for rank in list(active):
            left[rank] -= rates[rank] * step
            if left[rank] <= 1e-6 * nbytes[rank]:
                done[rank] = now
                active.remove(rank)
    return done, bound


# ---- a save and a load -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One world size. Seconds, bytes, requests."""

    ranks: int
    boxes: int
    nbytes_of_rank: int
    marker: float
    connections_of_node: int
    connections: int
    save_requests: int
    load_requests: int
    memory_of_saving: float
    memory_of_first: float
    memory_of_loading: float
    save: dict[str, float]
    load: dict[str, float]
    bounds: tuple[str, str]  # of writing and reading
    slow_save: float
    told_of_dead: float

    @property
    def saved(self) -> float:
        """All phases together."""
        return sum(self.save.values())

    @property
    def loaded(self) -> float:
        """All phases together."""
        return sum(self.load.values())


def simulated(ranks: int, nbytes: int, tensors: int, costs: Costs, links: Links, slow: float = 0.1) -> Outcome:
    """A save of `nbytes` that lie in rows of `tensors` tensors on `ranks` ranks, and a load by as many."""
    local = min(ranks, links.ranks_per_node)
    with ranks_of_a_node(local):
        connections = most_connections()
    unit = _C.HttpOptions().unit_nbytes
    uploads = min(DEFAULT_UPLOADS, connections)
    boxes, own = tensors * ranks, -(-nbytes // ranks)
    marker = int(costs.marker * boxes)
    up = Stream(uploads, part_nbytes(own), links.writes)
    down = Stream(connections, unit, links.reads)
    sent, writing = transfer([own] * ranks, up, links)
    late, _ = transfer([own] * ranks, up, links, {ranks - 1: slow})
    received, reading = transfer([own] * ranks, down, links)
    markers, _ = transfer([marker] * ranks, down, links)
    one_marker, _ = transfer([marker], Stream(uploads, part_nbytes(marker), links.writes), links)
    exchange = boxes / links.coordinator
    hops = max(1, math.ceil(math.log2(ranks)))
    save = {
        "plans to rank 0 and back": 2 * exchange * costs.plan,
        "planning on rank 0 (torch)": boxes * costs.global_plan,
        "writing": tensors * costs.save + max(sent),
        "results to rank 0": exchange * costs.result,
        "marker": boxes * costs.pack + one_marker[0],
        "old objects deleted": -(-ranks // _DELETIONS) * links.latency,
        "metadata to all ranks (torch)": hops * exchange * costs.metadata,
    }
    load = {
        "marker": max(markers) + boxes * costs.unpack,
        "planning (torch)": boxes * costs.read_plan + 2 * exchange * costs.plan,
        "reading": tensors * costs.load + max(received),
    }
    parts = (uploads + 2) * part_nbytes(own)
    return Outcome(
        ranks=ranks,
        boxes=boxes,
        nbytes_of_rank=own,
        marker=marker,
        connections_of_node=local * connections,
        connections=ranks * connections,
        # Rank 0 lists the folder before and after the marker, and deletes what was there, an object of each rank.
        save_requests=ranks * (upload_requests(own) + 1) + upload_requests(marker) + 3 * -(-(ranks + 1) // 1000),
        load_requests=ranks * (download_requests(own) + download_requests(marker)),
        memory_of_saving=2 * _BATCH_NBYTES + parts,
        memory_of_first=2 * _BATCH_NBYTES + parts + boxes * (costs.plan + costs.result + costs.metadata),
        memory_of_loading=boxes * costs.marker_memory + connections * unit,
        save=save,
        load=load,
        bounds=(writing, reading),
        slow_save=sum(save.values()) - max(sent) + max(late),
        told_of_dead=sum(list(save.values())[:3]),
    )


# ---- tables ----------------------------------------------------------------------------------------------------------


def figure(value: float) -> str:
    """Two or three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(nbytes: float) -> str:
    """Bytes, in a unit that suits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{figure(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def document(outcomes: Sequence[Outcome], nbytes: int, tensors: int, costs: Costs, links: Links) -> str:
    """Everything that docs/scale.md says in numbers."""
    facts = machine()
    each = {field.name: getattr(costs, field.name) for field in dataclasses.fields(costs)}
    words = {
        "pack": "writing the marker",
        "unpack": "reading the marker",
        "global_plan": "planning of a save on rank 0 (torch)",
        "read_plan": "planning of a load, on every rank (torch)",
        "save": "a save, beside the transfer, by its rank",
        "load": "a load, beside the transfer, by its rank",
        "marker": "the marker",
        "marker_memory": "the marker in memory, once read",
        "plan": "a plan on its way to rank 0 (torch)",
        "result": "a result on its way to rank 0",
        "metadata": "what torch sends to all ranks at the end",
    }
    timed = ("pack", "unpack", "global_plan", "read_plan", "save", "load")
    lines = [
        f"Measured on {facts['cpu']}, {facts['cores']} cores, torch {torch.__version__}. Per box:",
        "",
        *table(
            ["measured", "per box"],
            [
                [text, f"{figure(each[name] * 1e6)} us" if name in timed else f"{figure(each[name])} bytes"]
                for name, text in words.items()
            ],
        ),
        "",
        f"Assumed: {links.ranks_per_node} ranks on a node, {size(links.connection)}/s and {1e3 * links.latency:g} ms "
        f"per connection, {size(links.node)}/s per node, {size(links.store)}/s of the store, which "
        f"answers {links.reads:,.0f} reads and {links.writes:,.0f} writes per second; {size(links.coordinator)}/s "
        "between rank 0 and the others.",
        "",
        f"{size(nbytes)} in {tensors:,} tensors, each rank holding rows of every tensor:",
        "",
    ]
    phases = [
        *((f"save: {name}, s", [figure(o.save[name]) for o in outcomes]) for name in outcomes[0].save),
        ("**save, s**", [figure(o.saved) for o in outcomes]),
        *((f"load: {name}, s", [figure(o.load[name]) for o in outcomes]) for name in outcomes[0].load),
        ("**load, s**", [figure(o.loaded) for o in outcomes]),
    ]
    rows = [
        ("boxes", [f"{o.boxes:,}" for o in outcomes]),
        ("bytes of a rank", [size(o.nbytes_of_rank) for o in outcomes]),
        ("connections of a node, of all", [f"{o.connections_of_node}, {o.connections:,}" for o in outcomes]),
        ("requests of a save", [f"{o.save_requests:,}" for o in outcomes]),
        ("requests of a load", [f"{o.load_requests:,}" for o in outcomes]),
        ("marker", [size(o.marker) for o in outcomes]),
        ("memory of a save beside the tensors: a rank", [size(o.memory_of_saving) for o in outcomes]),
        ("memory of a save: rank 0", [size(o.memory_of_first) for o in outcomes]),
        ("memory of a load beside the tensors: a rank", [size(o.memory_of_loading) for o in outcomes]),
        *phases,
        ("what bounds writing", [o.bounds[0] for o in outcomes]),
        ("what bounds reading", [o.bounds[1] for o in outcomes]),
        ("save with one rank at a tenth of the speed, s", [figure(o.slow_save) for o in outcomes]),
        ("a rank was killed: the others raise after, s", [f"at most {figure(o.told_of_dead)}" for o in outcomes]),
    ]
    lines += table(["", *(f"{o.ranks:,} ranks" for o in outcomes)], [[name, *cells] for name, cells in rows])
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--nbytes", type=float, default=10e12, help="of the checkpoint (default 10e12)")
    parser.add_argument("--tensors", type=int, default=4000, help="parameters and states of the optimizer")
    parser.add_argument(
        "--measured-tensors", type=int, default=500, help="tensors of 64 ranks that costs are taken from"
    )
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scale.md")
    for field in dataclasses.fields(Links):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = parser.parse_args(arguments)
    links = Links(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Links)})
    costs = measured(given.measured_tensors)
    outcomes = [simulated(ranks, int(given.nbytes), given.tensors, costs, links) for ranks in given.ranks]
    text = document(outcomes, int(given.nbytes), given.tensors, costs, links)
    print(text, end="")
    if given.write:
        around = re.escape(BEGIN), re.escape(END)
        before = DOCUMENT.read_text(encoding="utf-8")
        after = re.sub(f"{around[0]}.*{around[1]}", lambda _: f"{BEGIN}\n\n{text}\n{END}", before, flags=re.DOTALL)
        DOCUMENT.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
