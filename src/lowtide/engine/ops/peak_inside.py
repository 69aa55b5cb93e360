"""The peak inside a call: how far live bytes rise above those before it, as the allocator of a device counts them.

On CPU the allocations of the thread are recorded. An accelerator counts by itself, and a measurement resets its peak
statistics. The accelerator part has not been tested on hardware.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from ...torch_compat import start_recording_allocations, stop_recording_allocations


class Rise(NamedTuple):
    """Live bytes during and after a call, above those before it."""

    highest_bytes: int
    final_bytes: int

    @property
    def workspace_bytes(self) -> int:
        """Bytes that were allocated and freed again, where most were live beside those that stay."""
        return self.highest_bytes - max(0, self.final_bytes)


class PeakProbe:
    """Measures the peak between `start` and `stop`, in one thread. Calls of `stop` must follow also after an error."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._start_bytes: int | None = None  # None: nothing is measured

    def start(self) -> None:
        """Begin to measure, unless the user's own profiler is running or the device has no statistics."""
        self._start_bytes = None
        if self.device.type == "cpu":
            if start_recording_allocations():
                self._start_bytes = 0
        elif self.device.type != "meta" and torch.accelerator.is_available():
            self._start_bytes = torch.accelerator.memory_allocated(self.device)
            torch.accelerator.reset_peak_memory_stats(self.device)

    def stop(self) -> Rise | None:
        """Return the rise since `start`, or None if nothing was measured."""
        start_bytes, self._start_bytes = self._start_bytes, None
        if start_bytes is None:
            return None
        if self.device.type == "cpu":
            live = list(accumulate(stop_recording_allocations(), initial=0))
            return Rise(max(live), live[-1])
        highest = torch.accelerator.max_memory_allocated(self.device)
        final = torch.accelerator.memory_allocated(self.device)
        return Rise(max(0, highest - start_bytes), final - start_bytes)
