"""`solve`: plans fit and are fast; a budget error explains what to do."""

import itertools
import re
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from lowtide._errors import ArgumentError, BudgetError
from lowtide.planning import BASELINES, Problem, Simulator, plan_or_name_budget, simulate, smallest, solve
from lowtide.planning.candidate import judge_decisions
from lowtide.planning.repair import repair

from .naive import naive_simulation
from .traces import cell_trace, changed, gpt_trace, traces, training_traces, unet_trace, unfused_trace


def peak_of(trace, baseline="keep all"):
    return simulate(trace, BASELINES[baseline](Problem(trace))).peak_bytes


@pytest.mark.parametrize(
    ("trace", "share", "gap", "seconds"),
    [
        (gpt_trace(12), 0.6, 0.01, 20),
        (gpt_trace(12), 0.35, 0.01, 20),
        (gpt_trace(48), 0.6, 0.01, 20),
        (gpt_trace(48), 0.35, 0.01, 20),
        (unfused_trace(12), 0.6, 0.01, 20),
        (unfused_trace(12), 0.35, 0.01, 20),
        (unet_trace(4), 0.6, 0.02, 20),
    ],
    ids=lambda x: f"{len(x.ops)} ops" if hasattr(x, "ops") else str(x),
)
def test_plans_are_close_to_the_bound(trace, share, gap, seconds):
    budget = int(share * peak_of(trace))
    started = time.monotonic()
    plan = solve(trace, budget)
    assert time.monotonic() - started < 3 * seconds
    assert plan.predicted_peak_bytes <= budget
    assert plan.bound_step_s <= plan.predicted_step_s
    assert plan.gap < gap
    simulation = simulate(trace, plan.keep, plan.released)
    assert (simulation.peak_bytes, simulation.step_s) == (plan.predicted_peak_bytes, plan.predicted_step_s)


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_plans_of_long_chains_are_close_to_the_bound_and_use_the_budget(share):
    trace = cell_trace(240)
    assert len(trace.ops) > 2000
    budget = int(share * peak_of(trace))
    plan = solve(trace, budget)
    assert 0.9 * budget < plan.predicted_peak_bytes <= budget
    assert plan.gap < 0.05


def test_six_thousand_ops_are_planned_in_time():
    trace = unfused_trace(48)
    assert len(trace.ops) > 5000
    problem = Problem(trace)
    simulator = Simulator(problem)
    started = time.monotonic()
    simulator.run(problem.recompute_all())
    assert time.monotonic() - started < 3 * 0.3
    budget = int(0.35 * peak_of(trace))
    started = time.monotonic()
    plan = solve(trace, budget)
    assert time.monotonic() - started < 3 * 20
    assert plan.predicted_peak_bytes <= budget
    assert plan.gap < 0.01


@pytest.mark.parametrize("baseline", ["every block", "√n segments", "keep matmuls and attention"])
@pytest.mark.parametrize("make", [gpt_trace, unfused_trace, lambda layers: unet_trace(4)])
def test_a_plan_with_the_memory_of_a_baseline_is_at_least_as_fast(make, baseline):
    trace = make(6)
    simulation = simulate(trace, BASELINES[baseline](Problem(trace)))
    plan = solve(trace, simulation.peak_bytes, deadline_s=6)
    assert plan.predicted_step_s <= simulation.step_s + 1e-9


def test_a_larger_budget_is_never_slower():
    trace = gpt_trace(8)
    plain = peak_of(trace)
    times = [solve(trace, int(share * plain), deadline_s=10).predicted_step_s for share in (0.4, 0.5, 0.6, 0.8, 1.0)]
    for tighter, looser in itertools.pairwise(times):
        assert looser <= tighter + 0.001 * trace.step_s  # tolerance of the search
    assert times[-1] == trace.step_s


def test_everything_is_kept_if_it_fits():
    trace = gpt_trace(2)
    plan = solve(trace, peak_of(trace))
    assert all(plan.keep)
    assert plan.gap == 0
    assert plan.predicted_step_s == plan.plain_step_s


@settings(max_examples=40, deadline=None)
@given(st.one_of(traces(max_ops=8), training_traces(max_ops=8)), st.integers(1, 60))
def test_a_plan_fits_or_the_error_names_a_budget_that_works(trace, budget):
    refused: BudgetError | None = None
    try:
        plan = solve(trace, budget, deadline_s=5)
    except BudgetError as error:
        refused = error
    if refused is not None:
        assert refused.budget_bytes == budget
        assert refused.smallest_bytes is not None
        assert refused.smallest_bytes > budget
        budget = refused.smallest_bytes
        plan = solve(trace, budget, deadline_s=5)
    forward, unpacks, seconds, _ = naive_simulation(trace, plan.keep, plan.released)
    assert max(forward + unpacks) == plan.predicted_peak_bytes <= budget
    assert plan.predicted_step_s == pytest.approx(trace.step_s + seconds)


def test_budget_error_names_the_smallest_budget_and_what_to_do():
    trace = gpt_trace(8)
    with pytest.raises(BudgetError) as caught:
        solve(trace, 2**20, deadline_s=4)
    error, text = caught.value, str(caught.value)
    assert error.budget_bytes == 2**20
    assert "a budget of 1.00 MiB cannot be met: the smallest that works is" in text
    assert f"({error.smallest_bytes} bytes)" in text
    assert "in backward, when it unpacks the output of aten." in text
    assert re.search(r"\n +[\d.]+ [KM]iB  \d+ × aten\.\S+ of transformer\.h\.\*", text)
    assert "parameters, gradients, batch and temporaries alone exceed the budget" in text
    assert str(error).endswith(error.explanation)
    plan = solve(trace, error.smallest_bytes, deadline_s=4)
    assert plan.predicted_peak_bytes <= error.smallest_bytes
    with pytest.raises(BudgetError, match="What helps: a smaller batch or shorter sequences"):
        solve(trace, 2 * error.smallest_bytes // 3, deadline_s=2)


def test_budget_error_names_dtype_and_shape_of_the_largest_values():
    trace = gpt_trace(4)
    values = tuple(replace(value, dtype="float32", shape=(2, 16, 8)) for value in trace.values)
    with pytest.raises(BudgetError, match=r"  \d+ × aten\.\S+ of \S+, float32 \(2, 16, 8\)"):
        solve(replace(trace, values=values), 2**10, deadline_s=4)


def test_a_named_budget_that_is_refused_is_not_named():
    """A step that was profiled within 10 bytes may need more than one that was profiled within 5."""
    asked = []

    def make_plan(budget):
        asked.append(budget)
        if budget < 12:
            raise BudgetError("", budget_bytes=budget, smallest_bytes=10 if budget < 10 else 12, explanation="Why.")
        return "a plan"

    with pytest.raises(
        BudgetError, match=r"5 B cannot be met: the smallest that works is 12 B \(12 bytes\)\. Why\."
    ) as e:
        plan_or_name_budget(make_plan, 5)
    assert (e.value.budget_bytes, e.value.smallest_bytes, e.value.at_least_bytes) == (5, 12, None)
    assert asked == [5, 10, 12]
    assert plan_or_name_budget(make_plan, 12) == "a plan"


def test_only_a_lower_limit_is_named_if_no_named_budget_works():
    def refuse(budget):
        raise BudgetError("", budget_bytes=budget, smallest_bytes=2 * budget)

    with pytest.raises(BudgetError, match=r"at least 16\.00 KiB is needed") as e:
        plan_or_name_budget(refuse, 2**10)
    assert (e.value.smallest_bytes, e.value.at_least_bytes) == (None, 2**14)


@pytest.mark.parametrize("make", [gpt_trace, unfused_trace])
def test_the_smallest_budget_is_below_the_peak_of_every_baseline(make):
    trace = make(6)
    candidate = smallest(Simulator(Problem(trace)))
    assert candidate.peak_bytes <= min(peak_of(trace, name) for name in BASELINES)
    simulation = simulate(trace, candidate.keep, candidate.released)
    assert simulation.peak_bytes == candidate.peak_bytes


def test_pinned_ops_are_kept_and_named():
    trace = gpt_trace(6)
    ops = tuple(replace(op, pinned="it draws") if "dropout" in op.module else op for op in trace.ops)
    trace = changed(trace, ops=ops)
    plan = solve(trace, int(0.6 * peak_of(trace)), deadline_s=10)
    assert all(kept for op, kept in zip(ops, plan.keep, strict=True) if op.pinned)
    assert {(pin.name, pin.why) for pin in plan.pinned} == {("aten.native_dropout.default", "it draws")}
    assert sum(pin.count for pin in plan.pinned) == 12


def test_repair_makes_a_plan_fit_that_nearly_does():
    trace = unet_trace(4)
    simulator = Simulator(Problem(trace))
    start = judge_decisions(simulator, BASELINES["every block"](simulator.problem), solver="every block")
    budget = int(0.95 * start.peak_bytes)
    repaired = repair(simulator, start, budget, deadline=time.monotonic() + 10)
    assert repaired is not None
    assert simulate(trace, repaired.keep, repaired.released).peak_bytes == repaired.peak_bytes <= budget
    assert repair(simulator, start, 1, deadline=time.monotonic() + 5) is None


def test_progress_is_reported():
    trace = gpt_trace(4)
    messages: list[str] = []
    solve(trace, int(0.7 * peak_of(trace)), progress=messages.append)
    assert any("% more time" in message for message in messages)


def test_budgets_and_deadlines_must_be_positive():
    for budget, deadline_s in ((0, 1.0), (-5, 1.0), (5, 0.0)):
        with pytest.raises(ArgumentError, match="must be positive"):
            solve(gpt_trace(1), budget, deadline_s=deadline_s)
