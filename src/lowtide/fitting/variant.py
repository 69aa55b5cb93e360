"""Variants: steps of a family that run the same ops, with their profiles and plans.

The first two sizes are profiled. For other sizes a trace is made from the profiles (`planning.scaling`), and the
fastest plan that fits is chosen by simulation. If all plans that fit were made for much larger steps, a new one is
made. One plan serves a *rung*: all steps whose plain peaks are at most a quarter apart.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .._errors import ArgumentError, BudgetError
from ..planning.predict import Prediction, Predictor
from ..planning.scaling import ScaledTrace, SizedTrace, scale
from ..planning.solve import Effort
from ..records import Plan, Trace
from ..records.codec_cost import CodecCost
from ..records.link import Link
from .make_plan import shift

_RUNG = 1.25
"""Plain peak of the largest step of a rung over that of the smallest. Doubled: half the plans, each slower."""
_RUNG_SEARCHES = 4
"""Traces made to find the largest sizes of a rung. Doubled: plans fit slightly more sizes."""
_MAX_UNCERTAIN = 0.05
"""Share of the limit by which the bytes of a step may be uncertain. Doubled: fewer profiles, slower plans."""
_SCALED_MARGIN = 200
"""A plan for a trace that was not profiled leaves 1/200 of the limit free in addition. Doubled: half the margin."""
_MAX_PROFILES = 6
"""Profiles of a variant. Doubled: more memory for traces, and more exact traces of several varying sizes."""
_MAX_PLANS = 16
"""Plans of a variant; the least recently used one is dropped. Doubled: more memory, fewer plans are made again."""
_PATIENCE = 20
"""Steps without a quick plan before a thorough search, which takes as long as many steps. Doubled: more run online."""
MAX_SCALED = 64
"""Traces of sizes that were not profiled, and known variants of sizes. Doubled: more memory, less work per step."""

Sizes = tuple[int, ...]
Solve = Callable[[Trace, int, Effort], Plan]
"""Returns a plan for a trace and a limit in bytes, or raises `BudgetError`."""
THOROUGH, QUICK = Effort(), Effort(milp_nodes=20, only_milp=True)
"""A plan for one of many sizes serves few steps, so it is made quickly if possible."""


@dataclass(eq=False)
class SizedPlan:
    """A plan and the sizes that it was made for."""

    plan: Plan
    sizes: Sizes
    trace: Trace | None = None
    """The trace that the plan was made for. None: the plan was given or comes from a cache."""
    bytes_before: int = 0
    """Bytes alive before the step, as the plan assumes."""
    followed_steps: int = 0


class SizedStep:
    """A step of certain sizes, and the predictions of plans for it."""

    def __init__(
        self,
        make: Callable[[], ScaledTrace],
        bytes_before: int,
        link: Link | None,
        costs: Sequence[CodecCost],
    ) -> None:
        """`make` returns the trace."""
        self.bytes_before = bytes_before
        self._make = make
        self._scaled: ScaledTrace | None = None
        self._predictor: Predictor | None = None
        self._link, self._costs = link, costs
        self._predictions: weakref.WeakKeyDictionary[SizedPlan, Prediction | None] = weakref.WeakKeyDictionary()
        trace = self.trace
        self.uncertain_bytes = self._whole.uncertain_bytes
        self.is_single_pass = trace.is_single_pass
        plain = self._predict.plain if self.is_single_pass else Prediction(trace.peak_bytes, trace.step_s)
        self.plain_s = plain.step_s
        """Time of the step in plain PyTorch."""
        self.own_bytes = max(1, plain.peak_bytes - bytes_before)
        """Plain peak above the bytes before the step."""

    @property
    def _whole(self) -> ScaledTrace:
        if self._scaled is None:
            self._scaled = self._make()
        return self._scaled

    @property
    def trace(self) -> Trace:
        """The trace of the step."""
        return self._whole.trace

    @property
    def _predict(self) -> Predictor:
        if self._predictor is None:
            self._predictor = Predictor(self.trace, self._link, self._costs)
        return self._predictor

    def forget_trace(self) -> None:
        """Free the trace until it is needed: its thousands of objects make garbage collection slow."""
        self._scaled = self._predictor = None

    def predict(self, sized: SizedPlan, sizes: Sizes) -> Prediction | None:
        """Return the peak and time of a plan, or None if it does not apply."""
        if not self.is_single_pass:  # a timeline: plans are made for its exact sizes
            if sized.sizes != sizes:
                return None
            peak_bytes = sized.plan.predicted_peak_bytes + self.bytes_before - sized.bytes_before
            return Prediction(peak_bytes, sized.plan.predicted_step_s)
        if sized not in self._predictions:
            try:
                self._predictions[sized] = self._predict.predict(sized.plan)
            except ArgumentError:  # it recomputes an op that cannot be replayed at this size
                self._predictions[sized] = None
        return self._predictions[sized]


class Variant:
    """Steps of a family that run the same ops."""

    def __init__(self) -> None:
        self.profiles: list[SizedTrace] = []
        self.plans: list[SizedPlan] = []
        """The most recently used one last."""
        self.infeasible_bytes = math.inf
        """The smallest plain peak, above the bytes before the step, of a step without a plan that fits."""
        self.refused_bytes = math.inf
        """The same, of a step for which no plan was found quickly."""
        self.left_in_a_row = 0
        self._waiting: list[Sizes] = []
        """The sizes of steps for which no plan was found quickly."""
        self._leaving_less: dict[Sizes, SizedTrace] = {}
        self._free: OrderedDict[Sizes, tuple[SizedPlan, int]] = OrderedDict()
        """By sizes: a plan that costs no time there, and its peak above the bytes before the step."""
        self._scaled: OrderedDict[Sizes, SizedStep] = OrderedDict()

    def add(self, profile: SizedTrace, leaving_less: SizedTrace) -> None:
        """Add a profile. It replaces one of the same sizes.

        Plans for `leaving_less` may leave less in memory for the next step.
        """
        others = [p for p in self.profiles if p.sizes != profile.sizes]
        self.profiles = [*others[-_MAX_PROFILES + 1 :], profile]
        self.plans = [sized for sized in self.plans if sized.sizes != profile.sizes]
        self._leaving_less = {p.sizes: self._leaving_less[p.sizes] for p in self.profiles[:-1]}
        self._leaving_less[profile.sizes] = leaving_less
        self._scaled.clear()
        self._free.clear()

    def discard_plans(self) -> None:
        """Forget all plans. New ones are made when they are needed."""
        self.plans.clear()
        self._free.clear()

    def needs_profile(self, sizes: Sizes, limit_bytes: int) -> bool:
        """Return whether a step of these sizes must be profiled, because the profiles do not say enough about it."""
        if any(profile.sizes == sizes for profile in self.profiles):
            return False
        if len(self.profiles) < 2:
            return True
        if len(self.profiles) >= _MAX_PROFILES:
            return False
        return self.at(sizes).uncertain_bytes > _MAX_UNCERTAIN * limit_bytes

    def at(self, sizes: Sizes) -> SizedStep:
        """Return the step of these sizes."""
        found = self._scaled.get(sizes)
        if found is None:
            profiles, bytes_before = self.profiles, self.profiles[-1].bytes_before
            found = SizedStep(lambda: scale(profiles, sizes, bytes_before), bytes_before, *self._costs())
            for step in self._scaled.values():
                step.forget_trace()
            self._scaled[sizes] = found
            while len(self._scaled) > MAX_SCALED:
                self._scaled.popitem(last=False)
        self._scaled.move_to_end(sizes)
        return found

    def _costs(self) -> tuple[Link | None, tuple[CodecCost, ...]]:
        """Return the link and the codecs of the plans, which are the same for all."""
        for sized in self.plans:
            if sized.plan.link is not None or sized.plan.codec_costs:
                return sized.plan.link, sized.plan.codec_costs
        return None, ()

    def without_cost(self, sizes: Sizes, bytes_before: int, limit_bytes: int) -> tuple[SizedPlan, int] | None:
        """Return a plan that costs no time and an upper limit on its peak, if one is known to fit.

        A plan fits if it fits sizes that are at least as large in each dimension. Small steps thus need no trace.
        """
        for known, (sized, own_bytes) in self._free.items():
            if own_bytes + bytes_before <= limit_bytes and all(map(operator.le, sizes, known)):
                self._use(sized)
                return sized, own_bytes + bytes_before
        return None

    def _use(self, sized: SizedPlan) -> None:
        """Make a plan the most recently used one."""
        self.plans.remove(sized)
        self.plans.append(sized)

    def fastest(self, sizes: Sizes, bytes_before: int, limit_bytes: int) -> tuple[SizedPlan, int] | None:
        """Return the fastest plan that fits and its peak, or None if no plan of this rung fits."""
        step = self.at(sizes)
        grown_bytes = bytes_before - step.bytes_before
        fitting = [
            (prediction, sized)
            for sized in self.plans
            if (prediction := step.predict(sized, sizes)) is not None
            and prediction.peak_bytes + grown_bytes <= limit_bytes
        ]
        if not fitting:
            return None
        best, sized = min(fitting, key=lambda found: found[0].step_s)
        costs_time = best.step_s > step.plain_s
        if costs_time and all(self.at(other.sizes).own_bytes > _RUNG * step.own_bytes for _, other in fitting):
            return None  # all were made for much larger steps
        self._use(sized)
        if not costs_time:
            self._free[sizes] = sized, best.peak_bytes - step.bytes_before
            while len(self._free) > MAX_SCALED:
                self._free.popitem(last=False)
        return sized, best.peak_bytes + grown_bytes

    def make_plan(self, sizes: Sizes, bytes_before: int, limit_bytes: int, solve: Solve, effort: Effort) -> None:
        """Make a plan for steps of these sizes. Raises `BudgetError` if none is found that fits."""
        step = self.at(sizes)
        trace = shift(step.trace, bytes_before - step.bytes_before)
        if all(profile.sizes != sizes for profile in self.profiles):
            limit_bytes -= limit_bytes // _SCALED_MARGIN
        costs = self._costs()
        try:
            plan = solve(trace, limit_bytes, effort)
        except BudgetError:
            less = self._leaving_less.get(sizes)
            if less is None or less.trace == step.trace:
                raise
            trace = shift(less.trace, bytes_before - less.bytes_before)
            plan = solve(trace, limit_bytes, effort)
        made = SizedPlan(plan, sizes, trace, bytes_before)
        others = [sized for sized in self.plans if sized.sizes != sizes]
        self.plans = [*others[-_MAX_PLANS + 1 :], made]
        self._free = OrderedDict((size, found) for size, found in self._free.items() if found[0] in self.plans)
        if self._costs() != costs:
            self._scaled.clear()  # predictions need the link and the codecs

    def attempts(self, sizes: Sizes) -> Iterator[tuple[Sizes, Effort]]:
        """Yield the sizes for which a plan is made until one fits steps of these sizes, and the efforts."""
        if len(self.profiles) < 2:
            yield sizes, THOROUGH
            return
        for wanted in dict.fromkeys((self.top_of_rung(sizes), sizes)):
            if self.at(wanted).own_bytes < self.refused_bytes:
                yield wanted, QUICK
        self._waiting.append(sizes)
        if len(self._waiting) >= _PATIENCE:
            waiting, self._waiting = self._waiting, []
            yield max(waiting, key=lambda wanted: self.at(wanted).own_bytes), THOROUGH

    def top_of_rung(self, sizes: Sizes) -> Sizes:
        """Return the largest sizes in proportion to `sizes` whose plain peak is in the same rung."""
        step = self.at(sizes)
        if not step.is_single_pass:
            return sizes
        top_bytes = _RUNG ** math.ceil(math.log(step.own_bytes, _RUNG) - 1e-9)
        constant = [len({p.sizes[i] for p in self.profiles} | {size}) == 1 for i, size in enumerate(sizes)]
        smaller, larger, best = 1.0, _RUNG, sizes
        for _ in range(_RUNG_SEARCHES):
            factor = (smaller + larger) / 2
            tried = tuple(size if fixed else round(size * factor) for size, fixed in zip(sizes, constant, strict=True))
            if self.at(tried).own_bytes <= top_bytes:
                smaller, best = factor, tried
            else:
                larger = factor
        return best
