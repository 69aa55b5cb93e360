"""Random moves change every large op and never a pinned or fixed one."""

import random

from hypothesis import given, settings, strategies as st

from lowtide.planning import Problem
from lowtide.planning.bits import bits_where
from lowtide.planning.moves import KEEP, RELEASE, RETAIN, Decisions, Moves

from .traces import gpt_trace, traces


@settings(max_examples=60, deadline=None)
@given(traces(), st.integers(0, 1000), st.data())
def test_pinned_and_fixed_ops_never_change(trace, seed, data):
    problem = Problem(trace)
    fixed = data.draw(st.sets(st.sampled_from(range(problem.n_ops)))) if problem.n_ops else set()
    moves = Moves(problem, 1, fixed)
    decisions = Decisions(bits_where(problem.keep_all()), 0)
    rng = random.Random(seed)
    for _ in range(50 if moves.groups else 0):
        moves.change(decisions, rng)
        assert all(decisions.keep >> j & 1 for j in range(problem.n_ops) if problem.pinned[j] or j in fixed)
        assert not decisions.keep & decisions.released


def test_large_ops_get_every_decision_and_small_ops_stay_kept():
    problem = Problem(gpt_trace(4))
    sizes = [sum(problem.nbytes[v] for v in outputs) for outputs in problem.outputs]
    budget = 100 * max(sizes)
    moves = Moves(problem, budget)
    decisions = Decisions(bits_where(problem.keep_all()), 0)
    decided: list[set[int]] = [set() for _ in range(problem.n_ops)]
    rng = random.Random(0)
    for _ in range(4000):
        moves.change(decisions, rng)
        for j in range(problem.n_ops):
            decided[j].add(decisions.of(j))
    large = [size >= 0.002 * budget for size in sizes]
    assert any(large)
    assert not all(large)
    for j, found in enumerate(decided):
        assert found == ({KEEP, RETAIN, RELEASE} if large[j] and not problem.pinned[j] else {KEEP})


def test_a_copy_is_changed_alone():
    decisions = Decisions(0b11, 0)
    changed = decisions.copy()
    changed.decide(0, RELEASE)
    assert (decisions.of(0), changed.of(0), changed.of(1)) == (KEEP, RELEASE, KEEP)
    changed.decide(0, RETAIN)
    assert (changed.keep, changed.released) == (0b10, 0)
