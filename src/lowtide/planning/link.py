"""The way to a store and back, as planning sees it: two speeds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """How fast values leave memory while ops run, and how fast they come back while backward waits."""

    tier: str
    """The store's: "disk"."""
    out_bytes_per_s: float
    in_bytes_per_s: float
    least_bytes: int = 2**16
    """A value of less is not worth a trip: what a trip takes beside its bytes is not modelled."""

    def out_s(self, nbytes: int) -> float:
        """How long writing takes; ops go on meanwhile."""
        return nbytes / self.out_bytes_per_s

    def in_s(self, nbytes: int) -> float:
        """How long reading takes; backward waits for it."""
        return nbytes / self.in_bytes_per_s
