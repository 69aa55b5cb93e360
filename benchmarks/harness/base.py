"""Base class of variants. A variant is one way of running a training step."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from .steps import Bench, Forward, StepMeter


class NotApplicableError(Exception):
    """This variant does not exist for this model; the message gives the reason."""


@dataclass
class BudgetResult:
    """Budget and predictions of a variant. Bytes of other tensors in the process are subtracted."""

    asked_bytes: int | None
    """Budget; None for a schedule that takes no budget."""
    predicted_bytes: int | None = None
    predicted_extra_s: float | None = None
    """Predicted time beyond a plain step."""
    predicted_plain_s: float | None = None
    """Time of a plain step in the profile."""
    bound_extra_s: float | None = None
    """Lower bound on the time beyond a plain step."""
    own_peak_bytes: int | None = None
    """Peak as lowtide measures it."""
    solver: str = ""


class Variant(ABC):
    """One way of running a step. `descriptions.py` has the set-up in words."""

    family: ClassVar[str]
    """Name in plots. Variants of one family differ in a setting."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.budget_result: BudgetResult | None = None
        self.note = ""

    @property
    def settling_steps(self) -> int:
        """Number of steps inside `applied` until the cost of a step is constant."""
        return 0

    def prepare(self, bench: Bench) -> None:  # noqa: B027  (most need no preparation)
        """Plan or compile: called once a model, and timed."""

    @abstractmethod
    def applied(self, bench: Bench) -> contextlib.AbstractContextManager[Forward]:
        """Return a context manager that yields the forward pass and restores the model at its exit."""

    def metering(self, meter: StepMeter) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager around a metered step, which reports allocations that bypass the dispatcher."""
        return contextlib.nullcontext()

    def finish(self, bench: Bench) -> None:  # noqa: B027
        """Free the plan or compiled code after the last step of a model."""


class Plain(Variant):
    """PyTorch without checkpointing."""

    family = "plain"

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        yield bench.loss


class PlainAgain(Plain):
    """`Plain` as a variant of its own, for the noise of the machine."""
