"""What the kernels of a model do to the processor's caches between two calls of ours, for measuring what those cost."""

from __future__ import annotations

import numpy as np
import torch

from .torch_private import without_modes

BETWEEN_OPS, BETWEEN_REPLAYS = 2**23, 2**25
"""Bytes that were moved since the recorder last ran, and, in backward, since anything was last replayed."""
_ROWS, _SIZE = 64, 512


class Walk:
    """Goes through megabytes of memory, and through the code of a matrix product."""

    def __init__(self, nbytes: int = BETWEEN_OPS) -> None:
        self._here, self._there = np.zeros(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)
        self._rows, self._matrix = torch.ones(_ROWS, _SIZE), torch.ones(_SIZE, _SIZE)

    def __call__(self, nbytes: int | None = None) -> None:
        """What was in the caches is not there any more; with `nbytes`, as far as a shorter walk takes it out."""
        with without_modes(), torch.no_grad():
            torch.mm(self._rows, self._matrix)
        np.copyto(self._here[:nbytes], self._there[:nbytes])
