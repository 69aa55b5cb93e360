"""Do plans hold their budgets? Twelve architectures, five budgets each, every byte metered.

    python -m benchmarks.held [--models NAME ...] [--out DIR]

For each budget (shares of plain's peak, and the smallest that the planner finds a plan for) the model is fitted
anew and takes four steps: one profiled under the online budget (at the smallest: by a plan too, from `lowtide.plan`),
three by the plan, the last of them under a meter that knows nothing of lowtide. Small models with large batches, so
that activations are most of the memory. Peaks do not depend on how busy the machine is; planning times do. Where a plan
is further above its lower bound than it should be, a better bound is looked for, for longer than planning can.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import lowtide

from .harness import machine
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
from .harness.pages import table
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
CLOSE = 0.03
NEAR = {"60 %": 0.01, "35 %": 0.03}
"""By budget: how far above the lower bound a plan's time may be, as a share of plain's."""
QUICK_S, QUICK_OPS = 2.0, 300
"""How long planning may take, with so many ops."""


@dataclass(frozen=True)
class Row:
    """A model at a budget. Bytes are without what lives beside the model and its batch."""

    model: str
    asked: str
    budget_bytes: int
    plain_peak_bytes: int
    smallest_bytes: int
    """The least that the planner has a plan for."""
    feasible: bool
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    """By lowtide itself, in the second and third step."""
    metered_bytes: int | None = None
    """By the meter, in the fourth."""
    exact: bool | None = None
    unplanned_steps: int | None = None
    ops: int | None = None
    planning_s: float | None = None
    extra: float | None = None
    """Simulated time above plain's, as a share of it."""
    gap: float | None = None
    """Simulated time above the lower bound, as a share of plain's."""
    planned_gap: float | None = None
    """The same with the bound that planning had time for."""

    @property
    def held(self) -> bool:
        """Whether every peak was within the budget."""
        return max(self.measured_bytes or 0, self.metered_bytes or 0) <= self.budget_bytes

    @property
    def off(self) -> float:
        """Predicted against measured."""
        return (self.predicted_bytes or 0) / max(1, self.measured_bytes or 0) - 1


def smallest_of(bench: Bench) -> int:
    """The smallest budget that works, as the error of one that does not says."""
    bench.reset()
    try:
        lowtide.plan(bench.model, bench.batch, 1, codecs=None)
    except lowtide.BudgetError as error:
        return (error.smallest_bytes or 0) - bench.other_bytes
    raise AssertionError("a plan for one byte")


def rows_of(name: str, case: Case) -> Iterator[Row]:
    """All budgets of one model."""
    bench = Bench(name, case)
    plain_peak, plain = bench.metered(bench.loss)
    smallest = smallest_of(bench)
    for asked in (*(f"{share} %" for share in SHARES), SMALLEST):
        budget = smallest if asked == SMALLEST else plain_peak * int(asked.removesuffix(" %")) // 100
        if budget < smallest:
            yield Row(name, asked, budget, plain_peak, smallest, feasible=False)
            continue
        beside = bench.other_bytes
        plan = None
        if asked == SMALLEST:  # for which the online budget, under which a step is profiled, may be too small
            bench.reset()
            plan = lowtide.plan(bench.model, bench.batch, budget + beside, codecs=None)
        lowtide.fit(bench.model, budget=budget + beside, plan=plan, stores=None, codecs=None)
        exact = True
        for _ in range(3):
            bench.reset()
            exact &= bench.bits(step(bench.loss)) == plain
        metered, bits = bench.metered(bench.loss)
        report = lowtide.report(bench.model)
        plan = report.plan
        assert plan is not None
        gap = plan.gap
        yield Row(
            name,
            asked,
            budget,
            plain_peak,
            smallest,
            feasible=True,
            predicted_bytes=(report.predicted_peak_bytes or 0) - beside,
            measured_bytes=(report.measured_peak_bytes or 0) - beside,
            metered_bytes=metered,
            exact=exact and bits == plain,
            unplanned_steps=report.online_steps,
            ops=len(plan.keep),
            planning_s=plan.solve_s,
            extra=plan.predicted_step_s / plan.plain_step_s - 1,
            gap=gap,
            planned_gap=plan.gap,
        )
        lowtide.unfit(bench.model)


def targets(rows: list[Row]) -> str:
    """Which of what plans should come up to holds, and where it does not."""

    def said(what: str, of: list[Row], missed: list[str]) -> str:
        return f"- {what}: {len(of) - len(missed)} of {len(of)} plans" + (
            f"; not {', '.join(missed)}" if missed else ""
        )

    planned = [row for row in rows if row.gap is not None and row.planning_s is not None]
    lines = []
    for asked, near in NEAR.items():
        of = [row for row in planned if row.asked == asked]
        missed = [
            f"{row.model} ({100 * (row.gap or 0):.1f} %; the smallest budget that works is "
            f"{100 * row.smallest_bytes / row.plain_peak_bytes:.1f} %)"
            for row in of
            if (row.gap or 0) > near
        ]
        lines.append(said(f"within {100 * near:.0f} % of the lower bound at {asked}", of, missed))
    of = [row for row in planned if (row.ops or 0) <= QUICK_OPS and row.asked != SMALLEST]
    missed = [f"{row.model} at {row.asked} ({row.planning_s:.1f} s)" for row in of if (row.planning_s or 0) > QUICK_S]
    lines.append(said(f"planned within {QUICK_S:.0f} s, of those with at most {QUICK_OPS} ops", of, missed))
    return "\n".join(lines)


def page(rows: list[Row], where: dict[str, object]) -> str:
    """The table, and what of it is not as it should be."""
    feasible = [row for row in rows if row.feasible]
    failures = [f"{row.model} at {row.asked}: over the budget" for row in feasible if not row.held]
    failures += [
        f"{row.model} at {row.asked}: predicted {100 * row.off:+.1f} % off" for row in feasible if abs(row.off) > CLOSE
    ]
    failures += [f"{row.model} at {row.asked}: not exact" for row in feasible if not row.exact]
    failures += [
        f"{row.model} at {row.asked}: {row.unplanned_steps} steps without a plan"
        for row in feasible
        if (row.unplanned_steps or 0) > (row.asked != SMALLEST)
    ]
    shown = []
    for row in rows:
        share = f"{100 * row.budget_bytes / row.plain_peak_bytes:.0f} %"
        if not row.feasible:
            least = f"{100 * row.smallest_bytes / row.plain_peak_bytes:.0f} %"
            shown.append([row.model, row.asked, share, f"refused: the smallest is {least}", *[""] * 6])
            continue
        assert row.metered_bytes is not None
        assert row.extra is not None
        assert row.gap is not None
        assert row.planned_gap is not None
        assert row.planning_s is not None
        shown.append([
            row.model, row.asked, share,
            f"{100 * row.metered_bytes / row.budget_bytes:.1f} %", f"{100 * row.off:+.2f} %",
            "to the bit" if row.exact else "NO", f"{100 * row.extra:.1f} %",
            f"{100 * row.gap:.2f} %" + (f" ({100 * row.planned_gap:.2f} %)" if row.planned_gap != row.gap else ""),
            f"{row.ops}", f"{row.planning_s:.1f} s",
        ])  # fmt: skip
    header = (
        "model", "asked", "of plain's peak", "metered, of the budget", "predicted against measured", "exact",
        "time above plain, simulated", "of that above the bound", "ops", "planning",
    )  # fmt: skip
    return (
        "# Plans hold their budgets\n\n"
        f"`python -m benchmarks.held` on {where.get('processor')}, {where.get('date')}. "
        f"{len(feasible)} plans of {len(rows)} combinations; the others are refused, and the smallest budget that "
        "works is named.\n\n"
        + (
            "Not as it should be: " + "; ".join(failures) + ".\n\n"
            if failures
            else "Every plan held, exact, and predicted within 3 %.\n\n"
        )
        + f"{targets(rows)}\n\n"
        + table(header, shown)
    )


def main() -> None:
    """Measure, and write `held.json` and `held.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, default=machine.RESULTS)
    options = parser.parse_args()
    machine.one_quiet_thread()
    options.out.mkdir(parents=True, exist_ok=True)
    where = machine.describe()
    rows: list[Row] = []
    for name in options.models:
        for row in rows_of(name, CASES[name]):
            rows.append(row)
            said = f"held {row.held}, {100 * row.off:+.2f} %, exact {row.exact}" if row.feasible else "refused"
            print(f"{row.model:10} {row.asked:9} {said}", file=sys.stderr)
        document = {"machine": where, "rows": [asdict(row) for row in rows]}
        (options.out / "held.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (options.out / "held.md").write_text(page(rows, where), encoding="utf-8")


if __name__ == "__main__":
    main()
