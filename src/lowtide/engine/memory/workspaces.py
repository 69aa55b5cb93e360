"""Workspace of ops: bytes that a kernel allocates and frees inside one call, beside its results.

It is measured in the first call with a signature, and in every call whose output size depends on the content of its
arguments. Before that it is estimated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..ops.facts import OpFacts
from ..ops.output_sizes import bytes_of
from ..ops.peak_inside import PeakProbe

T = TypeVar("T")

_MAX_SIGNATURES = 100_000  # the table must not grow without limit if shapes never repeat

# Parts of the names of kernels that may reorder all their arguments and results.
_REORDERING = ("conv", "rnn", "lstm", "gru", "upsample", "pool")
_CHANNEL_BLOCK = 16
"""Reordered images have a multiple of 16 channels. Doubled: higher estimates for images with few channels."""
# Parts of the names of matrix products, which may copy their arguments.
_MATRIX_PRODUCTS = ("mm.", "addmm", "matmul", "linear", "addmv", "mv.", "scaled_dot_product")


class Workspaces:
    """The workspace of all ops that ran under a memory budget of one device, by signature."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[Any, int] = {}

    def known_bytes(self, signature: Any) -> int | None:
        """Return the most workspace of the measured calls with this signature, or None if there were none."""
        return self._known.get(signature)

    def measured_call(self, signature: Any, kernel: Callable[[], T]) -> T:
        """Call a kernel and store its workspace."""
        probe = PeakProbe(self.device)
        probe.start()
        try:
            return kernel()
        finally:
            rise = probe.stop()
            if rise is not None:
                self.measured(signature, rise.workspace_bytes)

    def measured(self, signature: Any, nbytes: int) -> None:
        """Store the measured workspace of a call."""
        if len(self._known) >= _MAX_SIGNATURES:
            self._known.clear()
        self._known[signature] = max(nbytes, self._known.get(signature, 0))


def estimated_bytes(facts: OpFacts, args: tuple[Any, ...], output_bytes: int) -> int:
    """Return a cautious estimate of the workspace of a call that was never measured.

    Elementwise kernels need none. Convolutions, recurrent and resampling layers may copy arguments and results into
    blocks of channels, matrix products their arguments, and all other kernels their results and indices.
    """
    if facts.views or facts.blank or torch.Tag.pointwise in getattr(facts.func, "tags", ()):
        return 0
    if any(part in facts.name for part in _REORDERING):
        copies = [_reordered_bytes(a) for a in args if isinstance(a, torch.Tensor)]
        grouped_bytes = 0
        if facts.name == "aten.convolution_backward.default":
            _, _, weight, *_, groups, _ = args
            grouped_bytes = _grouped_weight_bytes(weight, groups)
        return sum(copies) + max(2 * output_bytes, *copies, 0) + grouped_bytes
    if any(part in facts.name for part in _MATRIX_PRODUCTS):
        return bytes_of(args)
    return output_bytes + bytes_of([a for a in args if isinstance(a, torch.Tensor) and not a.is_floating_point()])


def _reordered_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a copy with blocks of channels."""
    nbytes = tensor.numel() * tensor.itemsize
    if tensor.dim() < 3:
        return nbytes
    channels = tensor.shape[1]
    return nbytes // max(1, channels) * _blocked(channels)


def _grouped_weight_bytes(weight: torch.Tensor, groups: int) -> int:
    """Return the bytes of the weights of a grouped convolution with blocks of channels in each group."""
    if groups == 1:
        return 0
    outer, inner = weight.shape[:2]
    blocks = groups * _blocked(outer // groups) * _blocked(inner)
    return weight.numel() * weight.itemsize // max(1, outer * inner) * blocks


def _blocked(channels: int) -> int:
    return -(-channels // _CHANNEL_BLOCK) * _CHANNEL_BLOCK
