"""Changes at random: what is pinned or fixed stays as it is, everything else that is large comes into play."""

import random

from hypothesis import given, settings, strategies as st

from lowtide.planning import Problem
from lowtide.planning.bits import where
from lowtide.planning.moves import AGAIN, KEPT, ONCE, Decisions, Moves

from .traces import gpt_trace, traces


@settings(max_examples=60, deadline=None)
@given(traces(), st.integers(0, 1000), st.data())
def test_what_is_pinned_or_fixed_is_never_changed(trace, seed, data):
    problem = Problem(trace)
    fixed = data.draw(st.sets(st.sampled_from(range(problem.n_ops)))) if problem.n_ops else set()
    moves = Moves(problem, 1, fixed)
    decisions = Decisions(where(problem.keep_all()), 0)
    draw = random.Random(seed)
    for _ in range(50 if moves.groups else 0):
        moves.change(decisions, draw)
        assert all(decisions.keep >> j & 1 for j in range(problem.n_ops) if problem.pinned[j] or j in fixed)
        assert not decisions.keep & decisions.released


def test_every_large_op_gets_every_decision_and_small_ones_none():
    problem = Problem(gpt_trace(4))
    sizes = [sum(problem.nbytes[v] for v in outputs) for outputs in problem.outputs]
    budget = 100 * max(sizes)
    moves = Moves(problem, budget)
    decisions = Decisions(where(problem.keep_all()), 0)
    seen: list[set[int]] = [set() for _ in range(problem.n_ops)]
    draw = random.Random(0)
    for _ in range(4000):
        moves.change(decisions, draw)
        for j in range(problem.n_ops):
            seen[j].add(decisions.state(j))
    large = [size >= 0.002 * budget for size in sizes]
    assert any(large)
    assert not all(large)
    for j, states in enumerate(seen):
        assert states == ({KEPT, ONCE, AGAIN} if large[j] and not problem.pinned[j] else {KEPT})


def test_a_copy_is_changed_alone():
    decisions = Decisions(0b11, 0)
    changed = decisions.copy()
    changed.decide(0, AGAIN)
    assert (decisions.state(0), changed.state(0), changed.state(1)) == (KEPT, AGAIN, KEPT)
    changed.decide(0, ONCE)
    assert (changed.keep, changed.released) == (0b10, 0)
