"""Profiling one step: an online-budgeted step that also tells a profile everything a planner needs (a `Trace`).

The step is an ordinary one, exact and within its budget.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from typing import Any

from .. import trace as records
from ..codecs import Chooser
from ..stores import Store
from .budgeting import BudgetedRecorder
from .costs import timed
from .effects import FACTS, OpFacts, facts_of
from .overwriting import Written
from .recorder import Fresh
from .replay import Handle
from .room import Room
from .step_profile import Profile
from .stretches import Stretches
from .torch_private import graph_task, never_compile, new_alias, storage_key
from .values import Kept, Recipe, Ref, Tensor, Value


class ProfilingRoom(Room):
    """A room that tells a profile what is alive."""

    def __init__(self, limit_bytes: int, store: Store | None, chooser: Chooser | None) -> None:
        super().__init__(limit_bytes, store, chooser)
        self.profile = Profile()
        self._since = 0.0
        self._answering = False

    def after(self, out: Any, noted: Any) -> None:
        """Count what an op has made. What a replay makes is no other's, and not yet known as a value."""
        super().after(out, noted)
        if not self._answering:
            self.profile.moment(self.ledger.live_bytes)

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], strictly: bool = True) -> Any:
        """Run an op of backward, and know what watching it took."""
        start = time.perf_counter()
        noted = self.before(facts, args, kwargs, strictly)
        called = time.perf_counter()
        out = facts.call(*args, **kwargs)
        returned = time.perf_counter()
        self.after(out, noted)
        self.profile.watched(called - start + time.perf_counter() - returned)
        return out

    def passes(self) -> None:
        """A view goes by."""
        self.profile.watched(0.0)

    def copies(self, part: Tensor) -> Callable[[float], None]:
        """A gradient is about to be copied."""
        return self.profile.copies(part)

    def own(self, value: Value, tensor: Tensor) -> None:
        """A value has been made again."""
        self.profile.remade(tensor)
        super().own(value, tensor)

    def asks(self) -> None:
        """A node is about to be given a value."""
        self._since = time.perf_counter()
        self._answering = True

    def asked(self, value: Value) -> None:
        """Backward has asked for a value."""
        super().asked(value)
        self._answering = False
        self.profile.asked(value, self._since, self.ledger.live_bytes)


class TracingRecorder(BudgetedRecorder):  # type: ignore[no-untyped-call]
    """A budgeted recorder that writes down what it sees."""

    room: ProfilingRoom
    where: Stretches

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if graph_task() != -1:
            return super().__torch_dispatch__(func, types, args, kwargs)
        profile = self.room.profile
        facts = FACTS.get(id(func)) or facts_of(func)
        profile.back()
        try:
            if facts.views:
                profile.traffic.views[self.where.at, len(profile.ops)] += 1
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.where.ran(writes=bool(facts.writes))
            profile.leave()

    def trace(self, device: str) -> records.Trace:
        """The step that was recorded, for a planner."""
        return self.room.profile.trace(self.room.peak_bytes, device, self.where)

    def _timed(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
        """Run an op; each is timed, not only the first of those alike."""
        return timed(facts, args, kwargs)

    def _made(
        self,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        fresh: tuple[Fresh, ...],
        draw: Any,
        writes: tuple[Written, ...],
        cost_us: float,
    ) -> Recipe | None:
        number = self.tape.ops
        recipe = super()._made(facts, args, kwargs, out, fresh, draw, writes, cost_us)
        again_us = None
        if recipe is not None and self.verifier is not None and math.isfinite(self.verifier.took_us):
            if recipe.origin.facts is facts:
                # What was checked before it has been through the caches; the replay came right after.
                cost_us = min(cost_us, self.verifier.took_us)
            else:
                again_us = self.verifier.took_us
        made: list[tuple[Value, Tensor]] = []
        written: list[tuple[Written, Value]] = []
        pinned = facts.pinned
        for _, tensor, _, key in fresh:
            entry = self.table.get(key)
            value = entry.value() if entry is not None else None
            if value is not None and value.origin is not None and value.origin.number == number:
                made.append((value, tensor))
        for w in writes:
            entry = self.table.get(storage_key(w.storage))
            value = entry.value() if entry is not None else None
            if value is not None and value.origin is not None and value.origin.number == number:
                written.append((w, value))
        if recipe is None or any(v.recipe is None for v in [*(v for v, _ in made), *(v for _, v in written)]):
            recipe = None
            pinned = pinned or "what it makes cannot be made again"
        self.room.profile.op(facts, self.where.place.path, recipe, made, written, pinned, cost_us, again_us)
        return recipe

    def pack(self, tensor: Tensor) -> Handle | Kept:
        """The handle that autograd gets; also for values that cannot be made again, to see when they are asked for."""
        self.room.profile.back()
        self.where.saved()
        self.room.profile.traffic.handed_over[self.where.at] += 1
        try:
            return self._packed(tensor)
        finally:
            self.room.profile.leave()

    def _packed(self, tensor: Tensor) -> Handle | Kept:
        storage, value = self._known(tensor)
        if value is None or storage is None or value.origin is None:
            return super().pack(tensor)
        self.room.profile.saves(value, self.where.at)
        alias = None
        if value.tensor is None and type(tensor) is Tensor:
            # Hold another tensor object than user code has, to see when that one goes.
            alias = new_alias(tensor)
            value.alias = weakref.ref(alias)
        if value.recipe is not None and not value.blank:
            return super().pack(tensor)
        if value.tensor is None:
            self._keep(value, tensor, storage)
        if not value.counted:
            self.tape.count_saved(value)
        value.claims += 1
        return Handle(Ref(value, tensor), self.tape)


never_compile(TracingRecorder.__torch_dispatch__)
never_compile(TracingRecorder.pack)
