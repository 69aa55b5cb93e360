"""Step families: steps with one signature share profiles and plans, whatever their sizes.

The sizes of a step are the dimensions of its inputs. Steps of one signature may run different ops, for example if a
mask is skipped when it is not needed. Steps with the same ops are one *variant*, with profiles and plans of its own
(`variant`). Another profile is made where the profiles leave the bytes of a step too uncertain.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .._errors import BudgetError
from ..planning.scaling import SizedTrace
from ..records import Plan
from ..reporting.fit_report import FamilyReport, Rung
from .variant import MAX_SCALED, THOROUGH, SizedPlan, Sizes, Solve, Variant

if TYPE_CHECKING:
    from ..engine.strategies.step_profile import StepProfile
    from .fitted_model import FittedModel

_MAX_VARIANTS = 4
"""Variants of a family; the least recently used one is dropped. Doubled: more memory, fewer profiles."""
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
                if effort is THOROUGH:
                    variant.infeasible_bytes = min(variant.infeasible_bytes, variant.at(wanted).own_bytes)
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
        while len(self.variant_of) > MAX_SCALED:
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
