"""The timeline against the simulator: the same bytes, told apart."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from lowtide.planning import simulate, solve
from lowtide.records import TRACE_VERSION, Trace
from lowtide.reporting.timeline import BACKWARD, FORWARD, KINDS, REPLAY, follow
from tests.planning.test_offload import links, offloading
from tests.planning.test_simulator import step, traces_with_decisions
from tests.planning.traces import gpt_trace

KIND = {name: number for number, name in enumerate(KINDS)}


def kinds_of(timeline, kind):
    return timeline.kind_bytes[:, KIND[kind]].tolist()


@settings(max_examples=150, deadline=None)
@given(traces_with_decisions())
def test_its_bytes_are_those_of_the_simulator(case):
    trace, keep, released = case
    timeline = follow(trace, keep, released)
    judged = simulate(trace, keep, released)
    live = timeline.live_bytes
    forward = [int(b) for m, b in zip(timeline.moments, live, strict=True) if m.phase == FORWARD]
    by_ask = [[] for _ in trace.unpacks]
    for moment, nbytes in zip(timeline.moments, live, strict=True):
        if moment.unpack is not None:
            by_ask[moment.unpack].append(int(nbytes))
    assert forward == judged.forward_live.tolist()
    assert [max(moments) for moments in by_ask] == judged.unpack_live.tolist()
    assert live.max() == judged.peak_bytes
    assert (timeline.module_bytes.sum(axis=1) + timeline.other_bytes == live).all()
    assert (timeline.kind_bytes >= 0).all()
    assert (timeline.module_bytes >= 0).all()
    assert sum(m.phase == REPLAY for m in timeline.moments) == judged.replayed_ops
    assert sum(m.phase == BACKWARD for m in timeline.moments) == len(trace.unpacks)


@settings(max_examples=100, deadline=None)
@given(offloading(), links)
def test_what_is_read_ahead_is_counted_from_the_beginning_of_its_read(case, link):
    trace, keep, released, written_before, prefetch_after = case
    timeline = follow(trace, keep, released, written_before, link, prefetch_after=prefetch_after)
    judged = simulate(trace, keep, released, written_before, link, prefetch_after=prefetch_after)
    live = timeline.live_bytes
    assert live[: len(trace.ops)].tolist() == judged.forward_live.tolist()
    for k, nbytes in enumerate(judged.unpack_live):
        assert max(live[m] for m, moment in enumerate(timeline.moments) if moment.unpack == k) == nbytes
    assert (timeline.module_bytes.sum(axis=1) + timeline.other_bytes == live).all()
    assert (timeline.kind_bytes >= 0).all()
    busy_s = sum(moment.duration_s for moment in timeline.moments)
    replays_s = sum(m.duration_s for m in timeline.moments if m.phase == REPLAY)
    assert judged.extra_s == pytest.approx(replays_s + judged.store_wait_s)
    if trace.unpacks:
        assert timeline.duration_s == pytest.approx(busy_s + judged.store_wait_s)


@settings(max_examples=50, deadline=None)
@given(traces_with_decisions())
def test_moments_follow_each_other_without_gaps(case):
    timeline = follow(*case)
    now = 0.0
    for moment in timeline.moments:
        assert moment.start_s == now
        now += moment.duration_s
    assert timeline.duration_s == now
    replays_s = sum(m.duration_s for m in timeline.moments if m.phase == REPLAY)
    assert replays_s == pytest.approx(timeline.simulation.extra_s)


def test_its_peak_is_the_plans():
    trace = gpt_trace(3)
    plan = solve(trace, int(0.7 * simulate(trace, [True] * len(trace.ops)).peak_bytes), deadline_s=5)
    timeline = follow(trace, plan.keep, plan.released)
    assert plan.replayed_ops > 0
    assert timeline.live_bytes[timeline.peak] == plan.predicted_peak_bytes
    assert timeline.duration_s == pytest.approx(plan.predicted_step_s)


def test_each_byte_is_of_the_kind_that_holds_it():
    a, b, c = 1, 2, 3
    ops = [((0,), (a,), ()), ((a,), (b,), ()), ((b,), (c,), ())]
    timeline = follow(step(ops, sizes=[8, 4, 3, 2], unpacks=[c, b]), [True, False, False])
    # Forward makes a, b, c; then b and c are made again for the ask of c, and b is still there when it is asked.
    assert [m.phase for m in timeline.moments] == [FORWARD] * 3 + [REPLAY] * 2 + [BACKWARD] * 2
    assert kinds_of(timeline, "kept") == [4, 4, 4, 4, 0, 0, 0]
    assert kinds_of(timeline, "temporary") == [0, 3, 5, 0, 0, 0, 0]
    assert kinds_of(timeline, "recomputed") == [0, 0, 0, 3, 5, 5, 3]
    assert timeline.moments[3].op == 1
    assert timeline.describe(3) == "replay of op1"
    assert timeline.describe(5) == "backward, given what op2 made"


def test_what_the_script_holds_is_not_ours():
    a, b = 1, 2
    ops = [((0,), (a,), ()), ((a,), (b,), ())]
    timeline = follow(step(ops, sizes=[8, 4, 3], unpacks=[a, a], natural={b: None}), [True, True])
    assert kinds_of(timeline, "kept") == [4, 4, 4, 4]
    assert kinds_of(timeline, "other") == [0, 3, 3, 3]


def test_gradients_are_what_backward_takes_and_does_not_give_back():
    trace = step([((0,), (1,), ()), ((1,), (2,), ())], sizes=[8, 4, 3], unpacks=[2, 2, 1, 1])
    trace = replace(
        trace,
        ops=tuple(replace(op, other_bytes=other) for op, other in zip(trace.ops, (10, 12), strict=True)),
        unpacks=tuple(
            replace(unpack, other_bytes=other) for unpack, other in zip(trace.unpacks, (15, 20, 13, 14), strict=True)
        ),
    )
    timeline = follow(trace, [True, True])
    assert kinds_of(timeline, "parameters") == [8] * 6  # the one source
    assert kinds_of(timeline, "other") == [2] * 6  # beside it, never less than ten bytes were alive
    assert kinds_of(timeline, "gradients") == [0, 0, 3, 3, 3, 4]
    assert kinds_of(timeline, "temporary") == [0, 2, 2, 7, 0, 0]


def test_a_step_without_ops_has_no_moments():
    timeline = follow(Trace(TRACE_VERSION, (), (), (), (), 1.0, 0), [])
    assert timeline.moments == ()
    assert timeline.duration_s == 0.0
