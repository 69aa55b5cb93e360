"""The smallest budget for which a plan of a timeline is known, and that plan.

The backward pass with the peak is cut, again and again while this lowers the peak. A cut helps where a pass needs
values twice, with much memory of its own in between: with `create_graph`, a pass first unpacks values for the gradient
of a gradient, and later for the gradient. Within a stage such a value stays in memory.

The result does not depend on the requested budget, so that a budget which an error names is feasible when it is
requested.
"""

from __future__ import annotations

from .decisions import keep_all, recompute_all
from .stage_table import StageTable
from .step_candidate import StepCandidate, judge_step
from .step_facts import StepFacts
from .step_milp import solve_step_milp

_RELATIVE_GAP = 0.02
"""Gap at which the search for the smallest peak stops, and the least gain of a cut. Halved: twice the time for 1 %
smaller peaks."""


def smallest_step(facts: StepFacts, *, deadline: float) -> StepCandidate:
    """Return the plan with the smallest peak found. Its table may have cuts."""
    best = _smallest_with(StageTable(facts), deadline)
    while (cut := best.table.best_cut(best.simulation.peak_at)) is not None:
        plan = _smallest_with(StageTable(facts, (*best.table.cuts, cut)), deadline)
        if plan.peak_bytes > (1 - _RELATIVE_GAP) * best.peak_bytes:
            break
        best = plan
    return best


def _smallest_with(table: StageTable, deadline: float) -> StepCandidate:
    """Return the plan with the smallest peak found for the stages of a table."""
    facts = table.facts
    found = solve_step_milp(
        table, 0, deadline=deadline, relative_gap=_RELATIVE_GAP, minimize_peak=True, solver="smallest peak"
    ).best
    plans = [
        judge_step(table, keep_all(facts), "keep all"),
        judge_step(table, recompute_all(facts), "smallest peak"),
        *([found] if found is not None else []),
    ]
    allowed = [plan for plan in plans if not plan.simulation.late_replays]
    return min(allowed, key=lambda plan: (plan.peak_bytes, plan.extra_s))
