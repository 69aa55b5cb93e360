"""The counting allocator agrees with torch's profiler, and counts what no dispatch mode can observe."""

from __future__ import annotations

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lowtide.profiling.peak_meter import PeakMeter

from . import allocator_peak, live_bytes

MIB = 2**20


def profiled_rise(events) -> int:
    """Highest sum of the allocations and frees that the profiler has recorded."""
    live = highest = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.Flatten()
    )


def test_bytes_of_tensors():
    start = live_bytes()
    with allocator_peak() as peak:
        x = torch.empty(MIB, dtype=torch.uint8)
        y = torch.empty(2 * MIB, dtype=torch.uint8)
        del x
        assert peak.peak_bytes == start + 3 * MIB
    assert peak.rise_bytes == 3 * MIB
    assert live_bytes() == start + 2 * MIB
    with allocator_peak() as later:
        pass
    assert later.rise_bytes == 0
    del y
    assert live_bytes() == start
    assert peak.rise_bytes == 3 * MIB


def test_frees_of_earlier_memory_are_counted_only_if_its_allocation_was():
    live_bytes()
    x = torch.empty(MIB)
    with allocator_peak() as peak:
        del x
        assert peak.start_bytes - live_bytes() == 4 * MIB
    assert peak.rise_bytes == 0


def test_agrees_with_the_profiler():
    live_bytes()
    for model, x in (
        (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)), torch.randn(128, 64)),
        (conv_net(), torch.randn(4, 3, 32, 32)),
        (nn.LSTM(32, 32, num_layers=2), torch.randn(20, 8, 32)),
    ):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events, allocator_peak() as peak:
            out = model(x)
            (out[0] if isinstance(out, tuple) else out).square().mean().backward()
            del out
        assert peak.rise_bytes == profiled_rise(events.profiler.kineto_results.events())
        assert peak.rise_bytes > 0


def test_workspace_is_counted():
    live_bytes()
    image, kernel = torch.randn(1, 32, 64, 64), torch.randn(32, 32, 3, 3)
    with PeakMeter() as meter, allocator_peak() as peak:
        torch.conv2d(image, kernel)
    assert meter.peak_bytes == 32 * 62 * 62 * 4
    assert peak.rise_bytes > meter.peak_bytes + 2**16
