"""The report of `grad`: measured and predicted steps, bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass

from .._units import format_bytes


@dataclass(frozen=True, slots=True)
class GradReport:
    """Counts, peaks and times of one call of `grad`."""

    n: int
    schedule: str
    forward_steps: int
    """Plain steps, taped steps, and one for each step reversed from a state, because its adjoint evaluates
    the step once more."""
    predicted_forward_steps: int
    step_calls: int
    """Calls of `step`."""
    peak_bytes: int
    """Peak of stored states, working state, its successor, adjoints and scratch. An upper bound if steps
    return their argument arrays, because results are counted as new arrays."""
    budget_bytes: int | None
    peak_slots: dict[str, int]
    """Peak number of slots in use, by tier."""
    peak_stored_bytes: dict[str, int]
    """Peak bytes in the slots, by tier."""
    forward_seconds: float
    adjoint_seconds: float
    io_seconds: float
    """Time to copy states into and out of slots."""

    @property
    def factor(self) -> float:
        """`forward_steps` divided by n."""
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
