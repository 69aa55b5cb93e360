"""Traces of a step for all sizes of a range, from profiles at small sizes.

A *size* is any number from which batches are built: tokens, pixels, rows. The smallest size of the range is profiled,
and about twice that size. All other traces are made from these profiles (`planning.scaling`). Where they leave the
bytes of a step too uncertain, another profile is made, at about twice the largest profiled size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._errors import ArgumentError, BudgetError
from ..planning.scaling import ScaledTrace, SizedTrace, scale
from ..records import Trace
from .signature import sizes_of

_MAX_PROFILES = 4
"""Profiles of a range. Doubled: more exact bytes where they follow no simple function of the size."""
_MAX_UNCERTAIN = 0.02
"""Share of the limit by which the bytes of a step may be uncertain. Doubled: fewer profiles, less exact bytes."""

UNLIMITED = 2**62
"""A limit in bytes that no step exceeds."""

SizeRange = range | tuple[int, int]
"""The sizes to consider: all of a range, or all from the smallest to the largest."""


@dataclass(frozen=True)
class StepMaker:
    """Builds the batch of a size, and profiles its step."""

    batch: Callable[[int], Any]
    profile: Callable[[int, int], SizedTrace]
    """Profiles the step of a size within a limit in bytes if possible, else without a limit."""
    profile_within: Callable[[int, int], SizedTrace]
    """Profiles the step of a size within a limit in bytes. Raises `BudgetError` if the step does not fit."""


class SizedSteps:
    """The steps of a range of sizes."""

    def __init__(self, maker: StepMaker, sizes: SizeRange) -> None:
        self.sizes = _as_range(sizes)
        """From the smallest to the largest."""
        self._maker = maker
        self._profiles: dict[int, SizedTrace] = {}
        self._dimensions: dict[int, tuple[int, ...]] = {}

    @property
    def profiled(self) -> tuple[int, ...]:
        """The sizes that were profiled, ascending."""
        return tuple(self._profiles)

    def profile_smallest(self, limit_bytes: int) -> None:
        """Profile the smallest size, within the limit if possible."""
        smallest = self.sizes[0]
        self._maker.profile(smallest, limit_bytes)  # kernels are slow in their first calls, and times are scaled up
        self._profiles = {smallest: self._maker.profile(smallest, limit_bytes)}

    def profile_larger(self, largest: int, limit_bytes: int) -> bool:
        """Profile about twice the largest profiled size, or less if that is above `largest` or exceeds the limit.

        Return False if there is no such size, or enough profiles.
        """
        last = self.profiled[-1]
        start = self.sizes.index(last)
        more = bisect_right(self.sizes, min(2 * last, largest)) - 1 - start
        if more <= 0 and start + 1 < len(self.sizes) and self.sizes[start + 1] <= largest:
            more = 1  # the sizes are far apart
        if more <= 0 or len(self._profiles) >= _MAX_PROFILES:
            return False
        while more > 1:
            try:
                self._add(self.sizes[start + more], self._maker.profile_within, limit_bytes)
            except BudgetError:
                more //= 2
            else:
                return True
        self._add(self.sizes[start + 1], self._maker.profile, limit_bytes)
        return True

    def _add(self, size: int, profile: Callable[[int, int], SizedTrace], limit_bytes: int) -> None:
        """Profile a size, and check that traces of other sizes can be made from it."""
        found = profile(size, limit_bytes)
        last_size, last = next(reversed(self._profiles.items()))
        if found.sizes == last.sizes:
            raise ArgumentError(
                f"the batches of sizes {last_size} and {size} have the same shapes: the batch must depend on the size"
            )
        if found.trace.structure != last.trace.structure:
            raise ArgumentError(
                f"the step runs other ops at size {size} than at size {last_size}, so other sizes cannot be predicted: "
                f"start at a larger size than {last_size}, or call lowtide.plan for single sizes"
            )
        self._profiles[size] = found

    def at(self, size: int) -> ScaledTrace:
        """Return the step of a size."""
        profiles = list(self._profiles.values())
        if size in self._profiles:
            return ScaledTrace(self._profiles[size].trace, 0)
        return scale(profiles, self._dimensions_of(size), profiles[-1].bytes_before)

    def largest(self) -> Trace:
        """Profile small sizes without a limit, and return the step of the largest size."""
        self.profile_smallest(UNLIMITED)
        largest = self.sizes[-1]
        self.profile_larger(largest, UNLIMITED)
        while self.is_uncertain(largest, self.at(largest).trace.peak_bytes):
            if not self.profile_larger(largest, UNLIMITED):
                break
        return self.at(largest).trace

    def is_uncertain(self, size: int, limit_bytes: int) -> bool:
        """Return whether the profiles leave the bytes of this size too uncertain for this limit."""
        return self.at(size).uncertain_bytes > _MAX_UNCERTAIN * limit_bytes

    def _dimensions_of(self, size: int) -> tuple[int, ...]:
        if size not in self._dimensions:
            dimensions = sizes_of(self._maker.batch(size))
            n_known = len(next(iter(self._profiles.values())).sizes)
            if len(dimensions) != n_known:
                raise ArgumentError(
                    f"the batch of size {size} has {len(dimensions)} dimensions in total, and that of size "
                    f"{self.sizes[0]} has {n_known}: batches of all sizes need the same tensors"
                )
            self._dimensions[size] = dimensions
        return self._dimensions[size]


def _as_range(sizes: SizeRange) -> range:
    """Return the sizes, ascending. Raises `ArgumentError` if there is none, or one is not positive."""
    if isinstance(sizes, range):
        found = sizes if sizes.step > 0 else sizes[::-1]
    elif isinstance(sizes, tuple) and len(sizes) == 2 and all(type(size) is int for size in sizes):
        found = range(sizes[0], sizes[1] + 1)
    else:
        raise ArgumentError(f"sizes must be (smallest, largest) or a range, not {sizes!r}")
    if not found or found[0] < 1:
        raise ArgumentError(f"sizes {sizes!r}: the smallest size must be positive, and not above the largest")
    return found
