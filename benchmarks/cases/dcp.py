"""``torch.distributed.checkpoint`` with 1, 2 and 4 ranks on one machine: saves that reach the disk, loads, reshards.

Two ranks load a model as the hub has it, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.case import Bench, Case, Goal
from benchmarks.environments import ROOT

_RANKS = (1, 2, 4)
_TIMEOUT = 1800.0


def run_ranks(bench: Bench, operations: str, ranks: int, path: Path) -> float:
    """Seconds that the slowest rank took for the last one of ``operations``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.dcp_rank", bench.contender.name, operations]
        rest = [str(ranks), str(bench.manifest.nbytes), f"{folder}/store", str(path)]
        processes = [
            subprocess.Popen(
                [*command, str(rank), *rest], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=_TIMEOUT) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    for process, (_, errors) in zip(processes, outputs):
        if process.returncode != 0:
            raise RuntimeError(f"{bench.contender.label}: a rank failed: {errors[-1000:]}")
    return max(float(json.loads(output.splitlines()[-1])["seconds"]) for output, _ in outputs)


@contextlib.contextmanager
def checkpoint(bench: Bench) -> Iterator[Path]:
    """A folder of its own, deleted afterwards."""
    folder = bench.target.with_name(bench.target.name + "-dcp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()
    try:
        yield folder / "checkpoint"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save(bench: Bench, ranks: int) -> float:
    """Until files and marker are on the disk."""
    with checkpoint(bench) as path:
        return run_ranks(bench, "save", ranks, path)


def load(bench: Bench, ranks: int) -> float:
    """What as many ranks saved just before, from the page cache."""
    with checkpoint(bench) as path:
        return run_ranks(bench, "save,load", ranks, path)


def reshard(bench: Bench, ranks: int) -> float:
    """What one rank more saved, cut along the same dimension. Ours fails where it reads over 1.05 times its part."""
    with checkpoint(bench) as path:
        run_ranks(bench, "save", ranks + 1, path)
        return run_ranks(bench, "load", ranks, path)


def load_model(bench: Bench, ranks: int) -> float:
    """The shards of a model in ``.safetensors``, of which each rank wants its rows, from the page cache."""
    with checkpoint(bench) as path:
        return run_ranks(bench, "shards,load-model", ranks, path)


_MODEL = Case(
    "dcp-model-2",
    "model folder of Hugging Face into sharded tensors, page cache hot, 2 ranks",
    "dcp_model_reader",
    partial(load_model, ranks=2),
    goals=(Goal("hf-dcp", at_least=3.0),),
)

CASES = (
    _MODEL,
    *(
        Case(
            f"dcp-{name}-{ranks}",
            f"{title}, {ranks} rank{'s' if ranks > 1 else ''}",
            "dcp_writer",
            partial(measure, ranks=ranks),
            goals=(Goal("torch-dcp", at_least=goal),),
            family=f"dcp-{name}",
            at=ranks,
        )
        for name, title, measure, goal in (
            ("save", "distributed checkpoint, save to disk", save, 1.5),
            ("load", "distributed checkpoint, load, page cache hot", load, 2.0),
            ("reshard", "distributed checkpoint, load with one rank less", reshard, 2.0),
        )
        for ranks in _RANKS
    ),
)
