"""Predicted peak and time of a plan for a step of other sizes than the plan was made for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from ..records import Trace
from ..records.codec_cost import CodecCost
from ..records.link import Link
from ..records.plan import Plan
from .problem import Problem
from .simulator import Simulator


class Prediction(NamedTuple):
    """The cost of a step that follows a plan."""

    peak_bytes: int
    step_s: float


class Predictor:
    """Predicts plans for one trace. They must have been made for traces of the same structure with a single pass."""

    def __init__(self, trace: Trace, link: Link | None = None, codec_costs: Sequence[CodecCost] = ()) -> None:
        self._trace = trace
        self._link = link
        self._codec_costs = codec_costs

    def predict(self, plan: Plan) -> Prediction:
        """Return the peak and time of a step with this trace that follows `plan`."""
        simulator = self._with_copies if plan.copies else self._without_copies
        deadlines = plan.offload_deadlines
        found = simulator.run(
            plan.keep, plan.released, offload=deadlines, written_before=deadlines, prefetch_after=plan.prefetches
        )
        return Prediction(found.peak_bytes, found.step_s)

    @cached_property
    def plain(self) -> Prediction:
        """The peak and time of plain PyTorch."""
        found = self._without_copies.run(self._without_copies.problem.keep_all())
        return Prediction(found.peak_bytes, found.step_s)

    @cached_property
    def _with_copies(self) -> Simulator:
        return Simulator(Problem(self._trace, self._link, self._codec_costs))

    @cached_property
    def _without_copies(self) -> Simulator:
        if not self._trace.copies:
            return self._with_copies
        return Simulator(Problem(self._trace.without_copies(), self._link, self._codec_costs))
