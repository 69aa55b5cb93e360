"""Check budgets: twelve architectures, five budgets each, with a meter that is independent of lowtide.

    python -m benchmarks.held [--models NAME ...] [--out DIR] [--report]

Budgets are shares of plain's peak, and the smallest budget with a plan. For each budget the model is fitted anew and
runs four steps. The first one is profiled under the online budget; at the smallest budget a plan from `lowtide.plan`
replaces it. The other three follow the plan, the last one under the meter. Models are small and batches are large, so
that activations are most of the memory. Load on the machine affects planning times, but not peaks. Writes held.json
and held.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lowtide

from .harness import machine
from .harness.markdown import table
from .harness.models import (
    Case,
    bert,
    diffusion,
    gpt2,
    llama,
    lstm,
    mamba,
    mixtral,
    resnet,
    t5,
    unet,
    vit,
)
from .harness.rows import rewrite_page, write_rows
from .harness.steps import Bench, step

CASES: dict[str, Case] = {
    "gpt2": gpt2(6, 128, 16, 64, 512),
    "llama": llama(6, 128, 16, 64),
    "bert": bert(6, 128, 16, 64),
    "t5": t5(3, 128, 16, 64),
    "vit": vit(6, 128, 16),
    "resnet": resnet("ResNet-50 at a quarter of its width", 16, [64, 128, 256, 512], [3, 4, 6, 3], 8, 96),
    "unet": unet(8, 64),
    "diffusion": diffusion(4, 32, (16, 32, 64)),
    "mixtral": mixtral(4, 128, 16, 64),
    "mamba": mamba(3, 128, 4, 32),
    "lstm": lstm(6, 128, 16, 64),
    "deep": gpt2(24, 64, 16, 64, 512),
}
SHARES = (80, 60, 45, 35)
SMALLEST = "smallest"
MAX_PREDICTION_ERROR = 0.03
"""The page lists plans whose predicted peak differs from the measured one by more than this share."""


@dataclass(frozen=True)
class Row:
    """One model with one budget. Bytes of other tensors in the process are subtracted."""

    model: str
    asked: str
    """The budget, as a share of plain's peak or "smallest"."""
    budget_bytes: int
    plain_peak_bytes: int
    smallest_bytes: int
    """The smallest budget with a plan."""
    feasible: bool
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    """Peak as lowtide measures it, in the second and third step."""
    metered_bytes: int | None = None
    """Peak of the fourth step, by the meter."""
    exact: bool | None = None
    unplanned_steps: int | None = None
    ops: int | None = None
    planning_s: float | None = None
    extra: float | None = None
    """Predicted overhead, as a share of a plain step."""
    planned_gap: float | None = None
    """Distance of the predicted time to the lower bound, as a share of a plain step."""

    @property
    def held(self) -> bool:
        """Whether all peaks are within the budget."""
        return max(self.measured_bytes or 0, self.metered_bytes or 0) <= self.budget_bytes

    @property
    def prediction_error(self) -> float:
        """Predicted over measured peak, minus 1."""
        return (self.predicted_bytes or 0) / max(1, self.measured_bytes or 0) - 1


def smallest_budget(bench: Bench) -> int:
    """Return the smallest budget with a plan, which `BudgetError` names."""
    bench.reset()
    try:
        lowtide.plan(bench.model, bench.batch, "1 B", codecs=None)
    except lowtide.BudgetError as error:
        return (error.smallest_bytes or 0) - bench.other_bytes
    raise AssertionError("found a plan for a budget of one byte")


def measure(name: str, case: Case) -> Iterator[Row]:
    """Yield the results of one model, budget by budget."""
    bench = Bench(name, case)
    plain_peak_bytes, plain_bits = bench.metered(bench.loss)
    smallest_bytes = smallest_budget(bench)
    for asked in (*(f"{share} %" for share in SHARES), SMALLEST):
        budget_bytes = smallest_bytes if asked == SMALLEST else plain_peak_bytes * int(asked.removesuffix(" %")) // 100
        if budget_bytes < smallest_bytes:
            yield Row(name, asked, budget_bytes, plain_peak_bytes, smallest_bytes, feasible=False)
            continue
        other_bytes = bench.other_bytes
        plan = None
        if asked == SMALLEST:  # this budget may be too small for the online budget of a profiled step
            bench.reset()
            plan = lowtide.plan(bench.model, bench.batch, f"{budget_bytes + other_bytes} B", codecs=None)
        lowtide.fit(bench.model, budget=f"{budget_bytes + other_bytes} B", plan=plan, stores=None, codecs=None)
        exact = True
        for _ in range(3):
            bench.reset()
            exact &= bench.bits(step(bench.loss)) == plain_bits
        metered_bytes, bits = bench.metered(bench.loss)
        report = lowtide.report(bench.model)
        plan = report.plan
        assert plan is not None
        yield Row(
            name,
            asked,
            budget_bytes,
            plain_peak_bytes,
            smallest_bytes,
            feasible=True,
            predicted_bytes=(report.predicted_peak_bytes or 0) - other_bytes,
            measured_bytes=(report.measured_peak_bytes or 0) - other_bytes,
            metered_bytes=metered_bytes,
            exact=exact and bits == plain_bits,
            unplanned_steps=report.online_steps,
            ops=len(plan.keep),
            planning_s=plan.solve_s,
            extra=plan.predicted_step_s / plan.plain_step_s - 1,
            planned_gap=plan.gap,
        )
        lowtide.unfit(bench.model)


def page(rows: list[Row], where: dict[str, Any]) -> str:
    """Return the page."""
    feasible = [row for row in rows if row.feasible]
    faults = _faults(feasible)
    header = (
        "model", "budget", "of plain's peak", "metered peak, of the budget", "predicted over measured peak",
        "bit-equal", "predicted overhead", "above the lower bound", "ops", "planning",
    )  # fmt: skip
    parts = [
        "# Budgets and predicted peaks",
        f"Written by `python -m benchmarks.held` on {where.get('processor')}, {where.get('date')}.",
        f"{len(feasible)} of {len(rows)} budgets have a plan. The others are smaller than the smallest budget.",
        f"Faults: {'; '.join(faults)}."
        if faults
        else "All plans hold their budget, are bit-equal, and predict their peak within "
        f"{100 * MAX_PREDICTION_ERROR:g} %.",
        "Overheads are shares of a plain step. In *above the lower bound* the distance to the bound is in percentage "
        "points (pp).",
        "\n".join(_distances(feasible)),
        table(header, map(_cells, rows)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _faults(feasible: list[Row]) -> list[str]:
    faults = [f"{row.model} at {row.asked}: over the budget" for row in feasible if not row.held]
    faults += [
        f"{row.model} at {row.asked}: predicted peak differs by {100 * row.prediction_error:+.1f} %"
        for row in feasible
        if abs(row.prediction_error) > MAX_PREDICTION_ERROR
    ]
    faults += [f"{row.model} at {row.asked}: not bit-equal" for row in feasible if not row.exact]
    # Only the first step of a model that gets a budget runs without a plan.
    faults += [
        f"{row.model} at {row.asked}: {row.unplanned_steps} steps without a plan"
        for row in feasible
        if (row.unplanned_steps or 0) > (row.asked != SMALLEST)
    ]
    return faults


def _distances(feasible: list[Row]) -> list[str]:
    """Return the distance to the lower bound and the planning time by budget."""
    lines = []
    for asked in dict.fromkeys(row.asked for row in feasible):
        selected = [row for row in feasible if row.asked == asked]
        gaps = [100 * (row.planned_gap or 0.0) for row in selected]
        seconds = [row.planning_s or 0.0 for row in selected]
        lines.append(
            f"- Budget {asked}, {len(selected)} plans: {median(gaps):.2f} pp above the lower bound (median; at most "
            f"{max(gaps):.2f}), planned in {median(seconds):.1f} s (median; at most {max(seconds):.1f})."
        )
    return lines


def _cells(row: Row) -> list[str]:
    share = f"{100 * row.budget_bytes / row.plain_peak_bytes:.0f} %"
    if not row.feasible:
        smallest = f"{100 * row.smallest_bytes / row.plain_peak_bytes:.0f} %"
        return [row.model, row.asked, share, f"no plan: the smallest budget is {smallest}", *[""] * 6]
    return [
        row.model, row.asked, share, f"{100 * (row.metered_bytes or 0) / row.budget_bytes:.1f} %",
        f"{100 * row.prediction_error:+.2f} %", "yes" if row.exact else "**no**", f"{100 * (row.extra or 0.0):.1f} %",
        f"{100 * (row.planned_gap or 0.0):.2f} pp", f"{row.ops}", f"{row.planning_s or 0.0:.1f} s",
    ]  # fmt: skip


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.held", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(CASES)
    parser.add_argument("--models", nargs="+", metavar="NAME", choices=names, default=names, help=", ".join(names))
    parser.add_argument("--out", type=Path, default=machine.RESULTS, help="directory of the results")
    parser.add_argument("--report", action="store_true", help="write held.md again from held.json")
    options = parser.parse_args()
    file = options.out / "held.json"
    if options.report:
        rewrite_page(file, Row, page)
        return
    machine.use_one_thread()
    description = machine.describe()
    rows: list[Row] = []
    for name in options.models:
        for row in measure(name, CASES[name]):
            rows.append(row)
            result = "no plan"
            if row.feasible:
                result = f"held {row.held}, predicted peak {100 * row.prediction_error:+.2f} %, exact {row.exact}"
            print(f"{row.model:10} {row.asked:9} {result}", file=sys.stderr)
        write_rows(file, rows, description, page)
    print(file.with_suffix(".md"))


if __name__ == "__main__":
    main()
