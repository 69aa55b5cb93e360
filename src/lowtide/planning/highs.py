"""Minimisation of a linear cost with HiGHS."""

from __future__ import annotations

import math
import time
from typing import Any

from scipy.optimize import Bounds, OptimizeResult, milp

from .rows import Floats, Rows
from .solver_output import to_standard_error

INFEASIBLE = 2
"""Status of a result: no solution exists."""
OPTIMAL = 0
_MIN_TIME_LIMIT_S = 0.05


def minimize(
    cost: Floats,
    rows: Rows,
    upper: Floats,
    *,
    deadline: float,
    lower: Floats | float = 0.0,
    integrality: Floats | None = None,
    **options: Any,
) -> OptimizeResult:
    """Return the result of `scipy.optimize.milp` for variables from `lower` to `upper`.

    `integrality` is 1 for integer variables. `deadline` is a time of `time.monotonic()`, or `math.inf`.
    """
    if math.isfinite(deadline):
        options["time_limit"] = max(_MIN_TIME_LIMIT_S, deadline - time.monotonic())
    with to_standard_error():
        return milp(
            cost, constraints=rows.constraint(), bounds=Bounds(lower, upper), integrality=integrality, options=options
        )
