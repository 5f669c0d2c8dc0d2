"""The figures as one picture: a panel per case, a bar per contender, the machine's limit as a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import shown, spread
from benchmarks.runner import CaseResult

COLOURS = {"ours": "#1769aa", "reference": "#9e9e9e", "other": "#cfd8dc"}
COLUMNS = 2


def draw(outcomes: list[CaseResult], path: Path, subtitle: str) -> None:
    """Write the chart as PNG; cases without a figure are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    outcomes = [o for o in outcomes if any(r.median is not None for r in o.results)]
    if not outcomes:
        return
    rows = (len(outcomes) + COLUMNS - 1) // COLUMNS
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(13, 1.1 + 2.1 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(outcomes) :]:
        axis.axis("off")
    for axis, outcome in zip(axes.flat, outcomes):
        _panel(axis, outcome)
    figure.suptitle(f"tensorizer beside others\n{subtitle}", fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, outcome: CaseResult) -> None:
    case = outcome.case
    results = [r for r in outcome.results if r.median is not None and r.contender.role != "limit"]
    limits = [r for r in outcome.results if r.median is not None and r.contender.role == "limit"]
    values = [shown(case, r.median or 0.0, outcome.nbytes) for r in results]
    ranges = [spread(case, r, outcome.nbytes) for r in results]
    below = [value - low for value, (low, _) in zip(values, ranges)]
    above = [high - value for value, (_, high) in zip(values, ranges)]
    bars = axis.barh(
        [r.contender.label for r in results],
        values,
        xerr=[below, above],
        color=[COLOURS[r.contender.role] for r in results],
        error_kw={"elinewidth": 0.8, "capsize": 2, "ecolor": "#555555"},
    )
    axis.bar_label(bars, labels=[f"{value:.3g}" for value in values], padding=6, fontsize=8)
    for result in limits:
        axis.axvline(
            shown(case, result.median or 0.0, outcome.nbytes),
            color="#c62828",
            linestyle="--",
            linewidth=1,
            label=result.contender.label,
        )
        axis.legend(fontsize=7, loc="lower right", frameon=False)
    better = "more is better" if case.unit == "GB/s" else "less is better"
    axis.set_title(f"{case.title}  ({case.unit}, {better})", fontsize=9, loc="left")
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.margins(x=0.15)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
