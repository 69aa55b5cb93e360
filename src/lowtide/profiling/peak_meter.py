"""The peak of live tensor bytes in a block of code.

Each storage is counted once, from its creation until it is freed. Only storages that are returned by an op
are counted. The workspace that a kernel allocates and frees inside one op is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..engine.memory.ledger import Ledger
from ..engine.ops.facts import facts_of
from ..torch_compat import EngineMode, never_compile, tree_leaves


class PeakMeter(EngineMode):  # type: ignore[no-untyped-call]
    """Context manager that measures live and peak tensor bytes.

    `base` are tensors that exist before the block and are counted as well.

    >>> import torch
    >>> from lowtide.profiling.peak_meter import PeakMeter
    >>> with PeakMeter() as meter:
    ...     x = torch.zeros(256)
    ...     y = x + 1
    ...     del x, y
    >>> meter.peak_bytes, meter.live_bytes
    (2048, 0)
    """

    def __init__(self, base: Iterable[torch.Tensor | None] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = Ledger()
        self._ledger.count_all(base)

    @property
    def live_bytes(self) -> int:
        """Live bytes now."""
        return self._ledger.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak of the live bytes so far."""
        return self._ledger.peak_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = facts_of(func).call(*args, **(kwargs or {}))
        if type(out) is torch.Tensor:
            self._ledger.count(out)
        else:
            self._ledger.count_all(tree_leaves(out))
        return out


never_compile(PeakMeter.__torch_dispatch__)
