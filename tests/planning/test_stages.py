"""What the lower bound is proved with, read as a plan."""

import time

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.planning import Problem, Simulator, lower_bound, smallest
from lowtide.planning.candidate import judged
from lowtide.trace import TRACE_VERSION, Ask, Op, Trace, Value

from .traces import training_traces


def needed_twice_trace():
    """What is made first (2) is cheap and large; backward needs it first and last, and in between there is no room."""
    ops = (
        Op("dear", "", 100.0, (0,), (1,)),
        Op("cheap", "", 1.0, (1,), (2,)),
        Op("cheap", "", 1.0, (2,), (3,)),
        Op("dear", "", 100.0, (0,), (4,), other_bytes=21),
    )
    values = (Value(1, None, 0, 3), Value(1, 0, 1, 1), Value(10, 1, 2, 2), Value(10, 2, 3, 2), Value(10, 3, 4, 3))
    asks = (Ask(3, 0, 1, 1.0), Ask(4, 1, 21, 1.0), Ask(2, 2, 1, 1.0))
    return Trace(TRACE_VERSION, ops, values, (2, 3, 4), asks, step_s=300.0, peak_bytes=0)


def test_a_plan_that_replays_twice():
    problem = Problem(needed_twice_trace())
    bound = lower_bound(problem, 32, deadline=time.monotonic() + 5, whole=True)
    assert bound.decided is not None
    assert bound.decided.keep == (True, False, False, True)
    assert bound.decided.turns == {1: (0, 2)}  # ask 1 is for what is kept
    found = judged(Simulator(problem), bound.decided.keep, turns=bound.decided.turns, solver="stages")
    assert found is not None
    assert found.peak_bytes == 32
    assert found.extra_s == pytest.approx(3.0)
    assert found.simulation.step_s == pytest.approx(bound.step_s)


@settings(max_examples=60, deadline=None)
@given(training_traces(max_ops=12), st.floats(0.0, 1.0))
def test_it_can_be_followed_and_is_no_quicker_than_the_bound(trace, share):
    simulator = Simulator(Problem(trace))
    plain = judged(simulator, simulator.problem.keep_all(), solver="keep all")
    least = smallest(simulator, deadline=time.monotonic() + 2)
    budget = int(least.peak_bytes + share * (plain.peak_bytes - least.peak_bytes))
    bound = lower_bound(simulator.problem, budget, deadline=time.monotonic() + 5, whole=True)
    if bound.decided is None:
        return
    found = judged(simulator, bound.decided.keep, turns=bound.decided.turns, solver="stages")
    if found is not None and found.peak_bytes <= budget:
        assert found.simulation.step_s >= bound.step_s * (1 - 1e-6)
