"""Annealed plans fit and are never slower than their start."""

import time

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.planning import Problem, Simulator, smallest
from lowtide.planning.annealing import anneal
from lowtide.planning.candidate import judge_decisions

from .naive import naive_simulation
from .traces import gpt_trace, training_traces


@settings(max_examples=15, deadline=None)
@given(training_traces(max_ops=12), st.floats(0.0, 1.0))
def test_the_result_fits_and_is_not_slower(trace, share):
    simulator = Simulator(Problem(trace))
    plain = judge_decisions(simulator, simulator.problem.keep_all(), solver="keep all")
    smallest_plan = smallest(simulator)
    budget = int(smallest_plan.peak_bytes + share * (plain.peak_bytes - smallest_plan.peak_bytes))
    found = anneal(simulator, smallest_plan, budget, deadline=time.monotonic() + 0.05)
    assert found.extra_s <= smallest_plan.extra_s
    forward, unpacks, seconds, _ = naive_simulation(trace, found.keep, found.released)
    assert max(forward + unpacks) == found.peak_bytes <= budget
    assert seconds == pytest.approx(found.extra_s)


def test_a_slow_plan_gets_faster():
    simulator = Simulator(Problem(gpt_trace(4)))
    problem = simulator.problem
    recompute_all = judge_decisions(simulator, problem.recompute_all(), solver="recompute all")
    plain = judge_decisions(simulator, problem.keep_all(), solver="keep all")
    budget = (recompute_all.peak_bytes + plain.peak_bytes) // 2
    found = anneal(simulator, recompute_all, budget, deadline=time.monotonic() + 2)
    assert found.peak_bytes <= budget
    assert found.extra_s < 0.8 * recompute_all.extra_s
    assert found.solver == "recompute all, annealed"
