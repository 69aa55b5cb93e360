"""`fit`: a model that trains within a byte budget from now on, with a plan of its own.

The first step of each kind (shapes of the inputs, gradients there or not) runs under the online budget and is
profiled; before the next one a plan is made, and obeyed from then on. Recording begins when the model is called
and, where nothing else is in the way, goes on until backward begins, so that a loss outside the model belongs to
the step. The model itself gets two hooks and nothing else: no wrapper, no attribute, no entry in its state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ._errors import ArgumentError, BudgetError, LowtideWarning
from ._shelf import PlanShelf, key_of
from ._units import format_bytes, parse_bytes
from .codecs import Chooser, resolve
from .engine import scope, watching
from .engine.budgeting import BudgetedRecorder, WithinBudget, count_state, count_what_is_there
from .engine.modules import Whereabouts
from .engine.planned import Gauge, PlannedRecorder
from .engine.recorder import Recorder
from .engine.room import LEDGER, Room
from .engine.scope import saving
from .engine.tape import Tape
from .engine.torch_private import innermost_mode, makes_graph, next_node_number, saving_hooks, wrap_backward
from .engine.tracing import ProfilingRoom, TracingRecorder
from .engine.watching import Watch
from .planning import Plan, solve
from .reporting.fit_report import FitReport
from .reporting.scope_report import ScopeReport
from .stores import Store
from .stores.names import resolve as resolve_store
from .trace import Trace

M = TypeVar("M", bound=nn.Module)
log = logging.getLogger("lowtide")

_MOST_KINDS = 16  # of steps, for each model
_MEASURED_STEPS = 2  # after a plan is made
_MEASURED_EVERY = 100
_PATIENCE = 3  # plans that a kind of step may leave before it stays online
_DEADLINE_S = 20.0
_CAUTION = 200  # a plan leaves 1/200 of the limit free where it can: simulated bytes are right to about that


@overload
def report() -> ScopeReport: ...
@overload
def report(model: nn.Module) -> FitReport: ...
def report(model: nn.Module | None = None) -> ScopeReport | FitReport:
    """What happened: in the scope that was opened last, or in the steps of a fitted model.

    Raises `ArgumentError` if nothing has been recorded yet.
    """
    if model is None:
        return scope.report()
    return _state_of(model).report()


def fit(
    model: M,
    budget: str | int | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    stores: str | Store | Sequence[str | Store] | None = ("device",),
    codecs: str | Sequence[str] | None = "exact",
    plan: Plan | None = None,
    cache: str | os.PathLike[str] | None = None,
    verify: bool = True,
) -> M:
    """Have `model` train within `budget` bytes from now on; the same object, nothing else in the script changes.

    The budget counts all live tensors of the process: parameters, gradients, the optimizer's state, data,
    activations, temporaries. With `plan` (from `lowtide.plan`) the first step follows it without profiling, and
    `budget` is the plan's unless given. `cache` is a directory in which plans are kept for the next run of the same
    model, shapes and budget, which then starts with them. `verify` replays each op once in the profiled step and
    pins those that do not reproduce. `stores` and `codecs` serve steps that have no plan yet (see `lowtide.budget`).
    Gradients are bit-equal to those without lowtide.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> model = lowtide.fit(model, budget="64 MiB")
    >>> for _ in range(3):
    ...     model(torch.randn(4, 8)).square().mean().backward()
    >>> lowtide.report(model).steps
    3
    >>> _ = lowtide.unfit(model)
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"fit takes a torch.nn.Module, not {type(model).__name__}")
    if budget is None and plan is None:
        raise ArgumentError('how much memory may it take? fit(model, budget="8 GiB"), or a plan: fit(model, plan=plan)')
    if model in _fitted:
        unfit(model)
    limit = parse_bytes(budget) if budget is not None else plan.budget_bytes if plan is not None else 0
    allowed = resolve(codecs)
    chooser = Chooser(allowed) if allowed else None
    shelf = PlanShelf(Path(cache)) if cache is not None else None
    _fitted[model] = _Fitted(model, limit, optimizer, resolve_store(stores), chooser, plan, shelf, verify)
    if not _undo:
        _undo.append(wrap_backward(_around_backward, outermost=True))
    return model


def unfit(model: M) -> M:
    """The model as it was before `fit`; nothing happens if it was not fitted."""
    state = _fitted.pop(model, None)
    if state is not None:
        state.close()
    if not _fitted and _undo:
        _undo.pop()()
    return model


@dataclass
class _Kind:
    """Steps alike: what was seen of them, and the plan."""

    trace: Trace | None = None
    outside_bytes: int = 0  # alive before the profiled step
    plan: Plan | None = None
    planned_for: int = 0  # bytes alive outside, for which the plan was made
    grown_bytes: int = 0  # by which there are more now
    margin_bytes: int = 0  # by which plans turned out to be too bold
    obeyed: int = 0
    left: int = 0
    online: bool = False
    key: str = ""  # in the cache


class _Step:
    """One step: from the call of the model to the end of the backward pass through it."""

    def __init__(self, state: _Fitted, kind: _Kind, recorder: BudgetedRecorder, outside_bytes: int) -> None:
        self.state = state
        self.kind = kind
        self.recorder = recorder
        self.outside_bytes = outside_bytes
        self.thread = threading.get_ident()
        self.span = watching.Span(recorder.room)
        self.started = time.perf_counter()
        # Others may end what they began before us only after we have ended: then we cannot stay open.
        self.may_stay_open = innermost_mode() is None and saving_hooks() is None
        self.scope: StepScope | None = StepScope(recorder)
        self.scope.__enter__()

    def end_forward(self) -> None:
        """Stop recording."""
        step_scope, self.scope = self.scope, None
        if step_scope is not None:
            self.span.end = next_node_number()
            step_scope.__exit__(None, None, None)


class StepScope(saving):
    """The scope of one step."""

    _nests = False

    def __init__(self, recorder: BudgetedRecorder) -> None:
        super().__init__(recorder.policy)
        self._given = recorder

    def _open(self) -> Recorder:
        if not isinstance(self._given, PlannedRecorder):
            watching.begin(self._given.room)
        return self._given

    def _closed(self, recorder: Recorder) -> None:
        watching.end(self._given.room)


class _Fitted:
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
        self.verify = verify
        self.kinds: OrderedDict[Any, _Kind] = OrderedDict()
        self._given_plan = plan
        self._hooks = [
            model.register_forward_pre_hook(_BeforeForward(), with_kwargs=True, prepend=True),
            model.register_forward_hook(_AfterForward(), always_call=True),
        ]
        self.steps = 0
        self.online_steps = 0
        self.step_seconds: list[float] = []
        self.measured_peak_bytes: int | None = None
        self.predicted_peak_bytes: int | None = None  # of the step that was measured
        self.planning_s = 0.0
        self.last_kind: _Kind | None = None

    def close(self) -> None:
        """Take the hooks off the model, and end what is open."""
        for hook in self._hooks:
            hook.remove()
        for step in [s for s in _steps if s.state is self]:
            step.end_forward()
            _forget(step)

    # -- a step ---------------------------------------------------------------------------------------

    def before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is called: a step begins, unless this call belongs to one that has begun."""
        if not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        for step in [s for s in _steps if s.state is self and s.thread == threading.get_ident()]:
            if not step.recorder.tape.has_handles():  # what it recorded was thrown away
                step.end_forward()
                _forget(step)
        if scope.current_recorder() is not None:
            return
        kind = self._kind_of(model, args, kwargs)
        outside = self._outside_bytes(model, args, kwargs)
        recorder = self._recorder(kind, outside)
        step = _Step(self, kind, recorder, outside)
        _steps.append(step)
        recorder.where.enter(model)

    def after_forward(self) -> None:
        """The model has returned, or raised."""
        failed = sys.exc_info()[0] is not None
        for step in [s for s in _steps if s.state is self and s.scope is not None]:
            if failed or not step.may_stay_open:
                step.end_forward()
            if failed:
                _forget(step)

    def after_backward(self, step: _Step) -> None:
        """A backward pass through a step has ended."""
        kind, recorder = step.kind, step.recorder
        self.steps += 1
        self.last_kind = kind
        self.step_seconds.append(time.perf_counter() - step.started)
        del self.step_seconds[:-1000]
        if isinstance(recorder, TracingRecorder):
            room = recorder.room
            room.profile.ended()
            kind.trace = room.profile.trace(room.peak_bytes, _device_of(self._model()))
            kind.outside_bytes = step.outside_bytes
        elif isinstance(recorder, PlannedRecorder):
            self._judge(kind, recorder)
        if not isinstance(recorder, PlannedRecorder) or recorder.differs_at is not None:
            self.online_steps += 1

    def _judge(self, kind: _Kind, recorder: PlannedRecorder) -> None:
        """Learn from a step that had a plan."""
        kind.obeyed += 1
        if recorder.differs_at is not None:
            kind.left += 1
            kind.plan = kind.trace = None
            kind.online = kind.left >= _PATIENCE
            log.info("a step differed from its plan at op %s: it will be profiled again", recorder.differs_at)
        elif recorder.gauge is not None:
            self.measured_peak_bytes = recorder.gauge.peak_bytes
            assert kind.plan is not None
            self.predicted_peak_bytes = kind.plan.predicted_peak_bytes + kind.grown_bytes
            excess = recorder.gauge.peak_bytes - self.limit_bytes
            if excess > 0:  # plan more carefully, or, if the plan was given, for what is really here
                kind.margin_bytes += excess if kind.trace is not None else 0
                kind.plan = None

    # -- deciding -------------------------------------------------------------------------------------

    def _recorder(self, kind: _Kind, outside: int) -> BudgetedRecorder:
        plan = self._plan_for(kind, outside)
        policy = WithinBudget(self.limit_bytes)
        if plan is not None:
            gauge = Gauge() if kind.obeyed < _MEASURED_STEPS or kind.obeyed % _MEASURED_EVERY == 0 else None
            tape = Tape(f"a plan for {format_bytes(self.limit_bytes)}")
            room = Room(self.limit_bytes, self.store, self.chooser)
            return PlannedRecorder(plan, tape, Whereabouts(policy, tape), room, gauge)
        if kind.online:
            room = Room(self.limit_bytes, self.store, self.chooser)
            tape = Tape(repr(policy), room)
            return BudgetedRecorder(policy, tape, Whereabouts(policy, tape), room)
        profiling = ProfilingRoom(self.limit_bytes, self.store, self.chooser)
        profiling.clear(0, "what is there before the first op")
        tape = Tape(repr(policy), profiling)
        return TracingRecorder(policy, tape, Whereabouts(policy, tape), profiling, verify=self.verify)

    def _plan_for(self, kind: _Kind, outside: int) -> Plan | None:
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
            with _progress() as say:
                kind.plan = _solve(shifted, self.limit_bytes - kind.margin_bytes, say)
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

    def _kind_of(self, model: nn.Module, args: Any, kwargs: Any) -> _Kind:
        shapes = tuple((tuple(t.shape), t.dtype) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        has_gradients = any(p.grad is not None for p in model.parameters())
        signature = (shapes, has_gradients, torch.is_autocast_enabled("cpu"))
        kind = self.kinds.get(signature)
        if kind is None:
            kind = self.kinds[signature] = _Kind(plan=self._given_plan)
            if self._shelf is not None:
                kind.key = key_of(model, (signature, self.limit_bytes))
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
            planning_s=self.planning_s,
        )


class _BeforeForward:
    """The hook that begins a step. Pickles as itself, and does nothing in a model that is not fitted."""

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        state = _fitted.get(model)
        if state is not None:
            state.before_forward(model, args, kwargs)


class _AfterForward:
    """The hook that ends a forward pass."""

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        state = _fitted.get(model)
        if state is not None:
            state.after_forward()


_fitted: weakref.WeakKeyDictionary[nn.Module, _Fitted] = weakref.WeakKeyDictionary()
_steps: list[_Step] = []
_undo: list[Callable[[], None]] = []


def _state_of(model: nn.Module) -> _Fitted:
    state = _fitted.get(model)
    if state is None:
        raise ArgumentError("this model is not fitted: call lowtide.fit(model, budget=...) first")
    return state


def _forget(step: _Step) -> bool:
    """Take a step off the list; whether it was on it."""
    if step not in _steps:
        return False
    _steps.remove(step)
    return True


def _around_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
        mine = [s for s in _steps if s.thread == threading.get_ident()]
        for step in mine:
            step.end_forward()
        passed = watching.spans_reached(roots, [s.span for s in mine]) if mine else set()
        through = [s for s in mine if s.span in passed]
        gauge = next((g for s in through if (g := getattr(s.recorder, "gauge", None)) is not None), None)
        unplanned = any(getattr(s.recorder, "differs_at", 0) is not None for s in through)
        measured = gauge is not None and not unplanned and not makes_graph((roots, *args))
        try:
            with Watch(gauge) if measured and gauge is not None else contextlib.nullcontext():
                out = original(roots, *args, **kwargs)
        except BaseException:
            for step in through:  # what is left of it is of no use
                _forget(step)
            raise
        for step in through:
            if _forget(step):
                step.state.after_backward(step)
        return out

    return run


def shift(trace: Trace, nbytes: int) -> Trace:
    """The same step with so many more bytes alive beside it, all the time."""
    if not nbytes:
        return trace
    return replace(
        trace,
        ops=tuple(replace(op, other_bytes=max(0, op.other_bytes + nbytes)) for op in trace.ops),
        asks=tuple(replace(ask, other_bytes=max(0, ask.other_bytes + nbytes)) for ask in trace.asks),
        peak_bytes=max(0, trace.peak_bytes + nbytes),
    )


def _solve(trace: Trace, limit_bytes: int, say: Callable[[str], None]) -> Plan:
    """A plan that leaves a little of the limit free, or, if there is none, one that does not."""
    try:
        return solve(trace, limit_bytes - limit_bytes // _CAUTION, deadline_s=_DEADLINE_S, progress=say)
    except BudgetError:
        pass
    return solve(trace, limit_bytes, deadline_s=_DEADLINE_S, progress=say)


def _device_of(model: nn.Module | None) -> str:
    parameter = next(model.parameters(), None) if model is not None else None
    return parameter.device.type if parameter is not None else "cpu"


@contextlib.contextmanager
def _progress() -> Any:
    """Say what the planner is at, if it takes over a second: a spinner on a terminal, lines in the log elsewhere."""
    started = time.perf_counter()
    status: list[Any] = []

    def say(sentence: str) -> None:
        log.info("planning: %s", sentence)
        if sys.stderr.isatty() and time.perf_counter() - started > 1:
            if not status:
                from rich.console import Console

                status.append(Console(stderr=True).status(""))
                status[0].start()
            status[0].update(f"lowtide plans: {sentence}")

    try:
        yield say
    finally:
        for one in status:
            one.stop()
