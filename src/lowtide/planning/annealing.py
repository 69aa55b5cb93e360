"""A plan changed at random: a few decisions at a time, also for the worse at first.

For budgets at which what was found is far above the bound, as it is near the smallest: there ops have to be made again
more than once, which the programme cannot say. On the way there may be too many bytes, at a price that rises, because
from one plan that fits to the next there is often no other way; of those that fit the best is returned. The changes
are always the same; how many of them there are depends on the time.
"""

from __future__ import annotations

import math
import random
import time

from .candidate import Candidate, judged
from .simulator import Simulator

_WARMTHS = (0.02, 0.005)
"""What a change for the worse may cost, more or less, when a pass begins: a share of a plain step."""
_PRICE, _PRICE_FROM_ABOVE, _LAST_PRICE = 30.0, 3.0, 1500.0
"""What a budget's worth of bytes too many costs, in plain steps: at first, at first where nothing fits yet, at last."""
_AT_ONCE = (1, 1, 2, 2, 3)


def anneal(simulator: Simulator, start: Candidate, budget_bytes: int, *, deadline: float) -> Candidate:
    """The best plan that was found; `start` if that is none that fits, or fits and is faster than `start`."""
    draw = random.Random(0)
    best = start
    for passes_left, warmth in zip(range(len(_WARMTHS), 0, -1), _WARMTHS, strict=True):
        until = time.monotonic() + (deadline - time.monotonic()) / passes_left
        best = _pass(simulator, best, budget_bytes, warmth, draw, until)
    return best


def _pass(
    simulator: Simulator, start: Candidate, budget_bytes: int, warmth: float, draw: random.Random, deadline: float
) -> Candidate:
    """One cooling down."""
    problem = simulator.problem
    free = [j for j in range(problem.n_ops) if not problem.pinned[j]]
    fits = start.peak_bytes <= budget_bytes
    price = _PRICE if fits else _PRICE_FROM_ABOVE
    best = here = start
    began = time.monotonic()
    while free and (now := time.monotonic()) < deadline:
        left = (deadline - now) / (deadline - began)
        warmth_s = warmth * problem.trace.step_s * left
        price_s = price * problem.trace.step_s / max(left, price / _LAST_PRICE)
        other = _changed(simulator, here, free, budget_bytes, draw)
        if other is None:
            continue
        if other.peak_bytes <= budget_bytes and (not fits or other.extra_s < best.extra_s):
            best, fits = other, True
        worse_s = other.extra_s - here.extra_s + price_s * (_excess(other, budget_bytes) - _excess(here, budget_bytes))
        if worse_s <= 0 or draw.random() < math.exp(-worse_s / max(warmth_s, 1e-12)):
            here = other
    return best


def _excess(candidate: Candidate, budget_bytes: int) -> float:
    """Bytes too many, as a share of the budget."""
    return max(0, candidate.peak_bytes - budget_bytes) / budget_bytes


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
