"""Plans as records: round trips, damaged files, and the printed table."""

import json

import pytest

from lowtide._errors import ArgumentError
from lowtide.planning import BASELINES, PLAN_VERSION, Plan, Problem, simulate, solve
from lowtide.records import Trace

from .traces import gpt_trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return gpt_trace(4)


@pytest.fixture(scope="module")
def plan(trace) -> Plan:
    plain = simulate(trace, BASELINES["keep all"](Problem(trace))).peak_bytes
    return solve(trace, int(0.6 * plain), deadline_s=10)


def test_a_plan_is_equal_after_a_round_trip(plan, tmp_path):
    assert Plan.from_json(plan.to_json()) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(ArgumentError, match="cannot read a plan"):
        Plan.load(tmp_path / "other.json")


def test_a_plan_matches_only_its_trace(plan, trace):
    assert plan.matches(trace)
    assert not plan.matches(gpt_trace(5))


def test_the_printed_plan_has_a_summary_and_a_table(plan):
    lines = str(plan).splitlines()
    labels = [line.split()[0] for line in lines[:5]]
    assert labels == ["budget", "peak", "step", "recompute", "solver"]
    assert "in plain PyTorch" in lines[1]
    assert f"{len(plan.recomputed):,} of {len(plan.keep):,} ops" in lines[3]
    table = str(plan).split("\n\n")[1]
    assert table.splitlines()[0].split() == ["modules", "ops", "kept", "recomputed", "recompute", "time"]
    assert "transformer.h.*.mlp.c_fc" in table
    assert all(len(line) <= 140 for line in lines)


def test_module_summaries_add_up_to_the_step(plan, trace):
    assert sum(module.ops for module in plan.modules) == len(trace.ops)
    assert sum(module.recompute_s for module in plan.modules) == pytest.approx(
        plan.predicted_step_s - plan.plain_step_s
    )
    saved_bytes = sum(trace.values[v].nbytes for v in trace.saved if trace.values[v].made_at is not None)
    inputs_of_replays = sum(module.kept_bytes + module.recomputed_bytes for module in plan.modules) - saved_bytes
    assert inputs_of_replays >= 0


@pytest.mark.parametrize("text", ["", "nonsense", "{}", "[1]", '{"format":"lowtide trace","version":1}'])
def test_other_texts_are_refused(text):
    with pytest.raises(ArgumentError, match="not a lowtide plan"):
        Plan.from_json(text)


def test_damaged_plans_are_refused(plan):
    good = json.loads(plan.to_json())
    for field in good:
        for wrong in (None, [None], {"a": 1}, [[1]], True):
            if type(wrong) is type(good[field]) is bool or wrong == good[field]:
                continue
            with pytest.raises(ArgumentError):
                Plan.from_json(json.dumps({**good, field: wrong}))
        with pytest.raises(ArgumentError):
            Plan.from_json(json.dumps({name: value for name, value in good.items() if name != field}))
    with pytest.raises(ArgumentError, match="must be a string of 0 and 1"):
        Plan.from_json(json.dumps({**good, "keep": "012"}))
    with pytest.raises(ArgumentError, match="that is not recomputed"):
        Plan.from_json(json.dumps({**good, "released": [plan.keep.index(True)]}))
    with pytest.raises(ArgumentError):
        Plan.from_json(json.dumps({**good, "surplus": 1}))
    for version in (PLAN_VERSION - 1, PLAN_VERSION + 1):
        with pytest.raises(ArgumentError, match=f"version {version}"):
            Plan.from_json(json.dumps({**good, "version": version}))
