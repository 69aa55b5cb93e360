"""Planning of timelines: a trace with several backward passes and a budget in, the fastest plan found out.

The searches run in a fixed order, each with an effort counted in work.

1. Keep everything, if that fits.
2. MILP over what is held into which stage (`step_milp`). Each backward pass is one stage.
3. If no plan fits, the plan with the smallest peak (`step_smallest`), which does not depend on the budget. It may cut
   passes into several stages.
4. If that plan fits, MILP again, with its stages.
5. If the MILP finds no plan again, that of step 3 with ops kept where this fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ..._errors import BudgetError
from ..._units import format_bytes
from ...records import Trace
from ...records.plan import Plan
from ..bounds import Bound
from ..summary import summarise_pinned
from .decisions import KEPT, keep_all, plan_rows
from .stage_table import StageTable
from .step_candidate import StepCandidate, judge_step
from .step_facts import StepFacts
from .step_milp import solve_step_milp
from .step_smallest import smallest_step
from .step_summary import describe_event, describe_step_holders, summarise_step_modules

_BUDGET_MARGIN = 200
"""A budget error names the smallest budget plus 1/200: the next profile of the step may differ by a few bytes."""


def solve_timeline(
    trace: Trace,
    budget_bytes: int,
    *,
    target_bytes: int,
    deadline: float,
    max_nodes: int,
    report: Callable[[str], None],
) -> Plan:
    """Return the fastest plan found whose predicted peak is at most `budget_bytes`, and `target_bytes` if possible.

    `deadline` (`time.monotonic()`) is a safety net. Raises `BudgetError` if no plan is found that fits.
    """
    started = time.monotonic()
    trace = trace.without_copies()
    table = StageTable(StepFacts(trace))
    plain = judge_step(table, keep_all(table.facts), "keep all")
    if plain.fits(target_bytes):
        report("everything fits: nothing to recompute")
        return _step_plan(plain, plain, Bound(trace.step_s, infeasible=False), budget_bytes, started)
    best = _first_step_plan(table, target_bytes, budget_bytes, max_nodes, deadline, report)
    return _step_plan(best, plain, Bound(trace.step_s, infeasible=False), budget_bytes, started)


def _first_step_plan(
    table: StageTable,
    target_bytes: int,
    budget_bytes: int,
    max_nodes: int,
    deadline: float,
    report: Callable[[str], None],
) -> StepCandidate:
    """Return the plan of steps 2 to 4. Raises `BudgetError` if none fits."""

    def milp_plan(table: StageTable) -> StepCandidate | None:
        for limit_bytes in dict.fromkeys((target_bytes, budget_bytes)):
            found = solve_step_milp(table, limit_bytes, deadline=deadline, max_nodes=max_nodes).best
            if found is not None:
                return found
        return None

    found = milp_plan(table)
    if found is not None:
        return found
    report("the MILP found no plan that fits: looking for the smallest peak")
    least = smallest_step(table.facts, deadline=deadline)
    if not least.fits(budget_bytes):
        raise _step_budget_error(least, budget_bytes)
    found = milp_plan(least.table) if least.table.cuts else None
    if found is not None:
        return found
    limit_bytes = target_bytes if least.fits(target_bytes) else budget_bytes
    return _with_kept_ops(least, limit_bytes, deadline)


def _with_kept_ops(least: StepCandidate, limit_bytes: int, deadline: float) -> StepCandidate:
    """Return the plan with the smallest peak with ops kept where this fits and saves time.

    The last ops or the slowest replays come first, whichever is better. Without this a step of eight layers whose
    backward pass stops before the first ones was predicted to take 42 % more time, and 6 % with it (60 % of its peak).
    """
    replay_s = least.table.facts.replay_s
    last_first = range(len(replay_s) - 1, -1, -1)
    slowest_first = sorted(range(len(replay_s)), key=lambda j: -replay_s[j])
    found = [_kept_in_order(least, order, limit_bytes, deadline) for order in (last_first, slowest_first)]
    return min(found, key=lambda plan: plan.extra_s)


def _kept_in_order(plan: StepCandidate, order: Iterable[int], limit_bytes: int, deadline: float) -> StepCandidate:
    for j in order:
        if plan.decisions[j] == KEPT or time.monotonic() > deadline:
            continue
        found = judge_step(plan.table, [*plan.decisions[:j], KEPT, *plan.decisions[j + 1 :]], plan.solver)
        if found.fits(limit_bytes) and found.extra_s < plan.extra_s:
            plan = found
    return plan


def _step_plan(best: StepCandidate, plain: StepCandidate, bound: Bound, budget_bytes: int, started: float) -> Plan:
    """Return the record of a candidate, after a simulation from scratch that checks the budget."""
    trace = best.table.facts.trace
    checked = judge_step(StageTable(StepFacts(trace), best.table.cuts), best.decisions, best.solver)
    assert checked.fits(budget_bytes)
    assert checked.decisions == best.decisions
    keep, held, drops, tails = plan_rows(checked.table, checked.decisions)
    simulation = checked.simulation
    return Plan(
        keep=keep,
        released=(),
        budget_bytes=budget_bytes,
        predicted_peak_bytes=simulation.peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
        peak_at=describe_event(checked.table.facts, simulation.peak_at),
        predicted_step_s=simulation.step_s,
        plain_step_s=trace.step_s,
        bound_step_s=min(bound.step_s, simulation.step_s),
        solver=best.solver,
        solve_s=time.monotonic() - started,
        replayed_ops=simulation.replayed_ops,
        pinned=summarise_pinned(trace),
        modules=summarise_step_modules(checked),
        fingerprint=trace.fingerprint,
        op_names=tuple(op.name for op in trace.ops),
        held=held,
        drops=drops,
        tails=tails,
    )


def _step_budget_error(least: StepCandidate, budget_bytes: int) -> BudgetError:
    """Return the error for a budget that no plan meets. `least` has the smallest known peak."""
    facts, peak_at = least.table.facts, least.simulation.peak_at
    holders = "; ".join(describe_step_holders(least)) or "none"
    pinned = sum(facts.pinned)
    smallest_bytes = max(least.peak_bytes + least.peak_bytes // _BUDGET_MARGIN, budget_bytes + 1)
    return BudgetError(
        f"a budget of {format_bytes(budget_bytes)} cannot be met: the smallest that works is "
        f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes). The peak is then {describe_event(facts, peak_at)}: "
        f"{format_bytes(facts.other_bytes[peak_at])} are parameters, gradients, batch and temporaries, and the "
        f"largest values are {holders}. What helps: a smaller batch or shorter sequences, splitting the largest op "
        "(for example computing the loss in chunks)"
        + (f", or allowing lowtide to recompute the {pinned} pinned ops." if pinned else "."),
        budget_bytes=budget_bytes,
        smallest_bytes=smallest_bytes,
    )
