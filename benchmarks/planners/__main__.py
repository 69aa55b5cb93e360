"""Compare planners on profiled traces: greedy, knapsack, rotor, MILP alone, and lowtide's `solve`.

    python -m benchmarks.planners [--models NAME ...] [--out DIR] [--report]

Each model of the suite is profiled once. For budgets of 80, 60, 45 and 30 % of the way from the smallest budget to
plain's peak, every planner makes a plan, and the simulator predicts its overhead. No plan is executed. Writes
planners.json and planners.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lowtide.planning import Effort, Plan, Problem, Simulator, smallest, solve
from lowtide.planning.candidate import Candidate
from lowtide.planning.tied_milp import solve_tied_milp
from lowtide.records import Trace

from ..harness import machine
from ..harness.models import STANDARD
from ..harness.rows import rewrite_page, write_rows
from ..harness.steps import Bench
from ..harness.variants import COMPILED_MODELS
from .greedy import solve_greedy
from .knapsack import solve_knapsack
from .rotor import solve_rotor
from .tables import Row, page

PERCENTS = (80, 60, 45, 30)
DEADLINE_S = 60.0
"""Time limit of each planner, a safety net."""
MODELS = [name for name in STANDARD if name not in COMPILED_MODELS]


def planners(trace: Trace, simulator: Simulator, budget_bytes: int) -> dict[str, Callable[[], Candidate | Plan | None]]:
    """Return the planners for one budget, in the order of `tables.PLANNERS`."""
    effort = Effort()

    def milp() -> Candidate | None:
        return solve_tied_milp(
            simulator,
            budget_bytes,
            deadline=time.monotonic() + DEADLINE_S,
            max_nodes=effort.milp_nodes,
        )

    return {
        "greedy": lambda: solve_greedy(simulator, budget_bytes, deadline=time.monotonic() + DEADLINE_S),
        "knapsack": lambda: solve_knapsack(simulator, budget_bytes),
        "rotor": lambda: solve_rotor(simulator, budget_bytes),
        "MILP": milp,
        "solve": lambda: solve(trace, budget_bytes, deadline_s=DEADLINE_S),
    }


def compare_planners(name: str, title: str, trace: Trace, percents: tuple[int, ...] = PERCENTS) -> Iterator[Row]:
    """Yield the results of all planners, budget by budget."""
    trace = trace.without_copies()
    problem = Problem(trace)
    simulator = Simulator(problem)
    plain_peak_bytes = simulator.run(problem.keep_all()).peak_bytes
    smallest_bytes = smallest(simulator).peak_bytes
    for percent in percents:
        budget_bytes = smallest_bytes + (plain_peak_bytes - smallest_bytes) * percent // 100
        overheads: dict[str, float | None] = {}
        planning_s: dict[str, float] = {}
        bound = 0.0
        for planner, make_plan in planners(trace, simulator, budget_bytes).items():
            started = time.monotonic()
            plan = make_plan()
            planning_s[planner] = time.monotonic() - started
            if isinstance(plan, Plan):
                overheads[planner] = plan.predicted_step_s / plan.plain_step_s - 1
                bound = plan.bound_step_s / plan.plain_step_s - 1
            else:
                overheads[planner] = None if plan is None else plan.extra_s / trace.step_s
        yield Row(
            model=name,
            title=title,
            percent=percent,
            budget_bytes=budget_bytes,
            plain_peak_bytes=plain_peak_bytes,
            ops=len(trace.ops),
            overheads=overheads,
            planning_s=planning_s,
            bound=bound,
        )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planners",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", choices=MODELS, default=MODELS, help=", ".join(MODELS))
    parser.add_argument("--out", type=Path, default=machine.RESULTS, help="directory of the results")
    parser.add_argument("--report", action="store_true", help="write planners.md again from planners.json")
    options = parser.parse_args()
    file = options.out / "planners.json"
    if options.report:
        rewrite_page(file, Row, page)
        return
    machine.use_one_thread()
    description = machine.describe()
    rows: list[Row] = []
    for name in options.models:
        case = STANDARD[name]
        for row in compare_planners(name, case.title, Bench(name, case).trace()):
            rows.append(row)
            overheads = ((planner, overhead) for planner, overhead in row.overheads.items())
            shown = ", ".join(f"{p} {'no plan' if x is None else f'{100 * x:.1f} %'}" for p, x in overheads)
            print(f"{name} at {row.percent} %: {shown}, bound {100 * row.bound:.1f} %", file=sys.stderr)
        write_rows(file, rows, description, page)
    print(file.with_suffix(".md"))


if __name__ == "__main__":
    main()
