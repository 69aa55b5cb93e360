"""Results of `python -m benchmarks.planners`, and the tables made from them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from ..harness.machine import machine_line
from ..harness.markdown import table

PLANNERS = ("greedy", "knapsack", "rotor", "MILP", "solve")
EXPLANATION = """\
All planners get the same profiled traces, and one simulator computes the overhead of each plan, as a share of a plain
step. Values are kept or recomputed, without stores and codecs. A budget of 0 % is the smallest budget with a plan,
100 % is plain's peak.

- **greedy**: the best simple scheme, or recompute the values that are cheapest per byte; then local improvement.
- **knapsack**: keep the saved values that take most time per byte to recompute, as compilers' partitioners do. This
  does not count the memory of recomputation, so several nominal budgets are tried, and the fastest plan that fits
  counts.
- **rotor**: optimal schedules for chains of blocks (Beaumont et al., 2019).
- **MILP**: lowtide's integer programme, with its near misses repaired.
- **solve**: `lowtide.planning.solve`: MILP, improvement and annealing. It stops near the lower bound, so the MILP alone
  may be slightly better.
- **lower bound**: no plan within the budget has a smaller overhead."""


@dataclass(frozen=True)
class Row:
    """All planners on one model with one budget."""

    model: str
    title: str
    percent: int
    """Position of the budget between the smallest budget (0) and plain's peak (100)."""
    budget_bytes: int
    plain_peak_bytes: int
    ops: int
    overheads: dict[str, float | None]
    """Predicted overhead by planner, as a share of a plain step; None without a plan that fits."""
    planning_s: dict[str, float]
    bound: float
    """Lower bound on the overhead."""


def budget_table(rows: list[Row]) -> str:
    """Return the median overheads by budget."""
    lines = []
    for percent in sorted({row.percent for row in rows}, reverse=True):
        selected = [row for row in rows if row.percent == percent]
        cells = [_median_overhead(selected, planner) for planner in PLANNERS]
        lines.append([f"{percent} %", *cells, f"{100 * median(row.bound for row in selected):.1f} %"])
    return table(("budget", *PLANNERS, "lower bound"), lines)


def page(rows: list[Row], machine: dict[str, Any]) -> str:
    """Return the page."""
    planning = [f"{planner} {median(row.planning_s[planner] for row in rows):.1f} s" for planner in PLANNERS]
    lines = [
        [
            row.model, f"{row.percent} %", f"{100 * row.budget_bytes / row.plain_peak_bytes:.1f} %",
            *(_overhead(row, planner) for planner in PLANNERS), f"{100 * row.bound:.1f} %", str(row.ops),
        ]
        for row in rows
    ]  # fmt: skip
    parts = [
        "# Planners on the same traces",
        f"{machine_line(machine)}. Written by `python -m benchmarks.planners`.",
        EXPLANATION,
        "Median overheads of all models. If a planner finds no plan for some models, the number of its plans is in "
        "brackets.",
        budget_table(rows),
        f"Median planning time: {', '.join(planning)}.",
        "## Each model",
        table(("model", "budget", "of plain's peak", *PLANNERS, "lower bound", "ops"), lines),
    ]
    return "\n\n".join(parts) + "\n"


def _median_overhead(rows: list[Row], planner: str) -> str:
    overheads = [overhead for row in rows if (overhead := row.overheads[planner]) is not None]
    if not overheads:
        return "no plan"
    count = "" if len(overheads) == len(rows) else f" ({len(overheads)} of {len(rows)})"
    return f"{100 * median(overheads):.1f} %{count}"


def _overhead(row: Row, planner: str) -> str:
    overhead = row.overheads[planner]
    return "no plan" if overhead is None else f"{100 * overhead:.1f} %"
