"""`plan` and `frontier`: predict the memory and time of training without training.

One step is run and profiled, forward and backward, within the budget (see `profile_step`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from .._errors import ArgumentError, BudgetError
from .._units import parse_budget
from ..engine.runtime import current_runtime
from ..planning import (
    BASELINES,
    CodecCost,
    Link,
    Plan,
    Problem,
    Simulator,
    lower_bound,
    plan_or_name_budget,
    smallest,
    solve,
)
from ..records import Trace
from ..reporting.frontier import Frontier, Point
from ..stores import Store
from .make_plan import link_to
from .planner import Planner
from .profile_step import Loss, generators_restored, profile, profile_for, step_maker
from .sized_steps import SizedSteps, SizeRange


def plan(
    model: nn.Module,
    batch: Any,
    budget: str | int,
    *,
    loss: Loss | None = None,
    stores: str | Store | Sequence[str | Store] | None = ("device",),
    codecs: str | Sequence[str] | None = "exact",
    verify: bool = True,
    deadline_s: float = 20.0,
) -> Plan:
    """Return a plan for training `model` within `budget` on batches like this one. The model is not trained.

    `batch`: a dict is passed as keyword arguments, a tuple or list as positional arguments, anything else as the only
    argument. `loss` returns a scalar from the model's output; the default is the output's `.loss`. `stores`, `codecs`
    and `verify` are as for `fit`, which needs the same `stores` and `codecs` to follow the plan. `deadline_s` limits
    the planning time.

    `print(plan)` prints a table, `plan.save(path)` writes a file, and `lowtide.fit(model, plan=plan)` follows the plan.
    Raises `BudgetError` if no plan fits; its `smallest_bytes` is the smallest budget that works.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> found = lowtide.plan(model, torch.randn(4, 8), "64 MiB", loss=lambda out: out.mean())
    >>> found.predicted_peak_bytes < 64 * 2**20
    True
    """
    planner = Planner(deadline_s, link_to(current_runtime().store(stores)), codecs)

    def make_plan(limit_bytes: int) -> Plan:
        trace = profile_for(limit_bytes, model, batch, loss=loss, verify=verify).trace
        return planner.solve(trace, limit_bytes)

    return plan_or_name_budget(make_plan, parse_budget(budget))


def frontier(
    model: nn.Module,
    batch: Any,
    points: int = 20,
    *,
    sizes: SizeRange | None = None,
    loss: Loss | None = None,
    stores: str | Store | Sequence[str | Store] | None = ("device",),
    codecs: str | Sequence[str] | None = "exact",
    deadline_s: float = 10.0,
) -> Frontier:
    """Return step time against peak memory, from the smallest budget that works to everything kept.

    Each of the `points` is a plan and its lower bound. The frontier also has the predictions for simple schemes: a
    checkpoint on every block, √n segments, keeping matrix products. `stores` and `codecs` are as for `plan`.
    `deadline_s` limits the time of each plan.

    With `sizes`, `batch` is a function that returns the batch of a size, as for `longest`. The frontier is that of the
    largest size, predicted from profiles of small ones.
    """
    if points < 2:
        raise ArgumentError(f"a frontier needs at least two points, not {points}")
    planner = Planner(deadline_s, link_to(current_runtime().store(stores)), codecs)
    if sizes is None:
        trace = profile(model, batch, loss=loss)
    else:
        with generators_restored():
            trace = SizedSteps(step_maker(model, batch, loss, verify=False), sizes).largest()
    return frontier_of(trace, points, **planner.options(trace))


def frontier_of(
    trace: Trace,
    points: int,
    *,
    link: Link | None = None,
    codec_costs: Sequence[CodecCost] = (),
    deadline_s: float = 10.0,
    progress: Callable[[int], None] | None = None,
) -> Frontier:
    """Return the frontier of a profiled step. `progress` is called with the number of plans made so far."""
    simulator = Simulator(Problem(trace, link, codec_costs))
    plain_simulator = Simulator(Problem(trace.without_copies(), link, codec_costs))
    keep_all = plain_simulator.run([True] * len(trace.ops))
    least = smallest(simulator)
    found = []
    for k in range(points):
        # Points are denser at small budgets, where the step time changes most.
        limit = least.peak_bytes + (keep_all.peak_bytes - least.peak_bytes) * k**2 // (points - 1) ** 2
        with contextlib.suppress(BudgetError):
            one = solve(trace, limit, link=link, codec_costs=codec_costs, deadline_s=deadline_s)
            found.append(Point(limit, one.predicted_peak_bytes, one.predicted_step_s, one.bound_step_s, one.solver))
        if progress is not None:
            progress(k + 1)
    baselines = []
    for name, decide in BASELINES.items():
        simulation = plain_simulator.run(decide(plain_simulator.problem))
        bound = lower_bound(simulator.problem, simulation.peak_bytes)
        baselines.append(Point(simulation.peak_bytes, simulation.peak_bytes, simulation.step_s, bound.step_s, name))
    return Frontier(tuple(found), tuple(baselines), keep_all.peak_bytes, trace.step_s)
