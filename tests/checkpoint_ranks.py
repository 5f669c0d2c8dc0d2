"""Programs for ``fresh_process``: what goes wrong in the middle of a save, and the other ways to save."""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import run_ranks
from torch.distributed.checkpoint.api import CheckpointException

import tensorizer.distributed as td
from tensorizer.distributed._checkpoint import writer as writer_module

assert td.TensorizerReader, td.TensorizerWriter  # imported now, once for all ranks


STEPS_IN = tuple(os.path.join("_checkpoint", name) for name in ("writer.py", "folder.py", "upkeep.py"))


def state_of(number: int, rank: int = 0, rows: int = 500):
    """A state of rank `rank`, all of whose parts say which one it is."""
    return {f"w{rank}": torch.full((rows,), float(number)), "both": torch.full((3,), float(number)), "number": number}


def save(folder: Path, number: int, rank: int = 0, **arguments) -> None:
    dcp.save(state_of(number, rank), storage_writer=td.TensorizerWriter(folder, **arguments))


def number_in(folder: Path, ranks: int = 1) -> int:
    """Which state is there, all parts of which must be of one."""
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
    """Kills this process at the n-th call of or in the modules that write, calls of the extension included."""
    left = number

    def profile(frame, event, argument):
        nonlocal left
        if event in ("call", "c_call") and frame.f_code.co_filename.endswith(STEPS_IN):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(profile)


def kill_one_process_at_every_step(folder: Path) -> None:
    base = folder / "base"
    save(base, 1)
    seen: list[int] = []
    for step in range(1, 1000):
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
        td.prune(here)
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
    from tensorizer.distributed._checkpoint.folder import Folder

    for who, step in (
        (1, "written_in_one_call"),
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
                    die_before(step, Folder if step == "write" else writer_module)
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


def fail_on_one_rank(folder: Path) -> None:
    def work(rank):
        save(folder, 1, rank)
        original = writer_module._write_batches

        def disk_full(*_):
            raise OSError(28, "No space left on device")

        if rank == 1:
            writer_module._write_batches = disk_full
        begun = time.monotonic()
        error = error_of(lambda: save(folder, 2, rank))
        assert list(error.failures) == [1], error
        assert "No space left" in str(error)
        assert time.monotonic() - begun < 60  # not until a time limit of gloo
        writer_module._write_batches = original
        dist.barrier()
        assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]
        assert number_in(folder, 2) == 1
        dist.barrier()
        save(folder, 3, rank)
        dist.barrier()
        assert number_in(folder, 2) == 3
        assert len(list(folder.iterdir())) == 3
        assert sorted(error_of(lambda: save(folder, 4, rank, overwrite=False)).failures) == [0, 1]

    run_ranks(2, work)
    run_ranks(3, lambda rank: save(folder, 5, rank))  # a larger world, then a smaller one
    assert len(list(folder.iterdir())) == 4
    run_ranks(2, lambda rank: save(folder, 6, rank))
    assert len(list(folder.iterdir())) == 3
    assert number_in(folder, 2) == 6


def other_ways(folder: Path) -> None:
    """Without collectives, with kept plans, in the background, verified and put together by several ranks."""

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
        save(here, 2, rank)  # a save of all ranks takes the place of those
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
            state[name].fill_(-1)  # staged: the file does not see it
        future.result()
        dist.barrier()
        assert number_in(folder / "thread", 2) == 7

        report = td.verify(folder / "thread")
        assert report.ok, report
        assert report.boxes == 3
        assert report.nbytes == 2 * 2000 + 12
        if rank == 0:
            (damaged,) = (folder / "thread").glob("r00001-*")
            content = bytearray(damaged.read_bytes())
            content[content.index(struct.pack("f", 7.0) * 100) + 500] ^= 1
            damaged.write_bytes(bytes(content))
        dist.barrier()
        report = td.verify(folder / "thread")
        assert not report.ok
        assert "'w1'" in report.errors[0]
        assert "r00001-" in report.errors[0]

    run_ranks(2, work)


def example(folder: Path) -> None:
    """examples/distributed_checkpoint.py as torchrun starts it: whole, stopped, resumed by other numbers of ranks."""
    importlib.import_module("torch._dynamo")  # imported late otherwise, by each rank
    importlib.import_module("torch.distributed.fsdp")

    script = Path(__file__).parents[1] / "examples" / "distributed_checkpoint.py"

    def run(ranks: int, name: str, steps: int) -> list[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        def work(rank: int) -> None:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            sys.argv = [str(script), str(folder / name), str(steps)]
            with open(folder / f"{name}-{steps}-{rank}", "w") as out, contextlib.redirect_stdout(out):
                runpy.run_path(str(script), run_name="__main__")

        run_ranks(ranks, work, grouped=False)
        return (folder / f"{name}-{steps}-0").read_text().split()[2:]

    whole = run(2, "whole", 8)
    assert run(2, "part", 4) == whole[:4]
    assert run(3, "part", 6) == whole[4:6]
    assert run(1, "part", 8) == whole[6:]


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
