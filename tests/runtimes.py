"""Parts of the current runtime, for tests."""

from __future__ import annotations

from lowtide.engine.memory.eviction import Pool
from lowtide.engine.memory.ledger import Ledger
from lowtide.engine.recording.recorder import Recorder
from lowtide.engine.runtime import current_runtime
from lowtide.fitting.steps import Step, fitting_state


def ledger() -> Ledger:
    return current_runtime().memory().ledger


def pool() -> Pool:
    return current_runtime().memory().pool


def current_recorder() -> Recorder | None:
    return current_runtime().current_recorder()


def open_steps() -> list[Step]:
    step = fitting_state().step
    return [] if step is None else [step]
