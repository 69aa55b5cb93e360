"""The MILP against all 2ⁿ decisions, judged by the naive simulation."""

import time

import pytest
from hypothesis import example, given, settings, strategies as st

from lowtide.planning import Problem, Simulator, lower_bound, solve
from lowtide.planning.milp import solve_milp
from lowtide.planning.repetition import find_repeated_blocks, tie_blocks
from lowtide.records import Op, Unpack, Value

from .naive import all_decisions, naive_simulation
from .traces import changed, gpt_trace, make_trace, traces, training_traces, unfused_trace


def every_outcome(trace):
    """Return (peak, extra seconds) of all decisions."""
    outcomes = []
    for keep in all_decisions(trace):
        forward, unpacks, seconds, _ = naive_simulation(trace, keep)
        outcomes.append((max(forward + unpacks), seconds))
    return outcomes


def trace_with_an_early_replay():
    """Value 2 is unpacked last, but replayed early for value 3. Its replay frees its input, value 1."""
    ops = (
        Op("draw", "", 1.0, (0,), (1,), "it draws", 0),
        Op("f", "", 1.0, (0, 1), (2,), None, 0),
        Op("g", "", 1.0, (2,), (3,), None, 0),
        Op("draw", "", 1.0, (0,), (4,), "it draws", 0),
    )
    values = (Value(8, None, 0, 3), Value(1, 0, 1, 1), Value(3, 1, 2, 2), Value(1, 2, 3, 2), Value(3, 3, 4, 3))
    unpacks = (Unpack(3, 1, 0, 1.0), Unpack(2, 1, 1, 1.0))
    return make_trace(ops=ops, unpacks=unpacks, values=values, saved=(2, 3), step_s=100.0)


@settings(max_examples=60, deadline=None)
@given(training_traces(max_ops=7), st.sampled_from((0.3, 0.5, 0.8)))
@example(trace_with_an_early_replay(), 0.3)
def test_a_plan_fits_and_an_optimal_one_is_as_fast_as_the_best_decisions(trace, share):
    outcomes = every_outcome(trace)
    least, most = min(peak for peak, _ in outcomes), max(peak for peak, _ in outcomes)
    budget = max(1, int(least + share * (most - least)))
    best_s = min(seconds for peak, seconds in outcomes if peak <= budget)
    found = solve_milp(Simulator(Problem(trace)), budget, deadline=time.monotonic() + 20, relative_gap=0)
    if found.best is None:
        # Safe rows can exclude every plan. That is rare, and repair finds a plan then.
        plan = solve(trace, budget)
        forward, unpacks, *_ = naive_simulation(trace, plan.keep, plan.released)
        assert max(forward + unpacks) <= budget
        return
    forward, unpacks, seconds, _ = naive_simulation(trace, found.best.keep)
    assert max(forward + unpacks) <= budget
    assert seconds >= best_s
    if found.optimal:
        assert seconds == pytest.approx(best_s)


@settings(max_examples=60, deadline=None)
@given(traces(max_ops=7), st.integers(1, 60))
def test_a_plan_fits_and_no_decisions_are_faster_than_the_bound(trace, budget):
    fitting = [seconds for peak, seconds in every_outcome(trace) if peak <= budget]
    problem = Problem(trace)
    bound = lower_bound(problem, budget)
    found = solve_milp(Simulator(problem), budget, deadline=time.monotonic() + 20, relative_gap=0)
    if found.best is not None:
        forward, unpacks, seconds, _ = naive_simulation(trace, found.best.keep)
        assert max(forward + unpacks) <= budget
        assert bound.step_s <= trace.step_s + seconds + 1e-6
    if fitting:
        assert not bound.infeasible
        assert bound.step_s <= trace.step_s + min(fitting) + 1e-6


@pytest.mark.parametrize("trace", [gpt_trace(12), unfused_trace(4)], ids=["gpt", "unfused"])
def test_tied_blocks_cost_at_most_half_a_percent(trace):
    problem = Problem(trace)
    simulator = Simulator(problem)
    plain = simulator.run(problem.keep_all())
    ties = tie_blocks(problem, find_repeated_blocks(problem))
    assert len(set(ties)) < problem.n_ops
    budget = int(0.6 * plain.peak_bytes)
    free = solve_milp(simulator, budget, deadline=time.monotonic() + 20, relative_gap=0.01)
    tied = solve_milp(simulator, budget, ties=ties, deadline=time.monotonic() + 20, relative_gap=0.01)
    assert free.best is not None
    assert tied.best is not None
    assert tied.best.simulation.step_s <= free.best.simulation.step_s + 0.005 * trace.step_s


def test_a_step_without_saved_values():
    problem = Problem(changed(gpt_trace(1), saved=(), unpacks=()))
    found = solve_milp(Simulator(problem), 2**60, deadline=time.monotonic() + 5)
    assert found.best is not None
    assert all(found.best.keep)
