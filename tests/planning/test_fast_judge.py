"""The fast judge agrees with the simulator, and gives up exactly the plans that exceed the limit."""

import random

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.planning import Problem, simulate
from lowtide.planning.bits import bits_where, members_of
from lowtide.planning.fast_judge import FastJudge
from lowtide.planning.moves import Decisions, Moves

from .naive import naive_simulation
from .traces import gpt_trace, traces, training_traces, unet_trace


@st.composite
def plans(draw):
    trace = draw(st.one_of(traces(), training_traces()))
    problem = Problem(trace)
    keep = list(problem.effective_decisions([pinned or draw(st.booleans()) for pinned in problem.pinned]))
    released = [not kept and draw(st.booleans()) for kept in keep]
    return trace, problem, keep, released


@settings(max_examples=300, deadline=None)
@given(plans(), st.integers(1, 60))
def test_it_agrees_with_the_naive_simulator(case, budget):
    trace, problem, keep, released = case
    released_ops = [j for j, is_released in enumerate(released) if is_released]
    forward, unpacks, seconds, _ = naive_simulation(trace, keep, released_ops)
    found = FastJudge(problem).judge(bits_where(keep), bits_where(released), budget)
    assert found.peak_bytes == max(forward + unpacks)
    assert found.excess_bytes == max(0, max(forward) - budget) + sum(max(0, live - budget) for live in unpacks)
    assert found.extra_s == pytest.approx(seconds)


@settings(max_examples=200, deadline=None)
@given(plans(), st.integers(1, 60), st.floats(0.0, 2.0), st.floats(0.0, 40.0))
def test_it_gives_up_exactly_the_plans_above_the_limit(case, budget, penalty_s_per_byte, limit_s):
    _, problem, keep, released = case
    fast_judge = FastJudge(problem)
    decisions = bits_where(keep), bits_where(released), budget
    early = FastJudge(problem).judge(*decisions, penalty_s_per_byte=penalty_s_per_byte, limit_s=limit_s)
    whole = fast_judge.judge(*decisions)
    cost_s = whole.extra_s + penalty_s_per_byte * whole.excess_bytes
    found = fast_judge.judge(*decisions, penalty_s_per_byte=penalty_s_per_byte, limit_s=limit_s)
    for result in (early, found):  # without and with cached results
        if cost_s < limit_s - 1e-9:
            assert result == whole
        elif cost_s > limit_s + 1e-9:
            assert result is None


def random_walk(trace, budget, seed, steps):
    """Yield decisions and results as in a search: small changes of earlier decisions, some of them given up early."""
    problem = Problem(trace)
    moves, fast_judge, rng = Moves(problem, budget), FastJudge(problem), random.Random(seed)
    current = Decisions(bits_where(problem.keep_all()), 0)
    for _ in range(steps if moves.groups else 0):
        changed = current.copy()
        moves.change(changed, rng)
        changed.make_effective(problem)
        if rng.random() < 0.5:
            limit_s = rng.random() * 2 * trace.step_s
            fast_judge.judge(changed.keep, changed.released, budget, limit_s=limit_s)
        yield problem, changed, fast_judge.judge(changed.keep, changed.released, budget)
        if rng.random() < 0.5:
            current = changed


@settings(max_examples=60, deadline=None)
@given(st.one_of(traces(), training_traces()), st.integers(1, 60), st.integers(0, 1000))
def test_cached_results_of_other_plans_change_nothing(trace, budget, seed):
    for problem, decisions, found in random_walk(trace, budget, seed, steps=60):
        keep, released = decisions.keep, decisions.released
        assert found == FastJudge(problem).judge(keep, released, budget)
        kept = [bool(keep >> j & 1) for j in range(problem.n_ops)]
        forward, unpacks, seconds, _ = naive_simulation(trace, kept, members_of(released))
        assert found.peak_bytes == max(forward + unpacks)
        assert found.extra_s == pytest.approx(seconds)


@pytest.mark.parametrize("trace", [unet_trace(4), gpt_trace(3)], ids=["unet", "gpt"])
def test_many_plans_of_a_large_step(trace):
    plain = simulate(trace, Problem(trace).keep_all())
    for _, decisions, found in random_walk(trace, plain.peak_bytes // 2, seed=0, steps=400):
        kept = [bool(decisions.keep >> j & 1) for j in range(len(trace.ops))]
        simulated = simulate(trace, kept, members_of(decisions.released))
        if found is None:
            assert simulated.replayed_ops > 60 * len(trace.ops)
        else:
            assert (found.peak_bytes, found.extra_s) == (simulated.peak_bytes, pytest.approx(simulated.extra_s))


def test_many_ops_with_writes_in_place():
    trace = unet_trace(4)
    problem = Problem(trace)
    fast_judge = FastJudge(problem)
    for every in (2, 3, 5, 7):
        keep = problem.effective_decisions([pinned or j % every == 0 for j, pinned in enumerate(problem.pinned)])
        released = [not kept and j % 4 == 1 for j, kept in enumerate(keep)]
        simulated = simulate(trace, keep, [j for j, is_released in enumerate(released) if is_released])
        found = fast_judge.judge(bits_where(keep), bits_where(released), 1)
        assert (found.peak_bytes, found.extra_s) == (simulated.peak_bytes, pytest.approx(simulated.extra_s))
