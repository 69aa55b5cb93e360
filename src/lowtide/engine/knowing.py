"""What a recorder knows of the memory that tensors lie in: which value it contains now, and whether that is held.

Knowledge is a table of live storages (Rule 3). What is not in it came from outside; what was written unseen is taken
out of it, and counts as coming from outside from then on (Rule 9). Tensors without memory of their own are foreign
(Rule 14). It decides nothing and runs no op: that is the recorder's business.
"""

from __future__ import annotations

from typing import Any

import torch

from . import overwriting
from .effects import OpFacts
from .modules import Whereabouts
from .tape import Tape
from .torch_private import is_wrapper, storage_key, version_of
from .values import UNWATCHED, Ref, StorageTable, Tensor, Value
from .verification import Verifier

_plain_types: dict[type, bool] = {Tensor: True, torch.nn.Parameter: True}


class ForeignArgumentError(Exception):
    """An argument has no storage of its own, so that the op cannot be noted."""


class Knowing:
    """The part of a recorder that looks memory up."""

    def __init__(self, tape: Tape, whereabouts: Whereabouts, verifier: Verifier | None) -> None:
        self.tape = tape
        self.table = StorageTable()
        self.where = whereabouts
        self.verifier = verifier
        self._doubts = verifier is not None

    def _refer(self, tensor: Tensor) -> Ref:
        """A reference for a recipe to what `tensor` contains now, held from now on if it is kept (Rule 5)."""
        storage, value = self._known(tensor)
        if storage is None:
            raise ForeignArgumentError(f"it takes a {type(tensor).__name__} that the engine does not understand")
        if value is None:
            value = self.table.put_source(tensor, storage)
        elif (held := value.tensor) is not None:
            if value.version != UNWATCHED and value.version != version_of(held):
                value = self.table.put_source(tensor, storage)
        elif value.recipe is None or value.blank or (self.where.place.keeps_inputs and self._is_boundary(value)):
            self._keep(value, tensor, storage)
        value.claims += 1
        return Ref(value, tensor)

    def _known(self, tensor: Tensor) -> tuple[torch.UntypedStorage | None, Value | None]:
        """The storage behind a tensor (None: foreign), and the value that it has now, if the recorder knows it."""
        if type(tensor) is Tensor:  # the common case first; what is odd about others is for `_storage` to find out
            try:
                storage: torch.UntypedStorage | None = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):
                storage = self._storage(tensor)
        else:
            storage = self._storage(tensor)
        if storage is None:
            return None, None
        entry = self.table.get(storage_key(storage))
        if entry is None:
            return storage, None
        value = entry.strong or entry.value()
        if self._doubts and value is not None and self._changed_unseen(value, tensor, storage):
            del self.table[entry.key]  # Rule 9: somebody else wrote it, so it is a source now
            return storage, None
        return storage, value

    def _changed_unseen(self, value: Value, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether what the memory contains is not this value any more; asked only if it `_doubts` that."""
        return self.verifier is not None and self.verifier.changed_unseen(value, storage)

    def _keep(self, value: Value, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Hold a value from now on, whatever was decided when it was made."""
        if value.counted and value.recipe is not None:
            self.tape.count_kept_after_all(value)
        value.hold(tensor, storage)
        self.table[storage_key(storage)].put(value)

    def _is_boundary(self, value: Value) -> bool:
        """Whether a value crosses into a layer, where inputs are kept (`keeps_inputs`, asked by the caller)."""
        origin = value.origin
        return origin is not None and origin.place.layer != self.where.place.layer

    def _forget(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Memory is about to change in a way that is not noted: what it contains is unknown from now on."""
        for tensor in overwriting.written_by(facts, args, kwargs):
            storage = self._storage(tensor)
            entry = self.table.get(storage_key(storage)) if storage is not None else None
            if entry is not None:
                if facts.rebinds:
                    overwriting.rescue(entry.value(), self.tape)
                self.table.pop(entry.key, None)

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """The storage behind a tensor, or None for a foreign one, which is counted (Rule 14)."""
        kind = type(tensor)
        plain = _plain_types.get(kind)
        if plain is None:
            plain = _plain_types[kind] = not is_wrapper(kind)
        if plain:
            try:
                return tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse tensors and functorch wrappers have none
                pass
        self.tape.foreign[kind.__name__] += 1
        return None
