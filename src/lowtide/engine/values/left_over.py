"""Saved tensors that online steps have left: autograd holds them, but no backward pass of their step unpacked them.

Examples are the history of a loss that user code stores, and an output that the loss does not use. Steps that follow a
plan keep these values in memory if they can. An online step may evict them, so a profile adds what was evicted.
"""

from __future__ import annotations

from .handles import Handle, SwitchingHandle
from .saved_tensors import SavedTensors
from .value import Value


class LeftOver:
    """The saved tensors of earlier online steps that autograd still holds."""

    def __init__(self) -> None:
        self._steps: list[SavedTensors] = []

    def add(self, saves: SavedTensors) -> None:
        """An online step has ended."""
        if saves.alive():
            self._steps.append(saves)

    def evicted_bytes(self) -> int:
        """Return the bytes of the values that are not in memory."""
        if not self._steps:
            return 0
        evicted: dict[Value, int] = {}
        handles = [saves.alive() for saves in self._steps]
        self._steps = [saves for saves, alive in zip(self._steps, handles, strict=True) if alive]
        for handle in (handle for alive in handles for handle in alive):
            handle = handle.inner if isinstance(handle, SwitchingHandle) else handle
            if isinstance(handle, Handle) and handle.ref.value.tensor is None:
                evicted[handle.ref.value] = handle.ref.value.nbytes
        return sum(evicted.values())
