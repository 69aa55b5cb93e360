"""Noise: which differences between measured times are real. No torch.

Each step is divided by the plain steps around it, so that load on the machine cancels. The spread of a variant is the
median absolute deviation of the logarithms over the rounds. With few rounds this estimate can be far too small, so the
typical spread of the model's variants is a lower limit for it. A difference is real if it exceeds several standard
errors of the medians and a floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from .records import ModelResult

ERRORS_BETWEEN_RUNS = 4.0
"""Standard errors between two runs. A comparison of runs makes many tests with estimated spreads: of 100 pairs of
simulated runs with outliers, 9 rounds and 30 comparisons each, at most 2 raise a false alarm."""
ERRORS_BETWEEN_VARIANTS = 3.0
"""Standard errors between two variants of one run."""
MIN_ROUNDS = 5
"""With fewer rounds one or two outliers decide the median, so no difference counts."""
FLOOR = 0.01
"""Share of a step below which a difference does not count."""
_MAD_TO_DEVIATION = 1.4826
_MEDIAN_TO_MEAN_ERROR = 1.2533


@dataclass(frozen=True)
class Difference:
    """Time of one variant over another, with its confidence interval."""

    ratio: float
    least: float
    most: float

    @property
    def slower(self) -> bool:
        """Whether the first variant is slower, beyond noise and floor."""
        return self.least > 1 and self.ratio > 1 + FLOOR

    @property
    def faster(self) -> bool:
        """Whether the first variant is faster, beyond noise and floor."""
        return self.most < 1 and self.ratio < 1 - FLOOR


@dataclass(frozen=True)
class Change:
    """Time of a variant in an old and a new run, in plain steps of the same run."""

    old: float
    new: float
    noise: float
    """A smaller change is within the noise. Infinite with too few rounds."""

    @property
    def difference(self) -> float:
        """New time minus old time."""
        return self.new - self.old

    @property
    def slower(self) -> bool:
        """Whether the new run is slower by more than noise and by more than `FLOOR` of a plain step."""
        return self.difference > max(FLOOR, self.noise)

    @property
    def surely_not_slower(self) -> bool:
        """Whether the new run is slower by at most `FLOOR` of a plain step even if all noise is against it."""
        return self.difference + self.noise <= FLOOR

    @property
    def faster(self) -> bool:
        """Whether the new run is faster by more than noise and by more than `FLOOR` of a plain step."""
        return -self.difference > max(FLOOR, self.noise)


def spread(logs: Sequence[float]) -> float:
    """Return a robust standard deviation; infinite with too few rounds."""
    if len(logs) < MIN_ROUNDS:
        return math.inf
    centre = median(logs)
    return _MAD_TO_DEVIATION * median(abs(x - centre) for x in logs)


def between_variants(model: ModelResult, one: str, other: str) -> Difference:
    """Return the time of `one` over that of `other` in the same run."""
    typical, centre, errors = _typical_spread(model), 0.0, []
    for name, sign in ((one, 1), (other, -1)):
        if name != "plain":
            logs = _log_ratios(model, name)
            centre += sign * median(logs)
            errors.append(_standard_error(logs, typical))
    reach = ERRORS_BETWEEN_VARIANTS * math.hypot(*errors)
    return Difference(math.exp(centre), math.exp(centre - reach), _exp(centre + reach))


def between_runs(old: ModelResult, new: ModelResult, name: str) -> Change:
    """Return the times of a variant in two runs, each in plain steps of its own run."""
    ratios, errors = [], []
    for model in (old, new):
        logs = _log_ratios(model, name)
        ratios.append(math.exp(median(logs)))
        errors.append(ratios[-1] * _standard_error(logs, _typical_spread(model)))
    return Change(ratios[0], ratios[1], ERRORS_BETWEEN_RUNS * math.hypot(*errors))


def _log_ratios(model: ModelResult, name: str) -> list[float]:
    return [math.log(ratio) for ratio in model.ratios(name)]


def _typical_spread(model: ModelResult) -> float:
    found = [spread(_log_ratios(model, name)) for name in model.measured() if name != "plain"]
    known = [one for one in found if math.isfinite(one)]
    return median(known) if known else math.inf


def _standard_error(logs: Sequence[float], min_spread: float) -> float:
    """Return the standard error of the median."""
    return _MEDIAN_TO_MEAN_ERROR * max(spread(logs), min_spread) / math.sqrt(max(1, len(logs)))


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
