"""Decisions for a timeline with their simulation: the value that the searches pass to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .decisions import Decisions, normalised
from .stage_table import StageTable
from .step_simulator import StepSimulation, StepSimulator


@dataclass(frozen=True, eq=False)
class StepCandidate:
    """Normalised decisions for the stages of a table, and their simulation."""

    table: StageTable
    decisions: Decisions
    simulation: StepSimulation
    solver: str

    @property
    def peak_bytes(self) -> int:
        """Peak of the simulation."""
        return self.simulation.peak_bytes

    @property
    def extra_s(self) -> float:
        """Time beyond that of the plain step."""
        return self.simulation.extra_s

    def fits(self, budget_bytes: int) -> bool:
        """Return whether a step can follow the decisions within the budget."""
        return self.simulation.fits(budget_bytes)


def judge_step(table: StageTable, decisions: Sequence[int], solver: str) -> StepCandidate:
    """Return the decisions with their simulation."""
    decisions = normalised(table, decisions)
    return StepCandidate(table, decisions, StepSimulator(table).run(decisions), solver)


def faster(plans: Sequence[StepCandidate | None], budget_bytes: int) -> StepCandidate | None:
    """Return the fastest plan that fits, or None. Of equally fast plans, the first."""
    fitting = [plan for plan in plans if plan is not None and plan.fits(budget_bytes)]
    return min(fitting, key=lambda plan: plan.extra_s, default=None)
