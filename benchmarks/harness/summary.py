"""The five lines at the top of a results page, computed from the run. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import median

from .records import ModelResult
from .verdicts import OURS, Verdict, at_equal_peak, distance_to_bound, over_budget, peers, plans

MAIN_PEERS = {"checkpoint": "`torch.utils.checkpoint` on every block", "sac": "selective checkpointing (SAC)"}
AMPLE = "planned@125"
SMALLEST = "planned@smallest"
PLAIN_PEAK = 0.999  # from this share of plain's peak on, a plan keeps everything


def summary(models: dict[str, ModelResult]) -> list[str]:
    """Return five sentences: the two main peers, the other peers, the lower bound, and plain PyTorch."""
    return [
        *(_main_peer(models, peer, words) for peer, words in MAIN_PEERS.items()),
        _other_peers(models),
        _bound(models),
        _plain(models),
    ]


def _main_peer(models: dict[str, ModelResult], peer: str, words: str) -> str:
    found = [(model, at_equal_peak(model, peer)) for model in models.values() if peer in peers(model)]
    both = [(model.ratio(one.ours) - 1, model.ratio(peer) - 1) for model, one in found if one.ours is not None]
    if not both:
        return f"At the peak of {words}: not measured."
    ours, theirs = (median(column) for column in zip(*both, strict=True))
    return (
        f"At the peak of {words}, lowtide's median overhead is {100 * ours:.1f} % of a plain step against "
        f"{100 * theirs:.1f} %: {_counts(one for _, one in found)}."
    )


def _other_peers(models: dict[str, ModelResult]) -> str:
    by_peer: dict[str, list[Verdict]] = {}
    for model in models.values():
        for peer in peers(model):
            if peer not in MAIN_PEERS:
                by_peer.setdefault(peer.partition("@")[0], []).append(at_equal_peak(model, peer))
    if not by_peer:
        return "Other peers: not measured."
    return "At the peak of other peers: " + "; ".join(f"{p}: {_counts(all_)}" for p, all_ in by_peer.items()) + "."


def _counts(verdicts: Iterable[Verdict]) -> str:
    """Return the number of comparisons by outcome, such as "ahead on 3 of 4, undecided on 1"."""
    counts = Counter(one.outcome for one in verdicts)
    first, *rest = (f"{outcome} on {counts[outcome]}" for outcome in ("ahead", "undecided", "behind", "out of reach")
                    if counts[outcome])  # fmt: skip
    return ", ".join([f"{first} of {counts.total()}", *rest])


def _bound(models: dict[str, ModelResult]) -> str:
    distances = [
        distance
        for model in models.values()
        for name in plans(model)
        if name != SMALLEST
        and model.peak_share(name) < PLAIN_PEAK
        and (distance := distance_to_bound(model, name)) is not None
    ]
    if not distances:
        return "Distance to the lower bound: not measured."
    predicted = [one.predicted for one in distances]
    return (
        f"{len(distances)} plans between the smallest budget and plain's peak are {100 * median(predicted):.1f} "
        f"percentage points above the lower bound as predicted (median; at most {100 * max(predicted):.1f}), and "
        f"{100 * median(one.measured for one in distances):.1f} as measured."
    )


def _plain(models: dict[str, ModelResult]) -> str:
    ample = [model.ratio(AMPLE) - 1 for model in models.values() if AMPLE in model.measured()]
    ours = [(model, name) for model in models.values() for name, one in model.measured().items() if one.family in OURS]
    budgeted = [(model, name) for model, name in ours if model.variants[name].asked_bytes is not None]
    held = sum(not over_budget(model, name) for model, name in budgeted)
    exact = sum(bool(model.variants[name].exact and model.variants[name].buffers_equal) for model, name in ours)
    cost = (
        f"With a budget of 125 % of plain's peak the median overhead over plain PyTorch is {100 * median(ample):.1f} % "
        f"({100 * min(ample):.1f} to {100 * max(ample):.1f} %)"
        if ample
        else "Overhead with an ample budget: not measured"
    )
    return f"{cost}; {held} of {len(budgeted)} budgets were held; {exact} of {len(ours)} variants are bit-equal."
