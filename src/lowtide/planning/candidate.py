"""Decisions together with what the simulator says of them: what solvers hand to each other."""

from __future__ import annotations

from dataclasses import dataclass

from .simulator import Simulation, Simulator, TooManyReplaysError

_REPLAYS_AN_OP = 60
_MOST_REPLAYS = 60_000  # a quarter of a second to simulate


@dataclass(frozen=True, eq=False)
class Candidate:
    """One judged set of decisions."""

    keep: tuple[bool, ...]
    again: frozenset[int]
    simulation: Simulation
    solver: str

    @property
    def peak_bytes(self) -> int:
        """What it needs."""
        return self.simulation.peak_bytes

    @property
    def extra_s(self) -> float:
        """What it costs."""
        return self.simulation.extra_s


def judged(
    simulator: Simulator, keep: list[bool] | tuple[bool, ...], again: frozenset[int] = frozenset(), *, solver: str
) -> Candidate | None:
    """The candidate, or None if it replays so much that nobody would want it."""
    keep = tuple(bool(kept) for kept in simulator.problem.obeyed(keep))
    again = frozenset(j for j in again if not keep[j])
    limit = min(_REPLAYS_AN_OP * simulator.problem.n_ops + 1000, max(_MOST_REPLAYS, 4 * simulator.problem.n_ops))
    try:
        simulation = simulator.run(keep, again, max_replays=limit)
    except TooManyReplaysError:
        return None
    return Candidate(keep, again, simulation, solver)
