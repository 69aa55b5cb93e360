"""Repeated blocks in the op stream, and the ties that let one decision stand for many of them.

A stack of equal layers shows as a stretch of ops that repeats with a period. Found by comparing the stream
with itself, shifted; module names are not needed. Nothing is lost when none is found: ties are then trivial.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .problem import Problem

_LEAST_BLOCKS = 3
_LEAST_OPS = 12


@dataclass(frozen=True)
class RepeatedBlocks:
    """Ops `start` to `start + blocks · period`, in which every period does the same."""

    start: int
    period: int
    blocks: int


def find_repeated_blocks(problem: Problem) -> list[RepeatedBlocks]:
    """The repeated stretches of the stream, longest found first, disjoint."""
    marks = _marks(problem)
    found: list[RepeatedBlocks] = []
    pending = [(0, problem.n_ops)]
    while pending:
        low, high = pending.pop()
        repeat = _longest(marks, low, high)
        if repeat is None:
            continue
        found.append(repeat)
        end = repeat.start + repeat.blocks * repeat.period
        pending += [(low, repeat.start), (end, high)]
    return found


def tie_blocks(problem: Problem, repeats: list[RepeatedBlocks]) -> list[int]:
    """One label per op; ops with one label get one decision.

    The blocks of a stretch form groups of 1, 1, 2, 4, ... from its end, because backward starts there, with
    everything else still held; and because with such sizes any number of blocks can be given one treatment.
    """
    labels: dict[tuple[int, ...], int] = {}
    ties = [0] * problem.n_ops
    group_of: dict[int, tuple[RepeatedBlocks, list[int]]] = {}
    for repeat in repeats:
        groups = _groups(repeat.blocks)
        for j in range(repeat.start, repeat.start + repeat.blocks * repeat.period):
            group_of[j] = (repeat, groups)
    for j in range(problem.n_ops):
        key: tuple[int, ...] = (-1, j)
        if j in group_of:
            repeat, groups = group_of[j]
            block, offset = divmod(j - repeat.start, repeat.period)
            key = (repeat.start, groups[block], offset, int(problem.pinned[j]))
        ties[j] = labels.setdefault(key, len(labels))
    return ties


def _groups(blocks: int) -> list[int]:
    """By block: its group, numbered from the end."""
    groups: list[int] = []
    size, group = 1, 0
    while len(groups) < blocks:
        groups += [group] * min(size, blocks - len(groups))
        group += 1
        size = 1 if group == 1 else 2 * size
    return groups[::-1]


def _marks(problem: Problem) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A number per op: equal for ops that look alike, also in where their inputs come from."""
    numbers: dict[object, int] = {}
    trace = problem.trace
    position = {v: i for outputs in problem.outputs for i, v in enumerate(outputs)}
    marks = []
    for j, op in enumerate(trace.ops):
        near = tuple(
            (j - problem.producer[u], position[u])
            for u in problem.inputs[j]
            if j - problem.producer[u] <= problem.n_ops // 3
        )
        key = (
            op.name,
            op.pinned,
            len(op.inputs),
            near if len(near) <= 2 else len(near),  # wide ops reach back differently in every block
            tuple((problem.nbytes[v], problem.saved[v]) for v in op.outputs),
        )
        marks.append(numbers.setdefault(key, len(numbers)))
    return np.array(marks, dtype=np.int64)


def _longest(marks: np.ndarray[tuple[int], np.dtype[np.int64]], low: int, high: int) -> RepeatedBlocks | None:
    """The stretch that covers most of [low, high), of the shortest period among equals."""
    best: tuple[int, RepeatedBlocks] | None = None
    part = marks[low:high]
    n = len(part)
    for period in range(2, n // _LEAST_BLOCKS + 1):
        if best is not None and best[0] >= n - n % period:
            break
        differs = np.flatnonzero(part[:-period] != part[period:])
        edges = np.concatenate([[-1], differs, [n - period]])
        runs = np.diff(edges) - 1
        longest = int(runs.argmax())
        blocks = (int(runs[longest]) + period) // period
        if blocks < _LEAST_BLOCKS or blocks * period < _LEAST_OPS:
            continue
        # Early blocks differ more often (their inputs come from elsewhere), so align with the end of the run.
        end = low + int(edges[longest + 1]) + period
        if best is None or blocks * period > best[0] + period // 2:
            best = (blocks * period, RepeatedBlocks(end - blocks * period, period, blocks))
    return best[1] if best is not None else None
