"""Transfer speeds between memory and a store, as the planner uses them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Cost of offloading values to one store and fetching them back.

    Writes run in the background. A fetch either blocks backward or is prefetched in the background.
    """

    tier: str
    """Tier of the store, such as "disk"."""
    out_bytes_per_s: float
    """Write speed."""
    in_bytes_per_s: float
    """Read speed while backward waits."""
    min_bytes: int = 2**16
    """Smallest value that is offloaded."""
    put_s: float = 0.0
    """Seconds added to the ops for each value that is put."""
    put_s_per_byte: float = 0.0
    fetch_s: float = 0.0
    """Fixed seconds of one blocking fetch."""
    prefetch_bytes_per_s: float = 0.0
    """Read speed while ops run. 0 means `in_bytes_per_s`."""
    prefetch_s_each: float = 0.0
    """Seconds added to the ops for each value that is prefetched."""
    prefetch_s_per_byte: float = 0.0
    max_prefetch_bytes: int = 2**62
    """Upper limit on bytes that are prefetched and not yet fetched."""

    def write_s(self, nbytes: int) -> float:
        """Return the seconds of a background write."""
        return nbytes / self.out_bytes_per_s

    def put_slowdown_s(self, nbytes: int) -> float:
        """Return the seconds that ops lose to the put and the background write of a value."""
        return self.put_s + nbytes * self.put_s_per_byte

    def blocking_fetch_s(self, nbytes: int) -> float:
        """Return the seconds that backward waits for a value that was not prefetched."""
        return self.fetch_s + nbytes / self.in_bytes_per_s

    def prefetch_read_s(self, nbytes: int) -> float:
        """Return the seconds of a background read."""
        return nbytes / (self.prefetch_bytes_per_s or self.in_bytes_per_s)

    def prefetch_slowdown_s(self, nbytes: int) -> float:
        """Return the seconds that ops lose to the background read and the fetch of a value."""
        return self.prefetch_s_each + nbytes * self.prefetch_s_per_byte

    def prefetch_pays(self, nbytes: int) -> bool:
        """Return whether a prefetch can cost less than a blocking fetch."""
        return self.prefetch_slowdown_s(nbytes) < self.blocking_fetch_s(nbytes)
