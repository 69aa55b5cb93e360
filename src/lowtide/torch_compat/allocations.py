"""Allocations of torch's CPU allocator in one thread."""

from __future__ import annotations

from typing import Any

from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

_CONFIG = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())


def start_recording_allocations() -> bool:
    """Record the CPU allocations of this thread. Return False if a profiler is active already: nothing is recorded.

    Uses the profiler without Kineto, which takes 5 to 9 µs from start to stop. With Kineto it takes 0.3 ms, and
    `torch.profiler.profile` 40 ms.
    """
    if _profiler_enabled():
        return False
    _enable_profiler_legacy(_CONFIG)
    return True


def stop_recording_allocations() -> list[int]:
    """Return the bytes of all allocations since the start, in order. Freed bytes are negative."""
    threads: Any = _disable_profiler_legacy()
    return [event.cpu_memory_usage() for events in threads for event in events if event.kind() == "memory_alloc"]
