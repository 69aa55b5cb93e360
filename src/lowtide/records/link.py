"""The way to a store and back, as planning sees it: speeds, and what they take from the ops beside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """How fast values leave memory while ops run, and how fast they come back, while backward waits or goes on."""

    tier: str
    """The store's: "disk"."""
    out_bytes_per_s: float
    in_bytes_per_s: float
    min_bytes: int = 2**16
    """A value of less is not worth a trip."""
    put_s: float = 0.0
    """What handing over one value takes, and what its writing takes from the ops beside it."""
    put_s_per_byte: float = 0.0
    fetch_s: float = 0.0
    """What fetching one value takes beside its bytes."""
    prefetch_bytes_per_s: float = 0.0
    """How fast values are read while ops run; 0: as fast as while backward waits."""
    prefetch_s_each: float = 0.0
    """What reading one value ahead takes from the ops beside it, and fetching it then."""
    prefetch_s_per_byte: float = 0.0
    max_prefetch_bytes: int = 2**62
    """The most that the store reads ahead of what is fetched."""

    def write_s(self, nbytes: int) -> float:
        """How long writing takes; ops go on meanwhile."""
        return nbytes / self.out_bytes_per_s

    def put_slowdown_s(self, nbytes: int) -> float:
        """How much longer ops take because a value is handed over and written beside them."""
        return self.put_s + nbytes * self.put_s_per_byte

    def blocking_fetch_s(self, nbytes: int) -> float:
        """How long reading takes where backward waits for it from beginning to end."""
        return self.fetch_s + nbytes / self.in_bytes_per_s

    def prefetch_read_s(self, nbytes: int) -> float:
        """How long reading ahead takes; ops go on meanwhile."""
        return nbytes / (self.prefetch_bytes_per_s or self.in_bytes_per_s)

    def prefetch_slowdown_s(self, nbytes: int) -> float:
        """How much longer ops take because a value is read beside them, and fetched then."""
        return self.prefetch_s_each + nbytes * self.prefetch_s_per_byte

    def prefetch_pays(self, nbytes: int) -> bool:
        """Whether reading ahead can be quicker than waiting."""
        return self.prefetch_slowdown_s(nbytes) < self.blocking_fetch_s(nbytes)
