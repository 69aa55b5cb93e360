"""Compressed values: the simulator agrees with the naive simulator, and plans use codecs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from lowtide._errors import ArgumentError
from lowtide.planning import CodecCost, Link, Plan, Problem, Simulator, simulate, smallest, solve
from lowtide.records.codec_cost import suitable_codec_costs
from lowtide.reporting.timeline import DECOMPRESS, build_timeline

from .naive import naive_simulation
from .test_offload import FAST_OUT, assert_no_scheme_beats_the_bound, chain
from .test_simulator import traces_with_decisions
from .traces import gpt_trace, training_traces

HALVED = CodecCost(
    "halved",
    "small",
    True,
    itemsize=1,
    bits=4,
    block_bytes=0,
    work_bytes_per_element=2,
    chunk_elements=3,
    compress_s=0.25,
    compress_s_per_byte=0.5,
    decompress_s=0.125,
    decompress_s_per_byte=1.0,
    min_bytes=2,
)
LOSSY = replace(HALVED, codec="lossy", exact=False, bits=2)


def of_dtypes(trace, dtypes):
    """Return the trace with other dtypes of its values."""
    return replace(trace, values=tuple(replace(v, dtype=d) for v, d in zip(trace.values, dtypes, strict=True)))


@st.composite
def compress_decisions(draw):
    trace, keep, released = draw(traces_with_decisions())
    trace = of_dtypes(
        trace, draw(st.lists(st.sampled_from(["small", ""]), min_size=(n := len(trace.values)), max_size=n))
    )
    problem = Problem(trace, draw(st.sampled_from([None, FAST_OUT])), (draw(st.sampled_from([HALVED, LOSSY])),))
    keep = [bool(kept) for kept in problem.effective_decisions(keep)]
    written_before = {}
    for j in range(problem.n_ops):
        if keep[j] and problem.offloadable[j] and draw(st.booleans()):
            first = 1 + min(problem.natural_end[v] for v in problem.outputs[j])
            written_before[j] = j + 1 if problem.uses_codec[j] else draw(st.integers(first, problem.n_ops))
    return problem, keep, {j for j in released if not keep[j]}, written_before


@settings(max_examples=100, deadline=None)
@given(compress_decisions())
def test_it_agrees_with_the_naive_simulator(case):
    problem, keep, released, written_before = case
    codec_cost = {v: one for v, one in enumerate(problem.codec_cost) if one is not None}
    forward, unpacks, seconds, replays = naive_simulation(
        problem.trace, keep, released, written_before, FAST_OUT, codec_cost
    )
    simulated = simulate(problem.trace, keep, released, written_before, problem.link, problem.codec_costs)
    assert simulated.forward_live.tolist() == forward
    assert simulated.unpack_live.tolist() == unpacks
    assert simulated.extra_s == pytest.approx(seconds)
    assert simulated.replayed_ops == replays


@settings(max_examples=20, deadline=None)
@given(compress_decisions())
def test_a_timeline_adds_up_to_the_simulated_bytes(case):
    problem, keep, released, written_before = case
    timeline = build_timeline(problem.trace, keep, released, written_before, problem.link, problem.codec_costs)
    live = timeline.live_bytes
    simulated = timeline.simulation
    for j in range(problem.n_ops):
        assert live[j] == simulated.forward_live[j]
    for k in range(problem.n_unpacks):
        here = [live[m] for m, interval in enumerate(timeline.intervals) if interval.unpack == k]
        assert max(here) <= simulated.unpack_live[k]
    assert int(live.max()) <= simulated.peak_bytes
    decompressed = sum(interval.phase == DECOMPRESS for interval in timeline.intervals)
    assert (decompressed == 0) or any(problem.uses_codec[j] for j in written_before)


def test_a_compressed_value_takes_fewer_bytes_until_it_is_decompressed():
    trace = of_dtypes(chain(), ["small"] * 5)
    simulated = Simulator(Problem(trace, None, (HALVED,))).run([True] * 4, offload=[0])
    # Of the ten bytes of op 0, five stay from op 1 on. During op 1, six bytes of workspace are live too.
    assert simulated.forward_live.tolist() == [10, 10 + 10 + 5 + 6, 5 + 10 + 10, 5 + 10 + 10 + 10]
    assert simulated.unpack_live.tolist() == [35, 25, 15, 5 + 10 + 6]
    assert simulated.written_before == {0: 1}
    assert simulated.extra_s == simulated.store_wait_s == (0.25 + 5.0) + (0.125 + 10.0)


def test_exact_codecs_come_before_the_store_and_lossy_codecs_after_it():
    trace = of_dtypes(chain(), ["small"] * 4 + [""])
    assert Problem(trace, None, (LOSSY, HALVED)).codec_cost[1] == HALVED  # an exact codec is preferred
    assert Problem(trace, None, (LOSSY,)).codec_cost[1] == LOSSY
    lossy_or_store = Problem(trace, FAST_OUT, (LOSSY,))
    assert lossy_or_store.codec_cost[1] is None  # the store is exact
    assert lossy_or_store.offloadable[0]
    exact_or_store = Problem(trace, FAST_OUT, (HALVED,))
    assert exact_or_store.uses_codec == [True, True, True, False]
    assert exact_or_store.offloadable == [True] * 4
    assert suitable_codec_costs((HALVED,), "small", 1, binary=False) == []  # too small
    assert suitable_codec_costs((HALVED,), "other", 10, binary=False) == []


@settings(max_examples=10, deadline=None)
@given(training_traces(), st.floats(0.3, 0.95))
def test_a_codec_never_makes_a_plan_slower(trace, share):
    trace = of_dtypes(trace, ["small"] * len(trace.values))
    fast = replace(
        HALVED,
        compress_s=0.0,
        compress_s_per_byte=0.001,
        decompress_s=0.0,
        decompress_s_per_byte=0.001,
        work_bytes_per_element=0,
    )
    budget = int(share * simulate(trace, [True] * len(trace.ops)).peak_bytes)
    without = smallest(Simulator(Problem(trace)))
    compressed = smallest(Simulator(Problem(trace, None, (fast,))))
    assert compressed.peak_bytes <= without.peak_bytes
    if budget < max(without.peak_bytes, 1):
        return
    plan = solve(trace, budget, codec_costs=(fast,), deadline_s=5)
    assert plan.predicted_peak_bytes <= budget
    assert plan.bound_step_s <= plan.predicted_step_s
    checked = simulate(trace, plan.keep, plan.released, plan.offload_deadlines, None, (fast,))
    assert (checked.peak_bytes, checked.step_s) == (plan.predicted_peak_bytes, plan.predicted_step_s)
    assert plan.predicted_step_s <= solve(trace, budget, deadline_s=5).predicted_step_s * 1.02


@settings(max_examples=15, deadline=None)
@given(training_traces(), st.floats(0.3, 0.95))
def test_no_plan_beats_the_bound(trace, share):
    trace = of_dtypes(trace, ["small"] * len(trace.values))
    fast = replace(HALVED, compress_s_per_byte=0.01, decompress_s_per_byte=0.01, work_bytes_per_element=0)
    assert_no_scheme_beats_the_bound(Simulator(Problem(trace, None, (fast,))), share)


def test_a_fast_codec_is_faster_than_recomputing():
    trace = gpt_trace(12)
    trace = of_dtypes(trace, ["float32"] * len(trace.values))
    budget = int(0.6 * simulate(trace, [True] * len(trace.ops)).peak_bytes)
    total = sum(value.nbytes for value in trace.values)
    bf16 = CodecCost("bf16", "float32", False, 4, 16, 0, 0, 2**18, 0.0, trace.step_s / total / 40, 0.0,
                   trace.step_s / total / 40)  # fmt: skip
    plain, compressed = solve(trace, budget), solve(trace, budget, codec_costs=(bf16,))
    assert compressed.compress
    assert compressed.predicted_step_s - trace.step_s < 0.7 * (plain.predicted_step_s - trace.step_s)
    assert compressed.gap < 0.02
    assert Plan.from_json(compressed.to_json()) == compressed
    assert "compress" in str(compressed)
    assert "bf16" in str(compressed)
    assert "compress" not in str(plain)


def test_store_and_codec_in_one_plan():
    trace = gpt_trace(12)
    dtypes = ["small" if v % 2 else "float32" for v in range(len(trace.values))]
    trace = of_dtypes(trace, dtypes)
    budget = int(0.3 * simulate(trace, [True] * len(trace.ops)).peak_bytes)
    total = sum(value.nbytes for value in trace.values)
    link = Link("disk", out_bytes_per_s=20 * total / trace.step_s, in_bytes_per_s=20 * total / trace.step_s)
    fast = replace(HALVED, compress_s=0.0, compress_s_per_byte=trace.step_s / total / 40, decompress_s=0.0,
                    decompress_s_per_byte=trace.step_s / total / 40)  # fmt: skip
    plan = solve(trace, budget, link=link, codec_costs=(fast,))
    assert plan.compress
    assert plan.in_store
    assert not plan.in_store & set(plan.compress)
    assert "for codecs and the store" in str(plan)


def test_invalid_compressed_plans_are_errors():
    trace = of_dtypes(chain(), ["small"] * 5)
    plan = solve(trace, 40, codec_costs=(HALVED,))
    for broken in (
        replace(plan, offload=(0,), written_before=(1,), compress=(1,)),
        replace(plan, offload=(0,), written_before=(1,), compress=(0,), codec_costs=()),
        replace(plan, offload=(0, 1), written_before=(1, 2), compress=(0,)),
    ):
        with pytest.raises(ArgumentError, match="not a valid plan"):
            Plan.from_json(broken.to_json())
