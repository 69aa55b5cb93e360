"""The state of one fitted model. It chooses the strategy of the steps that begin with a call of the model.

Several fitted models may take part in a step. The one that is called first owns its plan. All of them count the step.
The smallest of their budgets is the limit of the step.
"""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from .._errors import BudgetError, LowtideWarning
from .._units import format_budget, format_bytes
from ..codecs import Chooser
from ..engine.memory.budget import MemoryBudget
from ..engine.memory.device_memory import DeviceMemory
from ..engine.memory.ledger import Row
from ..engine.runtime import current_runtime
from ..engine.scopes.recording_scope import make_recorder
from ..engine.strategies.online import OnlineStrategy, WithinBudget
from ..engine.strategies.planned import PlannedStrategy, StepMeter
from ..engine.strategies.profile import ProfileObserver, ProfileStrategy
from ..engine.strategies.step_profile import StepProfile
from ..planning.scaling import SizedTrace
from ..planning.solve import Effort
from ..records import Plan, Trace
from ..reporting.fit_report import FitReport
from ..stores import Store
from ..torch_compat import graph_task, memory_of, storage_key, tree_leaves
from .make_plan import planning_progress, solve_with_margin
from .plan_cache import PlanCache, key_of
from .signature import ModelState, Signature, Versions, signature_of
from .step_family import Choice, NewProfile, StepFamily
from .steps import Step, fitting_state
from .unplanned import why_unplanned
from .variant import SizedPlan, Sizes

log = logging.getLogger("lowtide")

_MAX_FAMILIES = 16
"""Step signatures remembered per model. Doubled: more memory for traces, fewer profiles of rare shapes."""
_TRUSTED_AFTER = 5
"""Steps that must follow their plan before steps run without a recorder (see `_runs_plain`)."""
_AMPLE = 0.1
"""Share of the limit that must be free for that: then a step that differs a little fits too."""
_KEPT_TIMES = 1000
"""Step times kept for the report."""


class FittedModel:
    """The plans, statistics and settings of one fitted model."""

    def __init__(
        self,
        model: nn.Module,
        limit_bytes: int,
        optimizer: torch.optim.Optimizer | None,
        store: Store | None,
        chooser: Chooser | None,
        plan: Plan | None,
        plan_cache: PlanCache | None,
        verify: bool,
    ) -> None:
        self._settings = limit_bytes, None, store, chooser, plan, plan_cache, verify
        self._plan_cache = plan_cache
        self._model = weakref.ref(model)
        self.limit_bytes = limit_bytes
        self.optimizer = optimizer
        self.store = store
        self.chooser = chooser
        self._codecs = chooser.allowed if chooser is not None else ()
        self.verify = verify
        self.families: OrderedDict[Signature, StepFamily] = OrderedDict()
        self._given_plan = plan
        self.steps = 0
        self.online_steps = 0
        self.step_seconds: list[float] = []
        self.planned_seconds: list[float] = []  # of steps that followed their plan
        self.measured_peak_bytes: int | None = None
        self.predicted_peak_bytes: int | None = None  # of the measured step
        self.planning_s = 0.0
        self.last_plan: SizedPlan | None = None

    def state_maker(self) -> Callable[[nn.Module], FittedModel]:
        """Return a function that makes the state of a copy of the model: same settings, but no optimizer and plans."""
        settings = self._settings
        return lambda model: FittedModel(model, *settings)

    @property
    def is_gone(self) -> bool:
        """Whether the model was freed."""
        return self._model() is None

    def close(self) -> None:
        """End the open step, if this model takes part in it."""
        state = fitting_state()
        if state.step is not None and self in state.step.fitted():
            state.abandon()

    # -- one step -------------------------------------------------------------------------------------

    def was_trained_since(self, versions: Versions) -> bool:
        """Return whether a parameter was written since the model had these versions.

        During `torch.func.functional_call` the model has other parameters, which do not count.
        """
        model = self._model()
        now = ModelState.of(model).versions if model is not None else {}
        return any(now.get(parameter, version) != version for parameter, version in versions.items())

    def before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is called: begin a step, or take part in the open one."""
        if torch.compiler.is_compiling():
            return
        running = fitting_state().running
        running.append((self, False))
        if not (model.training and torch.is_grad_enabled()) or graph_task() != -1 or device_of(model).type == "meta":
            return
        if any(belongs for _, belongs in running):
            return  # inside the call of another fitted model
        try:
            running[-1] = self, self._join_step(model, args, kwargs)
        except BaseException:
            running.pop()
            raise

    def after_forward(self, failed: bool) -> None:
        """The model has returned or raised."""
        if torch.compiler.is_compiling():
            return
        state = fitting_state()
        if not state.running or state.running[-1][0] is not self:
            return  # `before_forward` has raised
        _, belongs = state.running.pop()
        step = state.step
        if step is None or not belongs:
            return
        if failed:
            state.abandon()
        elif not step.may_stay_open:
            step.pause()

    def _join_step(self, model: nn.Module, args: Any, kwargs: Any) -> bool:
        """Take part in the open step, or begin one. Return whether the call belongs to a step."""
        state = fitting_state()
        step = state.step
        if step is not None and step.is_stale():
            if step.passes_done:
                state.finish()
            else:
                state.abandon()
            step = None
        recorder = current_runtime().current_recorder()
        if recorder is not None and (step is None or recorder is not step.recorder):
            return False  # inside a scope of the user
        memory = current_runtime().memory(device_of(model))
        own = ModelState.of(model)
        others = [ModelState.of(other) for other in state.models if other is not model]
        signature, sizes = signature_of(own, others, args, kwargs)
        if step is None:
            family = self._family_of(signature)
            # The first profile of a family, and one after a step that has left its plan, are worth an exact count.
            memory.recount(always=family.is_new or family.profile_next)
            bytes_before = self._count_bytes(memory, model, args, kwargs)
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            inputs = {storage_key(storage) for tensor in tensors for storage in memory_of(tensor)}
            self._look_in_cache(family, model, signature, sizes)
            step = self._start_step(family, sizes, memory, bytes_before, inputs)
            state.begin(step)
            was_off = True
        else:
            self._count_bytes(memory, model, args, kwargs)
            was_off = step.resume()
            self._limit(step)
        step.called(self, (signature, sizes), own.versions)
        if step.recorder is not None and was_off:
            step.recorder.tracker.enter(model)
        return True

    def _limit(self, step: Step) -> None:
        """Keep the step within the budget of this model too."""
        memory_budget = step.recorder.strategy.memory_budget if step.recorder is not None else None
        if memory_budget is not None:
            memory_budget.limit_bytes = min(memory_budget.limit_bytes, self.limit_bytes)

    def _start_step(
        self, family: StepFamily, sizes: Sizes, memory: DeviceMemory, bytes_before: int, inputs: Collection[int]
    ) -> Step:
        limit_bytes = min([self.limit_bytes, *(fitted.limit_bytes for fitted in family.partners)])
        choice = self._choose(family, sizes, bytes_before, limit_bytes)
        if choice.sized is not None:
            return self._start_planned(family, choice, choice.sized.plan, memory, limit_bytes)
        if not choice.is_profiled:
            memory_budget = MemoryBudget(memory, limit_bytes, self.store, self.chooser)
            recorder = make_recorder(
                OnlineStrategy(memory_budget), WithinBudget(limit_bytes), memory_budget=memory_budget
            )
            return Step(lambda step: self._finish_online(step, family, choice), recorder, unused=family.unused)
        # Steps free their inputs again and again. Other memory that the profiled step frees may be there only once.
        rows = memory.ledger.rows.copy()  # garbage collection may remove rows at any time
        others = [row for key, row in rows.items() if key not in inputs]
        return self._start_profiled(family, choice, memory, bytes_before, limit_bytes, others)

    def _choose(self, family: StepFamily, sizes: Sizes, bytes_before: int, limit_bytes: int) -> Choice:
        """Return what the step does. If no plan fits, it runs without one; the first time, warn."""

        def solve(trace: Trace, target_bytes: int, effort: Effort) -> Plan:
            started = time.perf_counter()
            try:
                with planning_progress() as say:
                    plan = solve_with_margin(trace, target_bytes, say, self.store, self._codecs, effort)
            finally:
                self.planning_s += time.perf_counter() - started
            log.info("planned in %.1f s:\n%s", time.perf_counter() - started, plan)
            return plan

        had_plans = not family.has_no_plan
        try:
            choice = family.choose(sizes, bytes_before, limit_bytes, solve)
        except BudgetError as error:
            if had_plans:
                # The online budget has just held such a step, by recomputing some values several times.
                warnings.warn(
                    "no plan fits, so the model trains under the online budget, which is slower. The smallest budget "
                    f"with a plan is {format_budget(error.smallest_bytes or 0)}. {error.explanation}",
                    LowtideWarning,
                    stacklevel=6,
                )
            return Choice(sizes)
        sized = choice.sized
        if sized is not None and sized.trace is not None and not sized.followed_steps and sized.sizes == sizes:
            key = family.cache_keys.get(sizes)
            if self._plan_cache is not None and key is not None:
                self._plan_cache.put(key, sized.plan)
        return choice

    def _start_planned(
        self, family: StepFamily, choice: Choice, plan: Plan, memory: DeviceMemory, limit_bytes: int
    ) -> Step:
        is_measured = choice.sized is not None and family.measures(choice.sized)
        if not is_measured and self._runs_plain(family, choice, plan, limit_bytes):
            return Step(lambda step: self._finish_followed(step, family, choice), n_passes=family.n_passes)
        meter = StepMeter(memory.ledger) if is_measured else None
        memory_budget = MemoryBudget(memory, limit_bytes, self.store, self.chooser)
        strategy = PlannedStrategy(
            plan,
            memory_budget,
            meter,
            current_runtime().backward.begin,
            may_differ=family.followed_steps < _TRUSTED_AFTER or family.left_plans > 0,
            may_be_shorter=family.left_plans > 0,
        )
        name = f"a plan for {format_bytes(limit_bytes)}"
        recorder = make_recorder(strategy, WithinBudget(limit_bytes), name=name)

        def finish(step: Step) -> None:
            self._finish_planned(step, strategy, family, choice)

        return Step(finish, recorder, strategy, n_passes=family.n_passes, unused=family.unused)

    def _start_profiled(
        self,
        family: StepFamily,
        choice: Choice,
        memory: DeviceMemory,
        bytes_before: int,
        limit_bytes: int,
        others: Collection[Row],
    ) -> Step:
        strategy = profile_strategy(memory, limit_bytes, self.store, self.chooser)
        memory_budget = strategy.memory_budget
        memory_budget.make_room_to_start()
        recorder = make_recorder(strategy, WithinBudget(limit_bytes), memory_budget=memory_budget, verify=self.verify)

        def finish(step: Step) -> None:
            freed_bytes = sum(row.nbytes for row in others if row() is None)
            self._finish_profiled(step, strategy, family, choice, bytes_before, freed_bytes)

        return Step(finish, recorder, unused=family.unused)

    def _runs_plain(self, family: StepFamily, choice: Choice, plan: Plan, limit_bytes: int) -> bool:
        """Return whether steps need no recorder: everything is kept, and earlier steps followed their plan."""
        spare = limit_bytes - choice.predicted_peak_bytes
        trusted = family.followed_steps >= _TRUSTED_AFTER and family.left_plans == 0
        keeps_all = not (plan.recomputed or plan.offload or plan.copies)
        return trusted and keeps_all and spare >= _AMPLE * limit_bytes

    # -- after backward -------------------------------------------------------------------------------

    def _finish_online(self, step: Step, family: StepFamily, choice: Choice) -> None:
        family.step_ended(choice.sizes, was_planned=False)
        for fitted in self._participants(step):
            fitted.step_ended(step, None)

    def _finish_profiled(
        self,
        step: Step,
        strategy: ProfileStrategy,
        family: StepFamily,
        choice: Choice,
        bytes_before: int,
        freed_bytes: int,
    ) -> None:
        self._finish_online(step, family, choice)
        if not step.is_trusted:
            log.info("the end of the step was found too late: the next one will be profiled")
            family.profile_next = True
            return
        if family.is_too_short(_ops_of(step)):
            log.info("steps differ in length, and this one is not the longest: the next one will be profiled")
            return
        model = self._model()
        trace = strategy.trace(device_of(model).type if model is not None else "cpu")
        family.new_profile = NewProfile(SizedTrace(choice.sizes, trace, bytes_before), strategy.profile, freed_bytes)
        family.n_passes = step.passes_done
        family.partners = weakref.WeakSet(fitted for fitted in self._participants(step) if fitted is not self)

    def _finish_followed(self, step: Step, family: StepFamily, choice: Choice) -> None:
        family.step_ended(choice.sizes, was_planned=True)
        family.followed(choice, was_shorter=step.planned is not None and step.planned.ops_left_out > 0)
        for fitted in self._participants(step):
            fitted.step_ended(step, choice.sized)

    def _participants(self, step: Step) -> list[FittedModel]:
        return [fitted for fitted in step.fitted() if isinstance(fitted, FittedModel)]

    def step_ended(self, step: Step, followed: SizedPlan | None) -> None:
        """Count a step in which this model took part, and the plan that it has followed, if any."""
        self.steps += 1
        self.step_seconds.append(time.perf_counter() - step.started_s)
        del self.step_seconds[:-_KEPT_TIMES]
        if followed is not None:
            self.last_plan = followed
            self.planned_seconds.append(self.step_seconds[-1])
            del self.planned_seconds[:-_KEPT_TIMES]
        else:
            self.online_steps += 1

    def _finish_planned(self, step: Step, strategy: PlannedStrategy, family: StepFamily, choice: Choice) -> None:
        if strategy.left_at is not None:
            self._finish_online(step, family, choice)
            family.left(choice, _ops_of(step))
            log.info("a step differed from its plan at op %s", strategy.left_at)
            return
        self._finish_followed(step, family, choice)
        if strategy.meter is None or strategy.ops_left_out:
            return
        for fitted in self._participants(step):
            fitted.measured_peak_bytes = strategy.meter.peak_bytes
            fitted.predicted_peak_bytes = choice.predicted_peak_bytes
        excess_bytes = strategy.meter.peak_bytes - strategy.memory_budget.limit_bytes
        if excess_bytes > 0:
            family.exceeded(choice, excess_bytes)

    # -- plans ----------------------------------------------------------------------------------------

    def _family_of(self, signature: Signature) -> StepFamily:
        family = self.families.get(signature)
        if family is None:
            family = self.families[signature] = StepFamily(given_for_all=self._given_plan)
            while len(self.families) > _MAX_FAMILIES:
                self.families.popitem(last=False)
        self.families.move_to_end(signature)
        return family

    def _look_in_cache(self, family: StepFamily, model: nn.Module, signature: Signature, sizes: Sizes) -> None:
        """Load the plan for these sizes from the cache, if there is one."""
        if self._plan_cache is None or sizes in family.cache_keys:
            return
        tier = self.store.tier if self.store is not None else None
        codecs = [codec.name for codec in self._codecs]
        key = family.cache_keys[sizes] = key_of(model, (signature, sizes, self.limit_bytes, tier, codecs))
        if self._given_plan is None and (plan := self._plan_cache.get(key)) is not None:
            family.given[sizes] = SizedPlan(plan, sizes)

    def _count_bytes(self, memory: DeviceMemory, model: nn.Module, args: Any, kwargs: Any) -> int:
        """Return the bytes alive before the call."""
        if fitting_state().step is None or fitting_state().is_optimizing:
            memory.ledger.count_recent()  # what the user's code or an optimizer has made since the last step
        memory.ledger.count_module(model)
        memory.ledger.count_all(tree_leaves((args, kwargs)))
        if self.optimizer is not None:
            current_runtime().count_optimizer(self.optimizer)
        return memory.ledger.live_bytes + fitting_state().left_over.evicted_bytes()

    def why_unplanned(self) -> str | None:
        """Return why no step has followed a plan so far, or None if one has or there was no step."""
        if self.steps > self.online_steps:
            return None
        return why_unplanned(self.families.keys(), self.families.values(), self.steps)

    def report(self) -> FitReport:
        """Return the report of all steps so far."""
        last = self.last_plan
        plan = last.plan if last is not None else self._given_plan
        return FitReport(
            budget_bytes=self.limit_bytes,
            plan=plan,
            predicted_peak_bytes=self.predicted_peak_bytes or (plan.predicted_peak_bytes if plan is not None else None),
            measured_peak_bytes=self.measured_peak_bytes,
            steps=self.steps,
            online_steps=self.online_steps,
            step_signatures=len(self.families),
            step_seconds=tuple(self.step_seconds),
            planned_seconds=tuple(self.planned_seconds),
            planning_s=self.planning_s,
            trace=last.trace if last is not None else None,
            families=tuple(family.report() for family in self.families.values()),
            why_unplanned=self.why_unplanned(),
        )


def profile_strategy(
    memory: DeviceMemory, limit_bytes: int, store: Store | None, chooser: Chooser | None
) -> ProfileStrategy:
    """Return a strategy that profiles a step under the online budget."""
    profile = StepProfile(fitting_state().left_over)
    memory_budget = MemoryBudget(memory, limit_bytes, store, chooser, ProfileObserver(profile))
    return ProfileStrategy(OnlineStrategy(memory_budget), profile)


def _ops_of(step: Step) -> int:
    """Return the number of ops that were recorded in a step."""
    if step.recorder is None:
        return 0
    return step.recorder.context.counts.ops - (step.planned.ops_left_out if step.planned is not None else 0)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, or the CPU."""
    parameter = next(model.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")
