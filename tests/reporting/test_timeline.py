"""The timeline agrees with the simulator, and splits live bytes by category and module."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from lowtide.planning import simulate, solve
from lowtide.reporting.timeline import BACKWARD, CATEGORIES, FORWARD, REPLAY, build_timeline
from tests.planning.test_offload import links, offload_decisions
from tests.planning.test_simulator import step, traces_with_decisions
from tests.planning.traces import gpt_trace, make_trace

COLUMN = {name: number for number, name in enumerate(CATEGORIES)}


def bytes_of(timeline, category):
    return timeline.category_bytes[:, COLUMN[category]].tolist()


@settings(max_examples=150, deadline=None)
@given(traces_with_decisions())
def test_live_bytes_agree_with_the_simulator(case):
    trace, keep, released = case
    timeline = build_timeline(trace, keep, released)
    simulation = simulate(trace, keep, released)
    live = timeline.live_bytes
    forward = [int(b) for m, b in zip(timeline.intervals, live, strict=True) if m.phase == FORWARD]
    by_unpack = [[] for _ in trace.unpacks]
    for interval, nbytes in zip(timeline.intervals, live, strict=True):
        if interval.unpack is not None:
            by_unpack[interval.unpack].append(int(nbytes))
    assert forward == simulation.forward_live.tolist()
    assert [max(intervals) for intervals in by_unpack] == simulation.unpack_live.tolist()
    assert live.max() == simulation.peak_bytes
    assert (timeline.module_bytes.sum(axis=1) + timeline.other_bytes == live).all()
    assert (timeline.category_bytes >= 0).all()
    assert (timeline.module_bytes >= 0).all()
    assert sum(m.phase == REPLAY for m in timeline.intervals) == simulation.replayed_ops
    assert sum(m.phase == BACKWARD for m in timeline.intervals) == len(trace.unpacks)


@settings(max_examples=100, deadline=None)
@given(offload_decisions(), links)
def test_prefetched_values_are_live_from_the_start_of_the_prefetch(case, link):
    trace, keep, released, written_before, prefetch_after = case
    timeline = build_timeline(trace, keep, released, written_before, link, prefetch_after=prefetch_after)
    simulation = simulate(trace, keep, released, written_before, link, prefetch_after=prefetch_after)
    live = timeline.live_bytes
    assert live[: len(trace.ops)].tolist() == simulation.forward_live.tolist()
    for k, nbytes in enumerate(simulation.unpack_live):
        assert max(live[m] for m, interval in enumerate(timeline.intervals) if interval.unpack == k) == nbytes
    assert (timeline.module_bytes.sum(axis=1) + timeline.other_bytes == live).all()
    assert (timeline.category_bytes >= 0).all()
    busy_s = sum(interval.duration_s for interval in timeline.intervals)
    replays_s = sum(m.duration_s for m in timeline.intervals if m.phase == REPLAY)
    assert simulation.extra_s == pytest.approx(replays_s + simulation.store_wait_s)
    if trace.unpacks:
        assert timeline.duration_s == pytest.approx(busy_s + simulation.store_wait_s)


@settings(max_examples=50, deadline=None)
@given(traces_with_decisions())
def test_intervals_are_consecutive(case):
    timeline = build_timeline(*case)
    now = 0.0
    for interval in timeline.intervals:
        assert interval.start_s == now
        now += interval.duration_s
    assert timeline.duration_s == now
    replays_s = sum(m.duration_s for m in timeline.intervals if m.phase == REPLAY)
    assert replays_s == pytest.approx(timeline.simulation.extra_s)


def test_the_peak_agrees_with_the_plan():
    trace = gpt_trace(3)
    plan = solve(trace, int(0.7 * simulate(trace, [True] * len(trace.ops)).peak_bytes), deadline_s=5)
    timeline = build_timeline(trace, plan.keep, plan.released)
    assert plan.replayed_ops > 0
    assert timeline.live_bytes[timeline.peak] == plan.predicted_peak_bytes
    assert timeline.duration_s == pytest.approx(plan.predicted_step_s)


def test_values_are_kept_temporary_or_recomputed():
    a, b, c = 1, 2, 3
    ops = [((0,), (a,), ()), ((a,), (b,), ()), ((b,), (c,), ())]
    timeline = build_timeline(step(ops, sizes=[8, 4, 3, 2], unpacks=[c, b]), [True, False, False])
    # Forward produces a, b, c. The unpack of c replays b and c; b is still live when it is unpacked.
    assert [m.phase for m in timeline.intervals] == [FORWARD] * 3 + [REPLAY] * 2 + [BACKWARD] * 2
    assert bytes_of(timeline, "kept") == [4, 4, 4, 4, 0, 0, 0]
    assert bytes_of(timeline, "temporary") == [0, 3, 5, 0, 0, 0, 0]
    assert bytes_of(timeline, "recomputed") == [0, 0, 0, 3, 5, 5, 3]
    assert timeline.intervals[3].op == 1
    assert timeline.describe(3) == "replay of op1"
    assert timeline.describe(5) == "backward, after unpacking the output of op2"


def test_values_held_by_the_script_count_as_other():
    a, b = 1, 2
    ops = [((0,), (a,), ()), ((a,), (b,), ())]
    timeline = build_timeline(step(ops, sizes=[8, 4, 3], unpacks=[a, a], natural={b: None}), [True, True])
    assert bytes_of(timeline, "kept") == [4, 4, 4, 4]
    assert bytes_of(timeline, "other") == [0, 3, 3, 3]


def test_memory_that_backward_allocates_and_does_not_free_counts_as_gradients():
    trace = step([((0,), (1,), ()), ((1,), (2,), ())], sizes=[8, 4, 3], unpacks=[2, 2, 1, 1])
    other_bytes = (10, 12, 15, 20, 13, 14)
    events = (replace(event, other_bytes=other) for event, other in zip(trace.events, other_bytes, strict=True))
    trace = replace(trace, events=tuple(events))
    timeline = build_timeline(trace, [True, True])
    assert bytes_of(timeline, "parameters") == [8] * 6  # the one source
    assert bytes_of(timeline, "other") == [2] * 6  # at least 10 bytes are live throughout, 8 of them are the source
    assert bytes_of(timeline, "gradients") == [0, 0, 3, 3, 3, 4]
    assert bytes_of(timeline, "temporary") == [0, 2, 2, 7, 0, 0]


def test_a_step_without_ops_has_no_intervals():
    timeline = build_timeline(make_trace(), [])
    assert timeline.intervals == ()
    assert timeline.duration_s == 0.0
