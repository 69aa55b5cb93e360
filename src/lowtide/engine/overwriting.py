"""In-place ops: what they overwrite, what must be rescued first, and how a replay will write (Rules 6, 7, 9).

An in-place op ends one value of a storage and begins the next. What it ends may still be wanted by recipes
that were noted before, which then get a copy. What it begins can be made again if what it overwrites can,
or if it overwrites all of it regardless.
"""

from __future__ import annotations

from typing import Any

import torch

from .effects import OpFacts
from .offloading import save_from_overwriting
from .replay import copy_of_storage
from .tape import Tape
from .torch_private import storage_key
from .values import Ref, Scratch, StorageTable, Tensor, Value


class Written:
    """One storage that an op is about to write."""

    __slots__ = ("alone", "before", "inside", "replaced", "storage", "target", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        target: Ref | Scratch | None,
        replaced: Value | None,
        alone: bool,
        inside: bool,
    ) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.target = target  # how a replay writes it; None where it cannot be replayed
        self.replaced = replaced  # the value it had, if what is made of it can be made again
        self.alone = alone  # no other recipe or handle wants that value
        self.inside = inside  # the storage was made in this scope
        self.before: Tensor | None = None  # a copy of what it contained, for verification


class Targets:
    """What stands in a recipe for the arguments of an op that has already overwritten some of them."""

    def __init__(self, writes: tuple[Written, ...]) -> None:
        self._targets = {id(w.tensor): w.target for w in writes}
        self._values = {storage_key(w.storage): w.target.value for w in writes if isinstance(w.target, Ref)}

    def stands_for(self, tensor: Tensor) -> Ref | Scratch | None:
        """The target for a written argument; what was there before for another view of the same memory."""
        target = self._targets.get(id(tensor))
        if target is not None:
            return target
        key = _key_or_none(tensor)
        value = self._values.get(key) if key is not None else None
        if value is None:
            return None
        value.claims += 1
        return Ref(value, tensor)


def prepare(
    table: StorageTable,
    tape: Tape,
    facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    kept: bool,
) -> tuple[Written, ...]:
    """Called before an op writes: rescue what recipes still need, and say how a replay would write, unless what it
    makes is kept anyway."""
    writes = tuple(_prepare_one(t, table, tape, facts, args, kwargs, kept) for t in written_by(facts, args, kwargs))
    if len(writes) > 1 and len({storage_key(w.storage) for w in writes}) < len(writes):
        for w in writes:  # two arguments write one storage: too odd to be worth a recipe
            w.target = w.replaced = None
    return writes


def _prepare_one(
    tensor: Tensor,
    table: StorageTable,
    tape: Tape,
    facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kept: bool,
) -> Written:
    storage = tensor.untyped_storage()
    entry = table.get(storage_key(storage))
    value = entry.value() if entry is not None else None
    alone = value is None or value.claims == 0
    inside = value is not None and value.origin is not None
    rescue(value, tape)
    if kept:
        return Written(tensor, None, None, alone, inside)
    if facts.statistics:
        return Written(tensor, Scratch(tensor), None, alone, inside)
    if facts.overwrites and covers(tensor, storage) and not _reads(storage, facts, args, kwargs):
        return Written(tensor, Scratch(tensor), value if inside else None, alone, inside)
    if value is not None and value.recipe is not None and not value.blank:
        value.claims += 1
        return Written(tensor, Ref(value, tensor), value, alone, inside)
    # What is there cannot be made again, so neither can what will be.
    return Written(tensor, None, None, alone, inside)


def rescue(value: Value | None, tape: Tape) -> None:
    """See to it that recipes do not read a value's memory after it is overwritten."""
    if value is None:
        return
    if value.seat is not None:
        save_from_overwriting(value)
    if value.tensor is None or value.version < 0:
        return
    if value.recipe is not None:
        value.let_go()  # it can be made again
        return
    if tape.room is not None:
        tape.room.clear(value.nbytes, "a copy of what is about to be overwritten")
    copy = copy_of_storage(value.tensor)
    if tape.room is not None:
        tape.room.ledger.see(copy)
    value.own(copy)
    tape.copied_bytes += value.nbytes


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """All tensors among an op's arguments."""
    found = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found.extend(item for item in a if isinstance(item, Tensor))
    return found


def written_by(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that this call writes."""
    return tensors_of(
        tuple(args[i] if i < len(args) else kwargs.get(name) for i, name in facts.writes),
        {},
    )


def covers(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether the tensor is all of its storage, each byte once."""
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
    """Whether the op also reads the storage that it writes, through another argument (`y.copy_(y)`)."""
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
    except (NotImplementedError, RuntimeError):  # sparse, wrapped: it shares no storage with anything
        return None
