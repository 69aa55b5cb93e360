"""Planning: a trace and a budget in, the fastest plan that the simulator accepts out.

The searches run in a fixed order, each with an effort counted in work, so that the same trace and budget give the
same plan on any machine.

1. Keep everything, if that fits.
2. MILP over keep, recompute and offload (`tied_milp`, `milp`). Solutions that do not fit are repaired (`repair`) and
   improved (`improve`).
3. If no plan fits, the simple scheme with the smallest peak (`smallest`), repaired and improved.
4. Simulated annealing (`annealing`), if the best plan is far above the lower bound (`bounds`).

A step with several forward or backward passes is planned by `timeline` instead, without offloading, compression and
gradient copies.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .._errors import ArgumentError, BudgetError
from ..records import Trace
from ..records.codec_cost import CodecCost
from ..records.link import Link
from ..records.plan import Plan
from .annealing import anneal
from .bounds import Bound, lower_bound
from .candidate import Candidate, judge_decisions
from .improve import improve
from .problem import Problem
from .refusal import no_plan_error
from .repair import repair
from .simulator import Simulator, simulate
from .smallest import smallest
from .summary import describe_place, summarise_modules, summarise_pinned
from .tied_milp import solve_tied_milp
from .timeline.step_solve import solve_timeline

_GOOD_ENOUGH, _GOOD_ENOUGH_EXTRA = 0.005, 0.03
"""Share of a plain step, or of the extra time in the bound, above the bound at which the MILP stops."""
_ANNEAL_ABOVE = 0.03
"""Share of a plain step above the bound from which annealing runs. Doubled: less time, plans up to 3 % slower."""
_MILP_SHARE = 2 / 3
"""Share of the time limit after which the MILP stops, so that simple schemes can still be improved."""
_log = logging.getLogger("lowtide")


@dataclass(frozen=True)
class Effort:
    """Work that planning may do, in counts, so that results do not depend on load."""

    milp_nodes: int = 100
    """Branch-and-bound nodes of one MILP attempt. Doubled: the same plans on twelve models, up to 1 s slower."""
    annealing_searches: int = 3
    """Annealing searches from keeping everything. Doubled: slightly faster plans near the smallest budget."""
    annealing_moves: int = 2_000
    """Upper limit on moves in one search. Doubled: twice the annealing time for slightly faster plans."""
    only_milp: bool = False
    """Whether to skip simple schemes and annealing. Then a plan may be refused although there is one."""


Progress = Callable[[str], None]


def solve(
    trace: Trace,
    budget_bytes: int,
    *,
    link: Link | None = None,
    codec_costs: Sequence[CodecCost] = (),
    leave_free_bytes: int = 0,
    deadline_s: float = 60.0,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Return the fastest plan found whose predicted peak is at most `budget_bytes`.

    A plan that leaves `leave_free_bytes` of the budget free is preferred. With a `link` values can be offloaded, with
    `codec_costs` compressed. `deadline_s` is a safety net: after it the searches stop early and a warning is logged.
    `progress` is called with short messages. Raises `BudgetError` if no plan is found that fits.
    """
    if budget_bytes <= 0 or deadline_s <= 0:
        raise ArgumentError(f"a budget of {budget_bytes} bytes and {deadline_s} s to plan: both must be positive")
    trace.check()
    effort = Effort() if effort is None else effort
    report = progress if progress is not None else _ignore
    started = time.monotonic()
    deadline = started + deadline_s
    target_bytes = max(1, budget_bytes - leave_free_bytes)
    if not trace.is_single_pass:
        return solve_timeline(
            trace,
            budget_bytes,
            target_bytes=target_bytes,
            deadline=deadline,
            max_nodes=effort.milp_nodes,
            report=report,
        )
    without_copies = Simulator(Problem(trace.without_copies(), link, codec_costs))
    plain = judge_decisions(without_copies, without_copies.problem.keep_all(), solver="keep all")
    assert plain is not None  # keeping everything replays nothing
    if plain.peak_bytes <= target_bytes:
        report("everything fits: nothing to recompute")
        bound = Bound(trace.step_s, infeasible=False)
        return _plan(without_copies, plain, plain, bound, budget_bytes, started)
    simulator = Simulator(Problem(trace, link, codec_costs)) if trace.copies else without_copies
    best, bound, limit_bytes = _first_plan(simulator, target_bytes, budget_bytes, effort, deadline, report)
    bound = _tightened(bound, simulator, best, limit_bytes, deadline)
    if not effort.only_milp and best.simulation.step_s - bound.step_s > _ANNEAL_ABOVE * trace.step_s:
        report("far above the bound: annealing")
        best = anneal(
            simulator,
            best,
            limit_bytes,
            deadline=deadline,
            searches=effort.annealing_searches,
            max_moves=effort.annealing_moves,
        )
    if trace.copies:
        other_bound = lower_bound(without_copies.problem, limit_bytes, deadline=deadline)
        if not other_bound.infeasible and other_bound.step_s < bound.step_s:
            bound = other_bound
        best, simulator = _without_copies_if_it_fits(best, simulator, without_copies, limit_bytes)
    if time.monotonic() > deadline:
        _log.warning("planning reached its time limit of %g s: the plan may differ from run to run", deadline_s)
    return _plan(simulator, best, plain, bound, budget_bytes, started)


def is_feasible(
    trace: Trace,
    budget_bytes: int,
    *,
    link: Link | None = None,
    codec_costs: Sequence[CodecCost] = (),
    deadline_s: float = 60.0,
    effort: Effort | None = None,
) -> bool:
    """Return whether `solve` finds a plan, with less work: any plan that fits is enough."""
    deadline = time.monotonic() + deadline_s
    if not trace.is_single_pass:
        try:
            solve(trace, budget_bytes, deadline_s=deadline_s, effort=effort)
        except BudgetError:
            return False
        return True
    plain = Simulator(Problem(trace.without_copies(), link, codec_costs))
    if plain.run(plain.problem.keep_all()).peak_bytes <= budget_bytes:
        return True
    simulator = Simulator(Problem(trace, link, codec_costs))
    start = smallest(simulator, limit_bytes=budget_bytes)
    if start.peak_bytes <= budget_bytes:
        return True
    bound = lower_bound(simulator.problem, budget_bytes, deadline=deadline)
    if bound.infeasible:
        return False
    if repair(simulator, start, budget_bytes, deadline=deadline) is not None:
        return True
    return _milp_plan(simulator, budget_bytes, bound, effort or Effort(), deadline, _ignore) is not None


def _first_plan(
    simulator: Simulator, target_bytes: int, budget_bytes: int, effort: Effort, deadline: float, report: Progress
) -> tuple[Candidate, Bound, int]:
    """Return the plan of steps 2 and 3, the lower bound, and the bytes that both are for: the target or the budget.

    Raises `BudgetError` if no plan fits into the budget.
    """
    now = time.monotonic()
    milp_deadline = now + _MILP_SHARE * (deadline - now)
    for limit_bytes in (target_bytes,) if effort.only_milp else dict.fromkeys((target_bytes, budget_bytes)):
        bound = lower_bound(simulator.problem, limit_bytes, deadline=deadline)
        if bound.infeasible:
            continue
        best = _milp_plan(simulator, limit_bytes, bound, effort, milp_deadline, report)
        if best is not None:
            return best, bound, limit_bytes
    if effort.only_milp:
        raise BudgetError("the MILP found no plan that fits", budget_bytes=budget_bytes)
    report("the MILP found no plan that fits: trying simple schemes")
    start = smallest(simulator, limit_bytes=budget_bytes)
    fits = start.peak_bytes <= budget_bytes
    fitting = start if fits else repair(simulator, start, budget_bytes, deadline=deadline)
    if fitting is None:
        raise no_plan_error(simulator, start, budget_bytes)
    # Not cut short: the schemes leave most of the budget free, and the work is limited by the number of ops.
    return improve(simulator, fitting, budget_bytes, deadline=math.inf), bound, budget_bytes


def _milp_plan(
    simulator: Simulator, budget_bytes: int, bound: Bound, effort: Effort, deadline: float, report: Progress
) -> Candidate | None:
    """Return the best plan of the MILP, improved, or None if none fits."""
    trace = simulator.problem.trace
    plain_s = max(trace.step_s, 1e-12)
    bound_extra_s = max(bound.step_s - trace.step_s, 1e-12)
    good_enough_s = bound_extra_s + max(_GOOD_ENOUGH * plain_s, _GOOD_ENOUGH_EXTRA * bound_extra_s)
    best = solve_tied_milp(
        simulator,
        budget_bytes,
        deadline=deadline,
        relative_gap=min(0.05, 0.5 * (good_enough_s / bound_extra_s - 1)),
        good_enough_s=good_enough_s,
        max_nodes=effort.milp_nodes,
    )
    if best is None:
        return None
    if best.extra_s > good_enough_s:
        best = improve(simulator, best, budget_bytes, deadline=deadline)
    gap = (best.simulation.step_s - bound.step_s) / plain_s
    report(f"{best.solver}: {100 * best.extra_s / plain_s:.2f} % more time, {100 * gap:.2f} % above the bound")
    return best


def _tightened(bound: Bound, simulator: Simulator, best: Candidate, budget_bytes: int, deadline: float) -> Bound:
    """Return the better of `bound` and the bound with backward cut where the best plan has most live bytes."""
    gap_s = best.simulation.step_s - bound.step_s
    if bound.infeasible or gap_s <= _GOOD_ENOUGH * simulator.problem.trace.step_s:
        return bound
    other = lower_bound(simulator.problem, budget_bytes, deadline=deadline, unpack_live=best.simulation.unpack_live)
    return other if other.step_s > bound.step_s else bound


def _without_copies_if_it_fits(
    best: Candidate, with_copies: Simulator, without_copies: Simulator, budget_bytes: int
) -> tuple[Candidate, Simulator]:
    """Return the same decisions without gradient copies if they fit and are not slower, else `best`."""
    other = judge_decisions(
        without_copies,
        best.keep,
        best.released,
        offload=best.offload,
        limit_bytes=budget_bytes,
        solver=best.solver,
    )
    if other is not None and other.peak_bytes <= budget_bytes and other.extra_s <= best.extra_s:
        return other, without_copies
    return best, with_copies


def _plan(
    simulator: Simulator, best: Candidate, plain: Candidate, bound: Bound, budget_bytes: int, started: float
) -> Plan:
    """Return the record of a candidate, after a simulation from scratch that checks the budget."""
    problem = simulator.problem
    simulation = simulate(
        problem.trace,
        best.keep,
        best.released,
        best.simulation.written_before,
        problem.link,
        problem.codec_costs,
        best.simulation.prefetch_after,
    )
    assert simulation.peak_bytes <= budget_bytes
    offload = simulation.written_before
    return Plan(
        keep=best.keep,
        released=tuple(sorted(best.released)),
        budget_bytes=budget_bytes,
        predicted_peak_bytes=simulation.peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
        peak_at=describe_place(problem, simulation.peak_at),
        predicted_step_s=simulation.step_s,
        plain_step_s=problem.trace.step_s,
        bound_step_s=min(bound.step_s, simulation.step_s),
        solver=best.solver,
        solve_s=time.monotonic() - started,
        replayed_ops=simulation.replayed_ops,
        pinned=summarise_pinned(problem.trace),
        modules=summarise_modules(simulator, best),
        fingerprint=problem.trace.fingerprint,
        op_names=tuple(op.name for op in problem.trace.ops),
        offload=tuple(offload),
        written_before=tuple(offload.values()),
        prefetch_after=tuple(simulation.prefetch_after.get(j, j) for j in offload),
        compress=tuple(j for j in offload if problem.uses_codec[j]),
        copies=bool(problem.trace.copies),
        link=problem.link,
        codec_costs=problem.codec_costs,
        store_wait_s=simulation.store_wait_s,
    )


def _ignore(message: str) -> None:
    pass
