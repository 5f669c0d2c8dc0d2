"""Runs ranks of a gloo group, as children of a process that has imported all modules, in ``fresh_process``."""

from __future__ import annotations

import datetime
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Optional

import torch
import torch.distributed as dist

__all__ = ["run_launched_ranks", "run_ranks"]


def run_ranks(
    ranks: int,
    work: Callable[[int], object],
    *,
    expected: int = 0,
    timeout: float = 150,
    own: float = 30,
    grouped: bool = True,
) -> list[int]:
    """Runs ``work(rank)`` in each rank. Returns the exit codes, which must be `expected` unless that is ``None``.

    If not `grouped`, the ranks make their group themselves. `own` is the time limit of a collective in seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os._exit(_run(rank, ranks, work, folder if grouped else None, own))
            children.append(child)
        codes = _wait(children, timeout)
    if expected is not None and codes != [expected] * ranks:
        raise SystemExit(f"ranks ended with {codes}")
    return codes


def run_launched_ranks(ranks: int, work: Callable[[int], object], **variables: str) -> None:
    """Runs ``work(rank)`` in each rank, with the environment that torchrun gives it, and `variables` in that.

    The ranks make their group themselves. A group that is left is destroyed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def launched(rank: int) -> None:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            GROUP_RANK="0",
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="none",
            **variables,
        )
        work(rank)
        if dist.is_initialized():
            dist.destroy_process_group()

    run_ranks(ranks, launched, grouped=False)


def _run(rank: int, ranks: int, work: Callable[[int], object], folder: Optional[str], own: float) -> int:
    try:
        # A forked process makes torch's pool of threads again, and two threads that do so at once end it with an error.
        torch.set_num_threads(1)
        if folder is None:
            work(rank)
            sys.stdout.flush()
            return 0
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=own),
        )
        work(rank)
        dist.destroy_process_group()
    except BaseException:
        print(f"rank {rank}:", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    sys.stdout.flush()
    return 0


def _wait(children: list[int], timeout: float) -> list[int]:
    deadline = time.monotonic() + timeout
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for child in children:
                if child not in codes:
                    os.kill(child, 9)
                    os.waitpid(child, 0)
                    codes[child] = -9
        time.sleep(0.005)
    return [codes[child] for child in children]
