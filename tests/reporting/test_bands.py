"""Data of stacked charts: merging intervals into columns and modules into bands loses no bytes."""

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.reporting.bands import NO_MODULE, OUTSIDE, REST, merge_modules, stack_by_category, stack_by_module
from lowtide.reporting.palette import COLOURS, colours_by_category, colours_by_module
from lowtide.reporting.ticks import byte_unit, ratio_ticks, round_ticks, time_unit
from lowtide.reporting.timeline import build_timeline
from tests.planning.test_simulator import traces_with_decisions
from tests.planning.traces import gpt_trace, unet_trace, unfused_trace


@settings(max_examples=60, deadline=None)
@given(traces_with_decisions(), st.integers(1, 12))
def test_columns_show_the_intervals_with_most_live_bytes(case, columns):
    timeline = build_timeline(*case)
    for stack in (stack_by_category(timeline, columns), stack_by_module(timeline, columns)):
        live = timeline.live_bytes[list(stack.intervals)]
        assert (stack.top_bytes == live).all()
        assert live.max() == timeline.live_bytes.max()
        assert len(stack.edges_s) == len(stack.intervals) + 1
        assert list(stack.edges_s) == sorted(stack.edges_s)
        for start, end, shown in zip(stack.edges_s, stack.edges_s[1:], stack.intervals, strict=False):
            interval = timeline.intervals[shown]
            assert interval.start_s <= end + 1e-9
            assert interval.start_s + interval.duration_s >= start - 1e-9


@pytest.mark.parametrize("trace", [gpt_trace(3), unfused_trace(2), unet_trace()], ids=["gpt", "unfused", "unet"])
def test_modules_are_merged_into_few_bands(trace):
    stack = stack_by_module(build_timeline(trace, [op.pinned is not None for op in trace.ops]))
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
def test_every_module_is_in_exactly_one_band(weights, max_groups):
    merged = merge_modules(weights, max_groups)
    members = [name for _, names in merged for name in names]
    assert sorted(members) == sorted(weights)
    assert len(merged) <= max_groups + 1


def test_modules_named_like_reserved_bands_are_not_lost():
    weights = {REST: 50, OUTSIDE: 30, "x": 0, "y": 0, "": 20}
    assert sorted(name for _, names in merge_modules(weights) for name in names) == sorted(weights)


def test_each_band_has_a_different_colour():
    timeline = build_timeline(gpt_trace(3), [True] * len(gpt_trace(3).ops))
    for stack, colours in (
        (stack_by_category(timeline), colours_by_category),
        (stack_by_module(timeline), colours_by_module),
    ):
        used = set(colours(stack))
        assert len(used) == len(stack.bands)
        assert used <= set(COLOURS)


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
