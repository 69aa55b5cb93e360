"""Traces: round trips, fingerprints and validation."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from lowtide._errors import ArgumentError
from lowtide.records import TRACE_VERSION, CopyEffect, Op, Trace, Unpack, Value, Write

from ..planning.traces import changed, gpt_trace, make_trace, traces, unfused_trace


@pytest.fixture
def trace() -> Trace:
    """x → relu_ in place → mm, saved by both."""
    return make_trace(
        ops=(
            Op("aten.mul.Tensor", "a", 0.5, (0,), (1,), other_bytes=7, replay_s=0.375),
            Op("aten.relu_.default", "b.0", 0.25, (1,), (2,), writes=(Write(1, 2, exclusive=True),)),
            Op("aten.mm.default", "b.1", 2.0, (2, 0), (3,), pinned="a collective"),
        ),
        values=(
            Value(80, None, 0, 3),
            Value(16, 0, 1, 0),
            Value(16, 1, 1, 2),
            Value(32, 2, 2, 4),
        ),
        saved=(0, 2),
        unpacks=(Unpack(2, 5, 11, 0.125), Unpack(0, 5, 12, 0.0)),
        step_s=9.0,
        peak_bytes=1234,
        device="cuda:0",
        note="a note",
        replay_overhead_s=0.5,
        copies=(CopyEffect(0, -4, 0), CopyEffect(1, 8, 3)),
        copying_s=0.0625,
    )


def test_a_small_trace_is_valid_and_survives_json(trace):
    trace.check()
    assert Trace.from_json(trace.to_json()) == trace


@settings(max_examples=100, deadline=None)
@given(traces())
def test_any_valid_trace_survives_json(made):
    made.check()
    released = Trace.from_json(made.to_json())
    assert released == made
    assert released.fingerprint == made.fingerprint


def test_a_file_is_written_and_read(trace, tmp_path):
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace
    with pytest.raises(ArgumentError, match="cannot read a trace"):
        Trace.load(tmp_path / "another.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ArgumentError, match="cannot read a trace"):
        Trace.load(tmp_path / "binary")


def test_the_json_of_a_deep_model_is_compact():
    trace = unfused_trace(12)
    assert len(trace.to_json()) < 200 * len(trace.ops)


def test_the_fingerprint_is_of_the_structure_only(trace):
    slower = changed(trace, ops=tuple(replace(op, time_s=2 * op.time_s, other_bytes=99) for op in trace.ops))
    later = changed(
        slower, unpacks=tuple(replace(unpack, other_bytes=1, time_s=1.0) for unpack in slower.unpacks), note=""
    )
    assert later.fingerprint == trace.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda t: changed(t, ops=(replace(t.ops[0], name="aten.div.Tensor"), *t.ops[1:])),
        lambda t: changed(t, ops=(replace(t.ops[0], module="c"), *t.ops[1:])),
        lambda t: changed(t, ops=(*t.ops[:2], replace(t.ops[2], inputs=(2,)))),
        lambda t: replace(t, values=(*t.values[:3], replace(t.values[3], nbytes=33))),
        lambda t: replace(t, saved=(2, 0)),
        lambda t: changed(t, unpacks=t.unpacks[:1]),
    ],
)
def test_the_fingerprint_sees_every_part_of_the_structure(trace, change):
    assert change(trace).fingerprint != trace.fingerprint


def broken(trace, **changes):
    with pytest.raises(ArgumentError) as caught:
        changed(trace, **changes).check()
    return str(caught.value)


def test_contradictions_are_named(trace):
    ops, values = trace.ops, trace.values
    assert f"version {TRACE_VERSION + 1}" in broken(trace, version=TRACE_VERSION + 1)
    assert "refers to value 9 of 4" in broken(trace, ops=(*ops[:2], replace(ops[2], inputs=(9,))))
    assert "made later, at event 2" in broken(trace, ops=(replace(ops[0], inputs=(3,)), *ops[1:]))
    assert "names a value twice" in broken(trace, ops=(*ops[:2], replace(ops[2], inputs=(2, 2))))
    assert "made at event 0" in broken(trace, ops=(*ops[:2], replace(ops[2], outputs=(3, 1))))
    assert "not an output of the op at event 1" in broken(trace, values=(*values[:3], replace(values[3], made_at=1)))
    assert "-1 bytes" in broken(trace, values=(*values[:3], replace(values[3], nbytes=-1)))
    assert "held until event 9 of 5" in broken(trace, values=(*values[:3], replace(values[3], held_until=9)))
    assert "different storages" in broken(trace, values=(values[0], replace(values[1], storage=8), *values[2:]))
    assert "not an input" in broken(trace, ops=(ops[0], replace(ops[1], writes=(Write(3, 2, True),)), ops[2]))
    assert "takes nan s" in broken(trace, ops=(replace(ops[0], time_s=float("nan")), *ops[1:]))
    assert "a replay of op 0 (aten.mul.Tensor) takes -1.0 s" in broken(
        trace, ops=(replace(ops[0], replay_s=-1.0), *ops[1:])
    )
    unpacks = trace.unpacks
    assert "unpack 0 allocates -3 bytes" in broken(trace, unpacks=(replace(unpacks[0], rise_bytes=-3), *unpacks[1:]))
    assert "the step takes" in broken(trace, step_s=float("inf"))
    assert "saved twice" in broken(trace, saved=(2, 0, 2))
    assert "gradient copies change unpack 2 of 2" in broken(trace, copies=(CopyEffect(2, 1, 0),))
    assert "without gradient copies, unpack 0 allocates a negative" in broken(trace, copies=(CopyEffect(0, 1, -9),))
    assert "copying gradients takes -1.0 s" in broken(trace, copying_s=-1.0)
    assert "was not saved" in broken(trace, unpacks=(Unpack(1, 0),))
    assert "do not follow each other" in broken(trace, unpacks=(Unpack(2, 0), Unpack(0, 1), Unpack(2, 0)))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format":"lowtide plan","version":1}', "\x00", "[" * 100_000]
)
def test_invalid_traces_are_refused(text):
    with pytest.raises(ArgumentError, match="not a lowtide trace"):
        Trace.from_json(text)


def test_another_version_is_refused_with_a_remedy(trace):
    document = json.loads(trace.to_json())
    document["version"] = 99
    with pytest.raises(ArgumentError, match=rf"version 99.*reads version {TRACE_VERSION}: create it again"):
        Trace.from_json(json.dumps(document))


def test_every_damage_to_a_field_is_an_argument_error(trace):
    good = json.loads(trace.to_json())
    for field in good:
        for wrong in (None, "x", -1, 1.5, [], {}, [[1]], [None], True):
            if wrong == good[field] or (field == "note" and wrong == "x") or (field == "device" and wrong == "x"):
                continue
            document = {**good, field: wrong}
            if field in ("step_s", "replay_overhead_s", "copying_s") and wrong == 1.5:
                continue  # another time, and a valid one
            if field == "peak_bytes" and wrong == -1:
                continue  # not checked
            if field == "copies" and wrong == []:
                continue  # no gradient is copied
            with pytest.raises(ArgumentError):
                Trace.from_json(json.dumps(document))
        document = {name: value for name, value in good.items() if name != field}
        with pytest.raises(ArgumentError):
            Trace.from_json(json.dumps(document))


def test_a_cut_off_file_is_refused():
    text = gpt_trace(2).to_json()
    for length in range(0, len(text), 997):
        with pytest.raises(ArgumentError):
            Trace.from_json(text[:length])
