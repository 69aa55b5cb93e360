"""What a reverse sweep did, beside what its schedule had promised. Bytes are the executor's own accounts."""

from __future__ import annotations

from dataclasses import dataclass

from .._units import format_bytes


@dataclass(frozen=True, slots=True)
class GradReport:
    """The facts of one call of `grad`."""

    n: int
    schedule: str
    forward_steps: int
    """Forward steps as schedules count them: plain ones, taped ones, and one for each step reversed from a
    state (its adjoint runs it once more inside)."""
    predicted_forward_steps: int
    step_calls: int
    """How often `step` was called."""
    peak_bytes: int
    """The most held in memory at one time: stored states, working state, its successor, adjoints, scratch. An
    upper bound where steps return the arrays they were given: results are counted as new."""
    budget_bytes: int | None
    peak_slots: dict[str, int]
    """The most slots in use at one time, for each tier that was used."""
    peak_stored_bytes: dict[str, int]
    """The most bytes in those slots."""
    forward_seconds: float
    adjoint_seconds: float
    io_seconds: float
    """Copying states into slots and out of them."""

    @property
    def factor(self) -> float:
        """`forward_steps` over n."""
        return self.forward_steps / self.n if self.n else 0.0

    def __str__(self) -> str:
        of = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes is not None else ""
        lines = [
            f"{self.n:,} steps reversed by {self.schedule}",
            f"  forward steps  {self.forward_steps:,} ({self.factor:.2f} × n), "
            f"predicted {self.predicted_forward_steps:,}",
            f"  peak           {format_bytes(self.peak_bytes)}{of}",
        ]
        lines += [
            f"  slots          {count:,} in {tier}, {format_bytes(self.peak_stored_bytes[tier])}"
            for tier, count in self.peak_slots.items()
        ]
        lines.append(
            f"  seconds        {self.forward_seconds:.2f} forward, {self.adjoint_seconds:.2f} adjoint, "
            f"{self.io_seconds:.2f} slots"
        )
        return "\n".join(lines)
