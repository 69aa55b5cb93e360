"""Values that are held packed: the judge against the naive machine, and plans that use it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from lowtide._errors import ArgumentError
from lowtide.planning import CodecCost, Link, Plan, Problem, Simulator, simulate, smallest, solve
from lowtide.records.codec_cost import suitable_codec_costs
from lowtide.reporting.timeline import DECOMPRESS, build_timeline

from .naive import naive_simulation
from .test_offload import FAST_OUT, assert_nothing_beats_the_bound, chain
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
    """The same trace, its values of these dtypes."""
    return replace(trace, values=tuple(replace(v, dtype=d) for v, d in zip(trace.values, dtypes, strict=True)))


@st.composite
def packing_some(draw):
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
            written_before[j] = j + 1 if problem.packed[j] else draw(st.integers(first, problem.n_ops))
    return problem, keep, {j for j in released if not keep[j]}, written_before


@settings(max_examples=100, deadline=None)
@given(packing_some())
def test_it_agrees_with_the_naive_machine(case):
    problem, keep, released, written_before = case
    codec_cost = {v: one for v, one in enumerate(problem.codec_cost) if one is not None}
    forward, unpacks, seconds, replays = naive_simulation(
        problem.trace, keep, released, written_before, FAST_OUT, codec_cost
    )
    judged = simulate(problem.trace, keep, released, written_before, problem.link, problem.codec_costs)
    assert judged.forward_live.tolist() == forward
    assert judged.unpack_live.tolist() == unpacks
    assert judged.extra_s == pytest.approx(seconds)
    assert judged.replayed_ops == replays


@settings(max_examples=20, deadline=None)
@given(packing_some())
def test_a_timeline_adds_up_to_what_the_judge_counts(case):
    problem, keep, released, written_before = case
    timeline = build_timeline(problem.trace, keep, released, written_before, problem.link, problem.codec_costs)
    live = timeline.live_bytes
    judged = timeline.simulation
    for j in range(problem.n_ops):
        assert live[j] == judged.forward_live[j]
    for k in range(problem.n_unpacks):
        here = [live[m] for m, moment in enumerate(timeline.intervals) if moment.unpack == k]
        assert max(here) <= judged.unpack_live[k]
    assert int(live.max()) <= judged.peak_bytes
    decompressed = sum(moment.phase == DECOMPRESS for moment in timeline.intervals)
    assert (decompressed == 0) or any(problem.packed[j] for j in written_before)


def test_a_packed_value_takes_fewer_bytes_until_it_is_unpacked():
    trace = of_dtypes(chain(), ["small"] * 5)
    judged = Simulator(Problem(trace, None, (HALVED,))).run([True] * 4, offload=[0])
    # Of op 0's ten bytes five stay from op 1 on, which also pays for packing: six bytes for a moment.
    assert judged.forward_live.tolist() == [10, 10 + 10 + 5 + 6, 5 + 10 + 10, 5 + 10 + 10 + 10]
    assert judged.unpack_live.tolist() == [35, 25, 15, 5 + 10 + 6]
    assert judged.written_before == {0: 1}
    assert judged.extra_s == judged.store_wait_s == (0.25 + 5.0) + (0.125 + 10.0)


def test_which_way_a_value_goes():
    trace = of_dtypes(chain(), ["small"] * 4 + [""])
    assert Problem(trace, None, (LOSSY, HALVED)).codec_cost[1] == HALVED  # an exact one before any other
    assert Problem(trace, None, (LOSSY,)).codec_cost[1] == LOSSY
    lossy_or_store = Problem(trace, FAST_OUT, (LOSSY,))
    assert lossy_or_store.codec_cost[1] is None  # the store loses nothing
    assert lossy_or_store.offloadable[0]
    exact_or_store = Problem(trace, FAST_OUT, (HALVED,))
    assert exact_or_store.packed == [True, True, True, False]
    assert exact_or_store.offloadable == [True] * 4
    assert suitable_codec_costs((HALVED,), "small", 1, binary=False) == []  # not worth it
    assert suitable_codec_costs((HALVED,), "other", 10, binary=False) == []


@settings(max_examples=10, deadline=None)
@given(training_traces(), st.floats(0.3, 0.95))
def test_packing_never_makes_a_plan_slower(trace, share):
    trace = of_dtypes(trace, ["small"] * len(trace.values))
    quick = replace(
        HALVED,
        compress_s=0.0,
        compress_s_per_byte=0.001,
        decompress_s=0.0,
        decompress_s_per_byte=0.001,
        work_bytes_per_element=0,
    )
    budget = int(share * simulate(trace, [True] * len(trace.ops)).peak_bytes)
    without = smallest(Simulator(Problem(trace)))
    packed = smallest(Simulator(Problem(trace, None, (quick,))))
    assert packed.peak_bytes <= without.peak_bytes
    if budget < max(without.peak_bytes, 1):
        return
    plan = solve(trace, budget, codec_costs=(quick,), deadline_s=5)
    assert plan.predicted_peak_bytes <= budget
    assert plan.bound_step_s <= plan.predicted_step_s
    checked = simulate(trace, plan.keep, plan.released, plan.offload_deadlines, None, (quick,))
    assert (checked.peak_bytes, checked.step_s) == (plan.predicted_peak_bytes, plan.predicted_step_s)
    assert plan.predicted_step_s <= solve(trace, budget, deadline_s=5).predicted_step_s * 1.02


@settings(max_examples=15, deadline=None)
@given(training_traces(), st.floats(0.3, 0.95))
def test_no_plan_beats_the_bound(trace, share):
    trace = of_dtypes(trace, ["small"] * len(trace.values))
    quick = replace(HALVED, compress_s_per_byte=0.01, decompress_s_per_byte=0.01, work_bytes_per_element=0)
    assert_nothing_beats_the_bound(Simulator(Problem(trace, None, (quick,))), share)


def test_a_quick_codec_beats_recomputing():
    trace = gpt_trace(12)
    trace = of_dtypes(trace, ["float32"] * len(trace.values))
    budget = int(0.6 * simulate(trace, [True] * len(trace.ops)).peak_bytes)
    total = sum(value.nbytes for value in trace.values)
    bf16 = CodecCost("bf16", "float32", False, 4, 16, 0, 0, 2**18, 0.0, trace.step_s / total / 40, 0.0,
                   trace.step_s / total / 40)  # fmt: skip
    plain, packed = solve(trace, budget), solve(trace, budget, codec_costs=(bf16,))
    assert packed.compress
    assert packed.predicted_step_s - trace.step_s < 0.7 * (plain.predicted_step_s - trace.step_s)
    assert packed.gap < 0.02
    assert Plan.from_json(packed.to_json()) == packed
    assert "compress" in str(packed)
    assert "bf16" in str(packed)
    assert "compress" not in str(plain)


def test_store_and_codec_in_one_plan():
    trace = gpt_trace(12)
    dtypes = ["small" if v % 2 else "float32" for v in range(len(trace.values))]
    trace = of_dtypes(trace, dtypes)
    budget = int(0.3 * simulate(trace, [True] * len(trace.ops)).peak_bytes)
    total = sum(value.nbytes for value in trace.values)
    link = Link("disk", out_bytes_per_s=20 * total / trace.step_s, in_bytes_per_s=20 * total / trace.step_s)
    quick = replace(HALVED, compress_s=0.0, compress_s_per_byte=trace.step_s / total / 40, decompress_s=0.0,
                    decompress_s_per_byte=trace.step_s / total / 40)  # fmt: skip
    plan = solve(trace, budget, link=link, codec_costs=(quick,))
    assert plan.compress
    assert plan.in_store
    assert not plan.in_store & set(plan.compress)
    assert "waiting for both" in str(plan)


def test_plans_that_cannot_be_are_refused():
    trace = of_dtypes(chain(), ["small"] * 5)
    plan = solve(trace, 40, codec_costs=(HALVED,))
    for broken in (
        replace(plan, offload=(0,), written_before=(1,), compress=(1,)),
        replace(plan, offload=(0,), written_before=(1,), compress=(0,), codec_costs=()),
        replace(plan, offload=(0, 1), written_before=(1, 2), compress=(0,)),
    ):
        with pytest.raises(ArgumentError, match="not a valid plan"):
            Plan.from_json(broken.to_json())
