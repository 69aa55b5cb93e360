"""Refused budgets: the error that names a budget which works, the largest values at its peak, and what helps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from .._errors import BudgetError
from .._units import format_budget, format_bytes
from .candidate import Candidate
from .problem import Problem
from .simulator import Simulator
from .summary import describe_place, module_pattern

T = TypeVar("T")

_MARGIN = 200
"""A budget error names the smallest budget plus 1/200: the next profile of the step may differ by a few bytes."""
_MAX_TRIES = 4
"""Budgets that are tried before only a lower limit is named. Doubled: up to four more profiles after a refusal."""
_LISTED_VALUES = 5


def no_plan_error(simulator: Simulator, start: Candidate, budget_bytes: int) -> BudgetError:
    """Return the error for a budget that no plan meets. `start` has the smallest known peak."""
    smallest_bytes = max(start.peak_bytes + start.peak_bytes // _MARGIN, budget_bytes + 1)
    return _error(budget_bytes, _explanation(simulator, start, budget_bytes), smallest_bytes=smallest_bytes)


def plan_or_name_budget(make_plan: Callable[[int], T], budget_bytes: int) -> T:
    """Return `make_plan(budget_bytes)`. If it is refused, raise a `BudgetError` with a budget that is not refused.

    A step that is profiled within another budget may have another smallest peak, so each named budget is tried.
    """
    asked_bytes = budget_bytes
    explanation = ""
    for _ in range(_MAX_TRIES):
        try:
            plan = make_plan(asked_bytes)
        except BudgetError as error:
            if error.smallest_bytes is None:
                raise
            explanation = error.explanation
            asked_bytes = max(error.smallest_bytes, asked_bytes + 1)
            continue
        if asked_bytes == budget_bytes:
            return plan
        raise _error(budget_bytes, explanation, smallest_bytes=asked_bytes)
    raise _error(budget_bytes, explanation, at_least_bytes=asked_bytes)


def _error(
    budget_bytes: int, explanation: str, *, smallest_bytes: int | None = None, at_least_bytes: int | None = None
) -> BudgetError:
    if smallest_bytes is not None:
        named = f"the smallest that works is {format_budget(smallest_bytes)} ({smallest_bytes} bytes)"
    else:
        named = f"at least {format_budget(at_least_bytes or 0)} is needed"
    return BudgetError(
        f"a budget of {format_bytes(budget_bytes)} cannot be met: {named}. {explanation}",
        budget_bytes=budget_bytes,
        smallest_bytes=smallest_bytes,
        at_least_bytes=at_least_bytes,
        explanation=explanation,
    )


def _explanation(simulator: Simulator, start: Candidate, budget_bytes: int) -> str:
    problem, peak_at = simulator.problem, start.simulation.peak_at
    events = problem.trace.ops if peak_at.phase == "forward" else problem.trace.unpacks
    other_bytes = events[peak_at.index].other_bytes if events else 0
    values = _largest_values(simulator, start)
    listed = "".join(f"\n  {line}" for line in values)
    return (
        f"The peak is then {describe_place(problem, peak_at)}: {format_bytes(other_bytes)} are parameters, gradients, "
        f"batch and temporaries, and the largest values are{':' + listed if listed else ' none.'}\n"
        f"What helps: {_advice(problem, other_bytes, budget_bytes)}."
    )


def _largest_values(simulator: Simulator, candidate: Candidate) -> list[str]:
    """Return the largest values at the peak, equal ones as one line with bytes, count, op, module, dtype and shape."""
    problem, simulation = simulator.problem, candidate.simulation
    alive = simulator.holders(
        candidate.keep,
        candidate.released,
        simulation.peak_at,
        simulation.written_before,
        simulation.prefetch_after,
    )
    nbytes: Counter[str] = Counter()
    values: Counter[str] = Counter()
    for v in alive:
        description = _describe(problem, v)
        nbytes[description] += problem.nbytes[v]
        values[description] += 1
    return [
        f"{format_bytes(total):>10}  {values[description]} × {description}"
        for description, total in nbytes.most_common(_LISTED_VALUES)
    ]


def _describe(problem: Problem, value: int) -> str:
    """Return such as "aten.mm.default of h.*.mlp, float32 (8, 64)"."""
    op, record = problem.trace.ops[problem.producer[value]], problem.trace.values[value]
    name = op.name + (f" of {module_pattern(op.module)}" if op.module else "")
    shape = "" if record.shape is None else f" {record.shape}"
    return f"{name}, {record.dtype}{shape}" if record.dtype else name


def _advice(problem: Problem, other_bytes: int, budget_bytes: int) -> str:
    pinned = sum(problem.pinned)
    if other_bytes >= budget_bytes:
        return (
            "parameters, gradients, batch and temporaries alone exceed the budget, so use a smaller model or batch, "
            "train fewer parameters, or split the largest op (for example computing the loss in chunks)"
        )
    return (
        "a smaller batch or shorter sequences, splitting the largest op (for example computing the loss in chunks)"
        + ("" if problem.link is not None else ', offloading values to a disk (stores=("disk",))')
        + (f", or allowing lowtide to recompute the {pinned} pinned ops" if pinned else "")
    )
