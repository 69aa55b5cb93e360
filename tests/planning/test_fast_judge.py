"""The judge in a hurry comes to the judge's numbers, and gives up just the plans that are worse than allowed."""

import random

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.planning import Problem, simulate
from lowtide.planning.bits import members_of, where
from lowtide.planning.fast_judge import FastJudge
from lowtide.planning.moves import Decisions, Moves

from .naive import naive_simulation
from .traces import gpt_trace, traces, training_traces, unet_trace


@st.composite
def decided(draw):
    trace = draw(st.one_of(traces(), training_traces()))
    problem = Problem(trace)
    keep = list(problem.effective_decisions([pinned or draw(st.booleans()) for pinned in problem.pinned]))
    released = [not kept and draw(st.booleans()) for kept in keep]
    return trace, problem, keep, released


@settings(max_examples=300, deadline=None)
@given(decided(), st.integers(1, 60))
def test_it_agrees_with_the_naive_machine(case, budget):
    trace, problem, keep, released = case
    more = [j for j, twice in enumerate(released) if twice]
    forward, unpacks, seconds, _ = naive_simulation(trace, keep, more)
    found = FastJudge(problem).judge(where(keep), where(released), budget)
    assert found.peak_bytes == max(forward + unpacks)
    assert found.excess_bytes == max(0, max(forward) - budget) + sum(max(0, live - budget) for live in unpacks)
    assert found.extra_s == pytest.approx(seconds)


@settings(max_examples=200, deadline=None)
@given(decided(), st.integers(1, 60), st.floats(0.0, 2.0), st.floats(0.0, 40.0))
def test_it_gives_up_what_is_worse_than_the_limit_and_nothing_else(case, budget, price_s, limit_s):
    _, problem, keep, released = case
    trials = FastJudge(problem)
    decisions = where(keep), where(released), budget
    early = FastJudge(problem).judge(*decisions, price_s=price_s, limit_s=limit_s)
    whole = trials.judge(*decisions)
    cost_s = whole.extra_s + price_s * whole.excess_bytes
    found = trials.judge(*decisions, price_s=price_s, limit_s=limit_s)
    for one in (early, found):  # without and with what it remembers
        if cost_s < limit_s - 1e-9:
            assert one == whole
        elif cost_s > limit_s + 1e-9:
            assert one is None


def walked(trace, budget, seed, steps):
    """Decisions as a search sees them: changed from the last ones that it went on from, some of them given up early."""
    problem = Problem(trace)
    moves, trials, draw = Moves(problem, budget), FastJudge(problem), random.Random(seed)
    here = Decisions(where(problem.keep_all()), 0)
    for _ in range(steps if moves.groups else 0):
        other = here.copy()
        moves.change(other, draw)
        other.obey(problem)
        if draw.random() < 0.5:
            limit_s = draw.random() * 2 * trace.step_s
            trials.judge(other.keep, other.released, budget, limit_s=limit_s)
        yield problem, other, trials.judge(other.keep, other.released, budget)
        if draw.random() < 0.5:
            here = other


@settings(max_examples=60, deadline=None)
@given(st.one_of(traces(), training_traces()), st.integers(1, 60), st.integers(0, 1000))
def test_what_it_remembers_of_other_plans_changes_nothing(trace, budget, seed):
    for problem, decisions, found in walked(trace, budget, seed, steps=60):
        keep, released = decisions.keep, decisions.released
        assert found == FastJudge(problem).judge(keep, released, budget)
        kept = [bool(keep >> j & 1) for j in range(problem.n_ops)]
        forward, unpacks, seconds, _ = naive_simulation(trace, kept, members_of(released))
        assert found.peak_bytes == max(forward + unpacks)
        assert found.extra_s == pytest.approx(seconds)


@pytest.mark.parametrize("trace", [unet_trace(4), gpt_trace(3)], ids=["unet", "gpt"])
def test_many_plans_of_a_large_step(trace):
    plain = simulate(trace, Problem(trace).keep_all())
    for _, decisions, found in walked(trace, plain.peak_bytes // 2, seed=0, steps=400):
        kept = [bool(decisions.keep >> j & 1) for j in range(len(trace.ops))]
        judged = simulate(trace, kept, members_of(decisions.released))
        if found is None:
            assert judged.replayed_ops > 60 * len(trace.ops)
        else:
            assert (found.peak_bytes, found.extra_s) == (judged.peak_bytes, pytest.approx(judged.extra_s))


def test_many_ops_with_writes_in_place():
    trace = unet_trace(4)
    problem = Problem(trace)
    trials = FastJudge(problem)
    for every in (2, 3, 5, 7):
        keep = problem.effective_decisions([pinned or j % every == 0 for j, pinned in enumerate(problem.pinned)])
        released = [not kept and j % 4 == 1 for j, kept in enumerate(keep)]
        judged = simulate(trace, keep, [j for j, more in enumerate(released) if more])
        found = trials.judge(where(keep), where(released), 1)
        assert (found.peak_bytes, found.extra_s) == (judged.peak_bytes, pytest.approx(judged.extra_s))
