"""Better bounds beside a plan, and plans where gradients may be copied: what is proved holds for every plan."""

from dataclasses import replace
from itertools import product

from hypothesis import given, settings, strategies as st

from lowtide._errors import BudgetError
from lowtide.planning import Problem, Simulator, simulate, solve
from lowtide.planning.candidate import judged
from lowtide.records import CopyEffect, Trace

from .traces import training_traces


@st.composite
def copying(draw) -> Trace:
    """A small step in which gradients are copied, which helps at some asks and is in the way at others."""
    trace = draw(training_traces(max_ops=7))
    some = sorted(draw(st.sets(st.sampled_from(range(len(trace.unpacks))), max_size=4))) if trace.unpacks else []
    copies = tuple(CopyEffect(k, draw(st.integers(-trace.unpacks[k].other_bytes, 40)), 0) for k in some)
    return replace(trace, copies=copies, copying_s=draw(st.sampled_from([0.0, 0.05])) if copies else 0.0)


def all_plans(trace):
    """Every choice of what is kept, and of what is made again and again."""
    simulator = Simulator(Problem(trace))
    problem = simulator.problem
    free = [j for j in range(problem.n_ops) if not problem.pinned[j]]
    for states in product(range(3), repeat=len(free)):
        keep = problem.keep_all()
        for j, state in zip(free, states, strict=True):
            keep[j] = state == 0
        released = frozenset(j for j, state in zip(free, states, strict=True) if state == 2)
        found = judged(simulator, keep, released, solver="any")
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
    released = simulate(followed, plan.keep, plan.released)
    assert (released.peak_bytes, released.step_s) == (plan.predicted_peak_bytes, plan.predicted_step_s)
    assert plan.predicted_peak_bytes <= budget
    assert plan.bound_step_s <= min([*fitting, plan.predicted_step_s]) * (1 + 1e-6)
