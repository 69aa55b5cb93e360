"""The five actions of which every schedule is made, and the contract of a schedule.

A chain has states x_0 … x_n; step i makes x_{i+1} from x_i, and the adjoint of step i needs x_i. Whoever
runs a schedule holds one *working state* and a number of *slots*; the working state takes no slot. What
each action means, to the executor and to the validator alike, is written at its class. The initial state
is no exception: where it is needed again it is stored, and takes a slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ..._errors import ScheduleError
from ..._units import format_bytes

Tier: TypeAlias = Literal["memory", "disk"]
Kind: TypeAlias = Literal["state", "tape"]


@dataclass(frozen=True, slots=True)
class Advance:
    """Run the forward steps `start` … `stop - 1` on the working state x_start; it is then x_stop."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Store:
    """Put something into a slot of `tier`.

    `what="state"`: the working state x_step, which stays the working state. `what="tape"`: the data for the
    reverse of `step`, obtained by running that forward step on the working state x_step while taping it;
    the working state is then x_{step+1}. Storing a tape counts as one forward step.
    """

    step: int
    tier: Tier = "memory"
    what: Kind = "state"


@dataclass(frozen=True, slots=True)
class Load:
    """The working state becomes the stored x_step, which also stays stored."""

    step: int
    tier: Tier = "memory"
    what: Kind = "state"


@dataclass(frozen=True, slots=True)
class Free:
    """Empty the slot of `tier` that holds the state x_step, or the tape of `step`."""

    step: int
    tier: Tier = "memory"
    what: Kind = "state"


@dataclass(frozen=True, slots=True)
class Reverse:
    """Run the adjoint of `step`.

    `source="state"`: from the working state x_step: the forward step runs once more with taping, so it
    counts as one forward step, and the working state is gone afterwards. `source="tape"`: from the stored
    tape of `step`; no forward step, the working state is untouched, and the tape stays until freed.
    """

    step: int
    source: Kind = "state"


Action: TypeAlias = Advance | Store | Load | Free | Reverse


class Tiers(NamedTuple):
    """One number for each tier."""

    memory: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a schedule will do, known before it runs. `str()` of it is for people."""

    name: str
    n: int
    forward_steps: int
    """Plain steps plus one taped step for each reverse step (or stored tape)."""
    factor: float
    """`forward_steps` over n: 1.0 is the price of keeping everything."""
    peak_slots: Tiers
    peak_bytes: int | None = None
    """Of what is stored (and of the declared work space); None where no sizes were given."""
    cost: float | None = None
    """In the units of the given costs; None where none were given."""

    @property
    def steps(self) -> int:
        """The same as `forward_steps`."""
        return self.forward_steps

    def __str__(self) -> str:
        memory, disk = self.peak_slots
        parts = [
            f"{self.name}: {self.n:,} steps reversed with {self.forward_steps:,} forward steps ({self.factor:.2f} × n)",
            f"at most {memory:,} {'slot' if memory == 1 else 'slots'} in memory"
            + (f" and {disk:,} on disk" if disk else ""),
        ]
        if self.peak_bytes is not None:
            parts.append(f"at most {format_bytes(self.peak_bytes)} held")
        if self.cost is not None:
            parts.append(f"cost {self.cost:g}")
        return ", ".join(parts)


class Schedule(ABC):
    """How to reverse a chain of `n` steps: an iterable of actions, made anew at each iteration.

    Everything but iterating is known beforehand: `forward_steps`, `peak_slots`, and where costs and sizes
    were given `cost` and `peak_bytes`.
    """

    name: str
    n: int | None
    """The number of steps; None while nobody knows it (`online`)."""

    @abstractmethod
    def __iter__(self) -> Iterator[Action]: ...

    @property
    @abstractmethod
    def forward_steps(self) -> int:
        """How many forward steps the whole run takes, the taped ones included."""

    @property
    @abstractmethod
    def peak_slots(self) -> Tiers:
        """The most slots in use at one time, for each tier."""

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes held at one time, where sizes were given."""
        return None

    @property
    def cost(self) -> float | None:
        """What the run costs, where costs were given."""
        return None

    def explain(self) -> Explanation:
        """Steps, factor over n and peaks, before anything runs."""
        if self.n is None:
            raise ScheduleError(f"{self!r} cannot be explained before its length is known")
        return Explanation(
            name=self.name,
            n=self.n,
            forward_steps=self.forward_steps,
            factor=self.forward_steps / self.n,
            peak_slots=self.peak_slots,
            peak_bytes=self.peak_bytes,
            cost=self.cost,
        )
