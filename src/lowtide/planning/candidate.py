"""Decisions with their simulation: the value that solvers pass to each other."""

from __future__ import annotations

from dataclasses import dataclass

from .backward import TooManyReplaysError
from .simulator import Simulation, Simulator

_REPLAYS_PER_OP = 60
_MAX_REPLAYS = 60_000  # a quarter of a second to simulate


@dataclass(frozen=True, eq=False)
class Candidate:
    """Decisions and their simulation."""

    keep: tuple[bool, ...]
    released: frozenset[int]
    simulation: Simulation
    solver: str
    offload: frozenset[int] = frozenset()
    """The kept ops whose outputs are in the store or compressed between forward and backward."""

    @property
    def peak_bytes(self) -> int:
        """Peak of the simulation."""
        return self.simulation.peak_bytes

    @property
    def extra_s(self) -> float:
        """Time beyond that of the plain step."""
        return self.simulation.extra_s


def max_replays(n_ops: int) -> int:
    """Return the upper limit on replays of a step: nested recomputation can grow exponentially."""
    return min(_REPLAYS_PER_OP * n_ops + 1000, max(_MAX_REPLAYS, 4 * n_ops))


def judge_decisions(
    simulator: Simulator,
    keep: list[bool] | tuple[bool, ...],
    released: frozenset[int] = frozenset(),
    *,
    offload: frozenset[int] = frozenset(),
    limit_bytes: int = 0,
    solver: str,
) -> Candidate | None:
    """Return the decisions, made effective, with their simulation, or None if there are more than `max_replays`.

    Forward waits for values to be offloaded where more than `limit_bytes` would be live.
    """
    problem = simulator.problem
    keep = tuple(bool(kept) for kept in problem.effective_decisions(keep))
    released = frozenset(j for j in released if not keep[j])
    offload = frozenset(j for j in offload if keep[j] and problem.offloadable[j])
    try:
        simulation = simulator.run(
            keep, released, offload=offload, limit_bytes=limit_bytes, max_replays=max_replays(problem.n_ops)
        )
    except TooManyReplaysError:
        return None
    # Ops of which backward needs no output are not offloaded.
    return Candidate(keep, released, simulation, solver, frozenset(simulation.written_before))
