"""Traces with several forward and backward passes: round trips, fingerprints, validation; plans for them."""

from dataclasses import replace

import pytest

from lowtide._errors import ArgumentError
from lowtide.records import TRACE_VERSION, CopyEffect, Op, Plan, Trace, Unpack, Value

from ..planning.traces import make_trace


@pytest.fixture
def timeline() -> Trace:
    """a and b from a source, backward through b, then c from a, and backward through c and a."""
    return Trace(
        version=TRACE_VERSION,
        events=(
            Op("aten.mul.Tensor", "m", 1.0, (0,), (1,), workspace_bytes=5, reads_until=5),
            Op("aten.exp.default", "m", 1.0, (1,), (2,)),
            Unpack(2, 0, backward=0, save=1),
            Op("aten.neg.default", "m", 1.0, (2,), (3,), backward=0),
            Op("aten.exp.default", "m", 1.0, (1,), (4,)),
            Unpack(4, 1, backward=1, save=3),
            Unpack(1, 2, backward=1, save=0),
        ),
        values=(
            Value(80, None, 0, 7, handles=((-1, 7),)),
            Value(16, 0, 1, 1, handles=((0, 6), (3, 7))),
            Value(16, 1, 2, 1, handles=((1, 3),)),
            Value(8, 3, 3, 3),
            Value(16, 4, 4, 4, handles=((4, 5),)),
        ),
        saved=(0, 1, 2, 4),
        step_s=9.0,
        peak_bytes=100,
        copies=(CopyEffect(1, 8, 3),),
    )


def test_a_timeline_is_valid_and_survives_json(timeline):
    timeline.check()
    assert Trace.from_json(timeline.to_json()) == timeline
    assert timeline.op_events == (0, 1, 3, 4)
    assert timeline.unpack_events == (2, 5, 6)
    assert not timeline.is_single_pass


def test_without_copies_the_order_of_events_stays(timeline):
    events = timeline.without_copies().events
    assert [type(event) for event in events] == [type(event) for event in timeline.events]
    assert events[5].other_bytes == 8
    assert events[2] == timeline.events[2]


def with_event(trace: Trace, index: int, **fields) -> Trace:
    events = list(trace.events)
    events[index] = replace(events[index], **fields)
    return replace(trace, events=tuple(events))


def with_value(trace: Trace, index: int, **fields) -> Trace:
    values = list(trace.values)
    values[index] = replace(values[index], **fields)
    return replace(trace, values=tuple(values))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: with_event(t, 3, backward=None),
        lambda t: with_event(t, 6, backward=2),
        lambda t: with_event(t, 6, save=2),
        lambda t: with_value(t, 1, handles=((0, 6),)),
        lambda t: replace(t, events=(t.events[0], t.events[1], t.events[3], t.events[2], *t.events[4:])),
    ],
)
def test_the_fingerprint_sees_the_structure(timeline, change):
    assert change(timeline).fingerprint != timeline.fingerprint


def test_the_fingerprint_does_not_see_when_handles_are_freed(timeline):
    assert with_value(timeline, 2, handles=((1, 5),)).fingerprint == timeline.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: with_event(t, 2, backward=2), "numbers 2, 0, 1"),
        (lambda t: with_event(t, 2, backward=-1), "numbers -1, 0, 1"),
        (lambda t: with_value(t, 2, handles=((1, 1),)), "unpacked at event 2, and no handle"),
        (lambda t: with_value(t, 2, handles=()), "unpacked at event 2, and no handle"),
        (lambda t: with_value(t, 2, handles=((0, 3),)), "made at event 1, is saved at 0"),
        (lambda t: with_value(t, 2, handles=((1, 8),)), "saved at 1 and freed at 8"),
        (lambda t: with_value(t, 3, handles=((3, 4),)), "value 3 has a handle and was not saved"),
        (lambda t: with_event(t, 5, save=0), "saved tensor 0 is of value 4 and of value 1"),
        (lambda t: with_event(t, 5, save=-1), "unpack at event 5 is of saved tensor -1"),
        (lambda t: with_event(t, 0, reads_until=0), "overwritten at event 0"),
        (lambda t: with_event(t, 0, workspace_bytes=-5), "workspace of -5 bytes"),
        (lambda t: with_value(t, 1, made_at=2), "event 2, which is not an op"),
        (lambda t: with_event(t, 3, inputs=(4,)), "made later, at event 4"),
    ],
)
def test_contradictions_are_named(timeline, change, message):
    with pytest.raises(ArgumentError, match=message):
        change(timeline).check()


SINGLE = make_trace(
    ops=(Op("a", "m", 1.0, (), (0,)), Op("b", "m", 1.0, (0,), (1,))),
    values=(Value(4, 0, 0, 1, handles=((0, 3), (1, 2))), Value(4, 1, 1, 1)),
    saved=(0,),
    unpacks=(Unpack(0, 0, save=0), Unpack(0, 1, save=1)),
)


def test_one_forward_and_one_backward_pass_is_a_single_pass():
    SINGLE.check()
    assert SINGLE.is_single_pass
    assert with_value(SINGLE, 0, handles=()).is_single_pass


@pytest.mark.parametrize(
    "change",
    [
        lambda t: with_event(t, 3, backward=1),
        lambda t: with_value(t, 0, handles=((0, 4), (1, 2))),
        lambda t: with_value(t, 1, handles=((1, 3),)),
        lambda t: with_event(t, 0, reads_until=3),
        lambda t: replace(t, events=(t.events[0], t.events[2], t.events[1], t.events[3])),
    ],
)
def test_anything_else_is_a_timeline(change):
    assert not change(SINGLE).is_single_pass


def plan(**fields) -> Plan:
    return Plan(
        keep=(True, False, False, True), released=(), budget_bytes=9, predicted_peak_bytes=8, plain_peak_bytes=10,
        peak_at="nowhere", predicted_step_s=2.0, plain_step_s=1.0, bound_step_s=1.0, solver="timeline", solve_s=0.0,
        replayed_ops=2, pinned=(), modules=(), fingerprint="f", op_names=("a", "b", "c", "d"), **fields,
    )  # fmt: skip


def test_a_plan_for_a_timeline_survives_json():
    made = plan(held=(1,), drops=((3, 0, 1, 0), (4, 1, 2, 1)), tails=(2,))
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    "fields",
    [
        {"held": (0,)},
        {"tails": (4,)},
        {"drops": ((0, 0, 3, 0),)},
        {"drops": ((0, -1, 1, 0),)},
        {"drops": ((0, 0, 1),)},
        {"drops": ((0, 0.5, 1, 0),)},
    ],
)
def test_a_damaged_plan_is_refused(fields):
    with pytest.raises(ArgumentError, match="not a valid plan"):
        Plan.from_json(plan(**fields).to_json())
