"""Spare recipes: how to recompute kept values if a step leaves its plan.

A step that follows its plan must hold no memory that the plan does not know. A recipe of a kept value would hold the
inputs of its op, and what their recipes read. So spare recipes refer to stand-ins, which hold no memory and refer to
the values weakly. When the step leaves its plan, a spare recipe is used if its inputs are still in memory or can be
recomputed.

Ops that write to their arguments have no spare recipe, and kept ops that draw have none.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from ...torch_compat import is_autocast_inside, storage_key, version_of
from ..recording.known_memory import KnownMemory
from ..recording.recorded_op import RecordedOp
from ..values.recipe import Recipe
from ..values.value import Origin, Tensor, Value, version_or_unwatched
from ..values.view import Ref


class _UnknownInputError(Exception):
    """An argument has no storage, or is not watched for writes."""


class _StandIn(Value):
    """Stands for a value in spare recipes. It becomes the value itself if that was freed and can be recomputed."""

    __slots__ = ("source", "source_version", "stood_for")

    stood_for: weakref.ref[Value] | None
    """The value. None: memory from outside the step."""
    source: weakref.ref[Tensor] | None
    """A tensor over memory from outside the step."""
    source_version: int


class SpareRecipes:
    """The spare recipes of one step."""

    def __init__(self, memory: KnownMemory, pinned: Collection[str]) -> None:
        """Record spare recipes of values in `memory`. Ops with names in `pinned` cannot be replayed."""
        self._memory = memory
        self._pinned = pinned
        self._table = memory.table
        self._stand_ins: dict[int, _StandIn] = {}
        """By `id` of the value. Another value may get the `id` of one that was freed."""
        self._written: set[int] = set()
        """Storages that ops have written. A batch norm does not change the version of its statistics."""
        self._recipes: list[tuple[Recipe, list[tuple[int, _StandIn]]]] = []

    def record(self, op: RecordedOp, *, may_replay: bool) -> None:
        """Record the spare recipe of an op that has just run, if it `may_replay` and has no effects."""
        facts = op.facts
        if op.writes:
            self._written.update(storage_key(w.storage) for w in op.writes)
            return
        if not may_replay or facts.pinned or facts.blank or facts.region or facts.name in self._pinned:
            return
        if (facts.autocasts_inside and is_autocast_inside()) or (
            facts.seeded and op.draw is None and facts.draws_now(op.args, op.kwargs)
        ):
            return
        made: list[tuple[int, _StandIn]] = []
        for position, tensor, _, key in op.fresh:
            entry = self._table.get(key)
            value = entry.value() if entry is not None else None
            if value is None or value.origin is None or value.origin.number != op.number:
                return
            stand_in = self._stand_in(value)
            stand_in.stride, stand_in.key = tensor.stride(), key
            made.append((position, stand_in))
        recipe = Recipe(Origin(op.number, facts, op.location), op.draw)
        recipe.refs = []
        try:
            recipe.args = self._recorded(op.args, recipe.refs)
            if op.kwargs:
                recorded = self._recorded(tuple(op.kwargs.values()), recipe.refs)
                recipe.kwargs = dict(zip(op.kwargs, recorded, strict=True))
        except _UnknownInputError:
            return
        self._recipes.append((recipe, made))

    def _recorded(self, items: Any, refs: list[Ref]) -> list[Any]:
        recorded = []
        for a in items:
            kind = type(a)
            if kind is Tensor or isinstance(a, Tensor):
                a = self._ref(a)
                refs.append(a)
            elif kind is list or kind is tuple:
                a = self._recorded(a, refs)
            recorded.append(a)
        return recorded

    def _ref(self, tensor: Tensor) -> Ref:
        storage, value = self._memory.lookup(tensor)
        if storage is None or tensor.is_nested:
            raise _UnknownInputError
        if value is not None and value.origin is not None:
            return Ref(self._stand_in(value), tensor)
        source = tensor if tensor._base is None else tensor._base
        stand_in = _StandIn(None, storage.nbytes(), None)
        stand_in.stood_for = None
        stand_in.source = weakref.ref(source)
        stand_in.source_version = version_or_unwatched(source)
        if stand_in.source_version < 0:
            raise _UnknownInputError
        return Ref(stand_in, tensor)

    def _stand_in(self, value: Value) -> _StandIn:
        found = self._stand_ins.get(id(value))
        if found is None or found.stood_for is None or found.stood_for() is not value:
            found = self._stand_ins[id(value)] = _StandIn(value.origin, value.nbytes, None)
            found.stood_for = weakref.ref(value)
            found.source = None
        return found

    def use(self) -> list[Value]:
        """Give kept values their recipes. Return those that can be recomputed from now on."""
        recomputable = []
        for recipe, made in self._recipes:
            inputs = [self._value_of(ref.value) for ref in recipe.refs]
            if any(value is None for value in inputs):
                continue
            for ref, value in zip(recipe.refs, inputs, strict=True):
                assert value is not None
                ref.value = value
                value.refer()
            recipe.made = []
            for position, stand_in in made:
                assert stand_in.stood_for is not None
                value = stand_in.stood_for() or stand_in
                recipe.made.append((position, weakref.ref(value)))
                if value.recipe is None and not _is_placed(value):
                    value.recipe, value.stride, value.key = recipe, stand_in.stride, stand_in.key
                    recomputable.append(value)
        self._recipes.clear()
        return recomputable

    def _value_of(self, stand_in: Value) -> Value | None:
        """Return the value that a recipe may read in place of its stand-in, or None if its content is lost."""
        assert isinstance(stand_in, _StandIn)
        if stand_in.stood_for is None:
            return self._source_of(stand_in)
        value = stand_in.stood_for()
        if value is None:
            return stand_in if stand_in.recipe is not None else None
        if value.recipe is not None or _is_placed(value):
            return value
        if value.tensor is not None:
            return value if value.changed() is None else None
        saved = value.alias() if value.alias is not None else None
        if saved is None or value.blank:
            return None
        value.hold(saved, saved.untyped_storage())
        self._memory.table.put(saved.untyped_storage(), value)
        return value

    def _source_of(self, stand_in: _StandIn) -> Value | None:
        source = stand_in.source() if stand_in.source is not None else None
        if source is None or version_of(source) != stand_in.source_version:
            return None
        storage, value = self._memory.lookup(source)
        if storage is None or storage.nbytes() != stand_in.nbytes or storage_key(storage) in self._written:
            return None
        if value is None:
            return self._memory.table.put_source(source, storage)
        return value if value.origin is None and value.tensor is not None and value.changed() is None else None


def _is_placed(value: Value) -> bool:
    return value.residency is not None and value.residency.placement is not None
