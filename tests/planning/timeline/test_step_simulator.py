"""The simulator of timelines agrees with a naive machine that follows the fields of a plan."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lowtide.planning import Problem, Simulator
from lowtide.planning.timeline.decisions import KEPT, normalised, plan_rows
from lowtide.planning.timeline.stage_table import StageTable
from lowtide.planning.timeline.step_facts import StepFacts
from lowtide.planning.timeline.step_simulator import StepSimulator

from ..traces import traces, training_traces
from .naive import naive_simulation
from .random_steps import timelines


def table_of(trace, cuts=()):
    return StageTable(StepFacts(trace), cuts)


@st.composite
def decided(draw, trace_strategy):
    """A trace, its stages, perhaps with cuts, and decisions."""
    trace = draw(trace_strategy)
    cuts = draw(st.lists(st.sampled_from(trace.unpack_events), max_size=2)) if trace.unpacks else []
    table = table_of(trace, cuts if draw(st.booleans()) else ())
    decisions = [draw(st.integers(-1, (1 << len(stages)) - 1)) for stages in table.stages_of]
    return table, normalised(table, decisions)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(decided(timelines()))
def test_the_simulator_agrees_with_the_naive_machine(case):
    table, decisions = case
    trace = table.facts.trace
    trace.check()
    simulated = StepSimulator(table).run(decisions)
    live, seconds, replays, late = naive_simulation(trace, *plan_rows(table, decisions))
    assert simulated.live.tolist() == live
    assert simulated.extra_s == pytest.approx(seconds)
    assert simulated.replayed_ops == replays == sum(simulated.replays)
    assert simulated.late_replays == late
    assert simulated.peak_bytes == max(live, default=0)


def without_unused_saves(trace):
    """The simulator of single passes never drops a value that is saved but not unpacked; timelines do."""
    unpacked = {unpack.value for unpack in trace.unpacks}
    return replace(trace, saved=tuple(v for v in trace.saved if v in unpacked))


@settings(max_examples=400, deadline=None)
@given(st.one_of(traces(), training_traces()), st.data())
def test_both_simulators_agree_on_a_single_pass(trace, data):
    trace = without_unused_saves(trace)
    problem = Problem(trace)
    keep = [op.pinned is not None or data.draw(st.booleans()) for op in trace.ops]
    keep = problem.effective_decisions(keep)
    table = table_of(trace)
    simulated = StepSimulator(table).run([KEPT if kept else 0 for kept in keep])
    expected = Simulator(problem).run(keep)
    assert simulated.live.tolist() == [*expected.forward_live, *expected.unpack_live]
    assert simulated.extra_s == pytest.approx(expected.extra_s)
    assert simulated.replays == expected.replays
