"""The state of one fitted model. It chooses the strategy of the next step and evaluates the last one."""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from .._errors import BudgetError, LowtideWarning
from .._units import format_bytes
from ..codecs import Chooser
from ..engine.memory.budget import MemoryBudget
from ..engine.memory.device_memory import DeviceMemory
from ..engine.runtime import current_runtime
from ..engine.scopes.recording_scope import make_recorder
from ..engine.strategies.online import OnlineStrategy, WithinBudget
from ..engine.strategies.planned import PlannedStrategy, StepMeter
from ..engine.strategies.profile import ProfileObserver, ProfileStrategy
from ..engine.strategies.step_profile import StepProfile
from ..records import Plan
from ..reporting.fit_report import FitReport
from ..stores import Store
from ..torch_compat import tree_leaves
from .families import StepFamily, signature_of
from .make_plan import planning_progress, shift, solve_with_margin
from .plan_cache import PlanCache, key_of
from .steps import Step, fitting_state

log = logging.getLogger("lowtide")

_MAX_FAMILIES = 16
"""Step signatures remembered per model. Doubled: more memory for traces, fewer profiles of rare shapes."""
_MEASURED_STEPS = 2
"""Steps measured after a plan is made. Doubled: two more steps with a meter."""
_MEASURED_EVERY = 100
"""Later, one step in 100 is measured. Doubled: errors of the prediction are found later."""
_TRUSTED_AFTER = 5
"""Steps that must follow their plan before steps run without a recorder (see `_runs_plain`)."""
_AMPLE = 0.1
"""Share of the limit that must be free for that: then a step that differs a little fits too."""
_MAX_LEFT_PLANS = 3
"""Plans that a family may leave before it stays online."""
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
        self._plan_cache = plan_cache
        self._model = weakref.ref(model)
        self.limit_bytes = limit_bytes
        self.optimizer = optimizer
        self.store = store
        self.chooser = chooser
        self._codecs = chooser.allowed if chooser is not None else ()
        self.verify = verify
        self.families: OrderedDict[Any, StepFamily] = OrderedDict()
        self._given_plan = plan
        self.steps = 0
        self.online_steps = 0
        self.step_seconds: list[float] = []
        self.planned_seconds: list[float] = []  # of steps that followed their plan
        self.measured_peak_bytes: int | None = None
        self.predicted_peak_bytes: int | None = None  # of the measured step
        self.planning_s = 0.0
        self.last_family: StepFamily | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the model was freed."""
        return self._model() is None

    def close(self) -> None:
        """End the open steps."""
        state = fitting_state()
        for step in state.steps_of(self):
            step.end_forward()
            state.remove(step)

    # -- one step -------------------------------------------------------------------------------------

    def before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is called: begin a step, unless the call belongs to an open one."""
        if not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        state = fitting_state()
        for step in state.steps_of_thread():
            if step.owner is self and not step.is_needed:  # its graph was freed without a backward pass
                step.end_forward()
                state.remove(step)
        if current_runtime().current_recorder() is not None:
            return
        memory = current_runtime().memory(device_of(model))
        family = self._family_of(model, args, kwargs)
        bytes_before = self._count_bytes(memory, model, args, kwargs)
        step = self._start_step(family, memory, bytes_before)
        state.add(step)
        if step.recorder is not None:
            step.recorder.tracker.enter(model)

    def after_forward(self, failed: bool) -> None:
        """The model has returned or raised."""
        state = fitting_state()
        for step in state.steps_of(self):
            if not step.is_forward:
                continue
            if failed or not step.may_stay_open:
                step.end_forward()
            if failed:
                state.remove(step)

    def _start_step(self, family: StepFamily, memory: DeviceMemory, bytes_before: int) -> Step:
        plan = self._plan_for(family, bytes_before)
        if plan is not None:
            return self._start_planned(family, plan, memory)
        if family.online:
            memory_budget = MemoryBudget(memory, self.limit_bytes, self.store, self.chooser)
            recorder = make_recorder(
                OnlineStrategy(memory_budget), WithinBudget(self.limit_bytes), memory_budget=memory_budget
            )
            return Step(self, lambda step: self._finish_online(step, family), recorder)
        return self._start_profiled(family, memory, bytes_before)

    def _start_planned(self, family: StepFamily, plan: Plan, memory: DeviceMemory) -> Step:
        followed = family.followed_steps
        is_measured = followed < _MEASURED_STEPS or followed % _MEASURED_EVERY == 0
        if not is_measured and self._runs_plain(family, plan):
            return Step(self, lambda step: self._finish_followed(step, family))
        meter = StepMeter(memory.ledger) if is_measured else None
        memory_budget = MemoryBudget(memory, self.limit_bytes, self.store, self.chooser)
        strategy = PlannedStrategy(plan, memory_budget, meter, current_runtime().backward.begin)
        name = f"a plan for {format_bytes(self.limit_bytes)}"
        recorder = make_recorder(strategy, WithinBudget(self.limit_bytes), name=name)
        return Step(self, lambda step: self._finish_planned(step, strategy, family), recorder, strategy)

    def _start_profiled(self, family: StepFamily, memory: DeviceMemory, bytes_before: int) -> Step:
        strategy = profile_strategy(memory, self.limit_bytes, self.store, self.chooser)
        memory_budget = strategy.memory_budget
        memory_budget.make_room_to_start()
        recorder = make_recorder(
            strategy, WithinBudget(self.limit_bytes), memory_budget=memory_budget, verify=self.verify
        )
        return Step(
            self, lambda step: self._finish_profiled(step, strategy, family), recorder, bytes_before=bytes_before
        )

    def _runs_plain(self, family: StepFamily, plan: Plan) -> bool:
        """Return whether steps need no recorder: everything is kept, and earlier steps followed their plan."""
        spare = self.limit_bytes - plan.predicted_peak_bytes - family.grown_bytes
        trusted = family.followed_steps >= _TRUSTED_AFTER and family.left_plans == 0
        keeps_all = not (plan.recomputed or plan.offload or plan.copies)
        return trusted and keeps_all and spare >= _AMPLE * self.limit_bytes

    # -- after backward -------------------------------------------------------------------------------

    def _count_step(self, step: Step, family: StepFamily) -> None:
        self.steps += 1
        self.last_family = family
        self.step_seconds.append(time.perf_counter() - step.started_s)
        del self.step_seconds[:-_KEPT_TIMES]

    def _finish_online(self, step: Step, family: StepFamily) -> None:
        self._count_step(step, family)
        self.online_steps += 1

    def _finish_profiled(self, step: Step, strategy: ProfileStrategy, family: StepFamily) -> None:
        self._finish_online(step, family)
        strategy.profile.ended()
        model = self._model()
        device = device_of(model).type if model is not None else "cpu"
        family.trace = strategy.trace(device)
        family.bytes_before = step.bytes_before

    def _finish_followed(self, step: Step, family: StepFamily) -> None:
        self._count_step(step, family)
        family.followed_steps += 1
        self.planned_seconds.append(self.step_seconds[-1])
        del self.planned_seconds[:-_KEPT_TIMES]

    def _finish_planned(self, step: Step, strategy: PlannedStrategy, family: StepFamily) -> None:
        if strategy.left_at is not None:
            self._finish_online(step, family)
            family.left_plans += 1
            family.plan = family.trace = None
            family.online = family.left_plans >= _MAX_LEFT_PLANS
            log.info("a step differed from its plan at op %s: it will be profiled again", strategy.left_at)
            return
        self._finish_followed(step, family)
        if strategy.meter is None:
            return
        self.measured_peak_bytes = strategy.meter.peak_bytes
        assert family.plan is not None
        self.predicted_peak_bytes = family.plan.predicted_peak_bytes + family.grown_bytes
        excess = strategy.meter.peak_bytes - self.limit_bytes
        if excess > 0:  # plan with a margin; a plan that was given is replaced by one for this machine
            family.margin_bytes += excess if family.trace is not None else 0
            family.plan = None

    # -- plans ----------------------------------------------------------------------------------------

    def _plan_for(self, family: StepFamily, bytes_before: int) -> Plan | None:
        """Return the plan for a step that starts with `bytes_before` live bytes, or None if there is none yet."""
        if family.plan is not None:
            family.grown_bytes = bytes_before - family.planned_for_bytes if family.trace is not None else 0
            if family.plan.predicted_peak_bytes + family.grown_bytes <= self.limit_bytes - family.margin_bytes:
                return family.plan
        if family.trace is None or family.online:
            return None
        started = time.perf_counter()
        shifted = shift(family.trace, bytes_before - family.bytes_before)
        try:
            with planning_progress() as say:
                limit = self.limit_bytes - family.margin_bytes
                family.plan = solve_with_margin(shifted, limit, say, self.store, self._codecs)
        except BudgetError as error:
            # The online budget has just held the step, by recomputing some values several times.
            family.online = True
            warnings.warn(
                f"no plan fits, so the model trains under the online budget, which is slower. {error}",
                LowtideWarning,
                stacklevel=5,
            )
            return None
        finally:
            self.planning_s += time.perf_counter() - started
        if self._plan_cache is not None:
            self._plan_cache.put(family.key, family.plan)
        family.planned_for_bytes = bytes_before
        family.grown_bytes = 0
        family.followed_steps = 0
        log.info("planned in %.1f s:\n%s", time.perf_counter() - started, family.plan)
        return family.plan

    def _family_of(self, model: nn.Module, args: Any, kwargs: Any) -> StepFamily:
        signature = signature_of(model, args, kwargs)
        family = self.families.get(signature)
        if family is None:
            family = self.families[signature] = StepFamily(plan=self._given_plan)
            if self._plan_cache is not None:
                tier = self.store.tier if self.store is not None else None
                codecs = [codec.name for codec in self._codecs]
                family.key = key_of(model, (signature, self.limit_bytes, tier, codecs))
                family.plan = family.plan or self._plan_cache.get(family.key)
            while len(self.families) > _MAX_FAMILIES:
                self.families.popitem(last=False)
        self.families.move_to_end(signature)
        return family

    def _count_bytes(self, memory: DeviceMemory, model: nn.Module, args: Any, kwargs: Any) -> int:
        """Return the bytes alive before the step."""
        memory.recount()
        memory.ledger.count_module(model)
        memory.ledger.count_all(tree_leaves((args, kwargs)))
        if self.optimizer is not None:
            current_runtime().count_optimizer(self.optimizer)
        return memory.ledger.live_bytes

    def report(self) -> FitReport:
        """Return the report of all steps so far."""
        family = self.last_family
        plan = family.plan if family is not None else self._given_plan
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
            trace=family.planned_trace() if family is not None else None,
        )


def profile_strategy(
    memory: DeviceMemory, limit_bytes: int, store: Store | None, chooser: Chooser | None
) -> ProfileStrategy:
    """Return a strategy that profiles a step under the online budget."""
    profile = StepProfile()
    memory_budget = MemoryBudget(memory, limit_bytes, store, chooser, ProfileObserver(profile))
    return ProfileStrategy(OnlineStrategy(memory_budget), profile)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, or the CPU."""
    parameter = next(model.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")
