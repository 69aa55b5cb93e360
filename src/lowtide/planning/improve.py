"""Improve a plan that fits: retain, hold in memory and keep more, for as long as it fits.

Also the simple schemes, from which searches start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from .baselines import every_block, keep_heavy_ops, sqrt_segments
from .bits import bits_of, bits_where
from .candidate import Candidate, judge_decisions
from .fast_judge import FastJudge, FastResult
from .problem import Problem
from .repetition import find_repeated_blocks
from .segments import block_cuts, even_cuts, keep_at_cuts
from .simulator import Simulator

_ROUNDING = 1e-9
"""Relative difference between sums of the same times in different order."""


class _Decisions(NamedTuple):
    keep: Sequence[bool]
    released: frozenset[int]
    offload: frozenset[int]

    def retaining(self, ops: list[int]) -> _Decisions:
        """Return these decisions with these ops retained instead of released."""
        return self._replace(released=self.released - set(ops))

    def holding(self, ops: list[int]) -> _Decisions:
        """Return these decisions with the outputs of these ops held in memory instead of offloaded."""
        return self._replace(offload=self.offload - set(ops))

    def keeping(self, ops: list[int]) -> _Decisions:
        """Return these decisions with these ops kept."""
        keep = list(self.keep)
        for j in ops:
            keep[j] = True
        return self._replace(keep=keep, released=self.released - set(ops))


def improve(simulator: Simulator, start: Candidate, budget_bytes: int, *, deadline: float) -> Candidate:
    """Return a plan that is not slower than `start` and fits, if `start` does.

    Retain released ops, then hold offloaded ops in memory, then keep recomputed ops. Ops with the highest cost per byte
    come first.
    """
    problem = simulator.problem
    search = _Improvement(simulator, start, budget_bytes, deadline)

    def by_cost_per_byte(ops: Collection[int]) -> list[int]:
        nbytes = {j: sum(problem.nbytes[v] for v in problem.outputs[j]) for j in ops}
        return sorted(ops, key=lambda j: -problem.replay_s[j] / max(nbytes[j], 1))

    search.try_ops(_Decisions.retaining, by_cost_per_byte(start.released))
    search.try_ops(_Decisions.holding, sorted(start.offload))
    search.try_ops(_Decisions.keeping, by_cost_per_byte([j for j in range(problem.n_ops) if not start.keep[j]]))
    return search.result()


class _Improvement:
    """The best decisions so far, and how they are judged."""

    def __init__(self, simulator: Simulator, start: Candidate, budget_bytes: int, deadline: float) -> None:
        self._simulator = simulator
        self._start = start
        self._budget_bytes = budget_bytes
        self._deadline = deadline
        self._fast_judge = FastJudge(simulator.problem)
        self._best = _Decisions(start.keep, start.released, start.offload)
        self._best_extra_s = start.extra_s

    def try_ops(self, change: Callable[[_Decisions, list[int]], _Decisions], ops: list[int]) -> None:
        """Apply a change to as many of the ops as possible."""
        position, size = 0, len(ops)
        while position < len(ops) and time.monotonic() < self._deadline:
            # Change many ops at once; halve the number where this fails, double it where it succeeds.
            size = max(1, min(size, len(ops) - position))
            if self._accepts(change(self._best, ops[position : position + size])):
                position += size
                size *= 2
            elif size > 1:
                size //= 2
            else:
                position += 1

    def result(self) -> Candidate:
        """Return the best decisions with their simulation."""
        candidate = self._simulate(self._best)
        if candidate is None or candidate.peak_bytes > self._budget_bytes or candidate.extra_s > self._start.extra_s:
            return self._start
        return candidate

    def _accepts(self, decisions: _Decisions) -> bool:
        """Make these the best decisions if they fit and are not slower."""
        result: FastResult | Candidate | None
        if decisions.offload:
            result = self._simulate(decisions)
        else:
            keep = self._simulator.problem.effective_bits(bits_where(decisions.keep))
            limit_s = self._best_extra_s * (1 + _ROUNDING)
            result = self._fast_judge.judge(
                keep,
                bits_of(decisions.released) & ~keep,
                self._budget_bytes,
                penalty_s_per_byte=limit_s + 1,  # a single excess byte exceeds the limit
                limit_s=limit_s,
            )
        if result is None or result.peak_bytes > self._budget_bytes or result.extra_s > self._best_extra_s:
            return False
        self._best, self._best_extra_s = decisions, result.extra_s
        return True

    def _simulate(self, decisions: _Decisions) -> Candidate | None:
        return judge_decisions(
            self._simulator,
            list(decisions.keep),
            decisions.released,
            offload=decisions.offload,
            limit_bytes=self._budget_bytes,
            solver=self._start.solver,
        )


def simple_schemes(problem: Problem) -> Iterator[tuple[str, list[bool]]]:
    """Yield the names and decisions of schemes that need no search."""
    yield "keep all", problem.keep_all()
    yield "keep matmuls and attention", keep_heavy_ops(problem)
    yield "every block", every_block(problem)
    yield "√n segments", sqrt_segments(problem)
    cuts = block_cuts(problem, find_repeated_blocks(problem))
    every = 1
    while every <= len(cuts):
        yield f"cut every {every} blocks", keep_at_cuts(problem, cuts[::every])
        every += 1 + every // 3
    segments = 1
    while segments <= max(1, problem.n_ops // 2):
        yield f"{segments} segments", keep_at_cuts(problem, even_cuts(problem, segments))
        segments += 1 + segments // 2
