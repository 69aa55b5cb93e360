"""Estimates of the workspace of ops that were never measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.engine.memory.workspaces import estimated_bytes
from lowtide.engine.ops.facts import facts_of
from lowtide.engine.ops.peak_inside import PeakProbe

CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


def measured_bytes(func: Any, args: tuple[Any, ...]) -> tuple[int, int]:
    """Return the bytes of the results, and the workspace."""
    probe = PeakProbe(torch.device("cpu"))
    probe.start()
    out = func(*args)
    rise = probe.stop()
    assert rise is not None
    return sum(tensor.nbytes for tensor in out if tensor is not None), rise.workspace_bytes


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "size", "kernel"), [(32, 2, 7), (16, 8, 7), (96, 28, 3), (384, 14, 7)])
def test_backward_of_depthwise_convolutions(channels: int, size: int, kernel: int, layout: torch.memory_format) -> None:
    """Kernels for channels last may give each group whole blocks of input and output channels."""
    image = torch.randn(2, channels, size, size).contiguous(memory_format=layout)
    weight = torch.randn(channels, 1, kernel, kernel)
    around = [kernel // 2] * 2
    settings = [channels], [1, 1], around, [1, 1], False, [0, 0], channels, [True, True, True]
    args = torch.randn_like(image), image, weight, *settings
    result_bytes, workspace_bytes = measured_bytes(CONVOLUTION_BACKWARD, args)
    assert workspace_bytes <= estimated_bytes(facts_of(CONVOLUTION_BACKWARD), args, result_bytes)
