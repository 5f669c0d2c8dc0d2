"""Programs for ``fresh_process``: failures in the middle of a save, and the other ways to save."""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib
import itertools
import os
import resource
import runpy
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from paths import snippet
from rank_processes import run_launched_ranks, run_ranks
from servers.s3_recorder import S3Recorder
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tensorizer.distributed as td
from tensorizer.distributed._checkpoint import writer as writer_module
from tensorizer.distributed._checkpoint.boxes import CheckpointFiles
from tensorizer.distributed._checkpoint.folder import Folder
from tensorizer.errors import HashMismatchError, TensorizerError, TruncatedError

assert td.TensorizerReader, td.TensorizerWriter  # imported now, once for all ranks


STEPS_IN = tuple(os.path.join("_checkpoint", name) for name in ("writer.py", "folder.py", "existing.py"))


def state_of(number: int, rank: int = 0, rows: int = 500):
    """A state of a rank. All its parts contain the number of the state."""
    return {f"w{rank}": torch.full((rows,), float(number)), "both": torch.full((3,), float(number)), "number": number}


def save(folder: Path, number: int, rank: int = 0, **arguments) -> None:
    dcp.save(state_of(number, rank), storage_writer=td.TensorizerWriter(folder, **arguments))


def number_in(folder: Path, ranks: int = 1) -> int:
    """The number of the saved state. Fails if its parts come from several states."""
    state = {"number": 0, "both": torch.zeros(3)} | {f"w{rank}": torch.zeros(500) for rank in range(ranks)}
    dcp.load(state, storage_reader=td.TensorizerReader(folder, verify_hash=True), no_dist=True)
    found = {state["number"], *(float(x) for name in state if name != "number" for x in state[name].unique())}
    assert len(found) == 1, found
    return int(found.pop())


def error_of(call: Callable[[], object]) -> CheckpointException:
    try:
        call()
    except CheckpointException as error:
        return error
    raise AssertionError("no error")


def in_child(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_event(number: int) -> None:
    """Kills this process at the n-th call of or in the modules that write, counting calls of the extension."""
    left = number

    def profile(frame, event, argument):
        nonlocal left
        if event in ("call", "c_call") and frame.f_code.co_filename.endswith(STEPS_IN):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(profile)


def kill_one_process_at_any_step(folder: Path, stride: int) -> None:
    base = folder / "base"
    save(base, 1)
    seen: list[int] = []
    for step in range(1, 1000, stride):
        here = folder / "here"
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(base, here)

        def work(here=here, step=step):
            kill_at_event(step)
            save(here, 2)

        code = in_child(work)
        assert code in (0, -signal.SIGKILL), code
        assert td.is_complete(here)
        seen.append(number_in(here))
        if code == 0:
            break
        save(here, 3)  # deletes what is left of this one
        assert len(list(here.iterdir())) == 2, list(here.iterdir())
    assert code == 0
    assert seen == sorted(seen), "a step after the marker shows the old checkpoint"
    assert seen.count(1) > 20
    assert seen.count(2) > 3
    print(len(seen), "steps")


def die_before(name: str, owner=writer_module):
    """Replaces a function of the writer by one that kills its process."""
    setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def kill_one_rank_of_two(folder: Path) -> None:
    for who, step in (
        (1, "tensors_file"),
        (1, "_write_batches"),
        (1, "after"),
        (0, "pack_marker"),
        (0, "write"),
        (0, "remove_stale"),
    ):
        here = folder / f"{who}-{step}"

        def first(rank, here=here):
            save(here, 1, rank)

        def second(rank, here=here, who=who, step=step):
            if rank == who:
                if step == "after":
                    original = writer_module.TensorizerWriter.write_data
                    writer_module.TensorizerWriter.write_data = lambda *a: (original(*a), os.kill(os.getpid(), 9))
                else:
                    die_before(step, Folder if step in ("write", "remove_stale") else writer_module)
            begun = time.monotonic()
            try:
                save(here, 2, rank)
            except BaseException:
                assert time.monotonic() - begun < 60  # not until a time limit of gloo
                raise

        run_ranks(2, first)
        codes = run_ranks(2, second, expected=None)
        assert codes[who] == -signal.SIGKILL, codes
        assert codes[1 - who] == 1, codes  # it was told
        assert td.is_complete(here)
        assert number_in(here, 2) == (2 if step == "remove_stale" else 1), step
    run_ranks(2, lambda rank: save(here, 3, rank))
    assert number_in(here, 2) == 3
    assert len(list(here.iterdir())) == 3


def kill_one_rank_of_two_at_any_step(folder: Path, stride: int) -> None:
    """Two ranks save over a checkpoint of three, and one is killed: the old checkpoint or the new one is whole."""
    base = folder / "base"
    run_ranks(3, lambda rank: save(base, 1, rank))
    seen: dict[int, list[int]] = {0: [], 1: []}
    for who, found in seen.items():
        for step in itertools.count(3, stride):
            here = folder / "here"
            shutil.rmtree(here, ignore_errors=True)
            shutil.copytree(base, here)

            def work(rank, here=here, who=who, step=step):
                if rank == who:
                    kill_at_event(step)
                save(here, 2, rank)

            codes = run_ranks(2, work, expected=None)
            if codes == [0, 0]:
                break
            assert (codes[who], codes[1 - who]) == (-signal.SIGKILL, 1), (who, step, codes)
            assert td.is_complete(here)
            names = td.TensorizerReader(here).read_metadata().state_dict_metadata
            ranks = sum(name.startswith("w") for name in names)
            found.append(number_in(here, ranks))
            assert ranks == (3 if found[-1] == 1 else 2)
            save(here, 3)  # deletes what is left of this one
            assert len(list(here.iterdir())) == 2
        assert len(found) > 4, seen
    assert set(seen[1]) == {1}  # the marker is written by rank 0 alone
    assert seen[0] == sorted(seen[0])
    assert set(seen[0]) == {1, 2}


class NoMemory(dcp.DefaultSavePlanner):
    """Fails to copy a tensor to the host."""

    def resolve_data(self, write_item):
        raise MemoryError("no memory for a copy")


@contextlib.contextmanager
def failing(owner, name: str, error: BaseException):
    """A block in which a function fails."""
    original = getattr(owner, name)

    def fail(*_, **__):
        raise error

    setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def full_disk():
    """A block in which no file of this process can grow beyond a KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fails_on_all(call: Callable[[], object], who: int, *words: str) -> None:
    """All ranks raise, long before a time limit, and name the cause and the rank that failed."""
    begun = time.monotonic()
    error = error_of(call)
    assert time.monotonic() - begun < 60
    assert list(error.failures) == [who], error
    assert all(word in str(error) for word in words), error
    dist.barrier()


def fail_on_one_rank(folder: Path) -> None:
    """If a save fails on one rank, all ranks raise, no temporary file stays, and the next save works."""
    writer = writer_module.TensorizerWriter

    def faults():
        full = OSError(28, "No space left on device")
        yield 1, failing(writer_module, "_write_batches", full), {}, "No space left"
        yield 1, full_disk(), {}, "File too large"
        yield 0, full_disk(), {}, "File too large"
        yield 1, contextlib.nullcontext(), {"planner": NoMemory()}, "no memory for a copy"
        yield 1, failing(writer, "set_up_storage_writer", PermissionError(13, "no access")), {}, "no access"
        yield 0, failing(writer, "prepare_global_plan", RuntimeError("no plan")), {}, "no plan"
        yield 0, failing(Folder, "write", full), {}, "No space left"
        yield 0, failing(writer_module, "pack_marker", MemoryError("no memory for a marker")), {}, "for a marker"

    def work(rank):
        save(folder, 1, rank)
        number = 1
        for who, fault, arguments, word in faults():

            def attempt(number=number, arguments=arguments, who=who):
                state, storage = state_of(number + 1, rank), td.TensorizerWriter(folder)
                dcp.save(state, storage_writer=storage, **(arguments if rank == who else {}))

            with fault if rank == who else contextlib.nullcontext():
                fails_on_all(attempt, who, word)
            assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")], word
            assert number_in(folder, 2) == number, word
            dist.barrier()
            number += 1
            save(folder, number, rank)
            dist.barrier()
            assert number_in(folder, 2) == number, word
            assert len(list(folder.iterdir())) == 3, word
            dist.barrier()
        assert sorted(error_of(lambda: save(folder, 4, rank, overwrite=False)).failures) == [0, 1]
        fail_to_load(folder, rank, number)

    run_ranks(2, work)
    run_ranks(3, lambda rank: save(folder, 5, rank))  # a larger world, then a smaller one
    assert len(list(folder.iterdir())) == 4
    run_ranks(2, lambda rank: save(folder, 6, rank))
    assert len(list(folder.iterdir())) == 3
    assert number_in(folder, 2) == 6


def fail_to_load(folder: Path, rank: int, number: int) -> None:
    """If a load fails on one rank, all ranks raise, and the group still works."""

    def attempt() -> None:
        state = {f"w{rank}": torch.zeros(500), "both": torch.zeros(3), "number": 0}
        dcp.load(state, storage_reader=td.TensorizerReader(folder))

    gone = FileNotFoundError(2, "not seen by this rank")
    for owner, name, word in (
        (CheckpointFiles, "file", "not seen by this rank"),
        (td.TensorizerReader, "read_data", "not seen by this rank"),
        (Folder, "read", ""),  # reads the marker; torch chooses the text of that error
    ):
        with failing(owner, name, gone) if rank == 1 else contextlib.nullcontext():
            fails_on_all(attempt, 1, word)
    attempt()
    dist.barrier()
    assert number_in(folder, 2) == number
    dist.barrier()


def a_store_that_refuses(folder: Path) -> None:
    """A store refuses the upload of one of two ranks, once."""
    import boto3  # once for all ranks

    assert boto3
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    with S3Recorder() as store:
        options = {"stream_options": store.arguments}

        def work(rank):
            error = error_of(lambda: dcp.save(state_of(2, rank), storage_writer=td.TensorizerWriter(uri, **options)))
            assert len(error.failures) == 1, error
            assert "InvalidAccessKeyId" in str(error), error

        uri = "s3://bucket/c"
        run_ranks(2, lambda rank: dcp.save(state_of(1, rank), storage_writer=td.TensorizerWriter(uri, **options)))
        before = dict(store.objects)
        store.fail_once["PutObject"] = (403, "InvalidAccessKeyId")
        run_ranks(2, work)
        assert before.items() <= store.objects.items()
        assert not store.open_uploads
        run_ranks(2, lambda rank: dcp.save(state_of(3, rank), storage_writer=td.TensorizerWriter(uri, **options)))
        assert len(store.objects) == 3
        state = {"number": 0, "w0": torch.zeros(500), "w1": torch.zeros(500), "both": torch.zeros(3)}
        dcp.load(state, storage_reader=td.TensorizerReader(uri, verify_hash=True, **options), no_dist=True)
        assert {state["number"], float(state["w0"][9]), float(state["w1"][9])} == {3}


def damage_between_ranks(folder: Path) -> None:
    """Exchanged files of two ranks are an error, and so are wrong bytes at any place in one of them."""

    def shards(data):
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2,))
        return {"w": DTensor.from_local(data[100 * rank : 100 * rank + 100].clone(), mesh, [Shard(0)], run_check=False)}

    full = torch.arange(200.0)
    run_ranks(2, lambda _: dcp.save(shards(full), storage_writer=td.TensorizerWriter(folder)))
    first, second = sorted(folder.glob("*.tensors"))
    contents = first.read_bytes(), second.read_bytes()
    assert len(contents[0]) == len(contents[1])

    def found(verify_hash: bool = True):
        state = {"w": torch.full((200,), -1.0)}
        try:
            dcp.load(state, storage_reader=td.TensorizerReader(folder, verify_hash=verify_hash), no_dist=True)
        except CheckpointException as error:
            (failure,) = (failure[0] for failure in error.failures.values())
            return failure
        return state["w"]

    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    for failure in (found(), *(wrong.reason for wrong in td.verify(folder).mismatched)):
        assert isinstance(failure, (HashMismatchError, str)), failure
        assert "'w'" in str(failure)
        assert ".tensors" in str(failure)
    assert not torch.equal(found(verify_hash=False), full)  # the files alone look right
    second.write_bytes(contents[1])

    outcomes = collections.Counter()
    whole = contents[0]
    for at in range(0, len(whole), 13):
        first.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        outcome = found()
        if isinstance(outcome, torch.Tensor):
            assert torch.equal(outcome, full), at
        else:
            assert isinstance(outcome, TensorizerError), (at, outcome)
            assert first.name in str(outcome), (at, outcome)
        outcomes[type(outcome).__name__] += 1
    for end in range(0, len(whole), 13):
        first.write_bytes(whole[:end])
        assert isinstance(found(), TruncatedError), end
    assert outcomes["HashMismatchError"] >= 400 // 13  # the payload of this rank


def other_ways(folder: Path) -> None:
    """Saves without collectives, with cached plans and in the background; several ranks verify a checkpoint."""

    def work(rank):
        here = folder / "alone"
        dcp.save(state_of(1, rank), storage_writer=td.TensorizerWriter(here), use_collectives=False)
        dist.barrier()
        assert td.is_complete(here)
        state = {f"w{rank}": torch.zeros(500), "both": torch.zeros(3), "number": 0}
        dcp.load(state, storage_reader=td.TensorizerReader(here))
        assert (state["number"], float(state[f"w{rank}"][-1])) == (1, 1.0)
        try:
            dcp.save(state, storage_writer=td.TensorizerWriter(here), use_collectives=False)
        except FileExistsError:
            pass
        else:
            raise AssertionError("no error")
        dist.barrier()
        save(here, 2, rank)  # a save of all ranks replaces it
        dist.barrier()
        assert number_in(here, 2) == 2
        assert not [path for path in here.iterdir() if path.name.startswith("__")]

        for number in range(3):
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            writer = td.TensorizerWriter(folder / f"cached{number % 2}")
            dcp.save(state_of(number, rank), storage_writer=writer, planner=planner)
        dist.barrier()
        assert [number_in(folder / f"cached{i}", 2) for i in range(2)] == [2, 1]

        state = state_of(7, rank)
        future = dcp.async_save(state, storage_writer=td.TensorizerWriter(folder / "thread"))
        for name in (f"w{rank}", "both"):
            state[name].fill_(-1)  # the save has a copy already
        future.result()
        dist.barrier()
        assert number_in(folder / "thread", 2) == 7

        report = td.verify(folder / "thread")
        alone = [dist.new_group([other]) for other in range(2)][rank]
        assert td.verify(folder / "thread", alone) == report  # by one process
        assert report.ok, report
        assert len(report.verified) == 3
        assert report.nbytes == 2 * 2000 + 12
        with pytest.raises(FileNotFoundError):  # on all ranks, also if only one of them finds no checkpoint
            td.verify(folder / ("nowhere", "thread")[rank])
        dist.barrier()
        if rank == 0:
            (damaged,) = (folder / "thread").glob("r00001-*")
            content = bytearray(damaged.read_bytes())
            content[content.index(struct.pack("f", 7.0) * 100) + 500] ^= 1
            damaged.write_bytes(bytes(content))
        dist.barrier()
        report = td.verify(folder / "thread")
        assert not report.ok
        assert "'w1'" in report.mismatched[0].reason
        assert "r00001-" in report.mismatched[0].reason

    run_ranks(2, work)


def example(folder: Path) -> None:
    """examples/distributed_checkpoint.py, as torchrun starts it, resumes with other numbers of ranks."""
    importlib.import_module("torch._dynamo")  # imported late otherwise, by each rank
    importlib.import_module("torch.distributed.fsdp")

    script = Path(__file__).parents[2] / "examples" / "distributed_checkpoint.py"

    def run(ranks: int, name: str, steps: int) -> list[str]:
        def work(rank: int) -> None:
            sys.argv = [str(script), str(folder / name), str(steps)]
            with open(folder / f"{name}-{steps}-{rank}", "w") as out, contextlib.redirect_stdout(out):
                runpy.run_path(str(script), run_name="__main__")

        run_launched_ranks(ranks, work)
        return (folder / f"{name}-{steps}-0").read_text().split()[2:]

    whole = run(2, "whole", 8)
    assert run(2, "part", 4) == whole[:4]
    assert run(3, "part", 6) == whole[4:6]
    assert run(1, "part", 8) == whole[6:]


def program_of_the_guide(folder: Path) -> None:
    """The program for FSDP2 in docs/training.md: it continues where it stopped, with another number of ranks."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.distributed.fsdp")
    code = compile(snippet("training.md", "fully_shard(model, mesh="), "training.md", "exec")

    def work(_: int) -> None:
        os.chdir(folder)
        exec(code, {"__name__": "__main__"})
        gc.collect()

    for ranks, steps in ((2, 4), (3, 8), (1, 12)):
        run_launched_ranks(ranks, work)
        state = {"step": 0, "model": {"weight": torch.zeros(16, 16)}}
        dcp.load(state, storage_reader=td.TensorizerReader(folder / "run" / "fsdp"), no_dist=True)
        assert state["step"] == steps


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
