"""A step as a row of stretches, each from one beginning or end of a module call to the next.

Also where in a stretch a recorder that sleeps could wake: when autograd has saved what an op gave, before the next one.
It decides nothing, and changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from ..policies import Policy
from .modules import Whereabouts
from .tape import Tape
from .torch_private import next_node_number
from .values import Place


class Wait(NamedTuple):
    """The beginning of a stretch, where a recorder may still sleep."""

    saves: int
    """How many tensors autograd saves."""
    next_op: int


class Stretches(Whereabouts):
    """Writes down where each stretch of a step begins."""

    def __init__(self, policy: Policy, tape: Tape) -> None:
        super().__init__(policy, tape)
        self.begins: list[tuple[int | type[nn.Module] | None, Place, int]] = [(None, self.place, 0)]
        """By stretch: the id of the module whose call begins it, or its class if it is no part of the model, or None
        where one ends; the place; and the number of its first op."""
        self.waits: dict[int, list[Wait]] = {}
        """By stretch: until when a recorder could sleep."""
        self.saves: list[int] = [0]
        """By stretch: how many tensors autograd saved, so far."""
        self._node = 0  # the number of autograd's next node when the last op ran
        self._unsure = 0  # places to wake since then

    @property
    def at(self) -> int:
        """The number of the stretch that the step is in."""
        return len(self.begins) - 1

    def enter(self, module: nn.Module) -> None:
        """A module's forward begins."""
        # Others than parts of a model may be made anew for every step: a loss, often.
        part = bool(self._stack) and self._map is not None and id(module) in self._map.names
        super().enter(module)
        self._begin(id(module) if part else type(module))

    def leave(self) -> None:
        """A module's forward ends."""
        super().leave()
        self._begin(None)

    def _begin(self, module: int | type[nn.Module] | None) -> None:
        self.begins.append((module, self.place, self._tape.ops))
        self.saves.append(0)
        self._node = 0
        self._unsure = 0

    def saved(self) -> None:
        """Autograd has saved a tensor."""
        self.saves[-1] += 1
        # What an op takes is saved before it runs, after autograd has made its node and settled who sees the op: too
        # late for a recorder to wake. What it gives is saved afterwards, when there is no new node yet.
        if self._node == next_node_number():
            self.waits.setdefault(self.at, []).append(Wait(self.saves[-1], self._tape.ops))
            self._unsure += 1

    def ran(self, *, writes: bool) -> None:
        """An op has run."""
        node = next_node_number()
        if self._unsure and writes and node == self._node:
            # It has made no node since, so perhaps it had one already, and what was saved is a copy that autograd made
            # for it of what it overwrites. That is too late as well.
            del self.waits[self.at][-self._unsure :]
        self._unsure = 0
        self._node = node
