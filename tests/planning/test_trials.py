"""The judge in a hurry comes to the judge's numbers, and gives up just the plans that are worse than allowed."""

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.planning import Problem, simulate
from lowtide.planning.trials import Trials

from .naive import naive_simulation
from .test_simulator import turns_for
from .traces import traces, training_traces, unet_trace


@st.composite
def decided(draw):
    trace = draw(st.one_of(traces(), training_traces()))
    problem = Problem(trace)
    keep = list(problem.obeyed([pinned or draw(st.booleans()) for pinned in problem.pinned]))
    again = [not kept and draw(st.booleans()) for kept in keep]
    return trace, problem, keep, again, draw(turns_for(trace, keep))


@settings(max_examples=300, deadline=None)
@given(decided(), st.integers(1, 60))
def test_it_agrees_with_the_naive_machine(case, budget):
    trace, problem, keep, again, turns = case
    more = [j for j, twice in enumerate(again) if twice]
    forward, asks, seconds, _ = naive_simulation(trace, keep, more, turns=turns)
    found = Trials(problem).judge(keep, again, budget, turns=turns)
    assert found.peak_bytes == max(forward + asks)
    assert found.excess_bytes == max(0, max(forward) - budget) + sum(max(0, live - budget) for live in asks)
    assert found.extra_s == pytest.approx(seconds)


@settings(max_examples=200, deadline=None)
@given(decided(), st.integers(1, 60), st.floats(0.0, 2.0), st.floats(0.0, 40.0))
def test_it_gives_up_what_is_worse_than_the_limit_and_nothing_else(case, budget, price_s, limit_s):
    _, problem, keep, again, turns = case
    trials = Trials(problem)
    whole = trials.judge(keep, again, budget, turns=turns)
    cost_s = whole.extra_s + price_s * whole.excess_bytes
    found = trials.judge(keep, again, budget, turns=turns, price_s=price_s, limit_s=limit_s)
    if cost_s < limit_s - 1e-9:
        assert found == whole
    elif cost_s > limit_s + 1e-9:
        assert found is None


def test_many_ops_with_writes_in_place():
    trace = unet_trace(4)
    problem = Problem(trace)
    trials = Trials(problem)
    for every in (2, 3, 5, 7):
        keep = problem.obeyed([pinned or j % every == 0 for j, pinned in enumerate(problem.pinned)])
        again = [not kept and j % 4 == 1 for j, kept in enumerate(keep)]
        judged = simulate(trace, keep, [j for j, more in enumerate(again) if more])
        found = trials.judge(keep, again, 1)
        assert (found.peak_bytes, found.extra_s) == (judged.peak_bytes, pytest.approx(judged.extra_s))
