"""``python -m benchmarks``: measure, print a table as the figures come, write JSON and a chart."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

from benchmarks import report
from benchmarks.cases import CASES, GPU_CASES, cases, names
from benchmarks.contenders import CONTENDERS, contender
from benchmarks.environments import ROOT
from benchmarks.runner import Runner

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size(text: str) -> int:
    """Bytes of ``2GB``, ``64MiB``, ``1000000``.

    Raises:
        argparse.ArgumentTypeError: No such size.
    """
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"expected a size such as 2GB or 64MB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2].upper()])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--size", type=size, default=2 * 10**9, help="bytes of the large model (default 2GB)")
    parser.add_argument("--runs", type=int, default=5, help="measurements per contender and case (default 5)")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help=", ".join(names()))
    parser.add_argument("--contenders", nargs="+", metavar="WHO", help=", ".join(c.name for c in CONTENDERS))
    parser.add_argument("--env", action="append", default=[], metavar="WHO=PYTHON", help="an interpreter to use")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "bench", help="models, environments")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to save to (default: in the cache)")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="folder in memory to save to")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "out", help="where JSON and chart go")
    parser.add_argument("--list", action="store_true", help="list cases and contenders, measure nothing")
    return parser.parse_args()


def list_everything() -> None:
    """Cases with those who take part in them."""
    for each in (*CASES, *GPU_CASES):
        print(f"{each.name:18} {each.title:44} {', '.join(c.name for c in CONTENDERS if each.takes(c))}")


def main() -> int:
    """Run the benchmark; the exit status tells whether this project's own figures came about."""
    given = arguments()
    if given.list:
        list_everything()
        return 0
    try:
        wanted = [c for name in given.cases for c in cases(name)] if given.cases else list(CASES)
        everybody = [c for c in CONTENDERS if not c.by_name_only]
        who = [contender(name) for name in given.contenders] if given.contenders else everybody
    except KeyError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    pythons = {name: Path(path) for name, _, path in (text.partition("=") for text in given.env)}
    cache = given.cache.resolve()
    runner = Runner(cache, given.scratch or cache / "scratch", given.tmpfs, given.size, pythons)
    facts = report.machine()
    about = (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB; {given.size / 1e9:g} GB, {given.runs} runs"
    )
    print(f"{about}\nmedians; contenders in turn, each run in a process of its own\n")
    outcomes = []
    for each in wanted:
        outcomes.append(runner.run(each, who, given.runs))
        print(report.table(outcomes[-1]), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    name = given.out / time.strftime("bench-%Y%m%d-%H%M%S")
    name.with_suffix(".json").write_text(json.dumps(report.as_json(outcomes, given.size, given.runs), indent=2) + "\n")
    try:
        from benchmarks.chart import draw

        drawn = draw(outcomes, name.with_suffix(".png"), about)
    except ImportError:
        drawn = []
        print("no chart: matplotlib is not installed (requirements/benchmarks.txt)", file=sys.stderr)
    print(f"written: {', '.join(map(str, [name.with_suffix('.json'), *drawn]))}")
    failed = [r.contender.name for o in outcomes for r in o.results if r.error and r.contender.role == "ours"]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
