"""The planner's front door: a trace and a budget in, a plan that the simulator accepts out.

Tries keeping everything; the programme with tied blocks; where that is not close to the bound, a greedy plan, rotor's
schedule and, for small steps, the plain programme; then single recomputes are undone while there is room. Where
nothing fits, the search for the smallest peak has the last word, and `BudgetError` says what it found. What is still
far above the bound is changed at random, for longer the further it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .._errors import ArgumentError, BudgetError
from .._units import format_bytes
from ..trace import Trace
from .annealing import anneal
from .bounds import Bound, lower_bound
from .candidate import Candidate, judged
from .chain import fitting, has_ties, reach_of, solve_chain
from .describing import describe_holders, describe_place, summarise_kinds, summarise_pinned
from .greedy import improve, solve_greedy
from .link import Link
from .milp import solve_milp
from .packing import Packing
from .plan import Plan
from .problem import Problem
from .proving import also_without_copies, proved
from .repetition import find_stretches
from .rotor import solve_rotor
from .simulator import Simulator, simulate
from .smallest import smallest
from .stages import Decided
from .turns import to_plan

_GOOD_ENOUGH, _GOOD_ENOUGH_EXTRA = 0.005, 0.03
"""Share of a plain step, and of the extra time that is needed at least, by which it is not worth searching on."""
_WORTH_TIME, _PROOF_SHARE = 0.01, 0.04
"""Share of a plain step above the bound from which on a better one is worth time, and this share of it."""
_LEAST_PROOF_S = 0.05
"""What a bound for another way has at least."""
_FAR, _ANNEALING_SHARE = 0.03, 0.3
"""The same for changing plans at random, and the share of the time that this may take."""
_LEAST_SEARCHES, _GAP_A_SEARCH = 3, 0.04
"""How often that is begun anew, at least; and once for so much of a plain step above the bound."""
_QUICK_OPS, _QUICK_S, _TOO_FAR = 300, 1.7, 0.25
"""Ops up to which planning takes no longer than that, unless what was found is so much above the bound."""
_VERY_FAR = 0.1
"""The same for looking once more where values may wait elsewhere."""
_UNHURRIED_SHARE = 0.3
"""Of the time: for the programme where values may wait elsewhere, and what was found at once is very far above."""
_MOST_SLOWNESS = 4.0
"""As many times longer it takes on a busy machine, at the most."""
_CAUTION = 200
"""The smallest budget is named with 1/200 more."""
_USUAL_DEADLINE_S, _PATIENCE_S, _PATIENCE_S_AN_OP = 20.0, 0.8, 0.02
"""How long a better plan is looked for where there is one that is not far above the bound; longer with more time."""
_FEW_OPS, _CLOSE_GAP = 150, 0.002
"""Ops up to which the programme is solved to this gap at once."""
_PATIENT_SHARE, _PATIENT_SHARE_FEW = 0.7, 0.3
"""Of the time that planning may take: for solvers. With few ops, a plan changed at random is soon as good."""
_PLAIN_OPS = 2500
"""Ops up to which the programme without ties is tried."""

Progress = Callable[[str], None]


def solve(
    trace: Trace,
    budget_bytes: int,
    *,
    link: Link | None = None,
    packings: Sequence[Packing] = (),
    leave_free_bytes: int = 0,
    deadline_s: float = _USUAL_DEADLINE_S,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan found whose predicted peak is at most `budget_bytes`, less `leave_free_bytes` where it can be.

    With a `link` values may also wait in a store, with `packings` be held packed. After `deadline_s` the best so far is
    taken; a plan close to the bound, sooner.
    `progress` is called with a sentence now and then. Raises `BudgetError` if no plan is found that fits.
    """
    if budget_bytes <= 0 or deadline_s <= 0:
        raise ArgumentError(f"a budget of {budget_bytes} bytes and {deadline_s} s to plan: both must be positive")
    trace.check()
    started, started_cpu = time.monotonic(), time.thread_time()
    say = progress if progress is not None else _silence
    untouched = Simulator(Problem(trace.without_copies(), link, packings))
    plain = judged(untouched, untouched.problem.keep_all(), solver="keep all")
    assert plain is not None  # keeping everything replays nothing
    wanted_bytes = max(1, budget_bytes - leave_free_bytes)
    if plain.peak_bytes <= wanted_bytes:
        say("everything fits: nothing to recompute")
        return _plan(untouched, plain, plain, Bound(trace.step_s, impossible=False), budget_bytes, started)
    simulator = Simulator(Problem(trace, link, packings)) if trace.copies else untouched
    bound = lower_bound(simulator.problem, wanted_bytes, deadline=started + 0.2 * deadline_s)
    slowness = _slowness(time.monotonic() - started, time.thread_time() - started_cpu)
    hurry_until = started + slowness * _hurry_s(simulator.problem.n_ops, deadline_s)
    best: Candidate | None = None
    if bound.impossible:
        say("no schedule fits: looking for the smallest budget that works")
    else:
        patience_s = slowness * _patience_s(simulator.problem.n_ops, deadline_s)
        best = _search(simulator, wanted_bytes, bound, min(deadline_s, patience_s), say)
        if any(simulator.problem.offloadable) and (best is None or _is_far(best, bound, trace, _VERY_FAR)):
            # Only the programme knows how values wait elsewhere: it is worth more time.
            longer = _search(simulator, wanted_bytes, bound, _UNHURRIED_SHARE * deadline_s, say)
            best = min((one for one in (best, longer) if one is not None), key=lambda one: one.extra_s, default=None)
    if best is None:
        # The alternative is an error: take the time that it takes to be sure.
        deadline = time.monotonic() + 1.5 * deadline_s
        least = smallest(simulator, enough_bytes=budget_bytes, deadline=deadline)
        if least.peak_bytes > budget_bytes:
            raise _budget_error(simulator, least, budget_bytes)
        best = improve(simulator, least, budget_bytes, deadline=time.monotonic() + 0.2 * deadline_s)
    proof_s = min(_PROOF_SHARE * deadline_s, 0.1 * (hurry_until - started))
    bound = proved(simulator, wanted_bytes, bound, best, proof_s)
    deadline = time.monotonic() + _ANNEALING_SHARE * deadline_s
    for far, until in ((_FAR, hurry_until - proof_s), (_TOO_FAR, deadline)):
        if _is_far(best, bound, trace, far) and time.monotonic() < min(until, deadline):
            say("far above the bound: changing plans at random")
            best = _annealed(simulator, best, max(wanted_bytes, best.peak_bytes), bound, min(until, deadline))
    if _is_far(best, bound, trace, _WORTH_TIME):
        proof_s = max(proof_s, min(_PROOF_SHARE * deadline_s, hurry_until - time.monotonic()))
    bound = proved(simulator, wanted_bytes, bound, best, proof_s, whole=True)
    if bound.decided is not None:
        best = _better(simulator, bound.decided, best, max(wanted_bytes, best.peak_bytes))
    if simulator is not untouched:
        left_s = max(_LEAST_PROOF_S, min(proof_s, hurry_until - time.monotonic()))
        bound = also_without_copies(untouched, bound, best, wanted_bytes, left_s)
        best, simulator = _copying_if_needed(untouched, simulator, best, max(wanted_bytes, best.peak_bytes))
    return _plan(simulator, best, plain, bound, budget_bytes, started)


def _copying_if_needed(
    untouched: Simulator, copying: Simulator, best: Candidate, budget_bytes: int
) -> tuple[Candidate, Simulator]:
    """The same plan without copies, where it fits all the same."""
    same = judged(
        untouched,
        best.keep,
        best.again,
        turns=best.turns,
        offload=best.offload,
        room_bytes=budget_bytes,
        solver=best.solver,
    )
    if same is not None and same.peak_bytes <= budget_bytes and same.extra_s <= best.extra_s:
        return same, untouched
    return best, copying


def _better(simulator: Simulator, decided: Decided, best: Candidate, budget_bytes: int) -> Candidate:
    """What the bound was proved with is a plan too, if it fits: it may replay an op more than once."""
    other = judged(
        simulator, decided.keep, turns=decided.turns, offload=decided.offload, room_bytes=budget_bytes, solver="stages"
    )
    fits = other is not None and other.peak_bytes <= budget_bytes
    return other if other is not None and fits and other.extra_s < best.extra_s else best


def _annealed(simulator: Simulator, best: Candidate, budget_bytes: int, bound: Bound, deadline: float) -> Candidate:
    """Plans changed at random: the further the best is above the bound, the more often it is tried."""
    plain_s = simulator.problem.trace.step_s

    def enough(found: Candidate, searches: int) -> bool:
        gap = (found.simulation.step_s - bound.step_s) / plain_s
        return searches >= _LEAST_SEARCHES and gap <= searches * _GAP_A_SEARCH

    return anneal(simulator, best, budget_bytes, deadline=deadline, enough=enough)


def _slowness(wall_s: float, cpu_s: float) -> float:
    """How many times as long everything takes because others use the machine too: a worse plan costs every step."""
    return min(_MOST_SLOWNESS, max(1.0, wall_s / max(cpu_s, 1e-9)))


def _patience_s(n_ops: int, deadline_s: float) -> float:
    """How long to look for a plan that is only a little better."""
    usual_s = _PATIENCE_S + _PATIENCE_S_AN_OP * n_ops
    share = _PATIENT_SHARE if n_ops > _FEW_OPS else _PATIENT_SHARE_FEW
    return min(deadline_s, usual_s * max(1.0, deadline_s / _USUAL_DEADLINE_S), share * _hurry_s(n_ops, deadline_s))


def _hurry_s(n_ops: int, deadline_s: float) -> float:
    """How long planning may take where it is not worth more."""
    return min(deadline_s, _QUICK_S * max(1.0, deadline_s / _USUAL_DEADLINE_S)) if n_ops <= _QUICK_OPS else deadline_s


def _is_far(found: Candidate, bound: Bound, trace: Trace, share: float) -> bool:
    return found.simulation.step_s - bound.step_s > share * trace.step_s


def _search(
    simulator: Simulator, budget_bytes: int, bound: Bound, patience_s: float, say: Progress
) -> Candidate | None:
    """The best plan of all solvers, in order of their price, until one is good enough or time is up."""
    started = time.monotonic()
    trace = simulator.problem.trace
    plain_s = max(trace.step_s, 1e-12)
    best: Candidate | None = None

    def consider(other: Candidate | None) -> None:
        nonlocal best
        if other is not None and other.peak_bytes <= budget_bytes and (best is None or other.extra_s < best.extra_s):
            best = other
            gap = (other.simulation.step_s - bound.step_s) / plain_s
            say(f"{other.solver}: {100 * other.extra_s / plain_s:.2f} % more time, {100 * gap:.2f} % above the bound")

    least_extra_s = max(bound.step_s - trace.step_s, 1e-12)
    enough_s = least_extra_s + max(_GOOD_ENOUGH * plain_s, _GOOD_ENOUGH_EXTRA * least_extra_s)

    def good_enough() -> bool:
        return best is not None and best.extra_s <= enough_s

    # Half of it is left for what the bound misses; with few ops it takes no time to look more closely.
    gap = min(0.05, 0.5 * (enough_s / least_extra_s - 1)) if simulator.problem.n_ops > _FEW_OPS else _CLOSE_GAP
    chained = solve_chain(
        simulator,
        budget_bytes,
        deadline=started + 0.9 * patience_s,
        relative_gap=gap,
        good_enough_s=enough_s,
    )
    consider(chained)
    if chained is None or not good_enough():
        # Quick schemes; what is dear about them is only worth it where the programme found nothing.
        share = 0.2 if chained is None else 0.05
        consider(solve_greedy(simulator, budget_bytes, deadline=time.monotonic() + share * patience_s))
        if not good_enough():  # where memory is short, blocks have to be replayed more than once
            rotor = solve_rotor(simulator, budget_bytes)
            if rotor is not None:  # it treats blocks as wholes, which leaves room
                until = time.monotonic() + 0.1 * patience_s
                consider(improve(simulator, rotor, budget_bytes, deadline=until))
    if has_ties(simulator.problem) and simulator.problem.n_ops <= _PLAIN_OPS and not good_enough():
        consider(_untied(simulator, budget_bytes, best, gap, started + patience_s))
    if best is not None and not good_enough():
        consider(improve(simulator, best, budget_bytes, deadline=time.monotonic() + 0.1 * patience_s))
    return best


def _untied(
    simulator: Simulator, budget_bytes: int, best: Candidate | None, gap: float, deadline: float
) -> Candidate | None:
    problem = simulator.problem
    stretches = find_stretches(problem)
    found = solve_milp(
        simulator,
        budget_bytes,
        deadline=deadline,
        relative_gap=gap,
        reach_asks=reach_of(problem, stretches),
        better_than_s=None if best is None else best.extra_s - _GOOD_ENOUGH * problem.trace.step_s,
    )
    if found.keep is None and best is not None:
        return None  # there is a plan already, also of what it nearly found, repaired
    return fitting(simulator, found, budget_bytes, "MILP", deadline)


def _plan(
    simulator: Simulator, chosen: Candidate, plain: Candidate, bound: Bound, budget_bytes: int, started: float
) -> Plan:
    problem = simulator.problem
    # The judge once more, from scratch: what leaves here fits.
    decided = chosen.simulation
    checked = simulate(
        problem.trace,
        chosen.keep,
        chosen.again,
        decided.written_by,
        problem.link,
        problem.packings,
        decided.read_after,
        chosen.turns,
    )
    assert checked.peak_bytes <= budget_bytes
    return Plan(
        keep=chosen.keep,
        again=tuple(sorted(chosen.again)),
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
        kinds=summarise_kinds(simulator, chosen),
        fingerprint=problem.trace.fingerprint,
        op_names=tuple(op.name for op in problem.trace.ops),
        offload=tuple(checked.written_by),
        written_by=tuple(checked.written_by.values()),
        read_after=tuple(checked.read_after.get(j, j) for j in checked.written_by),
        compress=tuple(j for j in checked.written_by if problem.packed[j]),
        turns=to_plan(problem, chosen.turns),
        copies=bool(problem.trace.copies),
        link=problem.link,
        packings=problem.packings,
        recording_s=checked.recording_s,
        waited_s=checked.waited_s,
    )


def _budget_error(simulator: Simulator, least: Candidate, budget_bytes: int) -> BudgetError:
    at = least.simulation.peak_at
    problem = simulator.problem
    records = problem.trace.ops if at.phase == "forward" else problem.trace.asks
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
