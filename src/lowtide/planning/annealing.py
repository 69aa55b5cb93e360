"""A plan that fits, changed at random: a few decisions at a time, also for the worse at first.

For plans that are far above the bound, as those for budgets near the smallest are: there ops have to be made again
more than once, which the programme cannot say. Everything that is taken fits, and the best of it is returned, so that
it can only become better. The changes are always the same; how many of them there are depends on the time.
"""

from __future__ import annotations

import math
import random
import time

from .candidate import Candidate, judged
from .simulator import Simulator

_WARMTH = 0.02
"""What a change for the worse may cost at first, more or less: a share of a plain step."""
_AT_ONCE = (1, 1, 2, 2, 3)


def anneal(simulator: Simulator, start: Candidate, budget_bytes: int, *, deadline: float) -> Candidate:
    """A plan at least as fast as `start`, within the same budget."""
    problem = simulator.problem
    free = [j for j in range(problem.n_ops) if not problem.pinned[j]]
    draw = random.Random(0)
    best = here = start
    began = time.monotonic()
    while free and (now := time.monotonic()) < deadline:
        warmth_s = _WARMTH * problem.trace.step_s * (deadline - now) / (deadline - began)
        other = _changed(simulator, here, free, budget_bytes, draw)
        if other is None or other.peak_bytes > budget_bytes:
            continue
        worse_s = other.extra_s - here.extra_s
        if worse_s <= 0 or draw.random() < math.exp(-worse_s / max(warmth_s, 1e-12)):
            here = other
        if here.extra_s < best.extra_s:
            best = here
    return best


def _changed(
    simulator: Simulator, here: Candidate, free: list[int], budget_bytes: int, draw: random.Random
) -> Candidate | None:
    """Some ops decided otherwise: kept, recomputed, or recomputed more than once."""
    keep, again = list(here.keep), set(here.again)
    for _ in range(draw.choice(_AT_ONCE)):
        j = draw.choice(free)
        if keep[j] or draw.random() < 0.5:
            keep[j] = not keep[j]
            again.discard(j)
        if not keep[j] and draw.random() < 0.5:
            again ^= {j}
    return judged(
        simulator,
        keep,
        frozenset(again),
        offload=here.offload,
        room_bytes=budget_bytes,
        solver=f"{_start_of(here)}, annealed",
    )


def _start_of(candidate: Candidate) -> str:
    """The solver whose plan was changed."""
    return candidate.solver.removesuffix(", annealed")
