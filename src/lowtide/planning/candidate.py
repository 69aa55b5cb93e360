"""Decisions together with what the simulator says of them: what solvers hand to each other."""

from __future__ import annotations

from dataclasses import dataclass

from .backward import TooManyReplaysError
from .simulator import Simulation, Simulator

_REPLAYS_AN_OP = 60
_MOST_REPLAYS = 60_000  # a quarter of a second to simulate


@dataclass(frozen=True, eq=False)
class Candidate:
    """One judged set of decisions."""

    keep: tuple[bool, ...]
    released: frozenset[int]
    simulation: Simulation
    solver: str
    offload: frozenset[int] = frozenset()
    """Of the kept ops: those whose values wait in a store, or packed."""

    @property
    def peak_bytes(self) -> int:
        """What it needs."""
        return self.simulation.peak_bytes

    @property
    def extra_s(self) -> float:
        """What it costs."""
        return self.simulation.extra_s


def most_replays(n_ops: int) -> int:
    """More than anybody would want: what is made again and again may need that again and again."""
    return min(_REPLAYS_AN_OP * n_ops + 1000, max(_MOST_REPLAYS, 4 * n_ops))


def judged(
    simulator: Simulator,
    keep: list[bool] | tuple[bool, ...],
    released: frozenset[int] = frozenset(),
    *,
    offload: frozenset[int] = frozenset(),
    limit_bytes: int = 0,
    solver: str,
) -> Candidate | None:
    """The candidate, or None if it replays so much that nobody would want it.

    Forward waits for values to be offloaded where more than `limit_bytes` would be alive.
    """
    problem = simulator.problem
    keep = tuple(bool(kept) for kept in problem.effective_decisions(keep))
    released = frozenset(j for j in released if not keep[j])
    offload = frozenset(j for j in offload if keep[j] and problem.offloadable[j])
    try:
        simulation = simulator.run(
            keep, released, offload=offload, limit_bytes=limit_bytes, max_replays=most_replays(problem.n_ops)
        )
    except TooManyReplaysError:
        return None
    # What backward does not need does not leave.
    return Candidate(keep, released, simulation, solver, frozenset(simulation.written_before))
