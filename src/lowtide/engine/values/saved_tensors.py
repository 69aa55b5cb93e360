"""The tensors that autograd saves in one scope, and which of them still wait for a backward pass."""

from __future__ import annotations

import weakref


class SavedTensors:
    """Saved tensors by number, in the order in which autograd saved them."""

    __slots__ = ("_held", "count", "freed_unused", "unpacked")

    def __init__(self) -> None:
        self.count = 0
        self.unpacked: set[int] = set()
        """The saved tensors that backward has unpacked."""
        self.freed_unused: list[int] = []
        """The saved tensors that autograd has freed and no backward pass has unpacked, as far as `waiting` saw."""
        self._held: list[tuple[int, weakref.ref[object]]] = []

    def add(self, handle: object) -> None:
        """Autograd holds `handle` for the tensor that it saved last."""
        self._held.append((self.count - 1, weakref.ref(handle)))

    def waiting(self) -> list[int]:
        """Return the saved tensors that autograd holds and that no backward pass has unpacked."""
        unpacked = self.unpacked
        self.freed_unused += [number for number, ref in self._held if ref() is None and number not in unpacked]
        self._held = [(number, ref) for number, ref in self._held if ref() is not None]
        return [number for number, _ in self._held if number not in unpacked]

    def alive(self) -> list[object]:
        """Return the handles of the saved tensors that autograd holds."""
        self._held = [(number, ref) for number, ref in self._held if ref() is not None]
        return [handle for _, ref in self._held if (handle := ref()) is not None]
