"""The five actions of schedules, and the base class `Schedule`.

A chain has states x_0 … x_n. Step i computes x_{i+1} from x_i, and the adjoint of step i needs x_i. The
executor of a schedule holds one *working state* and a number of *slots*. The working state takes no slot.
The initial state takes a slot if it is needed again. The class of each action defines its effect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ..._errors import ScheduleError
from ..._units import format_bytes

Tier: TypeAlias = Literal["memory", "disk"]
Content: TypeAlias = Literal["state", "tape"]


@dataclass(frozen=True, slots=True)
class Advance:
    """Run the forward steps `start` … `stop - 1` on the working state x_start. The working state becomes x_stop."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Store:
    """Store a state or a tape in a slot of `tier`.

    `content="state"`: store the working state x_step, which stays the working state. `content="tape"`: run the
    forward step `step` on the working state x_step and store its tape, the data to reverse this step. The
    working state becomes x_{step+1}. This counts as one forward step.
    """

    step: int
    tier: Tier = "memory"
    content: Content = "state"


@dataclass(frozen=True, slots=True)
class Load:
    """Replace the working state by a copy of the stored x_step."""

    step: int
    tier: Tier = "memory"
    content: Content = "state"


@dataclass(frozen=True, slots=True)
class Free:
    """Empty the slot of `tier` that holds the state x_step, or the tape of `step`."""

    step: int
    tier: Tier = "memory"
    content: Content = "state"


@dataclass(frozen=True, slots=True)
class Reverse:
    """Run the adjoint of `step`.

    `source="state"`: use the working state x_step. The adjoint evaluates the forward step once more, so this
    counts as one forward step, and the working state is released. `source="tape"`: use the stored tape of
    `step`. This counts as no forward step. The working state does not change, and the tape stays stored.
    """

    step: int
    source: Content = "state"


Action: TypeAlias = Advance | Store | Load | Free | Reverse


class Tiers(NamedTuple):
    """One number for each tier."""

    memory: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Predicted steps, peaks and cost of a schedule. `str()` gives one readable line."""

    name: str
    n: int
    forward_steps: int
    """Plain steps, plus one for each stored tape and one for each reverse step from a state."""
    factor: float
    """`forward_steps` divided by n."""
    peak_slots: Tiers
    peak_bytes: int | None = None
    """Peak of stored bytes and declared work space. None without sizes."""
    cost: float | None = None
    """In the units of the given costs. None without costs."""

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
    """An iterable of the actions that reverse a chain of `n` steps. Each iteration starts from the beginning.

    `forward_steps` and `peak_slots` are known before the schedule runs, and so are `cost` and `peak_bytes` if
    costs and sizes were given.
    """

    name: str
    n: int | None
    """The number of steps. None for an `online` schedule before its end."""

    @abstractmethod
    def __iter__(self) -> Iterator[Action]: ...

    @property
    @abstractmethod
    def forward_steps(self) -> int:
        """Number of forward steps of the whole run, including taped steps."""

    @property
    @abstractmethod
    def peak_slots(self) -> Tiers:
        """Peak number of slots in use, for each tier."""

    @property
    def peak_bytes(self) -> int | None:
        """Peak bytes, or None without sizes."""
        return None

    @property
    def cost(self) -> float | None:
        """Cost of the run, or None without costs."""
        return None

    def explain(self) -> Explanation:
        """Return predicted steps, peaks and cost. Raises `ScheduleError` if the length is not known yet."""
        if self.n is None:
            raise ScheduleError(f"the length of {self!r} is unknown: call explain() after finish()")
        return Explanation(
            name=self.name,
            n=self.n,
            forward_steps=self.forward_steps,
            factor=self.forward_steps / self.n,
            peak_slots=self.peak_slots,
            peak_bytes=self.peak_bytes,
            cost=self.cost,
        )
