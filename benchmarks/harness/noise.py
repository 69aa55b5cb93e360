"""What is a difference, and what is only noise: judged from the rounds themselves, without torch.

Every step is compared with the plain steps around it, as a ratio, in logarithms: what the machine does besides lasts
for seconds and falls on both. The spread of a variant over the rounds is its median absolute deviation; with few
rounds that is now and then far too small by chance, so it is never taken for less than what is usual among all
variants of the model in that run. The median of k rounds then has a standard error, and a difference counts beyond
some of them and beyond a floor below which nobody cares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from .records import ModelResult

SURE = 4.0
"""Standard errors between two runs: many comparisons are made at a time, and the spread itself is only estimated. Of
100 pairs of made-up runs with blips, 9 rounds and 30 comparisons each, at most 2 raise a false alarm."""
SURE_WITHIN = 3.0
"""Standard errors between two variants of one run."""
LEAST_ROUNDS = 5
"""With fewer, a blip or two are the median, and nothing is sure. With 5 there is still a false alarm now and then."""
FLOOR = 0.01
"""A difference of less than this share of a step is none."""
_NORMAL = 1.4826  # from a median absolute deviation to a standard deviation
_MEDIAN = 1.2533  # the standard error of a median, over that of a mean


@dataclass(frozen=True)
class Difference:
    """How much more one thing takes than another."""

    ratio: float
    least: float
    most: float
    """The interval in which it is sure to be."""

    @property
    def slower(self) -> bool:
        """Beyond noise and floor."""
        return self.least > 1 and self.ratio > 1 + FLOOR

    @property
    def faster(self) -> bool:
        """Beyond noise and floor."""
        return self.most < 1 and self.ratio < 1 - FLOOR


def spread(logs: Sequence[float]) -> float:
    """The standard deviation, robustly; nothing is known of few rounds."""
    if len(logs) < LEAST_ROUNDS:
        return math.inf
    centre = median(logs)
    return _NORMAL * median(abs(x - centre) for x in logs)


def logs_of(model: ModelResult, name: str) -> list[float]:
    """By round: the logarithm of a variant's time over plain's."""
    return [math.log(ratio) for ratio in model.ratios(name)]


def usual_spread(model: ModelResult) -> float:
    """What is usual among the variants of a model in one run."""
    found = [spread(logs_of(model, name)) for name in model.measured() if name != "plain"]
    known = [one for one in found if math.isfinite(one)]
    return median(known) if known else math.inf


def standard_error(logs: Sequence[float], at_least: float) -> float:
    """Of the median of these rounds."""
    return _MEDIAN * max(spread(logs), at_least) / math.sqrt(max(1, len(logs)))


def difference(centre: float, errors: Iterable[float], sure: float) -> Difference:
    """From a difference of logarithms and the errors of its parts."""
    reach = sure * math.hypot(*errors)
    return Difference(math.exp(centre), math.exp(centre - reach), _exp(centre + reach))


def between_variants(model: ModelResult, one: str, other: str) -> Difference:
    """How much longer `one` takes than `other` in the same run, both over the plain steps around them."""
    usual, centre, errors = usual_spread(model), 0.0, []
    for name, sign in ((one, 1), (other, -1)):
        if name != "plain":
            logs = logs_of(model, name)
            centre += sign * median(logs)
            errors.append(standard_error(logs, usual))
    return difference(centre, errors, SURE_WITHIN)


def between_runs(old: ModelResult, new: ModelResult, name: str) -> Difference:
    """How much longer a variant takes in the new run, both over their own plain steps."""
    before, after = logs_of(old, name), logs_of(new, name)
    errors = [standard_error(before, usual_spread(old)), standard_error(after, usual_spread(new))]
    return difference(median(after) - median(before), errors, SURE)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
