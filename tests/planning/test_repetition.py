"""Repeated blocks, ties and cuts, from the op list alone."""

from dataclasses import replace

from hypothesis import given, settings

from lowtide.planning import Problem
from lowtide.planning.repetition import find_repeated_blocks, tie_blocks
from lowtide.planning.segments import block_cuts, crossing_bytes, keep_at_cuts, layers_of
from lowtide.records import Trace

from .traces import cell_trace, changed, gpt_trace, traces, unfused_trace


def test_the_layers_of_a_transformer_are_repeated_blocks():
    for layers in (4, 12):
        problem = Problem(gpt_trace(layers))
        (repeat,) = find_repeated_blocks(problem)
        in_layers = [j for j, name in enumerate(layers_of(problem)) if name]
        assert repeat.period * layers == len(in_layers)
        assert repeat.blocks in (layers - 1, layers)  # the inputs of the first block have other makers


def test_blocks_of_many_ops_are_found():
    problem = Problem(unfused_trace(6))
    repeat = find_repeated_blocks(problem)[0]
    assert repeat.period == 115
    assert repeat.blocks >= 5


def test_two_stacks_in_one_model_are_found():
    trace = concatenated(gpt_trace(5), unfused_trace(4))
    trace.check()
    periods = {repeat.period for repeat in find_repeated_blocks(Problem(trace))}
    assert {12, 115} <= periods


def concatenated(first: Trace, second: Trace) -> Trace:
    """Return a step with the forward passes of both, then the backward passes in reverse order."""
    n_events, n_ops, n_values = len(first.events) + len(second.events), len(first.ops), len(first.values)

    def held_until(trace: Trace, value: int, shift: int) -> int:
        until = trace.values[value].held_until
        return n_events if until == len(trace.events) else until + shift

    values = [replace(value, held_until=held_until(first, v, 0)) for v, value in enumerate(first.values)]
    values += [
        replace(
            value,
            made_at=None if value.made_at is None else value.made_at + n_ops,
            storage=value.storage + n_values,
            held_until=held_until(second, v, n_ops),
        )
        for v, value in enumerate(second.values)
    ]
    ops = [
        replace(op, inputs=tuple(v + n_values for v in op.inputs), outputs=tuple(v + n_values for v in op.outputs))
        for op in second.ops
    ]
    unpacks = [replace(unpack, value=unpack.value + n_values) for unpack in second.unpacks]
    unpacks += [replace(unpack, node=unpack.node + 100_000) for unpack in first.unpacks]
    saved = (*first.saved, *(v + n_values for v in second.saved))
    return changed(first, ops=(*first.ops, *ops), unpacks=tuple(unpacks), values=tuple(values), saved=saved)


def test_tied_ops_have_equal_names_and_sizes():
    trace = unfused_trace(7)
    problem = Problem(trace)
    ties = tie_blocks(problem, find_repeated_blocks(problem))
    shapes: dict[int, tuple] = {}
    for op, tie in zip(trace.ops, ties, strict=True):
        shape = (op.name, len(op.inputs), tuple(trace.values[v].nbytes for v in op.outputs))
        assert shapes.setdefault(tie, shape) == shape


def test_several_short_blocks_are_tied_as_one():
    problem = Problem(cell_trace(60))
    (repeat,) = find_repeated_blocks(problem)
    ties = tie_blocks(problem, [repeat])
    end = repeat.start + repeat.blocks * repeat.period
    assert repeat.period < 36
    assert ties[end - 1] != ties[end - 1 - repeat.period]
    middle = end - 80 * 3  # in a group of several blocks
    assert ties[middle] != ties[middle - repeat.period]
    assert len(set(ties)) < problem.n_ops / 2


def test_only_the_residual_stream_crosses_block_cuts():
    trace = gpt_trace(6)
    problem = Problem(trace)
    crossing = crossing_bytes(problem)
    for cut in block_cuts(problem, find_repeated_blocks(problem)):
        assert crossing[cut] == min(crossing[1:-1])


@settings(max_examples=50, deadline=None)
@given(traces())
def test_values_that_cross_a_cut_are_kept(trace):
    problem = Problem(trace)
    cut = problem.n_ops // 2
    keep = keep_at_cuts(problem, [cut])
    for v in range(problem.n_values):
        if 0 <= problem.producer[v] <= cut and any(reader > cut for reader in problem.consumers[v]):
            assert keep[problem.producer[v]]


def test_one_layer_is_not_a_repeated_block():
    assert find_repeated_blocks(Problem(gpt_trace(1))) == []
