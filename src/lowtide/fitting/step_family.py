"""Step families: steps with one signature share profiles and plans, whatever their sizes.

The sizes of a step are the dimensions of its inputs. The first two sizes are profiled. For other sizes a trace is made
from the profiles (`planning.scaling`), and the fastest plan that fits is chosen by simulation. If all plans that fit
were made for much larger steps, a new one is made. One plan serves a *rung*: all steps whose plain peaks are at most a
quarter apart. Another profile is made where the profiles leave the bytes of a step too uncertain.

Steps of one signature may run different ops, for example if a mask is skipped when it is not needed. Steps with the
same ops are one *variant*, with profiles and plans of its own.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .._errors import ArgumentError, BudgetError
from ..planning.predict import Prediction, Predictor
from ..planning.scaling import ScaledTrace, SizedTrace, scale
from ..planning.solve import Effort
from ..records import Plan, Trace
from ..records.codec_cost import CodecCost
from ..records.link import Link
from ..reporting.fit_report import FamilyReport, Rung
from .make_plan import shift

if TYPE_CHECKING:
    from ..engine.strategies.step_profile import StepProfile
    from .fitted_model import FittedModel

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
_MAX_VARIANTS = 4
"""Variants of a family; the least recently used one is dropped. Doubled: more memory, fewer profiles."""
_MAX_SCALED = 64
"""Traces of sizes that were not profiled, and known variants of sizes. Doubled: more memory, less work per step."""
_MAX_LEFT = 3
"""Steps in a row that may leave the plans of a variant before it runs without plans. Doubled: more profiles."""
_MAX_SEEN = 10_000
"""Sizes remembered for the report."""
_MAX_SHORT_PROFILES = 8
"""Profiles discarded in a family whose steps differ in length, because they have fewer ops than a step that left its
plan. Doubled: more online steps where the longest steps are rare, and fewer plans that are left again."""
_MEASURED_STEPS = 2
"""Steps measured with each plan. Doubled: two more steps with a meter."""
_MEASURED_EVERY = 100
"""Later, one step in 100 is measured. Doubled: errors of the prediction are found later."""
_LEFT_OVER = 0.01
"""Share of the limit that a step may leave in memory without a second profile. Doubled: less exact predictions."""

Sizes = tuple[int, ...]
Solve = Callable[[Trace, int, Effort], Plan]
"""Returns a plan for a trace and a limit in bytes, or raises `BudgetError`."""
_THOROUGH, _QUICK = Effort(), Effort(milp_nodes=20, only_milp=True)
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


@dataclass(frozen=True)
class Choice:
    """What a step does: it follows a plan, or runs without one, profiled or not."""

    sizes: Sizes
    sized: SizedPlan | None = None
    predicted_peak_bytes: int = 0
    is_profiled: bool = False
    variant: Variant | None = None
    """The variant of the plan. None: the plan was given, or there is none."""

    @property
    def plan(self) -> Plan | None:
        """The plan to follow."""
        return self.sized.plan if self.sized is not None else None


class _Scaled:
    """A step of certain sizes, and the predictions of plans for it."""

    def __init__(self, scaled: ScaledTrace, bytes_before: int, link: Link | None, costs: Sequence[CodecCost]) -> None:
        self.scaled = scaled
        self.bytes_before = bytes_before
        self.predictor = Predictor(scaled.trace, link, costs) if scaled.trace.is_single_pass else None
        plain_bytes = self.predictor.plain.peak_bytes if self.predictor is not None else scaled.trace.peak_bytes
        self.own_bytes = max(1, plain_bytes - bytes_before)
        """Plain peak above the bytes before the step."""
        self._predictions: weakref.WeakKeyDictionary[SizedPlan, Prediction | None] = weakref.WeakKeyDictionary()

    @property
    def plain_s(self) -> float:
        """Time of the step in plain PyTorch."""
        return self.predictor.plain.step_s if self.predictor is not None else self.scaled.trace.step_s

    def predict(self, sized: SizedPlan, sizes: Sizes) -> Prediction | None:
        """Return the peak and time of a plan, or None if it does not apply."""
        if self.predictor is None:  # a timeline: plans are made for its exact sizes
            if sized.sizes != sizes:
                return None
            peak_bytes = sized.plan.predicted_peak_bytes + self.bytes_before - sized.bytes_before
            return Prediction(peak_bytes, sized.plan.predicted_step_s)
        if sized not in self._predictions:
            try:
                self._predictions[sized] = self.predictor.predict(sized.plan)
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
        self._leaving_less: dict[Sizes, SizedTrace] = {}
        self._free: OrderedDict[Sizes, tuple[SizedPlan, int]] = OrderedDict()
        """By sizes: a plan that costs no time there, and its peak above the bytes before the step."""
        self._scaled: OrderedDict[Sizes, _Scaled] = OrderedDict()

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
        return self.at(sizes).scaled.uncertain_bytes > _MAX_UNCERTAIN * limit_bytes

    def at(self, sizes: Sizes) -> _Scaled:
        """Return the step of these sizes."""
        found = self._scaled.get(sizes)
        if found is None:
            bytes_before = self.profiles[-1].bytes_before
            scaled = scale(self.profiles, sizes, bytes_before)
            found = self._scaled[sizes] = _Scaled(scaled, bytes_before, *self._costs())
            while len(self._scaled) > _MAX_SCALED:
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
            while len(self._free) > _MAX_SCALED:
                self._free.popitem(last=False)
        return sized, best.peak_bytes + grown_bytes

    def make_plan(self, sizes: Sizes, bytes_before: int, limit_bytes: int, solve: Solve, effort: Effort) -> None:
        """Make a plan for steps of these sizes. Raises `BudgetError` if none is found that fits."""
        step = self.at(sizes)
        trace = shift(step.scaled.trace, bytes_before - step.bytes_before)
        if all(profile.sizes != sizes for profile in self.profiles):
            limit_bytes -= limit_bytes // _SCALED_MARGIN
        costs = self._costs()
        try:
            plan = solve(trace, limit_bytes, effort)
        except BudgetError:
            less = self._leaving_less.get(sizes)
            if less is None or less.trace == step.scaled.trace:
                raise
            trace = shift(less.trace, bytes_before - less.bytes_before)
            plan = solve(trace, limit_bytes, effort)
        made = SizedPlan(plan, sizes, trace, bytes_before)
        others = [sized for sized in self.plans if sized.sizes != sizes]
        self.plans = [*others[-_MAX_PLANS + 1 :], made]
        self._free = OrderedDict((size, found) for size, found in self._free.items() if found[0] in self.plans)
        if self._costs() != costs:
            self._scaled.clear()  # predictions need the link and the codecs

    def attempts(self, sizes: Sizes) -> list[tuple[Sizes, Effort]]:
        """Return the sizes for which a plan is made until one fits steps of these sizes, and the efforts."""
        if len(self.profiles) < 2:
            return [(sizes, _THOROUGH)]
        quick = [
            s for s in dict.fromkeys((self.top_of_rung(sizes), sizes)) if self.at(s).own_bytes < self.refused_bytes
        ]
        return [*((wanted, _QUICK) for wanted in quick), (sizes, _THOROUGH)]

    def top_of_rung(self, sizes: Sizes) -> Sizes:
        """Return the largest sizes in proportion to `sizes` whose plain peak is in the same rung."""
        step = self.at(sizes)
        if step.predictor is None:
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


@dataclass(frozen=True)
class NewProfile:
    """The profile of the last step. Whether it is of use shows when the next step begins."""

    sized: SizedTrace
    profile: StepProfile
    freed_bytes: int
    """Bytes that were alive before the step and freed during it."""


@dataclass
class StepFamily:
    """Steps with one signature: variants, plans, and how well they were followed."""

    given: dict[Sizes, SizedPlan] = field(default_factory=dict)
    """Plans from the user or a cache, by sizes."""
    cache_keys: dict[Sizes, str] = field(default_factory=dict)
    """Names in the plan cache, by sizes."""
    given_for_all: Plan | None = None
    """A plan from the user, for any sizes."""
    variants: list[Variant] = field(default_factory=list)
    """The most recently used one last."""
    margin_bytes: int = 0
    """Bytes by which plans exceeded the limit."""
    followed_steps: int = 0
    left_plans: int = 0
    longest_ops: int = 0
    """Ops of the longest step that left its plan."""
    short_profiles: int = 0
    """Profiles that were discarded: another step, with more ops, had left its plan."""
    has_no_plan: bool = False
    """Whether no plan fits some of the steps."""
    profile_next: bool = False
    """Whether the next step is profiled, because a step has left its plan."""
    new_profile: NewProfile | None = None
    profiled_again: bool = False
    """Whether a profile was discarded because an earlier step left other memory than before the profiled step."""
    n_passes: int | None = None
    """Backward passes of the step that was profiled last."""
    partners: weakref.WeakSet[FittedModel] = field(default_factory=weakref.WeakSet)
    """The other fitted models that took part in the profiled step."""
    unused: set[tuple[Any, int]] = field(default_factory=set)
    """Saved tensors that no backward pass unpacks (see `steps`)."""
    variant_of: OrderedDict[Sizes, Variant] = field(default_factory=OrderedDict)
    """The variant of the last sizes."""
    steps: int = 0
    unplanned_steps: int = 0
    sizes_seen: set[Sizes] = field(default_factory=set)
    """At most `_MAX_SEEN`."""

    @property
    def is_new(self) -> bool:
        """Whether no step was profiled yet."""
        return not self.variants and self.new_profile is None

    @property
    def plans(self) -> list[SizedPlan]:
        """All plans that were made."""
        return [sized for variant in self.variants for sized in variant.plans]

    def step_ended(self, sizes: Sizes, *, was_planned: bool) -> None:
        """Count a step."""
        self.steps += 1
        self.unplanned_steps += not was_planned
        if len(self.sizes_seen) < _MAX_SEEN:
            self.sizes_seen.add(sizes)

    def report(self) -> FamilyReport:
        """Return what the family has done so far."""
        return FamilyReport(
            steps=self.steps,
            unplanned_steps=self.unplanned_steps,
            sizes=tuple(sorted(self.sizes_seen)),
            variants=len(self.variants),
            profiled=tuple(profile.sizes for variant in self.variants for profile in variant.profiles),
            rungs=tuple(
                Rung(sized.sizes, sized.plan.predicted_peak_bytes, sized.followed_steps) for sized in self.plans
            ),
        )

    def choose(self, sizes: Sizes, bytes_before: int, limit_bytes: int, solve: Solve) -> Choice:
        """Return what a step of these sizes does. `solve` makes a plan if one is needed.

        Raises `BudgetError` if no plan fits. The step then runs without a plan, and so do steps that are as large.
        """
        self._use_new_profile(bytes_before, limit_bytes)
        variant = self._variant_for(sizes)
        if variant is None:
            if self.given_for_all is not None and sizes not in self.given:
                self.given[sizes] = SizedPlan(self.given_for_all, sizes)
            given = self.given.get(sizes)
            if given is not None:
                return Choice(sizes, given, given.plan.predicted_peak_bytes)
        if variant is not None and not self.profile_next and variant.left_in_a_row < _MAX_LEFT:
            found = variant.without_cost(sizes, bytes_before, limit_bytes - self.margin_bytes)
            if found is not None and not self.measures(found[0]):
                return Choice(sizes, *found, variant=variant)
        if variant is None or self.profile_next or variant.needs_profile(sizes, limit_bytes):
            self.profile_next = False
            return Choice(sizes, is_profiled=True)
        return self._choose_plan(variant, sizes, bytes_before, limit_bytes - self.margin_bytes, solve)

    def _choose_plan(self, variant: Variant, sizes: Sizes, bytes_before: int, limit_bytes: int, solve: Solve) -> Choice:
        """Return the plan of a step whose bytes are known well enough."""
        step = variant.at(sizes)
        if step.own_bytes >= variant.infeasible_bytes or variant.left_in_a_row >= _MAX_LEFT:
            return Choice(sizes, variant=variant)
        found = variant.fastest(sizes, bytes_before, limit_bytes)
        for wanted, effort in variant.attempts(sizes) if found is None else ():
            try:
                variant.make_plan(wanted, bytes_before, limit_bytes, solve, effort)
            except BudgetError:
                variant.refused_bytes = min(variant.refused_bytes, variant.at(wanted).own_bytes)
                if effort is _THOROUGH:
                    variant.infeasible_bytes = min(variant.infeasible_bytes, step.own_bytes)
                    self.has_no_plan = True
                    raise
            found = variant.fastest(sizes, bytes_before, limit_bytes)
            if found is not None:
                break
        if found is None:
            return Choice(sizes, variant=variant)
        sized, peak_bytes = found
        return Choice(sizes, sized, peak_bytes, variant=variant)

    def measures(self, sized: SizedPlan) -> bool:
        """Return whether the peak of the next step with this plan is measured. Its prediction must be exact."""
        return sized.followed_steps < _MEASURED_STEPS or self.followed_steps % _MEASURED_EVERY == 0

    def _variant_for(self, sizes: Sizes) -> Variant | None:
        """Return the variant that a step of these sizes probably has: the one before, or the longest if they differ.

        A step that leaves out ops of its plan can follow it. A step with more ops cannot.
        """
        if self.left_plans > 1:
            return max(self.variants, key=lambda variant: len(variant.profiles[0].trace.ops), default=None)
        return self.variant_of.get(sizes) or (self.variants[-1] if self.variants else None)

    def is_too_short(self, n_ops: int) -> bool:
        """Return whether a profile of a step with `n_ops` ops is discarded, because other steps are longer."""
        if self.left_plans <= 1 or n_ops >= self.longest_ops or self.short_profiles >= _MAX_SHORT_PROFILES:
            return False
        self.short_profiles += 1
        self.profile_next = True
        return True

    def _use_new_profile(self, bytes_before: int, limit_bytes: int) -> None:
        """Add the profile of the last step to the variant with its structure, unless memory was different before it.

        Such memory may be outputs that user code still holds. The trace shows when it is freed, for the memory that
        there was. An example is a step with two models: before the second one is profiled, a profile of the first one
        has left its values, and later only what a plan keeps.
        """
        new, self.new_profile = self.new_profile, None
        if new is None:
            return
        whole = new.sized.trace
        sized = replace(new.sized, trace=new.profile.keep_left_over(whole))
        leaving_less = replace(new.sized, trace=new.profile.keep_left_over(whole, only_of_sources=True))
        freed_bytes = min(new.freed_bytes, abs(bytes_before - sized.bytes_before))
        if not self.profiled_again and max(new.profile.own_bytes, freed_bytes) > _LEFT_OVER * limit_bytes:
            self.profiled_again = self.profile_next = True
            return
        structure = sized.trace.structure
        same = [v for v in self.variants if v.profiles[0].trace.structure == structure]
        variant = same[0] if same else Variant()
        variant.add(sized, leaving_less)
        others = [v for v in self.variants if v is not variant]
        self.variants = [*others[-_MAX_VARIANTS + 1 :], variant]
        self.variant_of[sized.sizes] = variant
        while len(self.variant_of) > _MAX_SCALED:
            self.variant_of.popitem(last=False)

    def followed(self, choice: Choice, *, was_shorter: bool) -> None:
        """A step has followed its plan, or a part of it."""
        if choice.variant is not None:
            choice.variant.left_in_a_row = 0
        if was_shorter:
            return
        self.followed_steps += 1
        if choice.sized is not None:
            choice.sized.followed_steps += 1

    def left(self, choice: Choice, n_ops: int) -> None:
        """A step of `n_ops` ops differed from its plan. Its variant and plans are kept. The next step is profiled."""
        self.left_plans += 1
        self.longest_ops = max(self.longest_ops, n_ops)
        self.variant_of.pop(choice.sizes, None)
        if choice.variant is None:
            self._discard_given(choice)
            return
        choice.variant.left_in_a_row += 1
        self.profile_next = choice.variant.left_in_a_row < _MAX_LEFT

    def exceeded(self, choice: Choice, excess_bytes: int) -> None:
        """A step that followed its plan exceeded the limit. New plans leave a margin."""
        if choice.variant is None:
            self._discard_given(choice)  # it is replaced by a plan for this machine
            return
        self.margin_bytes += excess_bytes
        choice.variant.discard_plans()

    def _discard_given(self, choice: Choice) -> None:
        self.given_for_all = None
        self.given.pop(choice.sizes, None)
