"""A planner with fixed settings: a trace and a limit in, a plan out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..codecs.costs import codec_costs_for
from ..planning import Link, Plan, is_feasible, solve
from ..records import Trace


@dataclass(frozen=True)
class Planner:
    """The time limit of a plan, and the store and codecs that it may use."""

    deadline_s: float
    link: Link | None = None
    codecs: str | Sequence[str] | None = ()

    def solve(self, trace: Trace, limit_bytes: int, progress: Callable[[str], None] | None = None) -> Plan:
        """Return a plan for a step. Raises `BudgetError` if none fits."""
        return solve(trace, limit_bytes, **self.options(trace), progress=progress)

    def is_feasible(self, trace: Trace, limit_bytes: int) -> bool:
        """Return whether a plan fits, with less work than `solve`."""
        return is_feasible(trace, limit_bytes, **self.options(trace))

    def options(self, trace: Trace) -> dict[str, Any]:
        """Return the settings as keyword arguments of `planning.solve`."""
        return {
            "link": self.link,
            "codec_costs": codec_costs_for(trace, self.codecs),
            "deadline_s": self.deadline_s,
        }
