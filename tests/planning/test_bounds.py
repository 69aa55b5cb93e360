"""Lower bounds: no plan is faster, with gradient copies or without."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from lowtide._errors import BudgetError
from lowtide.planning import Problem, Simulator, lower_bound, simulate, solve
from lowtide.planning.candidate import judge_decisions
from lowtide.records import CopyEffect, Op, Trace, Unpack, Value

from .naive import naive_simulation
from .traces import make_trace, traces, training_traces


@st.composite
def traces_with_copies(draw) -> Trace:
    """A small step with gradient copies, which reduce the other bytes at some unpacks and raise them at others."""
    trace = draw(training_traces(max_ops=7))
    some = sorted(draw(st.sets(st.sampled_from(range(len(trace.unpacks))), max_size=4))) if trace.unpacks else []
    copies = tuple(CopyEffect(k, draw(st.integers(-trace.unpacks[k].other_bytes, 40)), 0) for k in some)
    return replace(trace, copies=copies, copying_s=draw(st.sampled_from([0.0, 0.05])) if copies else 0.0)


def all_plans(trace):
    """Candidates with every combination of kept, recomputed and retained, and recomputed and released ops."""
    simulator = Simulator(Problem(trace))
    problem = simulator.problem
    free = [j for j in range(problem.n_ops) if not problem.pinned[j]]
    for states in product(("keep", "retain", "release"), repeat=len(free)):
        keep = problem.keep_all()
        for j, state in zip(free, states, strict=True):
            keep[j] = state == "keep"
        released = frozenset(j for j, state in zip(free, states, strict=True) if state == "release")
        candidate = judge_decisions(simulator, keep, released, solver="any")
        if candidate is not None:
            yield candidate


@settings(max_examples=15, deadline=None)
@given(traces_with_copies(), st.floats(0.4, 0.95))
def test_no_plan_with_or_without_copies_is_faster_than_the_bound(trace, share):
    budget = int(share * simulate(trace.without_copies(), [True] * len(trace.ops)).peak_bytes)
    candidates = [candidate for way in (trace.without_copies(), trace) for candidate in all_plans(way)]
    fitting = [candidate.simulation.step_s for candidate in candidates if candidate.peak_bytes <= budget]
    try:
        plan = solve(trace, budget, deadline_s=5)
    except (BudgetError, ValueError):
        assert not fitting
        return
    followed = trace if plan.copies else trace.without_copies()
    simulation = simulate(followed, plan.keep, plan.released)
    assert (simulation.peak_bytes, simulation.step_s) == (plan.predicted_peak_bytes, plan.predicted_step_s)
    assert plan.predicted_peak_bytes <= budget
    assert plan.bound_step_s <= min([*fitting, plan.predicted_step_s]) * (1 + 1e-6)


@settings(max_examples=100, deadline=None)
@given(st.one_of(traces(max_ops=7), training_traces(max_ops=7)), st.data())
def test_plans_that_release_values_are_not_faster_than_the_bound(trace, data):
    keep = [op.pinned is not None or data.draw(st.booleans()) for op in trace.ops]
    recomputed = [j for j, kept in enumerate(keep) if not kept]
    released = data.draw(st.sets(st.sampled_from(recomputed))) if recomputed else set()
    forward, unpacks, seconds, _ = naive_simulation(trace, keep, released)
    bound = lower_bound(Problem(trace), max(1, *forward, *unpacks))
    assert not bound.infeasible
    assert bound.step_s <= trace.step_s + seconds + 1e-6


def trace_with_a_value_unpacked_first_and_last():
    """Value 2 is cheap and large. Backward needs it first and last; the unpack in between leaves no room for it."""
    ops = (
        Op("expensive", "", 100.0, (0,), (1,)),
        Op("cheap", "", 1.0, (1,), (2,)),
        Op("cheap", "", 1.0, (2,), (3,)),
        Op("expensive", "", 100.0, (0,), (4,), other_bytes=21),
    )
    values = (Value(1, None, 0, 3), Value(1, 0, 1, 1), Value(10, 1, 2, 2), Value(10, 2, 3, 2), Value(10, 3, 4, 3))
    unpacks = (Unpack(3, 0, 1, 1.0), Unpack(4, 1, 21, 1.0), Unpack(2, 2, 1, 1.0))
    return make_trace(ops=ops, unpacks=unpacks, values=values, saved=(2, 3, 4), step_s=300.0)


def test_the_bound_counts_two_replays_of_one_op():
    bound = lower_bound(Problem(trace_with_a_value_unpacked_first_and_last()), 32)
    assert not bound.infeasible
    assert bound.step_s == pytest.approx(303.0)
