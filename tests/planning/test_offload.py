"""Offloading to a store: the simulator agrees with the naive simulator, and plans use the store."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from lowtide._errors import ArgumentError
from lowtide.planning import BASELINES, Link, Plan, Problem, Simulator, lower_bound, simulate, smallest, solve
from lowtide.records import Op, Unpack, Value

from .naive import naive_simulation
from .test_simulator import traces_with_decisions
from .traces import gpt_trace, make_trace, training_traces, unfused_trace

FAST_OUT = Link("disk", out_bytes_per_s=1e15, in_bytes_per_s=4.0, min_bytes=1)


@st.composite
def offload_decisions(draw):
    trace, keep, released = draw(traces_with_decisions())
    problem = Problem(trace, FAST_OUT)
    keep = [bool(kept) for kept in problem.effective_decisions(keep)]
    written_before = {}
    for j in range(problem.n_ops):
        if keep[j] and problem.offloadable[j] and draw(st.booleans()):
            first = 1 + min(problem.natural_end[v] for v in problem.outputs[j])
            written_before[j] = draw(st.integers(first, problem.n_ops))
    events = st.sampled_from([-1, *written_before])
    prefetch_after = {j: event for j in written_before if (event := draw(events)) != j}
    return trace, keep, {j for j in released if not keep[j]}, written_before, prefetch_after


links = st.builds(
    Link,
    st.just("disk"),
    out_bytes_per_s=st.just(1e15),
    in_bytes_per_s=st.sampled_from([0.5, 4.0]),
    min_bytes=st.just(1),
    fetch_s=st.sampled_from([0.0, 0.25]),
    prefetch_bytes_per_s=st.sampled_from([0.0, 3.0]),
    prefetch_s_each=st.sampled_from([0.0, 0.125]),
    prefetch_s_per_byte=st.sampled_from([0.0, 0.01]),
)
"""Stores that write in no time and read a value in more or less time than an op."""


@settings(max_examples=200, deadline=None)
@given(offload_decisions(), links)
def test_it_agrees_with_the_naive_simulator(case, link):
    trace, keep, released, written_before, prefetch_after = case
    forward, unpacks, seconds, replays = naive_simulation(
        trace, keep, released, written_before, link, prefetch_after=prefetch_after
    )
    simulated = simulate(trace, keep, released, written_before, link, prefetch_after=prefetch_after)
    assert simulated.forward_live.tolist() == forward
    assert simulated.unpack_live.tolist() == unpacks
    assert simulated.extra_s == pytest.approx(seconds)
    assert simulated.replayed_ops == replays


@settings(max_examples=200, deadline=None)
@given(offload_decisions(), links, st.floats(0.3, 1.2), st.integers(1, 2**62))
def test_prefetches_fit_and_save_time_and_can_be_simulated_again(case, link, share, max_prefetch_bytes):
    trace, keep, released, written_before, _ = case
    link = replace(link, max_prefetch_bytes=max_prefetch_bytes)
    memory_budget = int(share * simulate(trace, [True] * len(trace.ops)).peak_bytes)
    chosen = Simulator(Problem(trace, link)).run(keep, released, offload=[*written_before], limit_bytes=memory_budget)
    needed = simulate(trace, keep, released, chosen.written_before, link)
    followed = simulate(trace, keep, released, chosen.written_before, link, prefetch_after=chosen.prefetch_after)
    assert (followed.unpack_live == chosen.unpack_live).all()
    assert (followed.forward_live == chosen.forward_live).all()
    assert followed.extra_s == chosen.extra_s
    assert followed.store_wait_s == chosen.store_wait_s
    for live, exclusive in ((chosen.unpack_live, needed.unpack_live), (chosen.forward_live, needed.forward_live)):
        assert all(some <= max(memory_budget, other) for some, other in zip(live, exclusive, strict=True))
    assert chosen.extra_s < needed.extra_s if chosen.prefetch_after else chosen.extra_s == needed.extra_s


def chain(ops=4, seconds=1.0, nbytes=10, unpacks_s=0.0):
    """A trace in which each op reads the previous one; all values are saved and unpacked in reverse order."""
    values = [Value(1, None, 0, 0)] + [Value(nbytes, j, j + 1, min(j + 1, ops - 1)) for j in range(ops)]
    return make_trace(
        ops=tuple(Op("op", "", seconds, (j,), (j + 1,)) for j in range(ops)),
        values=tuple(values),
        saved=tuple(range(1, ops + 1)),
        unpacks=tuple(Unpack(v, k, 0, unpacks_s) for k, v in enumerate(range(ops, 0, -1))),
        step_s=2.0 * ops * seconds,
        peak_bytes=ops * nbytes,
    )


def simulate_chain(trace, offload, limit_bytes=10**9, **speeds):
    """Simulate with a disk that writes in no time and reads a value of 10 bytes in 1 s."""
    link = Link("disk", **{"out_bytes_per_s": 1e15, "in_bytes_per_s": 10.0, "min_bytes": 1, **speeds})
    return Simulator(Problem(trace, link)).run([True] * len(trace.ops), offload=offload, limit_bytes=limit_bytes)


def test_reads_run_beside_backward_if_memory_allows():
    # The output of op 3 is kept and unpacked at 0 s. Those of ops 2, 1 and 0 are unpacked at 2 s, 4 s and 6 s.
    trace = chain(unpacks_s=2.0)
    free = simulate_chain(trace, [0, 1, 2])
    assert free.prefetch_after == {2: -1, 1: 2, 0: 1}
    assert free.store_wait_s == pytest.approx(0.0, abs=1e-9)
    assert free.unpack_live.tolist() == [20, 20, 20, 10]
    assert free.forward_live.tolist() == [10, 20, 20, 30]
    # Two values may be live at a time. During op 3 two are live already, so no prefetch starts there.
    tight = simulate_chain(trace, [0, 1, 2], limit_bytes=20)
    assert tight.prefetch_after == {1: 2, 0: 1}
    assert tight.store_wait_s == pytest.approx(1.0)
    assert tight.peak_bytes == 20
    # If only the value that is needed fits, backward waits for every read.
    none = simulate_chain(trace, [0, 1, 2], limit_bytes=19)
    assert none.prefetch_after == {}
    assert none.store_wait_s == pytest.approx(3.0)


def test_reads_follow_each_other_and_backward_waits_for_the_rest():
    # Unpacks follow each other by 0.75 s, and each read takes 1 s: backward waits 0.25 s for each.
    simulated = simulate_chain(chain(unpacks_s=0.75), [0, 1, 2])
    assert simulated.prefetch_after == {2: -1, 1: -1, 0: 2}
    assert simulated.store_wait_s == pytest.approx(3.0 - 3 * 0.75)
    # A store that prefetches at most one value.
    simulated = simulate_chain(chain(unpacks_s=0.75), [0, 1, 2], max_prefetch_bytes=10)
    assert simulated.prefetch_after == {2: -1, 1: 2, 0: 1}
    assert simulated.store_wait_s == pytest.approx(0.75)


def test_prefetches_start_later_if_the_disk_is_faster():
    # With 0.5 s per read, each prefetch starts one fetch earlier.
    simulated = simulate_chain(chain(6, unpacks_s=1.0), [0, 1, 2, 3, 4], in_bytes_per_s=20.0)
    assert simulated.prefetch_after == {4: -1, 3: 4, 2: 3, 1: 2, 0: 1}
    # With 1.5 s per read, it starts two fetches earlier.
    simulated = simulate_chain(chain(6, unpacks_s=2.0), [0, 1, 2, 3, 4], in_bytes_per_s=10 / 1.5)
    assert simulated.prefetch_after == {4: -1, 3: -1, 2: 4, 1: 3, 0: 2}


def test_prefetches_slow_down_ops():
    slow = simulate_chain(chain(unpacks_s=2.0), [0], prefetch_s_each=0.25, prefetch_s_per_byte=0.01)
    assert slow.prefetch_after == {0: -1}
    assert slow.store_wait_s == pytest.approx(0.35)
    # If a prefetch slows down ops as much as a blocking read takes, there is none.
    assert simulate_chain(chain(unpacks_s=2.0), [0], prefetch_s_per_byte=0.1).prefetch_after == {}


def test_writes_run_beside_ops_and_blocking_reads_do_not():
    link = Link("disk", out_bytes_per_s=10.0, in_bytes_per_s=20.0, min_bytes=1)
    simulator = Simulator(Problem(chain(), link))
    # The output of op 0 is put when op 1 starts, at 1 s. It is written at 2 s, so it is freed before op 2.
    simulated = simulator.run([True] * 4, offload=[0], limit_bytes=10**9)
    assert simulated.forward_live.tolist() == [10, 20, 20, 30]
    assert simulated.written_before == {0: 2}
    assert simulated.unpack_live.tolist() == [30, 20, 10, 10]
    assert simulated.extra_s == simulated.store_wait_s == 0.5


def test_forward_waits_where_too_many_bytes_would_be_live():
    slow = Link("disk", out_bytes_per_s=1.0, in_bytes_per_s=20.0, min_bytes=1)
    simulator = Simulator(Problem(chain(), slow))
    # The write ends at 1 s + 10 s. With enough memory, forward waits for it only at its end, at 4 s.
    free = simulator.run([True] * 4, offload=[0], limit_bytes=10**9)
    assert free.forward_live.tolist() == [10, 20, 30, 40]
    assert free.written_before == {0: 4}
    assert free.store_wait_s == (11 - 4) + 0.5
    # With a limit of 30 bytes, op 3 waits for it, from 3 s on.
    tight = simulator.run([True] * 4, offload=[0], limit_bytes=30)
    assert tight.forward_live.tolist() == [10, 20, 30, 30]
    assert tight.written_before == {0: 3}
    assert tight.store_wait_s == (11 - 3) + 0.5


@settings(max_examples=20, deadline=None)
@given(training_traces(), st.floats(0.3, 0.95))
def test_a_store_never_makes_a_plan_slower(trace, share):
    budget = int(share * simulate(trace, [True] * len(trace.ops)).peak_bytes)
    link = Link("disk", out_bytes_per_s=50.0, in_bytes_per_s=50.0, min_bytes=1)
    without = smallest(Simulator(Problem(trace)))
    with_store = smallest(Simulator(Problem(trace, link)))
    assert with_store.peak_bytes <= without.peak_bytes
    if budget < max(without.peak_bytes, 1):
        return
    plan = solve(trace, budget, link=link, deadline_s=5)
    assert plan.predicted_peak_bytes <= budget
    assert plan.bound_step_s <= plan.predicted_step_s
    checked = simulate(trace, plan.keep, plan.released, plan.offload_deadlines, link, (), plan.prefetches)
    assert (checked.peak_bytes, checked.step_s) == (plan.predicted_peak_bytes, plan.predicted_step_s)
    assert plan.predicted_step_s <= solve(trace, budget, deadline_s=5).predicted_step_s * 1.02


@pytest.mark.parametrize("trace", [gpt_trace(12), unfused_trace(6)], ids=["fused", "unfused"])
def test_a_fast_store_is_faster_than_recomputing(trace):
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


def test_a_store_that_is_slower_than_recomputing_is_not_used():
    trace = gpt_trace(12)
    budget = int(0.6 * simulate(trace, [True] * len(trace.ops)).peak_bytes)
    plan = solve(trace, budget, link=Link("disk", out_bytes_per_s=1e3, in_bytes_per_s=1e3))
    assert not plan.offload
    assert plan.recomputed


def assert_no_scheme_beats_the_bound(simulator, share):
    """Assert that no simple scheme beats the bound at a share of the plain peak, with all, half or no ops offloaded."""
    problem = simulator.problem
    budget = int(share * simulator.run(problem.keep_all()).peak_bytes)
    bound = lower_bound(problem, budget)
    offloadable = [j for j in range(problem.n_ops) if problem.offloadable[j]]
    for decide in BASELINES.values():
        keep = [bool(kept) for kept in problem.effective_decisions(decide(problem))]
        for offload in ([], [j for j in offloadable if keep[j]], [j for j in offloadable[::2] if keep[j]]):
            simulated = simulator.run(keep, offload=offload, limit_bytes=budget)
            if simulated.peak_bytes <= budget:
                assert not bound.infeasible
                assert bound.step_s <= simulated.step_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(training_traces(), st.floats(0.3, 0.95), links)
def test_no_plan_beats_the_bound(trace, share, link):
    assert_no_scheme_beats_the_bound(Simulator(Problem(trace, link)), share)


def test_invalid_offload_decisions_are_errors():
    trace = chain()
    with pytest.raises(ArgumentError, match="cannot be offloaded"):
        simulate(trace, [True] * 4, written_before={0: 2})  # there is no store
    with pytest.raises(ArgumentError, match="is offloaded, but not kept"):
        simulate(trace, [False] + [True] * 3, written_before={0: 2}, link=FAST_OUT)
    plan = solve(trace, 30, link=FAST_OUT)
    with pytest.raises(ArgumentError, match="not a valid plan"):
        Plan.from_json(replace(plan, offload=(0,), written_before=(0,)).to_json())
    with pytest.raises(ArgumentError, match="not a valid plan"):
        Plan.from_json(replace(plan, offload=(0,), written_before=(2,), link=None).to_json())
    two = replace(plan, offload=(0, 1), written_before=(2, 3), link=FAST_OUT, keep=(True,) * 4, released=())
    for wrong in ((2, 1), (-2, 1), (1,), (0, 1, 1), ("1", 1)):
        with pytest.raises(ArgumentError, match="not a valid plan"):
            Plan.from_json(replace(two, prefetch_after=wrong).to_json())
    for right in ((1, -1), (0, 0), ()):
        assert Plan.from_json(replace(two, prefetch_after=right).to_json()).prefetch_after == right
    assert replace(two, prefetch_after=(1, 1)).prefetches == {0: 1}


def test_puts_slow_down_ops():
    link = Link("disk", 10.0, 20.0, min_bytes=1, put_s=0.25, put_s_per_byte=0.01, fetch_s=0.125, prefetch_s_each=0.125)
    simulated = Simulator(Problem(chain(), link)).run([True] * 4, offload=[0], limit_bytes=10**9)
    # Put at 1 s, which takes 0.35 s; written at 2.35 s, when op 2 starts; read in 0.125 s + 0.5 s.
    assert simulated.written_before == {0: 2}
    assert simulated.store_wait_s == pytest.approx(0.35 + 0.625)
