"""Results as a table for people and as JSON for programs."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Optional

from benchmarks.case import Case, Goal
from benchmarks.runner import CaseResult, Result


def shown(case: Case, value: float, nbytes: int) -> float:
    """A measured value in the unit of the case."""
    if case.unit == "GB/s":
        return nbytes / value / 1e9
    return value * {"ms": 1e3, "MB": 1e-6, "requests": 1.0}[case.unit]


def spread(case: Case, result: Result, nbytes: int) -> tuple[float, float]:
    """Lowest and highest run in the unit of the case."""
    values = sorted(shown(case, value, nbytes) for value in result.values)
    return values[0], values[-1]


def ratio(outcome: CaseResult, result: Result, versus: str) -> Optional[float]:
    """How many times better than ``versus``: above 1 is faster, or takes less memory."""
    other = outcome.of(versus)
    if other is None or result.median is None or other.median is None or not result.median:
        return None
    return other.median / result.median


def verdict(outcome: CaseResult, goal: Goal) -> Optional[tuple[str, bool]]:
    """One goal in words and whether it is met; ``None`` where a contender is missing."""
    ours = outcome.of(goal.who)
    if ours is None or ours.median is None:
        return None
    who = "" if goal.who == "ours" else f"{goal.who}: "
    if goal.versus is None:
        value = shown(outcome.case, ours.median, outcome.nbytes)
        return f"{who}{value:.3g} {outcome.case.unit}, goal <= {goal.at_most:.3g}", value <= goal.at_most
    found = ratio(outcome, ours, goal.versus)
    if found is None:
        return None
    return f"{who}{found:.2f} x {goal.versus}, goal >= {goal.at_least:g}", found >= goal.at_least


def table(outcome: CaseResult) -> str:
    """One case as text: a line per contender, then the goals."""
    case = outcome.case
    lines = [f"{case.title}  [{case.unit}]", ""]
    lines.append(f"  {'':28}{'median':>9}{'lowest':>9}{'highest':>9}{'x reference':>13}{'of limit':>10}")
    for result in outcome.results:
        label = f"{result.contender.label:28}"
        if result.median is None:
            lines.append(f"  {label}  {result.error or 'not measured'}")
            continue
        low, high = spread(case, result, outcome.nbytes)
        middle = shown(case, result.median, outcome.nbytes)
        reference = ratio(outcome, result, "reference")
        limit = ratio(outcome, result, case.limit) if case.limit else None
        lines.append(
            f"  {label}{middle:9.4g}{low:9.4g}{high:9.4g}"
            f"{'' if reference is None else f'{reference:.2f}':>13}{'' if limit is None else f'{limit:.0%}':>10}"
        )
    for goal in case.goals:
        judged = verdict(outcome, goal)
        if judged:
            lines.append(f"  {'met   ' if judged[1] else 'MISSED'}  {judged[0]}")
    return "\n".join(lines) + "\n"


def machine() -> dict[str, object]:
    """What the figures were measured on, without naming the machine."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().partition("-")[0],
        "huge_pages": pages.read_text().strip() if pages.exists() else "",
        "python": platform.python_version(),
    }


def as_json(outcomes: list[CaseResult], size: int, runs: int) -> dict[str, object]:
    """Everything, with every single run in seconds or bytes."""
    return {
        "machine": machine(),
        "size": size,
        "runs": runs,
        "method": "each run a process of its own, contenders in turn, medians; as much memory as a run needs is "
        "faulted in and freed right before each clock starts, for every contender alike",
        "cases": [_case_json(outcome) for outcome in outcomes],
    }


def _case_json(outcome: CaseResult) -> dict[str, object]:
    case = outcome.case
    results = []
    for result in outcome.results:
        middle = result.median
        results.append(
            {
                "contender": result.contender.name,
                "label": result.contender.label,
                "role": result.contender.role,
                "version": result.version,
                "runs": result.values,
                "median": middle,
                "shown": None if middle is None else shown(case, middle, outcome.nbytes),
                "versus_reference": ratio(outcome, result, "reference"),
                "of_limit": ratio(outcome, result, case.limit) if case.limit else None,
                "error": result.error,
            }
        )
    judged = [verdict(outcome, goal) for goal in case.goals]
    return {
        "name": case.name,
        "title": case.title,
        "unit": case.unit,
        "nbytes": outcome.nbytes,
        "limit": case.limit,
        "family": case.family,
        "at": case.at,
        "results": results,
        "goals": [{"text": found[0], "met": found[1]} for found in judged if found],
    }
