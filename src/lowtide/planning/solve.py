"""Planning: a trace and a budget in, the fastest plan that the simulator accepts out.

The searches run in a fixed order, each with an effort counted in work, so that the same trace and budget give the
same plan on any machine.

1. Keep everything, if that fits.
2. MILP over keep and recompute (`chain`, `milp`), near misses repaired (`repair`) and improved (`improve`).
3. If nothing fits, the simple scheme with the smallest peak (`smallest`), repaired and improved.
4. Simulated annealing (`annealing`), if the best plan is far above the lower bound (`bounds`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .._errors import ArgumentError, BudgetError
from .._units import format_bytes
from ..records import Trace
from ..records.codec_cost import CodecCost
from ..records.link import Link
from ..records.plan import Plan
from .annealing import anneal
from .bounds import Bound, lower_bound
from .candidate import Candidate, judged
from .improve import improve
from .problem import Problem
from .repair import repair
from .simulator import Simulator, simulate
from .smallest import smallest
from .summary import describe_holders, describe_place, summarise_modules, summarise_pinned
from .tied_milp import solve_chain

_GOOD_ENOUGH, _GOOD_ENOUGH_EXTRA = 0.005, 0.03
"""Share of a plain step, or of the bound's extra time, above the bound at which the MILP stops."""
_FAR = 0.03
"""Share of a plain step above the bound from which annealing runs. Doubled: less time, plans up to 3 % slower."""
_CAUTION = 200
"""The smallest budget is named with 1/200 more."""
_log = logging.getLogger("lowtide")


@dataclass(frozen=True)
class Effort:
    """Work that planning may do, in counts, so that results do not depend on load."""

    milp_nodes: int = 500
    """Branch-and-bound nodes a round. Doubled: up to twice the MILP time at the knee."""
    milp_rounds: int = 60
    """Rounds of solving and adding byte rows. Doubled: fewer plans need repair, up to twice as slow."""
    annealing_searches: int = 3
    """Annealing searches from keeping everything. Doubled: slightly faster plans near the smallest budget."""
    annealing_moves: int = 6_000
    """Upper limit on moves a search. Doubled: twice the annealing time for traces of more than 150 ops."""


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
    """The fastest plan found whose predicted peak is at most `budget_bytes`, less `leave_free_bytes` where it can be.

    With a `link` values may also wait in a store, with `codec_costs` be held packed.
    `deadline_s` is a safety net: past it the searches stop early, and a warning is logged.
    `progress` is called with a sentence now and then. Raises `BudgetError` if no plan is found that fits.
    """
    if budget_bytes <= 0 or deadline_s <= 0:
        raise ArgumentError(f"a budget of {budget_bytes} bytes and {deadline_s} s to plan: both must be positive")
    trace.check()
    effort = Effort() if effort is None else effort
    started = time.monotonic()
    deadline = started + deadline_s
    say = progress if progress is not None else _silence
    untouched = Simulator(Problem(trace.without_copies(), link, codec_costs))
    plain = judged(untouched, untouched.problem.keep_all(), solver="keep all")
    assert plain is not None  # keeping everything replays nothing
    wanted_bytes = max(1, budget_bytes - leave_free_bytes)
    if plain.peak_bytes <= wanted_bytes:
        say("everything fits: nothing to recompute")
        return _plan(untouched, plain, plain, Bound(trace.step_s, impossible=False), budget_bytes, started)
    simulator = Simulator(Problem(trace, link, codec_costs)) if trace.copies else untouched
    best: Candidate | None = None
    for limit_bytes in dict.fromkeys((wanted_bytes, budget_bytes)):
        bound = lower_bound(simulator.problem, limit_bytes, deadline=deadline)
        if not bound.impossible:
            best = _search(simulator, limit_bytes, bound, effort, deadline, say)
        if best is not None:
            break
    else:
        say("no schedule fits: looking for the smallest budget that works")
        least = smallest(simulator, enough_bytes=budget_bytes)
        best = least if least.peak_bytes <= budget_bytes else repair(simulator, least, budget_bytes, deadline=deadline)
        if best is None:
            raise _budget_error(simulator, least, budget_bytes)
        best = improve(simulator, best, limit_bytes, deadline=deadline)
    bound = _tighter(simulator, limit_bytes, bound, best, deadline)
    if best.simulation.step_s - bound.step_s > _FAR * trace.step_s:
        say("far above the bound: annealing")
        best = anneal(
            simulator,
            best,
            limit_bytes,
            deadline=deadline,
            searches=effort.annealing_searches,
            max_moves=effort.annealing_moves,
        )
    if simulator is not untouched:
        without = lower_bound(untouched.problem, limit_bytes, deadline=deadline)
        if not without.impossible and without.step_s < bound.step_s:
            bound = without
        best, simulator = _copying_if_needed(untouched, simulator, best, limit_bytes)
    if time.monotonic() > deadline:
        _log.warning("planning reached its time limit of %g s: the plan may differ from run to run", deadline_s)
    return _plan(simulator, best, plain, bound, budget_bytes, started)


def _tighter(simulator: Simulator, budget_bytes: int, bound: Bound, best: Candidate, deadline: float) -> Bound:
    """Return the better of `bound` and the bound with backward cut where the best plan is fullest."""
    gap_s = best.simulation.step_s - bound.step_s
    if bound.impossible or gap_s <= _GOOD_ENOUGH * simulator.problem.trace.step_s:
        return bound
    other = lower_bound(simulator.problem, budget_bytes, deadline=deadline, unpack_live=best.simulation.unpack_live)
    return other if other.step_s > bound.step_s else bound


def _copying_if_needed(
    untouched: Simulator, copying: Simulator, best: Candidate, budget_bytes: int
) -> tuple[Candidate, Simulator]:
    """The same plan without copies, where it fits all the same."""
    same = judged(
        untouched,
        best.keep,
        best.released,
        offload=best.offload,
        limit_bytes=budget_bytes,
        solver=best.solver,
    )
    if same is not None and same.peak_bytes <= budget_bytes and same.extra_s <= best.extra_s:
        return same, untouched
    return best, copying


def _search(
    simulator: Simulator, budget_bytes: int, bound: Bound, effort: Effort, deadline: float, say: Progress
) -> Candidate | None:
    """Return the MILP's best plan, improved, or None if none fits."""
    trace = simulator.problem.trace
    plain_s = max(trace.step_s, 1e-12)
    least_extra_s = max(bound.step_s - trace.step_s, 1e-12)
    enough_s = least_extra_s + max(_GOOD_ENOUGH * plain_s, _GOOD_ENOUGH_EXTRA * least_extra_s)
    best = solve_chain(
        simulator,
        budget_bytes,
        deadline=deadline,
        relative_gap=min(0.05, 0.5 * (enough_s / least_extra_s - 1)),
        good_enough_s=enough_s,
        max_nodes=effort.milp_nodes,
        max_rounds=effort.milp_rounds,
    )
    if best is None:
        return None
    if best.extra_s > enough_s:
        best = improve(simulator, best, budget_bytes, deadline=deadline)
    gap = (best.simulation.step_s - bound.step_s) / plain_s
    say(f"{best.solver}: {100 * best.extra_s / plain_s:.2f} % more time, {100 * gap:.2f} % above the bound")
    return best


def _plan(
    simulator: Simulator, chosen: Candidate, plain: Candidate, bound: Bound, budget_bytes: int, started: float
) -> Plan:
    problem = simulator.problem
    # The judge once more, from scratch: what leaves here fits.
    decided = chosen.simulation
    checked = simulate(
        problem.trace,
        chosen.keep,
        chosen.released,
        decided.written_before,
        problem.link,
        problem.codec_costs,
        decided.prefetch_after,
    )
    assert checked.peak_bytes <= budget_bytes
    return Plan(
        keep=chosen.keep,
        released=tuple(sorted(chosen.released)),
        budget_bytes=budget_bytes,
        predicted_peak_bytes=checked.peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
        peak_at=describe_place(problem, checked.peak_at),
        predicted_step_s=checked.step_s,
        plain_step_s=problem.trace.step_s,
        bound_step_s=min(bound.step_s, checked.step_s),
        solver=chosen.solver,
        solve_s=time.monotonic() - started,
        replayed_ops=checked.replayed_ops,
        pinned=summarise_pinned(problem),
        modules=summarise_modules(simulator, chosen),
        fingerprint=problem.trace.fingerprint,
        op_names=tuple(op.name for op in problem.trace.ops),
        offload=tuple(checked.written_before),
        written_before=tuple(checked.written_before.values()),
        prefetch_after=tuple(checked.prefetch_after.get(j, j) for j in checked.written_before),
        compress=tuple(j for j in checked.written_before if problem.packed[j]),
        copies=bool(problem.trace.copies),
        link=problem.link,
        codec_costs=problem.codec_costs,
        store_wait_s=checked.store_wait_s,
    )


def _budget_error(simulator: Simulator, least: Candidate, budget_bytes: int) -> BudgetError:
    at = least.simulation.peak_at
    problem = simulator.problem
    records = problem.trace.ops if at.phase == "forward" else problem.trace.unpacks
    other = records[at.index].other_bytes
    holders = "; ".join(describe_holders(simulator, least)) or "none"
    pinned = sum(problem.pinned)
    # The next profile of the same step may differ by a few bytes: what is named here should work then too.
    works = max(least.peak_bytes + least.peak_bytes // _CAUTION, budget_bytes + 1)
    return BudgetError(
        f"a budget of {format_bytes(budget_bytes)} cannot be met: the smallest that works is "
        f"{format_bytes(works)} ({works} bytes). The peak is then "
        f"{describe_place(problem, at)}: {format_bytes(other)} are parameters, gradients, batch and temporaries, and "
        f"the largest values are {holders}. What helps: a smaller batch or shorter sequences, "
        "splitting the largest op (for example computing the loss in chunks)"
        + ("" if problem.link is not None else ', letting values wait on a disk (stores=("disk",))')
        + (f", or letting the {pinned} pinned ops be recomputed." if pinned else "."),
        budget_bytes=budget_bytes,
        smallest_bytes=works,
    )


def _silence(sentence: str) -> None:
    pass
