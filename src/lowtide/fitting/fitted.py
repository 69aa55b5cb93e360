"""What `fit` knows about one model, and how it decides what records the next step."""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .._errors import BudgetError, LowtideWarning
from .._units import format_bytes
from ..codecs import Chooser
from ..engine import scope
from ..engine.attention import Attention, Learner
from ..engine.budgeting import BudgetedRecorder, WithinBudget, count_state, count_what_is_there
from ..engine.modules import Whereabouts
from ..engine.planned import Gauge, PlannedRecorder
from ..engine.room import LEDGER, Room
from ..engine.stretches import Stretches
from ..engine.tape import Tape
from ..engine.tracing import ProfilingRoom, TracingRecorder
from ..planning import Plan
from ..reporting.fit_report import FitReport
from ..stores import Store
from . import steps
from .kinds import Kind, signature_of
from .shelf import PlanShelf, key_of
from .solving import planning_progress, shift, solve_with_caution
from .steps import Step

log = logging.getLogger("lowtide")

_MOST_KINDS = 16  # of steps, for each model
_MEASURED_STEPS = 2  # after a plan is made
_MEASURED_EVERY = 100
_TRUSTED_AFTER = 5  # steps that went as planned, none differing: see `_is_best_left_alone`
_AMPLE = 0.1  # of the limit left free: then a step that differs a little fits too
_PATIENCE = 3  # plans that a kind of step may leave before it stays online


class Fitted:
    """What `fit` knows about one model."""

    def __init__(
        self,
        model: nn.Module,
        limit_bytes: int,
        optimizer: torch.optim.Optimizer | None,
        store: Store | None,
        chooser: Chooser | None,
        plan: Plan | None,
        shelf: PlanShelf | None,
        verify: bool,
    ) -> None:
        self._shelf = shelf
        self._model = weakref.ref(model)
        self.limit_bytes = limit_bytes
        self.optimizer = optimizer
        self.store = store
        self.chooser = chooser
        self._codecs = chooser.allowed if chooser is not None else ()
        self.verify = verify
        self.kinds: OrderedDict[Any, Kind] = OrderedDict()
        self._given_plan = plan
        self.steps = 0
        self.online_steps = 0
        self.step_seconds: list[float] = []
        self.planned_seconds: list[float] = []  # of those that went as planned
        self.measured_peak_bytes: int | None = None
        self.predicted_peak_bytes: int | None = None  # of the step that was measured
        self.planning_s = 0.0
        self.last_kind: Kind | None = None

    @property
    def is_gone(self) -> bool:
        """Whether nobody has the model any more."""
        return self._model() is None

    def close(self) -> None:
        """End what is open."""
        for step in [s for s in steps.OPEN if s.owner is self]:
            step.end_forward()
            steps.forget(step)

    # -- a step ---------------------------------------------------------------------------------------

    def before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is called: a step begins, unless this call belongs to one that has begun."""
        if not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        for step in [s for s in steps.of_this_thread() if s.owner is self]:
            if not step.is_wanted:  # what it recorded was thrown away
                step.end_forward()
                steps.forget(step)
        if scope.current_recorder() is not None:
            return
        kind = self._kind_of(model, args, kwargs)
        outside = self._outside_bytes(model, args, kwargs)
        recorder = self._recorder(kind, outside)
        step = Step(self, kind, recorder, outside)
        steps.OPEN.append(step)
        if recorder is not None:
            recorder.where.enter(model)

    def after_forward(self, failed: bool) -> None:
        """The model has returned, or raised."""
        for step in [s for s in steps.OPEN if s.owner is self and s.is_forward]:
            if failed or not step.may_stay_open:
                step.end_forward()
            if failed:
                steps.forget(step)

    def after_backward(self, step: Step) -> None:
        """A backward pass through a step has ended."""
        kind, recorder = step.kind, step.recorder
        self.steps += 1
        self.last_kind = kind
        self.step_seconds.append(time.perf_counter() - step.started)
        del self.step_seconds[:-1000]
        if isinstance(recorder, TracingRecorder):
            room = recorder.room
            room.profile.ended()
            kind.trace = recorder.trace(_device_of(self._model()))
            kind.outside_bytes = step.outside_bytes
        elif isinstance(recorder, PlannedRecorder):
            self._judge(kind, recorder)
        if recorder is None or (isinstance(recorder, PlannedRecorder) and recorder.differs_at is None):
            kind.obeyed += 1
            self.planned_seconds.append(self.step_seconds[-1])
            del self.planned_seconds[:-1000]
        else:
            self.online_steps += 1

    def _judge(self, kind: Kind, recorder: PlannedRecorder) -> None:
        """Learn from a step that had a plan."""
        if recorder.differs_at is not None and recorder.sleeps:
            kind.wakeful = True  # perhaps it only looked so
            log.info(
                "a step differed from what was learnt of it at op %s: the next are seen whole", recorder.differs_at
            )
        elif recorder.differs_at is not None:
            kind.left += 1
            kind.plan = kind.trace = None
            kind.online = kind.left >= _PATIENCE
            log.info("a step differed from its plan at op %s: it will be profiled again", recorder.differs_at)
        elif recorder.gauge is not None:
            self.measured_peak_bytes = recorder.gauge.peak_bytes
            assert kind.plan is not None
            self.predicted_peak_bytes = kind.plan.predicted_peak_bytes + kind.grown_bytes
            learnt = recorder.learnt()
            kind.learnt = None if learnt is None else (kind.plan, learnt)
            excess = recorder.gauge.peak_bytes - self.limit_bytes
            if excess > 0:  # plan more carefully, or, if the plan was given, for what is really here
                kind.margin_bytes += excess if kind.trace is not None else 0
                kind.plan = None

    # -- deciding -------------------------------------------------------------------------------------

    def _recorder(self, kind: Kind, outside: int) -> BudgetedRecorder | None:
        """What records the next step; None: it is best left alone."""
        plan = self._plan_for(kind, outside)
        policy = WithinBudget(self.limit_bytes)
        if plan is not None:
            gauge = Gauge() if kind.obeyed < _MEASURED_STEPS or kind.obeyed % _MEASURED_EVERY == 0 else None
            if gauge is None and self._is_best_left_alone(kind, plan):
                return None
            tape = Tape(f"a plan for {format_bytes(self.limit_bytes)}")
            room = Room(self.limit_bytes, self.store, self.chooser)
            where: Whereabouts = Learner(policy, tape)
            if gauge is None and not kind.wakeful and kind.learnt is not None and kind.learnt[0] is plan:
                where = Attention(policy, tape, kind.learnt[1])
            return PlannedRecorder(plan, tape, where, room, gauge)
        if kind.online:
            room = Room(self.limit_bytes, self.store, self.chooser)
            tape = Tape(repr(policy), room)
            return BudgetedRecorder(policy, tape, Whereabouts(policy, tape), room)
        profiling = ProfilingRoom(self.limit_bytes, self.store, self.chooser)
        profiling.clear(0, "what is there before the first op")
        tape = Tape(repr(policy), profiling)
        return TracingRecorder(policy, tape, Stretches(policy, tape), profiling, verify=self.verify)

    def _is_best_left_alone(self, kind: Kind, plan: Plan) -> bool:
        """Whether everything is kept, and steps of this kind have shown that they go as planned."""
        spare = self.limit_bytes - plan.predicted_peak_bytes - kind.grown_bytes
        trusted = kind.obeyed >= _TRUSTED_AFTER and kind.left == 0
        untouched = not (plan.recomputed or plan.offload or plan.copies)
        return trusted and untouched and spare >= _AMPLE * self.limit_bytes

    def _plan_for(self, kind: Kind, outside: int) -> Plan | None:
        """The plan for a step that begins with so many bytes alive; None where there is none yet."""
        if kind.plan is not None:
            kind.grown_bytes = outside - kind.planned_for if kind.trace is not None else 0
            if kind.plan.predicted_peak_bytes + kind.grown_bytes <= self.limit_bytes - kind.margin_bytes:
                return kind.plan
        if kind.trace is None or kind.online:
            return None
        started = time.perf_counter()
        shifted = shift(kind.trace, outside - kind.outside_bytes)
        try:
            with planning_progress() as say:
                limit = self.limit_bytes - kind.margin_bytes
                kind.plan = solve_with_caution(shifted, limit, say, self.store, self._codecs)
        except BudgetError as error:
            # The online budget has just held it, by recomputing again and again what a plan recomputes once.
            kind.online = True
            warnings.warn(
                f"no plan fits, so the model trains under the online budget, which is slower. {error}",
                LowtideWarning,
                stacklevel=4,
            )
            return None
        finally:
            self.planning_s += time.perf_counter() - started
        if self._shelf is not None:
            self._shelf.put(kind.key, kind.plan)
        kind.planned_for = outside
        kind.grown_bytes = 0
        kind.obeyed = 0
        log.info("planned in %.1f s:\n%s", time.perf_counter() - started, kind.plan)
        return kind.plan

    def _kind_of(self, model: nn.Module, args: Any, kwargs: Any) -> Kind:
        signature = signature_of(model, args, kwargs)
        kind = self.kinds.get(signature)
        if kind is None:
            kind = self.kinds[signature] = Kind(plan=self._given_plan)
            if self._shelf is not None:
                tier = self.store.tier if self.store is not None else None
                codecs = [codec.name for codec in self._codecs]
                kind.key = key_of(model, (signature, self.limit_bytes, tier, codecs))
                kind.plan = kind.plan or self._shelf.get(kind.key)
            while len(self.kinds) > _MOST_KINDS:
                self.kinds.popitem(last=False)
        self.kinds.move_to_end(signature)
        return kind

    def _outside_bytes(self, model: nn.Module, args: Any, kwargs: Any) -> int:
        """All bytes alive before the step."""
        count_what_is_there()
        LEDGER.see_module(model)
        LEDGER.see_all(tree_leaves((args, kwargs)))
        if self.optimizer is not None:
            count_state(self.optimizer)
        return LEDGER.live_bytes

    def report(self) -> FitReport:
        """What happened so far."""
        kind = self.last_kind
        plan = kind.plan if kind is not None else self._given_plan
        return FitReport(
            budget_bytes=self.limit_bytes,
            plan=plan,
            predicted_peak_bytes=self.predicted_peak_bytes or (plan.predicted_peak_bytes if plan is not None else None),
            measured_peak_bytes=self.measured_peak_bytes,
            steps=self.steps,
            online_steps=self.online_steps,
            kinds_of_steps=len(self.kinds),
            step_seconds=tuple(self.step_seconds),
            planned_seconds=tuple(self.planned_seconds),
            planning_s=self.planning_s,
            trace=kind.planned_trace() if kind is not None else None,
        )


def _device_of(model: nn.Module | None) -> str:
    parameter = next(model.parameters(), None) if model is not None else None
    return parameter.device.type if parameter is not None else "cpu"
