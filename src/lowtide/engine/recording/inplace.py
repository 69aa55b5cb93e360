"""In-place ops: which values they overwrite, which they copy first, and how a replay writes (Rules 6, 7 and 9).

An in-place op ends one value of a storage and begins the next one. Earlier recipes may still need the old value, which
is then copied, or recomputed later. The new value can be recomputed if the old one can, or if the op overwrites the
storage completely.

An op may write a part of a storage, and autograd may have saved another part, as an LSTM cell does with its gates. That
part is the same in the old and the new value, so its handle moves to the new value.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...torch_compat import storage_key
from ..memory.offload import finish_write
from ..ops.facts import OpFacts
from ..values.handles import Handle
from ..values.recipe import Scratch
from ..values.replay_context import ReplayContext
from ..values.storage_table import StorageTable
from ..values.value import Tensor, Value
from ..values.view import Ref, are_disjoint, copy_of_storage

# References to a value, as `sys.getrefcount` counts them, that are not those of a recipe or handle.
_ONLY_IN_TABLE = 4
"""The table, the variables of `is_only_in_table` and of its caller, and the argument of `getrefcount`."""
_NO_OTHER_USER = 3
"""The variables of `preserve` and of its caller, and the argument of `getrefcount`. The table holds a source weakly."""


def is_only_in_table(value: Value) -> bool:
    """Return whether no recipe and no handle uses a value that the table holds and that is in one local variable."""
    return sys.getrefcount(value) <= _ONLY_IN_TABLE


class Written:
    """One storage that an op is about to write."""

    __slots__ = ("before", "exclusive", "inside", "replaced", "spared", "storage", "target", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        target: Ref | Scratch | None,
        replaced: Value | None,
        exclusive: bool,
        inside: bool,
        spared: tuple[Handle, ...],
    ) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.target = target  # the argument that a replay writes; None if the op cannot be replayed
        self.replaced = replaced  # the old value, if the new one can be recomputed
        self.exclusive = exclusive  # no other recipe or handle uses the old value
        self.spared = spared  # handles on parts of the old value that the op does not write
        self.inside = inside  # the storage was made in this scope
        self.before: Tensor | None = None  # a copy of the old content, for verification


class Targets:
    """References for the arguments of an op that has already overwritten some of them."""

    def __init__(self, writes: tuple[Written, ...]) -> None:
        self._targets = {id(w.tensor): w.target for w in writes}
        self._values = {storage_key(w.storage): w.target.value for w in writes if isinstance(w.target, Ref)}

    def target_of(self, tensor: Tensor) -> Ref | Scratch | None:
        """Return the target of a written argument, or the old value for another view of the same memory."""
        target = self._targets.get(id(tensor))
        if target is not None:
            return target
        key = _key_or_none(tensor)
        value = self._values.get(key) if key is not None else None
        if value is None:
            return None
        value.refer()
        return Ref(value, tensor)


def prepare(
    table: StorageTable,
    context: ReplayContext,
    facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_kept: bool,
) -> tuple[Written, ...]:
    """Prepare for the writes of an op: copy values that recipes still need, and find how a replay would write.

    With `is_kept` the new values are kept, so the op will not be replayed.
    """
    tensors = written_tensors(facts, args, kwargs)
    writes = tuple(_prepare_one(t, tensors, table, context, facts, args, kwargs, is_kept) for t in tensors)
    if len(writes) > 1 and len({storage_key(w.storage) for w in writes}) < len(writes):
        for w in writes:  # two arguments write one storage: not replayed
            w.target = w.replaced = None
    return writes


def _prepare_one(
    tensor: Tensor,
    tensors: list[Tensor],
    table: StorageTable,
    context: ReplayContext,
    facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_kept: bool,
) -> Written:
    storage = tensor.untyped_storage()
    key = storage_key(storage)
    entry = table.get(key)
    value = entry.value() if entry is not None else None
    spared = _spared_handles(value, [t for t in tensors if _key_or_none(t) == key])
    exclusive = value is None or value.n_references == len(spared)
    inside = key in table.skipped or (value is not None and value.origin is not None)
    preserve(value, table, context, n_spared=len(spared))
    if is_kept:
        return Written(tensor, None, None, exclusive, inside, spared)
    if facts.statistics:
        return Written(tensor, Scratch(tensor), None, exclusive, inside, spared)
    if facts.overwrites and covers(tensor, storage) and not _reads(storage, facts, args, kwargs):
        replaced = (value or Value(None, storage.nbytes(), None)) if inside else None
        return Written(tensor, Scratch(tensor), replaced, exclusive, inside, spared)
    if value is not None and value.recipe is not None and not value.blank:
        value.refer()
        return Written(tensor, Ref(value, tensor), value, exclusive, inside, spared)
    # The old value cannot be recomputed, so the new one cannot either.
    return Written(tensor, None, None, exclusive, inside, spared)


def _spared_handles(value: Value | None, written: list[Tensor]) -> tuple[Handle, ...]:
    """Return the handles on parts of a value that share no memory with the `written` tensors."""
    if value is None or value.origin is None or not value.parts:
        return ()
    handles = [handle for ref in value.parts if (handle := ref()) is not None and handle.ref.value is value]
    return tuple(handle for handle in handles if all(are_disjoint(handle.ref, tensor) for tensor in written))


def preserve(value: Value | None, table: StorageTable, context: ReplayContext, n_spared: int = 0) -> None:
    """Protect a value that recipes still need from being overwritten: copy it, or recompute it later.

    `n_spared` handles need only parts of it that are not overwritten.
    """
    if value is None:
        return
    if value.residency is not None:
        finish_write(value)
    if value.tensor is None or value.version < 0:
        return
    if value.recipe is not None:
        value.release()
        return
    if n_spared and value.n_references == n_spared:
        return
    if value.origin is None and value.key not in table.skipped:
        _delete_unneeded_readers(value, table, context)
        if context.observer is not None:
            context.observer.overwritten(value)
        if sys.getrefcount(value) <= _NO_OTHER_USER:
            return
    memory_budget = context.memory_budget
    if memory_budget is not None:
        memory_budget.make_room(value.nbytes, "a copy of a tensor that is about to be overwritten")
    copy = copy_of_storage(value.tensor)
    if memory_budget is not None:
        memory_budget.count(copy)
    value.own(copy)
    context.counts.copied(value.nbytes)


def _delete_unneeded_readers(source: Value, table: StorageTable, context: ReplayContext) -> None:
    """Delete the recipes that read `source`, directly or not, if their values are in memory without them.

    These are values that lowtide holds, and values that only user code holds, such as a loss when the optimizer changes
    the parameters.
    """
    for entry in list(table.values()):
        value = entry.value()
        if value is None or value.recipe is None or value.blank:
            continue
        if value.tensor is None and not is_only_in_table(value):
            continue
        if _reads_from(value, source):
            value.recipe = None  # it is kept if it is needed again
            if context.observer is not None:
                context.observer.recipe_deleted(value)


def _reads_from(value: Value, source: Value) -> bool:
    """Return whether a replay of `value` would read `source`."""
    pending, visited = [value], {id(value)}
    while pending:
        recipe = pending.pop().recipe
        for ref in recipe.refs if recipe is not None else ():
            if ref.value is source:
                return True
            if ref.value.tensor is None and id(ref.value) not in visited:
                visited.add(id(ref.value))
                pending.append(ref.value)
    return False


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return all tensors among the arguments of an op."""
    found = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found.extend(item for item in a if isinstance(item, Tensor))
    return found


def written_tensors(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that this call writes."""
    return tensors_of(
        tuple(args[i] if i < len(args) else kwargs.get(name) for i, name in facts.writes),
        {},
    )


def covers(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Return whether the tensor covers each byte of its storage exactly once."""
    if tensor.numel() * tensor.itemsize != storage.nbytes():
        return False
    expected = 1
    for size, stride in sorted(zip(tensor.size(), tensor.stride(), strict=True), key=lambda d: d[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _reads(storage: torch.UntypedStorage, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the op also reads the storage that it writes, through another argument (`y.copy_(y)`)."""
    written = {i for i, _ in facts.writes}
    names = {name for _, name in facts.writes}
    read = tensors_of(
        tuple(a for i, a in enumerate(args) if i not in written),
        {name: a for name, a in kwargs.items() if name not in names},
    )
    key = storage_key(storage)
    return any(_key_or_none(t) == key for t in read)


def _key_or_none(tensor: Tensor) -> int | None:
    try:
        return storage_key(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors share no storage
        return None
