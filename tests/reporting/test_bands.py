"""Stacks to draw: nothing is lost on the way from moments to bands."""

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.reporting.bands import NO_MODULE, OUTSIDE, REST, merge_modules, stack_by_kind, stack_by_module
from lowtide.reporting.palette import COLOURS, colours_by_kind, colours_by_module
from lowtide.reporting.ticks import byte_unit, ratio_ticks, round_ticks, time_unit
from lowtide.reporting.timeline import follow
from tests.planning.test_simulator import traces_with_decisions
from tests.planning.traces import gpt_trace, unet_trace, unfused_trace


@settings(max_examples=60, deadline=None)
@given(traces_with_decisions(), st.integers(1, 12))
def test_columns_show_the_fullest_moments_and_so_the_peak(case, columns):
    timeline = follow(*case)
    for stack in (stack_by_kind(timeline, columns), stack_by_module(timeline, columns)):
        live = timeline.live_bytes[list(stack.shown)]
        assert (stack.top_bytes == live).all()
        assert live.max() == timeline.live_bytes.max()
        assert len(stack.edges_s) == len(stack.shown) + 1
        assert list(stack.edges_s) == sorted(stack.edges_s)
        for start, end, moment in zip(stack.edges_s, stack.edges_s[1:], stack.shown, strict=False):
            at = timeline.moments[moment]
            assert at.start_s <= end + 1e-9
            assert at.start_s + at.duration_s >= start - 1e-9


@pytest.mark.parametrize("trace", [gpt_trace(3), unfused_trace(2), unet_trace()], ids=["gpt", "unfused", "unet"])
def test_modules_become_few_bands(trace):
    stack = stack_by_module(follow(trace, [op.pinned is not None for op in trace.ops]))
    names = [band.name for band in stack.bands]
    assert names[0] == NO_MODULE
    assert 4 <= len(names) <= 14
    assert len(set(names)) == len(names)


def test_the_largest_modules_are_split_furthest():
    weights = {"embed": 10, "h.*.attn.q": 400, "h.*.attn.k": 400, "h.*.mlp.up": 30, "h.*.mlp.down": 30, "": 20}
    merged = dict(merge_modules(weights))
    assert merged == {
        "embed": ["embed"],
        "h.*.attn.q": ["h.*.attn.q"],
        "h.*.attn.k": ["h.*.attn.k"],
        "h.*.mlp": ["h.*.mlp.up", "h.*.mlp.down"],
        OUTSIDE: [""],
    }


@given(
    st.dictionaries(st.lists(st.sampled_from("abc*"), max_size=4).map(".".join), st.integers(0, 99), min_size=1),
    st.integers(1, 6),
)
def test_every_module_is_in_one_band(weights, most):
    merged = merge_modules(weights, most)
    members = [name for _, names in merged for name in names]
    assert sorted(members) == sorted(weights)
    assert len(merged) <= most + 1


def test_modules_called_as_ours_are_not_mixed_up():
    weights = {REST: 50, OUTSIDE: 30, "x": 0, "y": 0, "": 20}
    assert sorted(name for _, names in merge_modules(weights) for name in names) == sorted(weights)


def test_bands_have_colours_of_their_own():
    timeline = follow(gpt_trace(3), [True] * len(gpt_trace(3).ops))
    for stack, colours in ((stack_by_kind(timeline), colours_by_kind), (stack_by_module(timeline), colours_by_module)):
        found = colours(stack)
        assert len(set(found)) == len(stack.bands)
        assert set(found) <= set(COLOURS)


def test_ticks_are_round_and_few():
    assert round_ticks(10, 5) == [0, 2, 4, 6, 8, 10]
    assert round_ticks(0) == [0]
    for high in (0.003, 1.7, 42, 999, 12345):
        assert 3 <= len(round_ticks(high)) <= 12
    assert ratio_ticks(3) == [1, 1.25, 1.5, 2, 3]
    assert ratio_ticks(1) == [1]
    assert byte_unit(3 * 2**20) == ("MiB", 2**20)
    assert byte_unit(1) == ("B", 1)
    assert [time_unit(s)[0] for s in (2, 0.5, 1e-4, 0)] == ["s", "ms", "µs", "µs"]
