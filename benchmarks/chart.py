"""The figures as pictures: a panel per case, a bar per contender, the limit as a line; families of cases as curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import shown, spread
from benchmarks.runner import CaseResult

COLOURS = {"ours": "#1769aa", "variant": "#6ba3d0", "reference": "#9e9e9e", "other": "#cfd8dc"}
COLUMNS = 2


def draw(outcomes: list[CaseResult], path: Path, subtitle: str) -> list[Path]:
    """Write the charts as PNG; cases without a figure are left out.

    Args:
        outcomes: What was measured.
        path: Where the bars go; the curves of a family go beside it, with the family's name in theirs.
        subtitle: What it was measured on.

    Returns:
        The files written.
    """
    import matplotlib

    matplotlib.use("Agg")
    outcomes = [o for o in outcomes if any(r.median is not None for r in o.results)]
    drawn = []
    if bars := [o for o in outcomes if not o.case.family]:
        _draw_bars(bars, path, subtitle)
        drawn.append(path)
    for family in dict.fromkeys(o.case.family for o in outcomes if o.case.family):
        drawn.append(path.with_name(f"{path.stem}-{family}{path.suffix}"))
        _draw_curves([o for o in outcomes if o.case.family == family], drawn[-1], subtitle)
    return drawn


def _draw_curves(outcomes: list[CaseResult], path: Path, subtitle: str) -> None:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    unit = outcomes[0].case.unit
    for contender in dict.fromkeys(r.contender for o in outcomes for r in o.results):
        found = [(o, r) for o in outcomes if (r := o.of(contender.name)) is not None]
        if not found:
            continue
        axis.plot(
            [o.case.at for o, _ in found],
            [shown(o.case, r.median or 0.0, o.nbytes) for o, r in found],
            marker="o",
            linestyle="--" if contender.role == "limit" else "-",
            color="#c62828" if contender.role == "limit" else None,
            linewidth=2.5 if contender.role == "ours" else 1.2,
            label=contender.label,
        )
    axis.set_xticks([o.case.at for o in outcomes])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("threads")
    axis.set_ylabel(f"{unit}, {_better(unit)}")
    axis.legend(fontsize=8, frameon=False)
    axis.set_title(f"{outcomes[0].case.family}: {outcomes[0].case.title.partition(':')[0]}\n{subtitle}", fontsize=9)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_bars(outcomes: list[CaseResult], path: Path, subtitle: str) -> None:
    from matplotlib import pyplot

    rows = (len(outcomes) + COLUMNS - 1) // COLUMNS
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(13, 1.1 + 2.1 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(outcomes) :]:
        axis.axis("off")
    for axis, outcome in zip(axes.flat, outcomes):
        _panel(axis, outcome)
    figure.suptitle(f"tensorizer beside others\n{subtitle}", fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _better(unit: str) -> str:
    return "more is better" if unit == "GB/s" else "less is better"


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
    axis.set_title(f"{case.title}  ({case.unit}, {_better(case.unit)})", fontsize=9, loc="left")
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.margins(x=0.15)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
