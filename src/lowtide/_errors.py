"""All exceptions of lowtide.

LowtideError
├── ArgumentError          (ValueError)    an invalid argument
├── NothingToDoError       (ValueError)    a checkpointed function without gradients
├── BudgetError            (MemoryError)   a byte budget that cannot be met
├── StaleSourceError       (RuntimeError)  a tensor needed by a replay has changed
├── ReplayMismatchError    (RuntimeError)  a replayed op returned a different result
├── ScheduleError          (RuntimeError)  an invalid chain schedule
├── DiskFullError          (OSError)       no space left in a disk store
├── StoreError             (RuntimeError)  a store is closed or cannot read a value
│   └── DamagedValueError                  a stored value is corrupted
├── MissingCheckpointError (LookupError)   a chain needs a checkpoint that was not stored
└── MissingPackageError    (ImportError)   an optional package is not installed

LowtideWarning             (UserWarning)   a warning

Each error also inherits from the built-in exception in parentheses. `except RuntimeError` around a
backward pass therefore also catches the errors of lowtide that can occur there.
"""

from __future__ import annotations


class LowtideError(Exception):
    """Base class of all lowtide errors."""


class ArgumentError(LowtideError, ValueError):
    """An argument is invalid."""


class NothingToDoError(LowtideError, ValueError):
    """A checkpointed function was given no tensors and returned none that requires grad."""


class BudgetError(LowtideError, MemoryError):
    """A byte budget cannot be met.

    `budget_bytes` is the requested budget. `smallest_bytes` is the smallest budget that works, if known.
    """

    def __init__(self, message: str, *, budget_bytes: int, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes


class StaleSourceError(LowtideError, RuntimeError):
    """A tensor that backward needs was changed, freed or moved after forward used it."""


class ReplayMismatchError(LowtideError, RuntimeError):
    """A replay did not reproduce the value of the first run."""


class ScheduleError(LowtideError, RuntimeError):
    """A chain schedule reads a value that is not available, or exceeds its number of checkpoints."""


class DiskFullError(LowtideError, OSError):
    """A disk store has no space left. The stored values are still valid."""


class StoreError(LowtideError, RuntimeError):
    """A store is closed, or cannot read or write a value."""


class DamagedValueError(StoreError):
    """A stored value was changed or corrupted after it was stored."""


class MissingCheckpointError(LowtideError, LookupError):
    """A chain has no stored checkpoint from which the requested value can be recomputed."""


class MissingPackageError(LowtideError, ImportError):
    """An optional package is not installed. The message contains the pip command."""

    def __init__(self, package: str, purpose: str, extra: str | None = None) -> None:
        requirement = f'"lowtide[{extra}]"' if extra else package
        super().__init__(f"{purpose} needs the package {package!r}: pip install {requirement}")


class LowtideWarning(UserWarning):
    """Base class of all lowtide warnings. The results are correct, but probably not as intended."""
