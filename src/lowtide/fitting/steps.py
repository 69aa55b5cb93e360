"""Steps: from the call of a fitted model to the end of the backward pass through it.

Recording begins when the model is called and, where nothing else is in the way, goes on until backward begins, so
that a loss outside the model belongs to the step.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..engine import watching
from ..engine.budgeting import BudgetedRecorder
from ..engine.part_gradients import copied
from ..engine.planned import PlannedRecorder
from ..engine.recorder import Recorder
from ..engine.scope import saving
from ..engine.torch_private import innermost_mode, makes_graph, next_node_number, saving_hooks, wrap_backward
from ..engine.watching import Watch
from .kinds import Kind


class Owner(Protocol):
    """Whose steps these are."""

    def after_backward(self, step: Step) -> None:
        """A backward pass through a step has ended."""


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


class Step:
    """One step: from the call of the model to the end of the backward pass through it.

    Without a recorder it is plain PyTorch's, and only counted.
    """

    def __init__(self, owner: Owner, kind: Kind, recorder: BudgetedRecorder | None, outside_bytes: int) -> None:
        self.owner = owner
        self.kind = kind
        self.recorder = recorder
        self.outside_bytes = outside_bytes
        self.thread = threading.get_ident()
        self.span = watching.Span(recorder.room if recorder is not None else None)
        self.started = time.perf_counter()
        # Others may end what they began before us only after we have ended: then we cannot stay open.
        self.may_stay_open = innermost_mode() is None and saving_hooks() is None
        self._scope = StepScope(recorder) if recorder is not None else None
        if self._scope is not None:
            self._scope.__enter__()

    @property
    def is_forward(self) -> bool:
        """Whether what is done now may belong to it."""
        return self.span.end is None

    @property
    def is_wanted(self) -> bool:
        """Whether a backward pass through it can still come, as far as that is known."""
        return self.recorder is not None and self.recorder.tape.has_handles()

    def end_forward(self) -> None:
        """Stop recording."""
        if self.is_forward:
            self.span.end = next_node_number()
        step_scope, self._scope = self._scope, None
        if step_scope is not None:
            step_scope.__exit__(None, None, None)


OPEN: list[Step] = []
"""The steps whose backward pass has not ended, in the order in which they began."""


def of_this_thread() -> list[Step]:
    """The open steps that began in this thread."""
    return [step for step in OPEN if step.thread == threading.get_ident()]


def is_in_forward() -> bool:
    """Whether what this thread does now belongs to a step."""
    return any(step.is_forward for step in of_this_thread())


def forget(step: Step) -> bool:
    """Take a step off the list; whether it was on it."""
    if step not in OPEN:
        return False
    OPEN.remove(step)
    return True


def _around_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
        mine = of_this_thread()
        for step in mine:
            step.end_forward()
        passed = watching.spans_reached(roots, [s.span for s in mine]) if mine else set()
        through = [s for s in mine if s.span in passed]
        recorders = [s.recorder for s in through if s.recorder is not None]
        unplanned = any(getattr(recorder, "differs_at", 0) is not None for recorder in recorders)
        gauge = next((g for recorder in recorders if (g := getattr(recorder, "gauge", None)) is not None), None)
        graph = makes_graph((roots, *args))
        measured = Watch(gauge) if gauge is not None and not unplanned and not graph else contextlib.nullcontext()
        try:
            with measured, copied(roots, None if graph else _oldest_copied(through)):
                for recorder in recorders:
                    if isinstance(recorder, PlannedRecorder):
                        recorder.backward_begins()
                out = original(roots, *args, **kwargs)
        except BaseException:
            for step in through:  # what is left of it is of no use
                forget(step)
            raise
        for step in through:
            if forget(step):
                step.owner.after_backward(step)
        return out

    return run


def _oldest_copied(steps: list[Step]) -> int | None:
    """The number from which on backward nodes belong to steps whose plans have gradients copied."""
    copying = [step for step in steps if isinstance(step.recorder, PlannedRecorder) and step.recorder.copies_gradients]
    return min((step.span.first for step in copying), default=None)


_undo: list[Callable[[], None]] = []


def watch_backward() -> None:
    """From now on steps end with the backward pass through them."""
    if not _undo:
        _undo.append(wrap_backward(_around_backward, outermost=True))


def leave_backward_alone() -> None:
    """Nobody has steps any more."""
    if _undo:
        _undo.pop()()
