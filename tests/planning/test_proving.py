"""Better bounds beside a plan, and plans where gradients may be copied: what is proved holds for every plan."""

import random
import time
from dataclasses import replace
from itertools import product

from hypothesis import given, settings, strategies as st

from lowtide._errors import BudgetError
from lowtide.planning import Problem, Simulator, lower_bound, simulate, solve
from lowtide.planning.annealing import anneal
from lowtide.planning.candidate import judged
from lowtide.planning.proving import prove
from lowtide.planning.turns import from_plan
from lowtide.trace import Copied, Trace

from .traces import training_traces, unet_trace


@st.composite
def copying(draw) -> Trace:
    """A small step in which gradients are copied, which helps at some asks and is in the way at others."""
    trace = draw(training_traces(max_ops=7))
    some = sorted(draw(st.sets(st.sampled_from(range(len(trace.asks))), max_size=4))) if trace.asks else []
    copies = tuple(Copied(k, draw(st.integers(-trace.asks[k].other_bytes, 40)), 0) for k in some)
    return replace(trace, copies=copies, copying_s=draw(st.sampled_from([0.0, 0.05])) if copies else 0.0)


def all_plans(trace):
    """Every choice of what is kept, and of what is made again and again, with a few turns."""
    simulator = Simulator(Problem(trace))
    problem = simulator.problem
    draw = random.Random(0)
    free = [j for j in range(problem.n_ops) if not problem.pinned[j]]
    for states in product(range(3), repeat=len(free)):
        keep = problem.keep_all()
        for j, state in zip(free, states, strict=True):
            keep[j] = state == 0
        again = frozenset(j for j, state in zip(free, states, strict=True) if state == 2)
        turning = [j for j in free if not keep[j] and draw.random() < 0.3] if problem.n_asks else []
        found = judged(
            simulator, keep, again, turns={j: (draw.randrange(problem.n_asks),) for j in turning}, solver="any"
        )
        if found is not None:
            yield found


@settings(max_examples=15, deadline=None)
@given(copying(), st.floats(0.4, 0.95))
def test_no_plan_with_copies_or_without_beats_the_bound(trace, share):
    budget = int(share * simulate(trace.without_copies(), [True] * len(trace.ops)).peak_bytes)
    plans = [found for way in (trace.without_copies(), trace) for found in all_plans(way)]
    fitting = [found.simulation.step_s for found in plans if found.peak_bytes <= budget]
    try:
        plan = solve(trace, budget, deadline_s=5)
    except (BudgetError, ValueError):
        assert not fitting
        return
    followed = trace if plan.copies else trace.without_copies()
    turns = from_plan(Problem(followed), plan.turns)
    again = simulate(followed, plan.keep, plan.again, turns=turns)
    assert (again.peak_bytes, again.step_s) == (plan.predicted_peak_bytes, plan.predicted_step_s)
    assert plan.predicted_peak_bytes <= budget
    proved_s = prove(trace, plan, seconds=1.0)
    assert plan.bound_step_s <= proved_s <= plan.predicted_step_s
    assert proved_s <= min([*fitting, plan.predicted_step_s]) * (1 + 1e-6)


def test_more_time_proves_more():
    trace = unet_trace(4)
    problem = Problem(trace)
    simulator = Simulator(problem)
    budget = int(0.35 * simulator.run(problem.keep_all()).peak_bytes)
    plan = solve(trace, budget)
    start = judged(
        simulator, plan.keep, frozenset(plan.again), turns=from_plan(problem, plan.turns), solver=plan.solver
    )
    at_once = lower_bound(problem, budget, deadline=time.monotonic() + 5, ask_live=start.simulation.ask_live)
    later_s = prove(trace, plan, seconds=5.0)
    assert at_once.step_s <= later_s + 1e-12
    best = anneal(simulator, start, budget, deadline=time.monotonic() + 2)
    assert later_s <= best.simulation.step_s * (1 + 1e-6)
