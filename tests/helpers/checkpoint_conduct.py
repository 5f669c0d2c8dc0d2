"""Programs for ``fresh_process``: interrupts, keys, concurrent saves, memory and unusual tensors of checkpoints."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import warnings
from concurrent.futures import Future
from pathlib import Path

import memory
import pytest
import torch
import torch._dynamo  # imported late otherwise, by each rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_ranks import STEPS_IN, in_child, number_in, save, state_of
from rank_processes import run_ranks
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import tensorizer.distributed as td
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer
from tensorizer.errors import AuthenticationError, CryptographyError

assert td.TensorizerReader, td.TensorizerWriter  # imported now, once for all ranks

READING = tuple(
    os.path.join("_checkpoint", name) for name in ("reader.py", "reading.py", "boxes.py", "folder.py", "marker.py")
)
KEY = EncryptionParams.random()
UNLOCK = DecryptionParams.from_key(KEY.key)
WRONG = DecryptionParams.from_key(EncryptionParams.random().key)


# ---- Ctrl-C ----


def interrupt_at_event(number: int, files: tuple[str, ...]) -> None:
    """Sends Ctrl-C at the n-th call of or in these modules, counting calls of the extension."""
    left = number

    def profile(frame, event, argument):
        nonlocal left
        if event in ("call", "c_call") and frame.f_code.co_filename.endswith(files):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                os.kill(os.getpid(), signal.SIGINT)

    sys.setprofile(profile)


def interrupted(work, step: int, files: tuple[str, ...]) -> bool:
    """Whether Ctrl-C came before the end. Fails if a thread of the package is still running."""
    interrupt_at_event(step, files)
    try:
        work()
    except BaseException as error:
        sys.setprofile(None)
        causes = [*getattr(error, "failures", {}).values()] or [(error,)]
        if not isinstance(causes[0][0], KeyboardInterrupt):
            raise
        came = True
    else:
        sys.setprofile(None)
        came = False
    ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("tensorizer")]
    assert not ours, ours
    return came


def ctrl_c_in_any_phase(folder: Path) -> None:
    base = folder / "base"
    save(base, 1)
    stops = {"save": 0, "load": 0}
    for phase, files, stride in (("save", STEPS_IN, 9), ("load", READING, 11)):
        for step in itertools.count(1, stride):
            here = folder / "here"
            shutil.rmtree(here, ignore_errors=True)
            shutil.copytree(base, here)

            def work(here=here, phase=phase, files=files, step=step):
                signal.signal(signal.SIGINT, signal.default_int_handler)
                call = (lambda: save(here, 2)) if phase == "save" else (lambda: number_in(here))
                if interrupted(call, step, files):
                    os._exit(3)

            code = in_child(work)
            assert code in (0, 3), (phase, step, code)
            hidden = [path.name for path in here.iterdir() if path.name.endswith(".tmp")]
            assert not hidden, (phase, step, hidden)
            assert number_in(here) in ((1, 2) if phase == "save" else (1,))
            save(here, 3)  # deletes what is left of this one
            assert len(list(here.iterdir())) == 2
            if code == 0:
                break
            stops[phase] += 1
    assert min(stops.values()) > 5, stops


# ---- keys ----


def is_of_keys(failure: BaseException) -> bool:
    """Whether this is an error about keys, or an error of torch that quotes one."""
    return isinstance(failure, CryptographyError) or "does not match its authentication code" in str(failure)


def altered(folder: Path) -> None:
    """All ranks refuse a marker that was altered, a marker without its tag, and a file of another step."""

    def work(rank):
        checkpoints = [folder / "one", folder / "two"]
        for step, checkpoint in enumerate(checkpoints):
            save(checkpoint, step, rank, encryption=KEY)
        dist.barrier()
        first, second = checkpoints
        if rank == 0:
            before = {path: path.read_bytes() for path in first.iterdir()}
        marker = first / ".metadata"
        for attack in (in_the_body, without_tag, foreign_file):
            if rank == 0:
                attack(marker, second)
            dist.barrier()
            target = {f"w{rank}": torch.zeros(500), "both": torch.zeros(3), "number": 0}
            try:
                dcp.load(target, storage_reader=td.TensorizerReader(first, encryption=UNLOCK))
            except CheckpointException as error:
                failures = {of: failure[0] for of, failure in error.failures.items()}
                assert failures, attack
                assert all(is_of_authenticity(failure) for failure in failures.values()), failures
                assert attack is foreign_file or set(failures) == {0, 1}, failures
            else:
                raise AssertionError(f"no error after {attack.__name__}")
            dist.barrier()
            if rank == 0:
                for path, content in before.items():
                    path.write_bytes(content)
            dist.barrier()
        dcp.load(target, storage_reader=td.TensorizerReader(first, encryption=UNLOCK, require_authenticated=True))
        assert float(target[f"w{rank}"][-1]) == 0

    run_ranks(2, work)


def is_of_authenticity(failure: BaseException) -> bool:
    return isinstance(failure, AuthenticationError) or "authentica" in str(failure)


def in_the_body(marker: Path, other: Path) -> None:
    """Changes the body, and the digest in the head to match it."""
    head, _, body = marker.read_bytes().partition(b"\n")
    body = body.replace(b'"world_size":2', b'"world_size":3')
    fitting = {**json.loads(head), "sha256": hashlib.sha256(body).hexdigest()}
    marker.write_bytes(json.dumps(fitting).encode() + b"\n" + body)


def without_tag(marker: Path, other: Path) -> None:
    head, _, body = marker.read_bytes().partition(b"\n")
    known = json.loads(head)
    assert len(known.pop("tag")) == 64
    marker.write_bytes(json.dumps(known).encode() + b"\n" + body)


def foreign_file(marker: Path, other: Path) -> None:
    """Replaces the files of both ranks by those of another step, with the same key and size."""
    mine, theirs = (sorted(folder.glob("*.tensors")) for folder in (marker.parent, other))
    for to, source in zip(mine, theirs):
        assert to.stat().st_size == source.stat().st_size
        to.write_bytes(source.read_bytes())


def keys(folder: Path) -> None:
    """A wrong key is an error on all ranks."""

    def work(rank):
        save(folder / "ranks", 4, rank, encryption=KEY)
        dist.barrier()
        for wrong in (WRONG, None):
            target = {f"w{rank}": torch.zeros(500), "both": torch.zeros(3), "number": 0}
            try:
                dcp.load(target, storage_reader=td.TensorizerReader(folder / "ranks", encryption=wrong))
            except CheckpointException as error:
                failures = {of: failure[0] for of, failure in error.failures.items()}
                assert set(failures) == {0, 1}
                assert all(map(is_of_keys, failures.values())), failures
            else:
                raise AssertionError("no error")
            assert not target["both"].any()
        dcp.load(target, storage_reader=td.TensorizerReader(folder / "ranks", encryption=lambda: UNLOCK))
        assert float(target[f"w{rank}"][-1]) == 4

    run_ranks(2, work)


def in_a_process(folder: Path) -> None:
    """Two ranks save in the background, each in its own process: encrypted, and without changes after the call."""

    def background(rank):
        state = {f"secret{rank}": torch.arange(5000.0) + rank, "step": 3}
        future = dcp.async_save(
            state,
            storage_writer=td.TensorizerWriter(folder / "process", encryption=KEY),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        expected = state[f"secret{rank}"].clone()
        state[f"secret{rank}"].zero_()
        future.result()
        target = {f"secret{rank}": torch.zeros(5000), "step": 0}
        wrong = td.TensorizerReader(folder / "process", encryption=WRONG)
        with pytest.raises(CheckpointException) as caught:
            dcp.load(target, storage_reader=wrong)
        assert set(caught.value.failures) == {0, 1}
        assert all(is_of_keys(failure[0]) for failure in caught.value.failures.values())
        dcp.load(target, storage_reader=td.TensorizerReader(folder / "process", encryption=UNLOCK, verify_hash=True))
        assert torch.equal(target[f"secret{rank}"], expected)
        assert target["step"] == 3
        assert all(expected.numpy().tobytes()[:64] not in path.read_bytes() for path in (folder / "process").iterdir())
        dist.barrier()

    run_ranks(2, background)


def by_default_in_the_background(folder: Path) -> None:
    """Saves without a storage use the writer of the block, also in a process and in a thread that begins later."""

    def background(rank):
        state = {"secret": torch.arange(5000.0), "step": 3}
        futures = []
        staged: Future = Future()
        with td.dcp_default(writer={"encryption": KEY}):
            for kind in (AsyncCheckpointerType.PROCESS, AsyncCheckpointerType.THREAD):
                path = folder / kind.name
                futures.append(dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=kind))
            executor = getattr(state_dict_saver, "_ThreadBasedAsyncCheckpointExecutor", None)
            if executor is not None and "staging_future" in str(inspect.signature(executor.__mro__[1].execute_save)):
                futures.append(executor().execute_save(staged, checkpoint_id=folder / "later"))
        staged.set_result(state)  # after the block
        for future in futures:
            getattr(future, "upload_completion", future).result()
        for path in folder.iterdir():
            target = {"secret": torch.zeros(5000), "step": 0}
            dcp.load(target, storage_reader=td.TensorizerReader(path, encryption=UNLOCK, require_authenticated=True))
            assert torch.equal(target["secret"], state["secret"])
            content = b"".join(file.read_bytes() for file in path.iterdir())
            assert state["secret"].numpy().tobytes()[:64] not in content
        assert {"PROCESS", "THREAD"} <= {path.name for path in folder.iterdir()}

    run_ranks(1, background)


# ---- in the background, one after the other ----


def two_in_the_background(folder: Path) -> None:
    def work(rank):
        state = state_of(1, rank)
        futures = []
        for number in (1, 2, 3):  # the next one begins while others may run
            for name, tensor in state.items():
                if name != "number":
                    tensor.fill_(number)
            state["number"] = number
            futures.append(dcp.async_save(state, storage_writer=td.TensorizerWriter(folder / str(number))))
        for name in (f"w{rank}", "both"):
            state[name].fill_(-1)
        for future in futures:
            future.result()
        assert [number_in(folder / str(number)) for number in (1, 2, 3)] == [1, 2, 3]
        future = dcp.async_save(state_of(4), storage_writer=td.TensorizerWriter("/dev/null/x"))
        with pytest.raises((OSError, CheckpointException), match="/dev/null"):
            future.result()

    run_ranks(1, work)


# ---- several boxes of one tensor on one rank ----


def boxes(folder: Path) -> None:
    full = torch.arange(8 * 12.0).view(8, 12)

    def wrapped(rank, data):
        """Each rank has its rows as two blocks of columns."""
        rows = slice(4 * rank, 4 * rank + 4)
        parts = [data[rows, :5].clone(), data[rows, 5:].clone()]
        shards = LocalShardsWrapper(parts, [(4 * rank, 0), (4 * rank, 5)])
        mesh = init_device_mesh("cpu", (2,))
        return DTensor.from_local(shards, mesh, [Shard(0)], run_check=False, shape=data.size(), stride=data.stride())

    def work(rank):
        dcp.save({"w": wrapped(rank, full)}, storage_writer=td.TensorizerWriter(folder))
        dist.barrier()
        again = wrapped(rank, torch.zeros_like(full))
        dcp.load({"w": again}, storage_reader=td.TensorizerReader(folder, verify_hash=True))
        found = again.to_local().local_shards()
        assert torch.equal(torch.cat(found, 1), full[4 * rank : 4 * rank + 4])
        columns = DTensor.from_local(torch.zeros(8, 6), init_device_mesh("cpu", (2,)), [Shard(1)])
        dcp.load({"w": columns}, storage_reader=td.TensorizerReader(folder))
        assert torch.equal(columns.to_local(), full[:, 6 * rank : 6 * rank + 6])

    run_ranks(2, work)
    whole = {"w": torch.zeros(8, 12)}
    dcp.load(whole, storage_reader=td.TensorizerReader(folder), no_dist=True)
    assert torch.equal(whole["w"], full)
    assert len(td.verify(folder).verified) == 4
    assert td.dcp_to_files(folder, folder / "one.tensors") == [full.nbytes]


class Blocks(torch.Tensor):
    """A tensor that holds some boxes of a larger one, has its shape, and describes the boxes to torch by methods."""

    @staticmethod
    def __new__(cls, full: torch.Tensor, boxes):
        made = torch.Tensor._make_wrapper_subclass(cls, full.shape, dtype=full.dtype)
        made.boxes = [
            (torch.Size(begin), full[tuple(slice(b, b + n) for b, n in zip(begin, sizes))].clone())
            for begin, sizes in boxes
        ]
        return made

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(begin, part.shape) for begin, part in self.boxes]

    def __create_write_items__(self, fqn, _):
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, i),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(self.dtype), self.shape),
            )
            for i, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __get_tensor_shard__(self, index):
        return dict(self.boxes)[index.offset]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def blocks(folder: Path) -> None:
    """Boxes of any order and size, which are not shards of a mesh, load as other boxes and as whole tensors."""
    full = torch.arange(6 * 10.0).view(6, 10)
    saved = [
        [((0, 0), (2, 3)), ((4, 3), (2, 7)), ((0, 3), (4, 1))],
        [((2, 0), (4, 3)), ((0, 4), (1, 6)), ((1, 4), (3, 6))],
    ]
    wanted = [[((1, 1), (4, 5)), ((5, 9), (1, 1))], [((0, 0), (6, 1)), ((3, 2), (1, 8))]]

    def work(rank):
        state = {"w": Blocks(full, saved[rank]), "plain": torch.ones(3)}
        dcp.save(state, storage_writer=td.TensorizerWriter(folder))
        dist.barrier()
        for verify in (False, True):
            target = {"w": Blocks(torch.zeros_like(full), wanted[rank]), "plain": torch.zeros(3)}
            dcp.load(target, storage_reader=td.TensorizerReader(folder, verify_hash=verify))
            for (begin, part), (_, sizes) in zip(target["w"].boxes, wanted[rank]):
                assert torch.equal(part, full[tuple(slice(b, b + n) for b, n in zip(begin, sizes))]), (verify, begin)

    run_ranks(2, work)
    whole = {"w": torch.zeros(6, 10), "plain": torch.zeros(3)}
    dcp.load(whole, storage_reader=td.TensorizerReader(folder), no_dist=True)
    assert torch.equal(whole["w"], full)
    assert len(td.verify(folder).verified) == 7
    td.dcp_to_files(folder, folder / "one.tensors")
    assert torch.equal(TensorDeserializer(folder / "one.tensors", device="cpu")["w"], full)
    for path in folder.glob("r*.tensors"):  # names are for people: the first box has the tensor's, others say where
        names = {name for name in TensorDeserializer(path, device="cpu", lazy_load=True) if name != "plain"}
        assert len(names) == 3
        assert {name.partition("@")[0] for name in names} == {"w"}


# ---- memory ----


def memory_of_a_save(folder: Path) -> None:
    """Saves tensors that must be copied first, twice as many bytes as may be copied at a time, in bounded memory."""
    assert memory.can_measure()
    save_small = {"w": torch.ones(10)}
    dcp.save(save_small, storage_writer=td.TensorizerWriter(folder / "small"), no_dist=True)
    for rows, limit in ((3 * 4096, 192), (4096, 256)):  # tensors of 192 MiB, of which two are too many, and of 64
        state = {f"w{i}": torch.ones(4096, rows).t() for i in range(512 * 4096 // (64 * rows))}
        with memory.peak_growth() as growth:
            dcp.save(state, storage_writer=td.TensorizerWriter(folder / "large", fsync=False), no_dist=True)
        assert growth.peak < (limit + 32) * memory.MIB, (limit, growth.peak / memory.MIB)
    count, side = len(state), 4096
    with memory.peak_growth() as growth:
        td.dcp_to_files(folder / "large", folder / "one.tensors")
    assert growth.peak < (256 + 64) * memory.MIB, growth.peak / memory.MIB
    target = {f"w{i}": torch.zeros(side, side).t() for i in range(count)}  # neither is their memory contiguous
    with memory.peak_growth() as growth:
        dcp.load(target, storage_reader=td.TensorizerReader(folder / "large"), no_dist=True)
    assert growth.peak < (256 + 64) * memory.MIB, growth.peak / memory.MIB


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    globals()[sys.argv[1]](Path(sys.argv[2]))
