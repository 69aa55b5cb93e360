"""The validator: simulates the actions of a schedule without arrays, and checks every rule.

Each step must be reversed exactly once, from the last to the first, from a state or tape that is available.
No tier and no budget may be exceeded, and no slot may be in use at the end. The validator shares no code with
the schedules, so its counts are an independent check of their predictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..._errors import ArgumentError, ScheduleError
from ..._units import format_bytes
from ._actions import Action, Advance, Free, Load, Reverse, Store, Tiers


@dataclass(frozen=True, slots=True)
class Counts:
    """Measured steps, slots, bytes and cost of a valid schedule."""

    forward_steps: int
    """Plain steps, plus one for each stored tape and one for each `Reverse` from a state."""
    peak_slots: Tiers
    reads: Tiers
    writes: Tiers
    peak_bytes: int | None
    """Peak bytes in memory, including work space. None without sizes."""
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
    """Simulate `schedule` for a chain of `n` steps. Raises `ScheduleError` at the first invalid action.

    `slots` means `memory_slots` and no disk. Only the given limits are checked. `sizes` are the bytes of
    x_0 … x_n, `tape_sizes` those of the tapes, and `work_sizes` those that a forward step needs beside the
    stored values. Their sum must not exceed `budget_bytes`. The cost is the sum of `costs` (one per step, by
    default 1 each), `backward_costs`, `write_cost` per write to disk and `read_cost` per read from disk.
    """
    if slots is not None:
        if memory_slots is not None or disk_slots is not None:
            raise ArgumentError("pass either slots, or memory_slots and disk_slots")
        memory_slots, disk_slots = slots, 0
    if n < 1:
        raise ArgumentError(f"a chain has at least one step, not {n}")
    run = _Simulation(n, {"memory": memory_slots, "disk": disk_slots}, sizes, budget_bytes, tape_sizes, work_sizes)
    for position, action in enumerate(schedule):
        problem = run.apply(action)
        if problem:
            raise ScheduleError(f"action {position}, {action}: {problem}")
    if run.to_reverse >= 0:
        raise ScheduleError(f"the schedule ends before steps 0 to {run.to_reverse} of {n} are reversed")
    if run.held:
        left = ", ".join(f"{content} {step} ({tier})" for step, tier, content in sorted(run.held))
        raise ScheduleError(f"the schedule ends with slots still in use: {left}")
    step_costs = costs if costs is not None else [1.0] * n
    cost = sum(times * step_costs[i] for i, times in enumerate(run.times_run))
    cost += sum(backward_costs) if backward_costs is not None else 0.0
    cost += run.writes["disk"] * write_cost + run.reads["disk"] * read_cost
    return Counts(
        forward_steps=sum(run.times_run),
        peak_slots=Tiers(**run.peak),
        reads=Tiers(**run.reads),
        writes=Tiers(**run.writes),
        peak_bytes=run.peak_bytes if sizes is not None else None,
        cost=cost,
    )


class _Simulation:
    """The state of a simulated run. Each method for an action returns its problem, or None."""

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

    def apply(self, action: object) -> str | None:
        """Simulate one action. Return its problem, or None."""
        match action:
            case Advance(start, stop):
                return self._advance(start, stop)
            case Store(step, tier, content):
                return self._store(step, tier, content)
            case Load(step, tier, content):
                return self._load(step, tier, content)
            case Free(step, tier, content):
                return self._free(step, tier, content)
            case Reverse(step, source):
                return self._reverse(step, source)
            case _:
                return "not an action of a schedule"

    def _advance(self, start: int, stop: int) -> str | None:
        if self.working != start:
            return self._not_working(start)
        if not start < stop <= self.n:
            return f"{start} to {stop} is not a range of forward steps in a chain of {self.n} steps"
        for step in range(start, stop):
            problem = self._forward(step)
            if problem:
                return problem
        self.working = stop
        return None

    def _store(self, step: int, tier: str, content: str) -> str | None:
        if tier not in self.used or content not in ("state", "tape"):
            return f"unknown tier {tier!r} or content {content!r}"
        if self.working != step:
            return self._not_working(step)
        if (step, tier, content) in self.held:
            return f"the {content} {step} is already stored in {tier}"
        if content == "tape" and step >= self.n:
            return f"a chain of {self.n} steps has no step {step} to tape"
        limit = self.limits[tier]
        if limit is not None and self.used[tier] >= limit:
            return f"all {limit} {tier} slots are in use"
        if content == "tape":
            # The tape is not part of stored_bytes yet.
            problem = self._forward(step, self.tape_bytes[step] if tier == "memory" else 0)
            if problem:
                return problem
            self.working = step + 1
        self.held.add((step, tier, content))
        self.used[tier] += 1
        self.writes[tier] += 1
        self.peak[tier] = max(self.peak[tier], self.used[tier])
        if tier == "memory":
            self.stored_bytes += self._bytes(step, content)
        return self._check_bytes(0)

    def _load(self, step: int, tier: str, content: str) -> str | None:
        if content == "tape":
            return "a tape cannot be loaded: Reverse reads it from its slot"
        if (step, tier, content) not in self.held:
            return f"x_{step} is not stored in {tier}; {self._inventory()}"
        self.working = step
        self.reads[tier] += 1
        return None

    def _free(self, step: int, tier: str, content: str) -> str | None:
        if (step, tier, content) not in self.held:
            return f"the {content} {step} is not stored in {tier}; {self._inventory()}"
        self.held.remove((step, tier, content))
        self.used[tier] -= 1
        if tier == "memory":
            self.stored_bytes -= self._bytes(step, content)
        return None

    def _reverse(self, step: int, source: str) -> str | None:
        if step != self.to_reverse:
            if self.to_reverse < 0:
                return "all steps are already reversed"
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
            return f"the source of Reverse is 'state' or 'tape', not {source!r}"
        self.to_reverse -= 1
        return None

    def _forward(self, step: int, tape_bytes: int = 0) -> str | None:
        self.times_run[step] += 1
        return self._check_bytes(self.work_bytes[step] + tape_bytes)

    def _check_bytes(self, extra_bytes: int) -> str | None:
        nbytes = self.stored_bytes + extra_bytes
        self.peak_bytes = max(self.peak_bytes, nbytes)
        if self.budget_bytes is not None and nbytes > self.budget_bytes:
            return (
                f"{nbytes} bytes ({format_bytes(nbytes)}) would be live, "
                f"{nbytes - self.budget_bytes} more than the budget of {self.budget_bytes}"
            )
        return None

    def _bytes(self, step: int, content: str) -> int:
        return self.state_bytes[step] if content == "state" else self.tape_bytes[step]

    def _not_working(self, step: int) -> str:
        return f"needs x_{step}, but " + (
            "there is no working state" if self.working is None else f"the working state is x_{self.working}"
        )

    def _inventory(self) -> str:
        names = [f"{content} {step} ({tier})" for step, tier, content in sorted(self.held)]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return f"stored: {shown}" if names else "nothing is stored"
