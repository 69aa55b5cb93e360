"""Plans changed at random: they fit, and are never slower than what they began with."""

import time

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.planning import Problem, Simulator, smallest
from lowtide.planning.annealing import anneal
from lowtide.planning.candidate import judged

from .naive import naive_simulation
from .traces import gpt_trace, training_traces


@settings(max_examples=15, deadline=None)
@given(training_traces(max_ops=12), st.floats(0.0, 1.0))
def test_what_comes_out_fits_and_is_not_slower(trace, share):
    simulator = Simulator(Problem(trace))
    plain = judged(simulator, simulator.problem.keep_all(), solver="keep all")
    least = smallest(simulator)
    budget = int(least.peak_bytes + share * (plain.peak_bytes - least.peak_bytes))
    found = anneal(simulator, least, budget, deadline=time.monotonic() + 0.05)
    assert found.extra_s <= least.extra_s
    forward, unpacks, seconds, _ = naive_simulation(trace, found.keep, found.released)
    assert max(forward + unpacks) == found.peak_bytes <= budget
    assert seconds == pytest.approx(found.extra_s)


def test_a_plan_that_wastes_time_becomes_better():
    simulator = Simulator(Problem(gpt_trace(4)))
    problem = simulator.problem
    nothing_kept = judged(simulator, problem.recompute_all(), solver="recompute all")
    plain = judged(simulator, problem.keep_all(), solver="keep all")
    budget = (nothing_kept.peak_bytes + plain.peak_bytes) // 2
    found = anneal(simulator, nothing_kept, budget, deadline=time.monotonic() + 2)
    assert found.peak_bytes <= budget
    assert found.extra_s < 0.8 * nothing_kept.extra_s
    assert found.solver == "recompute all, annealed"
