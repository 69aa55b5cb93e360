"""The meter: the largest sum of live tensor bytes at any moment of a block of code.

Counts storages, each once, whoever made them: those given as the base, and those that any op makes inside
the block, until they are freed. It sees what goes through torch's dispatcher; memory that a kernel takes
and gives back within one op is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..engine.torch_private import storage_key


class PeakMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Peak of live tensor bytes inside the block.

    >>> import torch
    >>> from lowtide.profiling.meter import PeakMeter
    >>> with PeakMeter() as meter:
    ...     x = torch.zeros(256)
    ...     y = x + 1
    ...     del x, y
    >>> meter.peak_bytes, meter.live_bytes
    (2048, 0)
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled."""
        return True

    def __init__(self, base: Iterable[torch.Tensor | None] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._rows: dict[int, _Row] = {}
        for tensor in base:
            if tensor is not None:
                self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if type(out) is torch.Tensor:
            self._see(out)
        else:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._see(leaf)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
            return
        key = storage_key(storage)
        nbytes = storage.nbytes()
        row = self._rows.get(key)
        if row is None:
            row = _Row(storage, self._gone)
            row.key, row.nbytes = key, 0
            self._rows[key] = row
        if row.nbytes != nbytes:  # new, or resized since
            self.live_bytes += nbytes - row.nbytes
            row.nbytes = nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _gone(self, row: _Row) -> None:
        if self._rows.pop(row.key, None) is not None:
            self.live_bytes -= row.nbytes


class _Row(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int
