"""Decisions for a timeline: one number for each op.

`KEPT`: the op has no recipe, and its values are held as in plain PyTorch. Otherwise the op is recorded, and the number
is a set of stages as bits: bit k says whether its values are held into stage `StageTable.stages_of[op][k]`. Bit 0 is
the first stage in which the op matters: the values are held from the first handle or recipe that needs them. A later
bit says that they are not dropped between the stage before and this one. In a stage into which they are not held they
are replayed, if the stage needs them.

After the last stage, the values of a recorded op are dropped if a handle outlives it (`StageTable.tailed`).
"""

from __future__ import annotations

from collections.abc import Sequence

from .stage_table import StageTable
from .step_facts import StepFacts

KEPT = -1

Decisions = tuple[int, ...]

PlanRows = tuple[tuple[bool, ...], tuple[int, ...], tuple[tuple[int, int, int, int], ...], tuple[int, ...]]
"""The fields `keep`, `held`, `drops` and `tails` of a plan."""


def keep_all(facts: StepFacts) -> Decisions:
    """Return the decisions of plain PyTorch."""
    return (KEPT,) * facts.n_ops


def recompute_all(facts: StepFacts) -> Decisions:
    """Return the decisions that recompute every op in every stage, except pinned ops."""
    return tuple(KEPT if pinned else 0 for pinned in facts.pinned)


def all_stages(table: StageTable, op: int) -> int:
    """Return the decision that holds the values of a recorded op into all stages in which it matters."""
    return (1 << len(table.stages_of[op])) - 1


def normalised(table: StageTable, decisions: Sequence[int]) -> Decisions:
    """Return equal decisions for the engine, with every op kept that must be kept or that is never dropped.

    Pinned ops are kept. An op that overwrites a kept value in place is kept too: its input does not exist later.
    """
    facts = table.facts
    result = list(decisions)
    for j, decision in enumerate(result):
        if decision == KEPT:
            continue
        stages = all_stages(table, j)
        never_dropped = stages > 0 and decision & stages == stages and not table.tailed[j]
        overwrites_kept = any(i < 0 or result[i] == KEPT for i in facts.overwritten_producers[j])
        result[j] = KEPT if facts.pinned[j] or never_dropped or overwrites_kept else decision & stages
    return tuple(result)


def plan_rows(table: StageTable, decisions: Decisions) -> PlanRows:
    """Return normalised decisions as the fields of a plan."""
    facts = table.facts
    nth_unpack: dict[int, int] = {}
    anchor: dict[int, tuple[int, int]] = {}  # by unpack event: saved tensor, and how often it was unpacked before
    for t, unpack in zip(facts.trace.unpack_events, facts.trace.unpacks, strict=True):
        nth = nth_unpack.get(unpack.save, 0)
        nth_unpack[unpack.save] = nth + 1
        anchor[t] = unpack.save, nth
    drops = [
        (*anchor[t], j, facts.outputs[j].index(v))
        for t, (v, j, position) in table.drops()
        if not decisions[j] >> position & 1
    ]
    return (
        tuple(decision == KEPT for decision in decisions),
        tuple(j for j, decision in enumerate(decisions) if decision != KEPT and decision & 1),
        tuple(drops),
        tuple(j for j, decision in enumerate(decisions) if decision != KEPT and table.tailed[j]),
    )
