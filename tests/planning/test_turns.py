"""Turns: a solver's asks and a plan's words for them are the same thing."""

from hypothesis import given, settings, strategies as st

from lowtide.planning import Problem, simulate
from lowtide.planning.turns import Turn, from_plan, is_seen, settled, to_plan

from .test_simulator import step, traces_with_decisions, turns_for


@settings(max_examples=200, deadline=None)
@given(traces_with_decisions(), st.data())
def test_settled_turns_come_when_they_did_before_and_a_plan_brings_them_back(case, data):
    trace, keep, again = case
    problem = Problem(trace)
    keep = problem.obeyed(keep)
    again = {j for j in again if not keep[j]}
    turns = data.draw(turns_for(trace, keep))
    found = settled(problem, keep, turns)
    assert all(is_seen(problem, keep, k) for asks in found.values() for k in asks)
    assert from_plan(problem, to_plan(problem, found)) == found
    before, after = simulate(trace, keep, again, turns=turns), simulate(trace, keep, again, turns=found)
    assert after.replayed_ops == before.replayed_ops
    # A recipe whose last turns undo each other is known to be done with sooner.
    assert (after.ask_live <= before.ask_live).all()


def test_a_turn_waits_for_something_that_is_recomputed():
    a, b, c = 1, 2, 3
    trace = step([((0,), (a,), ()), ((a,), (b,), ()), ((a,), (c,), ())], sizes=[8, 4, 1, 1], asks=[c, b, c, c])
    problem = Problem(trace)
    keep = [False, True, False]
    assert settled(problem, keep, {0: (1,), 2: (1, 2)}) == {0: (2,)}
    assert to_plan(problem, {0: (2,)}) == (Turn(op=0, asked=2, time=1),)
    assert settled(problem, [False, True, True], {0: (1,)}) == {}


def test_what_a_step_does_not_ask_for_never_comes():
    trace = step([((0,), (1,), ())], sizes=[8, 4], asks=[1])
    assert from_plan(Problem(trace), [Turn(0, 0, 0), Turn(0, 0, 1), Turn(0, 5, 0)]) == {0: (0,)}
