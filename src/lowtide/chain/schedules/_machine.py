"""The abstract machine: replays any schedule without running anything, and judges it.

It holds no arrays, only the numbers of the states and tapes that would be there. Every rule by which a
schedule could be wrong is checked: each step is reversed once, from the last to the first, from something
that is there at that moment; no tier and no budget is ever exceeded; nothing is left stored at the end. It
shares no code with the schedules, so what it counts is evidence for what they promise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..._errors import ArgumentError, ScheduleError
from ..._units import format_bytes
from ._actions import Action, Advance, Free, Load, Reverse, Store, Tiers


@dataclass(frozen=True, slots=True)
class Counts:
    """What a valid schedule did."""

    forward_steps: int
    """Plain steps, steps taped into a slot, and one taped step for each `Reverse` from a state."""
    peak_slots: Tiers
    reads: Tiers
    writes: Tiers
    peak_bytes: int | None
    """In memory, work space included; None where no sizes were given."""
    cost: float


def validate(
    schedule: Iterable[Action],
    n: int,
    *,
    slots: int | None = None,
    memory_slots: int | None = None,
    disk_slots: int | None = None,
    sizes: Sequence[int] | None = None,
    budget_bytes: int | None = None,
    tape_sizes: Sequence[int] | None = None,
    work_sizes: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    backward_costs: Sequence[float] | None = None,
    write_cost: float = 0.0,
    read_cost: float = 0.0,
) -> Counts:
    """Replay `schedule` for a chain of `n` steps; raise `ScheduleError` at the first thing that is wrong.

    `slots` is `memory_slots` with no disk. A limit that is not given is not checked. `sizes` are the bytes
    of x_0 … x_n, `tape_sizes` those of the tapes, `work_sizes` what a forward step needs beside what is
    stored; together they are held against `budget_bytes`. `costs` (one a step, else 1 each),
    `backward_costs`, and the price of a write to disk and of a read from it make up `cost`.
    """
    if slots is not None:
        if memory_slots is not None or disk_slots is not None:
            raise ArgumentError("give either slots, or memory_slots and disk_slots")
        memory_slots, disk_slots = slots, 0
    if n < 1:
        raise ArgumentError(f"a chain has at least one step, not {n}")
    machine = _Machine(n, {"memory": memory_slots, "disk": disk_slots}, sizes, budget_bytes, tape_sizes, work_sizes)
    for position, action in enumerate(schedule):
        problem = machine.run(action)
        if problem:
            raise ScheduleError(f"action {position}, {action}: {problem}")
    if machine.to_reverse >= 0:
        raise ScheduleError(f"the schedule ends with the steps 0 to {machine.to_reverse} of {n} not yet reversed")
    if machine.held:
        left = ", ".join(f"{what} {step} ({tier})" for step, tier, what in sorted(machine.held))
        raise ScheduleError(f"the schedule ends with slots still in use: {left}")
    step_costs = costs if costs is not None else [1.0] * n
    cost = sum(times * step_costs[i] for i, times in enumerate(machine.times_run))
    cost += sum(backward_costs) if backward_costs is not None else 0.0
    cost += machine.writes["disk"] * write_cost + machine.reads["disk"] * read_cost
    return Counts(
        forward_steps=sum(machine.times_run),
        peak_slots=Tiers(**machine.peak),
        reads=Tiers(**machine.reads),
        writes=Tiers(**machine.writes),
        peak_bytes=machine.peak_bytes if sizes is not None else None,
        cost=cost,
    )


class _Machine:
    """The state of a run: each `_verb` method returns what is wrong with its action, or nothing."""

    def __init__(
        self,
        n: int,
        limits: dict[str, int | None],
        sizes: Sequence[int] | None,
        budget_bytes: int | None,
        tape_sizes: Sequence[int] | None,
        work_sizes: Sequence[int] | None,
    ) -> None:
        self.n = n
        self.limits = limits
        self.budget_bytes = budget_bytes
        self.state_bytes = sizes if sizes is not None else [0] * (n + 1)
        self.tape_bytes = tape_sizes if tape_sizes is not None else [0] * n
        self.work_bytes = work_sizes if work_sizes is not None else [0] * n
        self.working: int | None = 0
        self.to_reverse = n - 1
        self.held: set[tuple[int, str, str]] = set()
        self.used = {"memory": 0, "disk": 0}
        self.peak = {"memory": 0, "disk": 0}
        self.reads = {"memory": 0, "disk": 0}
        self.writes = {"memory": 0, "disk": 0}
        self.stored_bytes = 0
        self.peak_bytes = 0
        self.times_run = [0] * n

    def run(self, action: object) -> str | None:
        """Perform one action, and say what is wrong with it, if anything is."""
        match action:
            case Advance(start, stop):
                return self._advance(start, stop)
            case Store(step, tier, what):
                return self._store(step, tier, what)
            case Load(step, tier, what):
                return self._load(step, tier, what)
            case Free(step, tier, what):
                return self._free(step, tier, what)
            case Reverse(step, source):
                return self._reverse(step, source)
            case _:
                return "is no action of a schedule"

    def _advance(self, start: int, stop: int) -> str | None:
        if self.working != start:
            return self._not_working(start)
        if not start < stop <= self.n:
            return f"steps {start} to {stop} are not a forward run within a chain of {self.n} steps"
        for step in range(start, stop):
            problem = self._forward(step)
            if problem:
                return problem
        self.working = stop
        return None

    def _store(self, step: int, tier: str, what: str) -> str | None:
        if tier not in self.used or what not in ("state", "tape"):
            return "there is no such tier or kind"
        if self.working != step:
            return self._not_working(step)
        if (step, tier, what) in self.held:
            return f"the {what} {step} is already stored in {tier}"
        if what == "tape" and step >= self.n:
            return f"a chain of {self.n} steps has no step {step} to tape"
        limit = self.limits[tier]
        if limit is not None and self.used[tier] >= limit:
            return f"all {limit} {tier} slots are in use"
        if what == "tape":
            # Until it is made the tape is no part of what is stored; then it is, beside the work space.
            problem = self._forward(step, self.tape_bytes[step] if tier == "memory" else 0)
            if problem:
                return problem
            self.working = step + 1
        self.held.add((step, tier, what))
        self.used[tier] += 1
        self.writes[tier] += 1
        self.peak[tier] = max(self.peak[tier], self.used[tier])
        if tier == "memory":
            self.stored_bytes += self._bytes(step, what)
        return self._need(0)

    def _load(self, step: int, tier: str, what: str) -> str | None:
        if what == "tape":
            return "a tape is not loaded: Reverse uses it where it is"
        if (step, tier, what) not in self.held:
            return f"x_{step} is not stored in {tier}; {self._inventory()}"
        self.working = step
        self.reads[tier] += 1
        return None

    def _free(self, step: int, tier: str, what: str) -> str | None:
        if (step, tier, what) not in self.held:
            return f"the {what} {step} is not stored in {tier}; {self._inventory()}"
        self.held.remove((step, tier, what))
        self.used[tier] -= 1
        if tier == "memory":
            self.stored_bytes -= self._bytes(step, what)
        return None

    def _reverse(self, step: int, source: str) -> str | None:
        if step != self.to_reverse:
            if self.to_reverse < 0:
                return "every step has been reversed already"
            return f"the next step to reverse is {self.to_reverse}"
        if source == "tape":
            tier = next((t for t in ("memory", "disk") if (step, t, "tape") in self.held), None)
            if tier is None:
                return f"the tape of step {step} is not stored; {self._inventory()}"
            self.reads[tier] += 1
        elif source == "state":
            if self.working != step:
                return self._not_working(step)
            problem = self._forward(step, self.tape_bytes[step])
            if problem:
                return problem
            self.working = None
        else:
            return f"a step is reversed from its 'state' or its 'tape', not from {source!r}"
        self.to_reverse -= 1
        return None

    def _forward(self, step: int, tape_bytes: int = 0) -> str | None:
        self.times_run[step] += 1
        return self._need(self.work_bytes[step] + tape_bytes)

    def _need(self, extra_bytes: int) -> str | None:
        nbytes = self.stored_bytes + extra_bytes
        self.peak_bytes = max(self.peak_bytes, nbytes)
        if self.budget_bytes is not None and nbytes > self.budget_bytes:
            return (
                f"{nbytes} bytes ({format_bytes(nbytes)}) would be held, "
                f"{nbytes - self.budget_bytes} more than the budget of {self.budget_bytes}"
            )
        return None

    def _bytes(self, step: int, what: str) -> int:
        return self.state_bytes[step] if what == "state" else self.tape_bytes[step]

    def _not_working(self, step: int) -> str:
        return f"needs x_{step}, but " + (
            "there is no working state" if self.working is None else f"the working state is x_{self.working}"
        )

    def _inventory(self) -> str:
        names = [f"{what} {step} ({tier})" for step, tier, what in sorted(self.held)]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return f"stored are {shown}" if names else "nothing is stored"
