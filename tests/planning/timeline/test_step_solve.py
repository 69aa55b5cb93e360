"""`solve` on timelines: plans fit, and a budget error names a budget that works."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lowtide._errors import BudgetError
from lowtide.planning import Plan, solve
from lowtide.records import TRACE_VERSION, Op, Trace, Unpack, Value

from .naive import naive_simulation
from .random_steps import timelines


def followed(trace, plan: Plan):
    """The step under a plan, simulated by the naive machine."""
    assert not plan.released
    assert not plan.offload
    return naive_simulation(trace, plan.keep, plan.held, plan.drops, plan.tails)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(timelines(max_events=20).filter(lambda trace: not trace.is_single_pass), st.floats(0.3, 1.0))
def test_a_plan_fits_or_the_error_names_a_budget_that_works(trace, share):
    plain = max(naive_simulation(trace, [True] * len(trace.ops))[0])
    budget = max(1, int(share * plain))
    refused: BudgetError | None = None
    try:
        plan = solve(trace, budget)
    except BudgetError as error:
        refused = error
    if refused is not None:
        assert refused.budget_bytes == budget
        assert refused.smallest_bytes > budget
        budget = refused.smallest_bytes
        plan = solve(trace, budget)
    live, seconds, replays, late = followed(trace, plan)
    assert max(live) == plan.predicted_peak_bytes <= budget
    assert plan.plain_peak_bytes == plain
    assert plan.predicted_step_s == pytest.approx(trace.step_s + seconds)
    assert plan.replayed_ops == replays
    assert late == 0
    assert plan.matches(trace)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_value_that_one_pass_needs_twice_is_not_held_in_between():
    """As in the backward pass of a gradient penalty, which first passes through the graph of a gradient."""
    op = Op("aten.sin.default", "", 1.0, (0,), (1,))
    source = Value(100, None, 0, held_until=5)
    saved = Value(100, 0, 1, held_until=0, handles=((0, 2), (0, 4)))
    unpacks = (
        Unpack(0, node=0, backward=0, save=0),
        Unpack(1, node=1, backward=1, save=1),
        Unpack(0, node=2, other_bytes=300, backward=1, save=2),
        Unpack(1, node=3, backward=1, save=3),
    )
    trace = Trace(TRACE_VERSION, (op, *unpacks), (source, saved), (0, 1), step_s=1.0, peak_bytes=400)
    assert solve(trace, 400).replayed_ops == 0
    plan = solve(trace, 399)
    live, _, replays, late = followed(trace, plan)
    assert (max(live), replays, late) == (300, 1, 0)
    assert plan.predicted_peak_bytes == 300
