"""Repeated blocks in the list of ops, and ties: labels that give ops in several blocks one decision.

A stack of equal layers is a run of ops that repeats with a period. It is found by comparison of the op list with
itself, shifted by the period. Module names are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .problem import Problem

_MIN_BLOCKS = 3
_MIN_OPS = 12
"""A run of fewer blocks, or of fewer ops in all, does not count as repeated blocks."""

_MIN_TIED_OPS = 36
"""Ops in a tied block, at least. Doubled: programmes of twice the size for chains of short blocks, too slow at small
budgets. With blocks of 12 ops a chain of 240 LSTM cells took 2.5 to 5.4 % of a step longer."""

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RepeatedBlocks:
    """`blocks` blocks of `period` equal ops each, from op `start` on."""

    start: int
    period: int
    blocks: int


def find_repeated_blocks(problem: Problem) -> list[RepeatedBlocks]:
    """Return the runs of repeated blocks. They are disjoint, and the longest one comes first."""
    signatures = _op_signatures(problem)
    found: list[RepeatedBlocks] = []
    pending = [(0, problem.n_ops)]
    while pending:
        low, high = pending.pop()
        repeat = _longest_run(signatures, low, high)
        if repeat is None:
            continue
        found.append(repeat)
        end = repeat.start + repeat.blocks * repeat.period
        pending += [(low, repeat.start), (end, high)]
    return found


def tie_blocks(problem: Problem, repeats: list[RepeatedBlocks]) -> list[int]:
    """Return a label for each op. Ops with equal labels get one decision.

    The blocks of a run form groups of 1, 1, 2, 4, ... blocks, counted from its end. The last blocks have groups of
    their own because backward starts there, while all other values are still held. Groups of these sizes can be
    combined to any number of blocks with equal decisions. Several short blocks count as one, so that a plan can hold
    a value in every third cell of a recurrent net.
    """
    labels: dict[tuple[int, ...], int] = {}
    tied: dict[int, tuple[int, ...]] = {}
    for repeat in repeats:
        period = repeat.period * -(-_MIN_TIED_OPS // repeat.period)
        n_ops = repeat.blocks * repeat.period
        end = repeat.start + n_ops
        groups = _groups(-(-n_ops // period))
        for i in range(n_ops):
            block, offset = divmod(i, period)  # counted from the end of the run
            tied[end - 1 - i] = (repeat.start, groups[block], offset)
    ties = []
    for j in range(problem.n_ops):
        key = (*tied[j], int(problem.pinned[j])) if j in tied else (-1, j)
        ties.append(labels.setdefault(key, len(labels)))
    return ties


def _groups(blocks: int) -> list[int]:
    """Return the group of each block, from the last block to the first."""
    groups: list[int] = []
    size, group = 1, 0
    while len(groups) < blocks:
        groups += [group] * min(size, blocks - len(groups))
        group += 1
        size = 1 if group == 1 else 2 * size
    return groups


def _op_signatures(problem: Problem) -> _Ints:
    """Return a number for each op: equal for ops with equal name, sizes and distances to the makers of their inputs."""
    numbers: dict[object, int] = {}
    position = {v: i for outputs in problem.outputs for i, v in enumerate(outputs)}
    signatures = []
    for j, op in enumerate(problem.trace.ops):
        near_inputs = tuple(
            (j - problem.producer[v], position[v])
            for v in problem.inputs[j]
            if j - problem.producer[v] <= problem.n_ops // 3
        )
        signature = (
            op.name,
            op.pinned,
            len(op.inputs),
            # In ops with many inputs, such as cat, the distances differ from block to block.
            near_inputs if len(near_inputs) <= 2 else len(near_inputs),
            tuple((problem.nbytes[v], problem.saved[v]) for v in op.outputs),
        )
        signatures.append(numbers.setdefault(signature, len(numbers)))
    return np.array(signatures, dtype=np.int64)


def _longest_run(signatures: _Ints, low: int, high: int) -> RepeatedBlocks | None:
    """Return the longest run in the ops [low, high). Of runs with similar length, take the shortest period."""
    best: RepeatedBlocks | None = None
    best_ops = 0
    part = signatures[low:high]
    n = len(part)
    for period in range(2, n // _MIN_BLOCKS + 1):
        if best is not None and best_ops >= n - n % period:
            break
        differs = np.flatnonzero(part[:-period] != part[period:])
        edges = np.concatenate([[-1], differs, [n - period]])
        lengths = np.diff(edges) - 1
        longest = int(lengths.argmax())
        blocks = (int(lengths[longest]) + period) // period
        ops = blocks * period
        if blocks < _MIN_BLOCKS or ops < _MIN_OPS:
            continue
        # Align with the end of the run: the first blocks differ more often, because their inputs have other makers.
        end = low + int(edges[longest + 1]) + period
        if best is None or ops > best_ops + period // 2:
            best, best_ops = RepeatedBlocks(end - ops, period, blocks), ops
    return best
