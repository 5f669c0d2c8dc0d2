"""One process of the benchmark: prepares a file or measures once, and prints one line of JSON.

Started by path, not as a module, with the repository's root in ``BENCH_ROOT``: the root must not be on the import path,
or the reference's environment would import this project's ``tensorizer``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path


def import_benchmarks_only() -> None:
    """Make ``benchmarks.*`` importable, and nothing else of the repository."""
    root = os.environ["BENCH_ROOT"]
    sys.path[0] = root
    import benchmarks  # noqa: F401

    sys.path.remove(root)


def prepare(arguments: argparse.Namespace) -> dict[str, object]:
    """Write the contender's own file of a model."""
    from benchmarks import models
    from benchmarks.contenders import contender

    who = contender(arguments.contender)
    who.import_library()
    final = arguments.folder / who.file_name(arguments.variant)
    partial = final.with_name("partial-" + final.name)
    write = getattr(who, f"prepare_{arguments.variant}") if arguments.variant else who.prepare
    write(models.read_base(arguments.folder), partial)
    partial.rename(final)
    return {"version": who.version()}


def make(arguments: argparse.Namespace) -> dict[str, object]:
    """Make a model."""
    from dataclasses import asdict

    from benchmarks import models

    return asdict(models.make(arguments.model, arguments.size, arguments.folder))


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Measure one case on one contender, once."""
    from benchmarks.case import Bench
    from benchmarks.cases import case
    from benchmarks.contenders import contender

    bench = Bench(
        contender(arguments.contender),
        case(arguments.case),
        arguments.folder,
        arguments.tiny,
        arguments.scratch,
        len(os.sched_getaffinity(0)),
        json.loads(os.environ["BENCH_SETTINGS"]),
    )
    if bench.case.needs != "import_time":
        bench.wake_up()
    value = bench.case.measure(bench)
    return {"value": value, "version": bench.contender.version()}


def main() -> None:
    """Read the command line, do one thing."""
    import_benchmarks_only()
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("make", "prepare", "measure"))
    parser.add_argument("--contender")
    parser.add_argument("--case")
    parser.add_argument("--model")
    parser.add_argument("--variant", default="")
    parser.add_argument("--size", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tiny", type=Path)
    parser.add_argument("--scratch", type=Path)
    arguments = parser.parse_args()
    answer = {"make": make, "prepare": prepare, "measure": measure}[arguments.what](arguments)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
