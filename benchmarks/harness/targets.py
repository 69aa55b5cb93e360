"""What lowtide sets itself for a step's time, and whether a run shows it. No torch.

An overhead is the time beyond plain's, as a share of it. A target holds, or does not, if that is sure for all that
the rounds leave open about both overheads; otherwise it is undecided.
"""

from __future__ import annotations

from dataclasses import dataclass

from .noise import Difference, between_variants
from .records import ModelResult


@dataclass(frozen=True)
class Target:
    """An overhead that a variant may have at most: a share of a peer's, or, if that is more, a share of a step."""

    words: str
    short: str
    ours: str
    peer: str | None = None
    of_peer: float = 0.0
    of_step: float = 0.0


_CHECKPOINT = "at the peak of a checkpoint on every block, half of its overhead"
_HALF = "at half of what plain adds, 5 %"
TARGETS = (
    Target(_CHECKPOINT, "at checkpoint's peak", "planned@checkpoint", "checkpoint", 0.5),
    Target("at SAC's peak, 0.3 of its overhead, or 1 %", "at SAC's peak", "planned@sac", "sac", 0.3, 0.01),
    Target(_HALF, "at half", "planned@half", of_step=0.05),
    Target("with an ample budget, 125 % of plain's peak, 1 %", "ample", "planned@125", of_step=0.01),
)
WITH_DISK = (
    Target(f"with a disk, {_CHECKPOINT}", "at checkpoint's peak, disk", "planned-disk@checkpoint", "checkpoint", 0.5),
    Target(f"with a disk, {_HALF}", "at half, disk", "planned-disk@half", of_step=0.05),
)


@dataclass(frozen=True)
class Outcome:
    """One target on one model."""

    overhead: float
    allowed: float
    verdict: str
    least: float | None = None
    """The overhead that the planner proves of any plan, from the op times of its profile."""
    predicted: float | None = None


def outcome(model: ModelResult, target: Target) -> Outcome | None:
    """What a run says; None if it has not measured what it takes."""
    there = model.measured()
    if target.ours not in there or (target.peer is not None and target.peer not in there):
        return None
    ours = between_variants(model, target.ours, "plain")
    theirs = between_variants(model, target.peer, "plain") if target.peer is not None else Difference(1.0, 1.0, 1.0)

    def allowed(ratio: float) -> float:
        return max(target.of_peer * (ratio - 1), target.of_step)

    if ours.most - 1 <= allowed(theirs.least):
        verdict = "holds"
    elif ours.least - 1 > allowed(theirs.most):
        verdict = "**does not hold**"
    else:
        verdict = "undecided, but met" if ours.ratio - 1 <= allowed(theirs.ratio) else "undecided, but missed"
    least, predicted = (model.said(target.ours, what) for what in ("bound", "predicted"))
    if least is not None and least > allowed(theirs.most) and verdict != "holds":
        verdict += "; by the bound no plan can"
    return Outcome(ours.ratio - 1, allowed(theirs.ratio), verdict, least, predicted)
