"""The contract of a variant: one way of taking a training step."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from .steps import Bench, Forward, StepMeter


class NotApplicableError(Exception):
    """This variant cannot be had for this model; the message says why."""


@dataclass
class Budgeted:
    """What a variant with a byte budget said of itself; bytes beside the model and its batch are taken off."""

    asked_bytes: int | None
    """None: nothing was asked, a schedule was given."""
    predicted_bytes: int | None = None
    predicted_extra_s: float | None = None
    """Beyond a plain step."""
    predicted_plain_s: float | None = None
    """A plain step, as profiled."""
    bound_extra_s: float | None = None
    """Beyond a plain step, of any plan."""
    own_peak_bytes: int | None = None
    """As lowtide measured it itself."""
    solver: str = ""


class Variant(ABC):
    """One way of taking a step. Each docstring says how it is meant to be used, by its own documentation."""

    family: ClassVar[str]
    """What it is drawn as: variants of one family differ in a setting."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.budgeted: Budgeted | None = None
        self.note = ""

    @property
    def settling_steps(self) -> int:
        """Steps to take after `applied` before they are as they will stay."""
        return 0

    def prepare(self, bench: Bench) -> None:  # noqa: B027  (most need no preparation)
        """What is done once for a model, and timed: planning, compiling."""

    @abstractmethod
    def applied(self, bench: Bench) -> contextlib.AbstractContextManager[Forward]:
        """The model's forward pass in this way; as it was afterwards."""

    def metering(self, meter: StepMeter) -> contextlib.AbstractContextManager[Any]:
        """Around a step whose peak is measured: shows the meter what it cannot see by itself."""
        return contextlib.nullcontext()

    def finish(self, bench: Bench) -> None:  # noqa: B027
        """After the last step of this model: let go of what was prepared."""


class Plain(Variant):
    """PyTorch as it is: what everything else is compared with."""

    family = "plain"

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        yield bench.loss


class PlainAgain(Plain):
    """The same once more, treated as a variant: how far from 1 it comes out is what the machine does by itself."""
