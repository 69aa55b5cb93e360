"""Blocks are found from the op stream alone."""

from hypothesis import given, settings

from lowtide.planning import Problem
from lowtide.planning.repetition import find_repeated_blocks, tie_blocks
from lowtide.planning.segments import block_cuts, crossing_bytes, keep_at_cuts, layers_of

from .traces import gpt_trace, traces, unfused_trace


def test_the_layers_of_a_transformer_are_one_stretch():
    for layers in (4, 12):
        problem = Problem(gpt_trace(layers))
        (repeat,) = find_repeated_blocks(problem)
        in_layers = [j for j, name in enumerate(layers_of(problem)) if name]
        assert repeat.period * layers == len(in_layers)
        assert repeat.blocks in (layers - 1, layers)  # the ends may look different


def test_a_period_of_many_ops_is_found_too():
    problem = Problem(unfused_trace(6))
    repeat = find_repeated_blocks(problem)[0]
    assert repeat.period == 115
    assert repeat.blocks >= 5


def test_two_stacks_in_one_model_are_two_stretches():
    encoder, decoder = gpt_trace(5), unfused_trace(4)
    shift_v, shift_o = len(encoder.values), len(encoder.ops)
    trace = joined(encoder, decoder, shift_v, shift_o)
    trace.check()
    periods = {repeat.period for repeat in find_repeated_blocks(Problem(trace))}
    assert {12, 115} <= periods


def joined(one, two, shift_v, shift_o):
    from dataclasses import replace

    values = [
        replace(v, held_until=len(one.events) + len(two.events) if v.held_until == len(one.events) else v.held_until)
        for v in one.values
    ]
    values += [
        replace(
            v,
            made_at=None if v.made_at is None else v.made_at + shift_o,
            storage=v.storage + shift_v,
            held_until=len(one.events) + len(two.events) if v.held_until == len(two.events) else v.held_until + shift_o,
        )
        for v in two.values
    ]
    ops = list(one.ops)
    ops += [
        replace(op, inputs=tuple(v + shift_v for v in op.inputs), outputs=tuple(v + shift_v for v in op.outputs))
        for op in two.ops
    ]
    unpacks = [replace(a, value=a.value + shift_v) for a in two.unpacks]
    unpacks += [replace(a, node=a.node + 100_000) for a in one.unpacks]
    saved = (*one.saved, *(v + shift_v for v in two.saved))
    return replace(one, ops=tuple(ops), values=tuple(values), saved=saved, unpacks=tuple(unpacks))


def test_tied_ops_do_the_same_in_their_blocks():
    trace = unfused_trace(7)
    problem = Problem(trace)
    ties = tie_blocks(problem, find_repeated_blocks(problem))
    looks: dict[int, tuple] = {}
    for op, tie in zip(trace.ops, ties, strict=True):
        look = (op.name, len(op.inputs), tuple(trace.values[v].nbytes for v in op.outputs))
        assert looks.setdefault(tie, look) == look


def test_cuts_are_where_only_the_residual_stream_crosses():
    trace = gpt_trace(6)
    problem = Problem(trace)
    crossing = crossing_bytes(problem)
    for cut in block_cuts(problem, find_repeated_blocks(problem)):
        assert crossing[cut] == min(crossing[1:-1])


@settings(max_examples=50, deadline=None)
@given(traces())
def test_what_crosses_a_cut_is_kept(trace):
    problem = Problem(trace)
    cut = problem.n_ops // 2
    keep = keep_at_cuts(problem, [cut])
    for v in range(problem.n_values):
        if 0 <= problem.producer[v] <= cut and any(reader > cut for reader in problem.consumers[v]):
            assert keep[problem.producer[v]]


def test_a_stream_without_repetition_has_no_stretch():
    trace = gpt_trace(1)
    assert find_repeated_blocks(Problem(trace)) == []
