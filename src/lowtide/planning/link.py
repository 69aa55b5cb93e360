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
    """A value of less is not worth a trip."""
    put_s: float = 0.0
    """What handing over one value takes, and what its writing takes from the ops beside it."""
    put_s_per_byte: float = 0.0
    fetch_s: float = 0.0
    """What fetching one value takes beside its bytes."""

    def out_s(self, nbytes: int) -> float:
        """How long writing takes; ops go on meanwhile."""
        return nbytes / self.out_bytes_per_s

    def slowed_s(self, nbytes: int) -> float:
        """How much longer ops take because a value is handed over and written beside them."""
        return self.put_s + nbytes * self.put_s_per_byte

    def in_s(self, nbytes: int) -> float:
        """How long reading takes; backward waits for it."""
        return self.fetch_s + nbytes / self.in_bytes_per_s
