"""The peak of torch's CPU allocator: `with allocator_peak() as peak: ...; peak.peak_bytes`."""

from .counting import AllocatorPeak, allocator_peak, live_bytes

__all__ = ["AllocatorPeak", "allocator_peak", "live_bytes"]
