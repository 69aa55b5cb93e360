"""Every error lowtide raises, in one tree.

LowtideError
├── ArgumentError          (ValueError)    a call that cannot mean anything
├── NothingToDoError       (ValueError)    a checkpoint through which no gradient can flow
├── BudgetError            (MemoryError)   a byte budget that cannot be met
├── StaleSourceError       (RuntimeError)  something needed for a recompute has changed since
├── ReplayMismatchError    (RuntimeError)  a recompute gave something else than the first run
├── ScheduleError          (RuntimeError)  a chain schedule that breaks its own promises
├── DiskFullError          (OSError)       a store on disk has no room left
├── StoreError             (RuntimeError)  a store cannot do what was asked: closed, or a value cannot be read
│   └── DamagedValueError                  a value is no longer what was stored
├── MissingCheckpointError (LookupError)   a chain asked for something that was never stored
└── MissingPackageError    (ImportError)   an optional package is not installed

Each also inherits the built-in that plain code would have raised, so `except RuntimeError` around a
backward pass catches what it always caught. `LowtideWarning` is for what is odd but harmless.
"""

from __future__ import annotations


class LowtideError(Exception):
    """Anything lowtide raises on purpose."""


class ArgumentError(LowtideError, ValueError):
    """An argument has a value that cannot be meant."""


class NothingToDoError(LowtideError, ValueError):
    """A checkpointed function has nothing through which a gradient could flow."""


class BudgetError(LowtideError, MemoryError):
    """A byte budget cannot be met.

    `budget_bytes` is what was asked; `smallest_bytes`, where known, is the least that would work.
    """

    def __init__(self, message: str, *, budget_bytes: int, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes


class StaleSourceError(LowtideError, RuntimeError):
    """A tensor that backward needs was changed, freed or moved after forward used it."""


class ReplayMismatchError(LowtideError, RuntimeError):
    """Replaying an op gave a result of another kind than the first time."""


class ScheduleError(LowtideError, RuntimeError):
    """A schedule asks for something that is not there, or exceeds what it was given."""


class DiskFullError(LowtideError, OSError):
    """A store on disk has no room; what it holds is untouched."""


class StoreError(LowtideError, RuntimeError):
    """A store cannot do what was asked."""


class DamagedValueError(StoreError):
    """A value is no longer what was stored."""


class MissingCheckpointError(LowtideError, LookupError):
    """No stored activation from which the wanted one could be made."""


class MissingPackageError(LowtideError, ImportError):
    """An optional package is needed for this call; the message has the pip line."""

    def __init__(self, package: str, purpose: str, extra: str | None = None) -> None:
        what = f'"lowtide[{extra}]"' if extra else package
        super().__init__(f"{purpose} needs the package {package!r}: pip install {what}")


class LowtideWarning(UserWarning):
    """Something is probably not as the user thinks, but nothing is wrong."""
