"""Values that wait in a store: the judge against the naive machine, and plans that use it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from lowtide._errors import ArgumentError
from lowtide.planning import BASELINES, Link, Plan, Problem, Simulator, lower_bound, simulate, smallest, solve
from lowtide.trace import TRACE_VERSION, Ask, Op, Trace, Value

from .naive import naive_simulation
from .test_simulator import traces_with_decisions
from .traces import gpt_trace, training_traces, unfused_trace

FAST_OUT = Link("disk", out_bytes_per_s=1e15, in_bytes_per_s=4.0, least_bytes=1)


@st.composite
def offloading(draw):
    trace, keep, again = draw(traces_with_decisions())
    problem = Problem(trace, FAST_OUT)
    keep = [bool(kept) for kept in problem.obeyed(keep)]
    written_by = {}
    for j in range(problem.n_ops):
        if keep[j] and problem.offloadable[j] and draw(st.booleans()):
            first = 1 + min(problem.natural_end[v] for v in problem.outputs[j])
            written_by[j] = draw(st.integers(first, problem.n_ops))
    return trace, keep, {j for j in again if not keep[j]}, written_by


@settings(max_examples=100, deadline=None)
@given(offloading())
def test_it_agrees_with_the_naive_machine(case):
    trace, keep, again, written_by = case
    forward, asks, seconds, replays = naive_simulation(trace, keep, again, written_by, FAST_OUT.in_s)
    judged = simulate(trace, keep, again, written_by, FAST_OUT)
    assert judged.forward_live.tolist() == forward
    assert judged.ask_live.tolist() == asks
    assert judged.extra_s == pytest.approx(seconds)
    assert judged.replayed_ops == replays


def chain(ops=4, seconds=1.0, nbytes=10):
    """Each op reads the one before; everything is saved, and asked for in reverse."""
    values = [Value(1, None, 0, 0)] + [Value(nbytes, j, j + 1, min(j + 1, ops - 1)) for j in range(ops)]
    return Trace(
        version=TRACE_VERSION,
        ops=tuple(Op("op", "", seconds, (j,), (j + 1,)) for j in range(ops)),
        values=tuple(values),
        saved=tuple(range(1, ops + 1)),
        asks=tuple(Ask(v, k) for k, v in enumerate(range(ops, 0, -1))),
        step_s=2.0 * ops * seconds,
        peak_bytes=ops * nbytes,
    )


def test_writing_is_hidden_behind_ops_and_reading_is_not():
    link = Link("disk", out_bytes_per_s=10.0, in_bytes_per_s=20.0, least_bytes=1)
    simulator = Simulator(Problem(chain(), link))
    # Op 0's value is put when op 1 begins, at 1 s, written at 2 s, and so gone when op 2 begins.
    judged = simulator.run([True] * 4, offload=[0], room_bytes=10**9)
    assert judged.forward_live.tolist() == [10, 20, 20, 30]
    assert judged.written_by == {0: 2}
    assert judged.ask_live.tolist() == [30, 20, 10, 10]
    assert judged.extra_s == judged.waited_s == 0.5


def test_forward_waits_where_too_much_would_be_alive():
    slow = Link("disk", out_bytes_per_s=1.0, in_bytes_per_s=20.0, least_bytes=1)
    simulator = Simulator(Problem(chain(), slow))
    # Written at 1 s + 10 s. Without need it goes at the end of forward, which has lasted 4 s by then.
    free = simulator.run([True] * 4, offload=[0], room_bytes=10**9)
    assert free.forward_live.tolist() == [10, 20, 30, 40]
    assert free.written_by == {0: 4}
    assert free.waited_s == (11 - 4) + 0.5
    # With room for 30 bytes, op 3 has to wait for it, from 3 s on.
    tight = simulator.run([True] * 4, offload=[0], room_bytes=30)
    assert tight.forward_live.tolist() == [10, 20, 30, 30]
    assert tight.written_by == {0: 3}
    assert tight.waited_s == (11 - 3) + 0.5


@settings(max_examples=20, deadline=None)
@given(training_traces(), st.floats(0.3, 0.95))
def test_a_store_never_makes_a_plan_slower(trace, share):
    budget = int(share * simulate(trace, [True] * len(trace.ops)).peak_bytes)
    link = Link("disk", out_bytes_per_s=50.0, in_bytes_per_s=50.0, least_bytes=1)
    without = smallest(Simulator(Problem(trace)), deadline=math.inf)
    with_store = smallest(Simulator(Problem(trace, link)), deadline=math.inf)
    assert with_store.peak_bytes <= without.peak_bytes
    if budget < max(without.peak_bytes, 1):
        return
    plan = solve(trace, budget, link=link, deadline_s=5)
    assert plan.predicted_peak_bytes <= budget
    assert plan.bound_step_s <= plan.predicted_step_s
    checked = simulate(trace, plan.keep, plan.again, plan.departures, link)
    assert (checked.peak_bytes, checked.step_s) == (plan.predicted_peak_bytes, plan.predicted_step_s)
    assert plan.predicted_step_s <= solve(trace, budget, deadline_s=5).predicted_step_s * 1.02


@pytest.mark.parametrize("trace", [gpt_trace(12), unfused_trace(6)], ids=["fused", "unfused"])
def test_a_quick_store_beats_recomputing(trace):
    budget = int(0.35 * simulate(trace, [True] * len(trace.ops)).peak_bytes)
    total = sum(value.nbytes for value in trace.values)
    link = Link("disk", out_bytes_per_s=20 * total / trace.step_s, in_bytes_per_s=20 * total / trace.step_s)
    plain, moved = solve(trace, budget), solve(trace, budget, link=link)
    assert moved.offload
    assert moved.predicted_step_s - trace.step_s < 0.7 * (plain.predicted_step_s - trace.step_s)
    assert moved.gap < 0.02
    assert Plan.from_json(moved.to_json()) == moved
    assert "offload" in str(moved)
    assert "offload" not in str(plain)


def test_a_store_that_is_slower_than_recomputing_is_left_alone():
    trace = gpt_trace(12)
    budget = int(0.6 * simulate(trace, [True] * len(trace.ops)).peak_bytes)
    plan = solve(trace, budget, link=Link("disk", out_bytes_per_s=1e3, in_bytes_per_s=1e3))
    assert not plan.offload
    assert plan.recomputed


def assert_nothing_beats_the_bound(simulator, share, whole):
    """No simple scheme within a share of plain's peak is faster, with all, some or none of what may move away."""
    problem = simulator.problem
    budget = int(share * simulator.run(problem.keep_all()).peak_bytes)
    bound = lower_bound(problem, budget, whole=whole)
    movable = [j for j in range(problem.n_ops) if problem.offloadable[j]]
    for decide in BASELINES.values():
        keep = [bool(kept) for kept in problem.obeyed(decide(problem))]
        for offload in ([], [j for j in movable if keep[j]], [j for j in movable[::2] if keep[j]]):
            judged = simulator.run(keep, offload=offload, room_bytes=budget)
            if judged.peak_bytes <= budget:
                assert not bound.impossible
                assert bound.step_s <= judged.step_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(training_traces(), st.floats(0.3, 0.95), st.booleans())
def test_no_plan_beats_the_bound(trace, share, whole):
    link = Link("disk", out_bytes_per_s=1e9, in_bytes_per_s=30.0, least_bytes=1)
    assert_nothing_beats_the_bound(Simulator(Problem(trace, link)), share, whole)


def test_decisions_that_cannot_be_followed_are_refused():
    trace = chain()
    with pytest.raises(ArgumentError, match="nothing that could wait"):
        simulate(trace, [True] * 4, written_by={0: 2})  # there is no store
    with pytest.raises(ArgumentError, match="not to be kept"):
        simulate(trace, [False] + [True] * 3, written_by={0: 2}, link=FAST_OUT)
    plan = solve(trace, 30, link=FAST_OUT)
    with pytest.raises(ArgumentError, match="not a valid plan"):
        Plan.from_json(replace(plan, offload=(0,), written_by=(0,)).to_json())
    with pytest.raises(ArgumentError, match="not a valid plan"):
        Plan.from_json(replace(plan, offload=(0,), written_by=(2,), link=None).to_json())


def test_what_writing_takes_from_the_ops_is_counted():
    link = Link("disk", 10.0, 20.0, least_bytes=1, put_s=0.25, put_s_per_byte=0.01, fetch_s=0.125)
    judged = Simulator(Problem(chain(), link)).run([True] * 4, offload=[0], room_bytes=10**9)
    # Handed over at 1 s, which takes 0.35 s; written at 2.35 s, just when op 2 begins; read in 0.125 s + 0.5 s.
    assert judged.written_by == {0: 2}
    assert judged.waited_s == pytest.approx(0.35 + 0.625)
