"""The simulator agrees with a second, simpler implementation of the same rules, and with examples."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from lowtide._errors import ArgumentError
from lowtide.planning import PeakAt, Problem, Simulator, simulate, solve
from lowtide.records import Op, Unpack, Value, Write

from .naive import naive_simulation
from .traces import changed, make_trace, traces


@st.composite
def traces_with_decisions(draw):
    trace = draw(traces())
    keep = [op.pinned is not None or draw(st.booleans()) for op in trace.ops]
    recomputed = [j for j, kept in enumerate(keep) if not kept]
    released = draw(st.sets(st.sampled_from(recomputed))) if recomputed else set()
    return trace, keep, released


@settings(max_examples=300, deadline=None)
@given(traces_with_decisions())
def test_it_agrees_with_the_naive_simulator(case):
    trace, keep, released = case
    forward, unpacks, seconds, replays = naive_simulation(trace, keep, released)
    simulated = simulate(trace, keep, released)
    assert simulated.forward_live.tolist() == forward
    assert simulated.unpack_live.tolist() == unpacks
    assert simulated.extra_s == pytest.approx(seconds)
    assert simulated.replayed_ops == replays
    assert simulated.peak_bytes == max(forward + unpacks)


def step(ops, sizes, unpacks, natural=None):
    """A trace from (inputs, outputs, writes) for each op and bytes for each value. Value 0 is a source.

    `natural` gives, for values that others hold in backward, the last unpack at which they do; None: all unpacks.
    """
    producer = {v: j for j, (_, outputs, _) in enumerate(ops) for v in outputs}
    held_until = {v: j for j, (inputs, outputs, _) in enumerate(ops) for v in (*inputs, *outputs)}
    for v, last in (natural or {}).items():
        held_until[v] = len(ops) + (len(unpacks) if last is None else last)
    storage = {w.new: w.old for _, _, writes in ops for w in writes}
    values = [Value(size, producer.get(v), storage.get(v, v), held_until[v]) for v, size in enumerate(sizes)]
    return make_trace(
        ops=tuple(Op(f"op{j}", "", 1.0, i, o, writes=w) for j, (i, o, w) in enumerate(ops)),
        values=tuple(values),
        saved=tuple(sorted(set(unpacks))),
        unpacks=tuple(Unpack(v, node) for node, v in enumerate(unpacks)),
        step_s=10.0,
        peak_bytes=0,
    )


def test_a_replay_overwrites_its_input_unless_the_input_has_another_user():
    a, b, c, d = 1, 2, 3, 4
    trace = step(
        [((0,), (a,), ()), ((a,), (b,), (Write(a, b, exclusive=True),)), ((b,), (c,), ()), ((b,), (d,), ())],
        sizes=[8, 4, 4, 1, 1],
        unpacks=[d, c],
    )
    keep = [False] * 4
    once = simulate(trace, keep)
    assert once.unpack_live.tolist() == [5, 5]  # b in the memory of a, and the unpacked value
    assert once.replays == (1, 1, 1, 1)
    twice = simulate(trace, keep, released={1})
    assert twice.unpack_live.tolist() == [9, 9]  # a is used by the second replay, so b is a copy
    assert twice.replays == (1, 2, 1, 1)
    both = simulate(trace, keep, released={0, 1})
    assert both.unpack_live.tolist() == [5, 5]  # a is replayed for each replay of b, so b may overwrite it
    assert both.replays == (2, 2, 1, 1)
    # If a is kept, b overwrote it in forward. The input of b no longer exists, so b is kept too.
    kept = simulate(trace, [True, False, False, False], released={1})
    assert kept.replays == (0, 0, 1, 1)
    assert kept.unpack_live.tolist() == [5, 5]


def test_a_released_value_is_freed_after_each_use():
    a, b, c, d, e = 1, 2, 3, 4, 5
    ops = [((0,), (a,), ()), ((a,), (b,), ()), ((a,), (c,), ()), ((a,), (d,), ()), ((0,), (e,), ())]
    trace = step(ops, sizes=[8, 4, 1, 1, 1, 1], unpacks=[d, e, c, b])
    keep = [False, False, False, False, True]
    assert simulate(trace, keep).unpack_live.tolist() == [4 + 1 + 1, 4 + 1, 4 + 1, 4 + 1]
    assert simulate(trace, keep, released={0}).unpack_live.tolist() == [4 + 1 + 1, 1, 4 + 1, 4 + 1]


def test_a_value_that_others_hold_is_live_until_they_free_it():
    a, b, c = 1, 2, 3
    ops = [((0,), (a,), ()), ((a,), (b,), ()), ((b,), (c,), ())]
    freed = step(ops, sizes=[8, 4, 3, 2], unpacks=[c, c], natural={a: 0})
    keep = [True, False, False]
    assert simulate(freed, keep).unpack_live.tolist() == [4 + 3 + 2, 2]
    never = step(ops, sizes=[8, 4, 3, 2], unpacks=[c, c], natural={a: None})
    assert simulate(never, keep).unpack_live.tolist() == [4 + 3 + 2, 4 + 2]
    # A replay makes a second copy, because a handle cannot reach the memory that others hold.
    assert simulate(never, [False] * 3).unpack_live.tolist() == [4 + 4 + 3, 4 + 2]


def test_a_kept_value_is_copied_when_an_op_overwrites_it():
    a, b, c = 1, 2, 3
    trace = step(
        [((0,), (a,), ()), ((a,), (c,), ()), ((a,), (b,), (Write(a, b, exclusive=False),))],
        sizes=[8, 4, 4, 1],
        unpacks=[c],
    )
    assert simulate(trace, [True, True, True]).forward_live.tolist() == [4, 5, 5]
    assert simulate(trace, [True, False, True]).forward_live.tolist() == [4, 5, 8]


def test_invalid_decisions_are_errors():
    trace = step([((0,), (1,), ()), ((1,), (2,), ())], sizes=[8, 4, 4], unpacks=[2])
    with pytest.raises(ArgumentError, match="1 decisions for 2 ops"):
        simulate(trace, [True])
    with pytest.raises(ArgumentError, match="op 0 is released, but not recomputed"):
        simulate(trace, [True, False], released={0})
    pinned = changed(trace, ops=(replace(trace.ops[0], pinned="a collective"), trace.ops[1]))
    with pytest.raises(ArgumentError, match="cannot be recomputed: a collective"):
        simulate(pinned, [False, False])


def test_holders_at_the_peak_are_listed_largest_first():
    a, b, c = 1, 2, 3
    trace = step([((0,), (a,), ()), ((a,), (b,), ()), ((b,), (c,), ())], sizes=[8, 4, 6, 2], unpacks=[c])
    simulator = Simulator(Problem(trace))
    keep = [True, False, False]
    assert simulator.holders(keep, (), PeakAt("forward", 1)) == [b, a]
    assert simulator.holders(keep, (), PeakAt("unpack", 0)) == [b, a]
    assert simulator.run(keep).unpack_live.tolist() == [10]


def test_a_step_without_ops_has_no_peak():
    empty = make_trace()
    assert simulate(empty, []).peak_bytes == 0
    assert solve(empty, 1).predicted_step_s == 1.0


def test_the_workspace_of_an_op_is_live_during_its_replay_only():
    # Values 1 to 3 have 10 bytes each. Op 0 is replayed for the unpack of value 1, when 2 and 3 are held.
    trace = step([((0,), (1,), ()), ((1,), (2,), ()), ((2,), (3,), ())], [1, 10, 10, 10], unpacks=[1, 2, 3])
    with_workspace = changed(trace, ops=(replace(trace.ops[0], workspace_bytes=100), *trace.ops[1:]))
    keep = [False, True, True]
    assert simulate(trace, keep).unpack_live.tolist() == [30, 20, 10]
    assert simulate(with_workspace, keep).unpack_live.tolist() == [130, 20, 10]
    assert simulate(with_workspace, [True] * 3).unpack_live.tolist() == [30, 20, 10]
    assert simulate(with_workspace, keep).forward_live.tolist() == simulate(trace, keep).forward_live.tolist()
