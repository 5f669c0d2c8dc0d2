"""Draw speed over buffer size from the JSON lines of benchmark.py, one image for each kind of source."""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure


def node_labels(path: Path) -> dict[str, str]:
    """Host name to the other columns of the table, joined."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        row["node"]: " ".join(value for column, value in row.items() if column != "node" and value) or row["node"]
        for row in rows
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="files of JSON lines")
    parser.add_argument("-n", "--node-info", type=Path, required=True, metavar="CSV", help="table with a column 'node'")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not name the images")
    parser.add_argument("-o", "--out-dir", type=Path, default=Path(), help="folder for the images")
    args = parser.parse_args()

    labels = node_labels(args.node_info)
    # scheme -> (label, kind) -> buffer size -> rates
    rates: dict[str, dict[tuple[str, str], dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for path in args.files:
        for line in path.read_text().splitlines():
            if line:
                run = json.loads(line)
                label = labels.get(run["node"], run["node"])
                rates[run["scheme"]][label, run["kind"]][run["buffer_size"]].append(run["bytes_per_second"])

    args.out_dir.mkdir(parents=True, exist_ok=True)
    for scheme, lines in sorted(rates.items()):
        figure = Figure(figsize=(8, 5))
        axes = figure.subplots()
        for (label, kind), points in sorted(lines.items()):
            sizes = sorted(points)
            speeds = [median(points[size]) / 1e9 for size in sizes]
            axes.plot([size / 1024 for size in sizes], speeds, marker="o", label=f"{label}, {kind}")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("buffer size, KiB")
        axes.set_ylabel("GB/s, median")
        axes.set_title(scheme)
        axes.legend()
        figure.tight_layout()
        output = args.out_dir / f"{scheme}.png"
        figure.savefig(output, dpi=150)
        if not args.quiet:
            print(f"Wrote {output}")


if __name__ == "__main__":
    main()
