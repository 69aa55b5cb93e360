"""The meter: the largest sum of live tensor bytes at any moment of a block of code.

Counts storages, each once, whoever made them: those given as the base, and those that any op makes inside
the block, until they are freed. It sees what goes through torch's dispatcher; memory that a kernel takes
and gives back within one op is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..engine.memory.ledger import Ledger
from ..engine.ops.facts import facts_of
from ..engine.recording.modes import EngineMode
from ..torch_compat import never_compile


class PeakMeter(EngineMode):  # type: ignore[no-untyped-call]
    """Peak of live tensor bytes inside the block.

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
        self._ledger.see_all(base)

    @property
    def live_bytes(self) -> int:
        """The bytes alive now."""
        return self._ledger.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most so far."""
        return self._ledger.peak_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = facts_of(func).call(*args, **(kwargs or {}))
        if type(out) is torch.Tensor:
            self._ledger.see(out)
        else:
            self._ledger.see_all(tree_leaves(out))
        return out


never_compile(PeakMeter.__torch_dispatch__)
