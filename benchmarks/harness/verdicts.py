"""Verdicts: distance of lowtide to the lower bound and to each peer, and where lowtide is behind. No torch.

A peer is compared with measured plans only, without interpolation: with the fastest plan that needs no more memory,
and with the smallest plan that is no slower. Differences within the noise are undecided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from .noise import FLOOR, Difference, between_variants
from .records import ModelResult

OURS = ("lowtide planned", "lowtide planned, disk", "lowtide online", "lowtide rules")
PLAN = "lowtide planned"
PLAN_FAMILIES = (PLAN, "lowtide planned, disk")
NOT_PEERS = (*OURS, "plain", "schedules")
SAME_PEAK = 1.001  # a budget taken from a peer's peak is met to within this
Outcome = Literal["ahead", "behind", "undecided", "out of reach"]


@dataclass(frozen=True)
class Verdict:
    """One peer and the plan of lowtide that it is compared with."""

    peer: str
    ours: str | None
    """None: no plan qualifies."""
    difference: Difference | None
    """Time of lowtide over the peer's."""
    outcome: Outcome


@dataclass(frozen=True)
class BoundDistance:
    """Overhead of a plan above the lower bound, as shares of a plain step."""

    predicted: float
    measured: float


def distance_to_bound(model: ModelResult, variant: str) -> BoundDistance | None:
    """Return the distance of a measured plan to its lower bound; None if the run has no bound for it."""
    bound, predicted = (model.planned_overhead(variant, key) for key in ("bound", "predicted"))
    if bound is None or predicted is None:
        return None
    return BoundDistance(predicted - bound, model.ratio(variant) - 1 - bound)


def peers(model: ModelResult) -> list[str]:
    """Return the measured peers, in the order of the run."""
    return [name for name, one in model.measured().items() if one.family not in NOT_PEERS]


def plans(model: ModelResult) -> list[str]:
    """Return the measured plans of lowtide, largest peak first."""
    measured = [name for name, one in model.measured().items() if one.family == PLAN]
    return sorted(measured, key=lambda name: -model.peak_share(name))


def at_equal_peak(model: ModelResult, peer: str) -> Verdict:
    """Compare the peer with the fastest plan that needs no more memory."""
    limit = model.peak_share(peer) * SAME_PEAK
    qualified = [name for name in plans(model) if model.peak_share(name) <= limit]
    if not qualified:
        return Verdict(peer, None, None, "out of reach")
    ours = min(qualified, key=model.ratio)
    difference = between_variants(model, ours, peer)
    return Verdict(peer, ours, difference, _outcome(difference))


def at_equal_overhead(model: ModelResult, peer: str) -> Verdict:
    """Compare the peer with the smallest plan that was measured no slower.

    lowtide is ahead only if its time is certainly not above the peer's by more than the floor.
    """
    for ours in reversed(plans(model)):
        difference = between_variants(model, ours, peer)
        if difference.ratio <= 1:
            share, theirs = model.peak_share(ours), model.peak_share(peer)
            if share > theirs * SAME_PEAK:
                return Verdict(peer, ours, difference, "behind")
            certain = share * SAME_PEAK < theirs and difference.most <= 1 + FLOOR
            return Verdict(peer, ours, difference, "ahead" if certain else "undecided")
    return Verdict(peer, None, None, "out of reach")


def _outcome(difference: Difference) -> Outcome:
    if difference.slower:
        return "behind"
    return "ahead" if difference.faster else "undecided"


@dataclass(frozen=True)
class Behind:
    """A peer that lowtide is behind, or a variant of lowtide that fails."""

    model: str
    variant: str
    sentence: str


def where_behind(name: str, model: ModelResult) -> list[Behind]:
    """Return the results of one model in which lowtide is behind or fails."""
    found = [*_behind_peers(name, model), *_own_faults(name, model)]
    return sorted(found, key=lambda one: one.variant)


def _behind_peers(name: str, model: ModelResult) -> Iterable[Behind]:
    for peer in peers(model):
        share = 100 * model.peak_share(peer)
        one = at_equal_peak(model, peer)
        if one.outcome == "out of reach":
            yield Behind(name, peer, f"no plan of this run has a peak as low as {share:.1f} % of plain's")
        elif one.outcome == "behind" and one.ours is not None and one.difference is not None:
            yield Behind(
                name,
                peer,
                f"at {share:.1f} % of plain's peak lowtide ({one.ours}, {100 * model.peak_share(one.ours):.1f} %) "
                f"takes {_percent(one.difference.ratio)} longer: × {model.ratio(one.ours):.3f} of plain's time "
                f"against × {model.ratio(peer):.3f}",
            )


def _own_faults(name: str, model: ModelResult) -> Iterable[Behind]:
    checks: list[tuple[Callable[[str], bool], str]] = [
        (lambda v: model.variants[v].exact is False, "loss or gradients differ from plain's"),
        (lambda v: model.variants[v].buffers_equal is False, "buffers differ from plain's"),
        (lambda v: over_budget(model, v), "the peak is over the budget"),
        (lambda v: "not followed" in model.variants[v].note, "the plan was not followed in every step"),
    ]
    for variant, one in model.variants.items():
        if one.family not in OURS:
            continue
        if one.error is not None:
            yield Behind(name, variant, first_sentence(one.error))
        yield from (Behind(name, variant, sentence) for holds, sentence in checks if holds(variant))
        if model.measured().get("plain") and one.measured and _saves_nothing(model, variant):
            yield Behind(
                name,
                variant,
                f"needs as much memory as plain and × {model.ratio(variant):.3f} of plain's time",
            )


def over_budget(model: ModelResult, variant: str) -> bool:
    """Return whether the peak is above the budget, by either meter."""
    one = model.variants[variant]
    return one.asked_bytes is not None and max(one.peak_bytes or 0, one.own_peak_bytes or 0) > one.asked_bytes


def _saves_nothing(model: ModelResult, variant: str) -> bool:
    return model.peak_share(variant) >= 0.999 and between_variants(model, variant, "plain").slower


def first_sentence(error: str) -> str:
    """Return the first sentence of an error, on one line."""
    return re.split(r"(?<=[.:;])\s+(?=[A-Z0-9])", error, maxsplit=1)[0].replace("\n", " ").rstrip(":;")


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.1f} %"
