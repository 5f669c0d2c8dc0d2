"""Draw the results of deserialize_benchmark.py: one bar per library and model, at the median, trials as dots."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files")
    parser.add_argument("--output", type=Path, default=Path("benchmark.png"))
    args = parser.parse_args()

    times: dict[tuple[str, str], list[float]] = {}
    for path in args.results:
        report = json.loads(path.read_text())
        for result in report["results"]:
            times.setdefault((report["model"], result["loader"]), []).append(result["seconds"])

    figure = Figure(figsize=(8, 1 + 0.5 * len(times)))
    axes = figure.subplots()
    for row, ((_, loader), seconds) in enumerate(sorted(times.items())):
        axes.barh(row, median(seconds), color="tab:blue" if loader == "tensorizer" else "lightgray")
        axes.plot(seconds, [row] * len(seconds), "k.", markersize=4)
    axes.set_yticks(range(len(times)), [f"{model}\n{loader}" for model, loader in sorted(times)])
    axes.set_xlabel("seconds until the model is loaded (less is better)")
    figure.tight_layout()
    figure.savefig(args.output, dpi=150)
    print(f"Wrote {args.output}")


if __name__ == "__main__":
    main()
