"""All exceptions of lowtide.

LowtideError
├── ArgumentError          (ValueError)    an invalid argument
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

import functools
from typing import Any


class LowtideError(Exception):
    """Base class of all lowtide errors."""


class ArgumentError(LowtideError, ValueError):
    """An argument is invalid."""


class BudgetError(LowtideError, MemoryError):
    """A byte budget cannot be met.

    `budget_bytes` is the requested budget. `smallest_bytes` is the smallest budget that works, if known.
    `at_least_bytes` is set instead if only a lower limit is known: smaller budgets fail at the same place.
    `explanation` is the part of the message on what uses the memory and what helps.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        smallest_bytes: int | None = None,
        at_least_bytes: int | None = None,
        explanation: str = "",
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.at_least_bytes = at_least_bytes
        self.explanation = explanation

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Errors with keyword arguments must say how they are copied and sent to other processes."""
        fields = {name: getattr(self, name) for name in _BUDGET_FIELDS}
        return functools.partial(BudgetError, **fields), self.args


_BUDGET_FIELDS = "budget_bytes", "smallest_bytes", "at_least_bytes", "explanation"


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
