"""Known memory: which value each tensor contains.

Values are looked up in the table of live storages (Rule 3). A storage that is not in the table came from outside. A
storage that was written without a recorded op is removed from the table, and is a source from then on (Rule 9).
Tensors that are not the content of one storage are foreign (Rule 14).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...torch_compat import has_content, is_wrapper, kind_of, memory_of, storage_key
from ..ops.facts import OpFacts
from ..values.replay_context import ReplayContext
from ..values.storage_table import StorageTable
from ..values.value import Tensor, Value
from . import inplace
from .inplace import Written, is_only_in_table
from .recorded_op import RecordedOp
from .verifier import Verifier

# A cache of facts about tensor classes: whether they have their own storage.
_has_storage: dict[type, bool] = {Tensor: True, torch.nn.Parameter: True}


class KnownMemory:
    """The storages that one recorder knows."""

    def __init__(self, context: ReplayContext, verifier: Verifier | None) -> None:
        self.table = StorageTable()
        self._context = context
        self._verifier = verifier

    def lookup(self, tensor: Tensor) -> tuple[torch.UntypedStorage | None, Value | None]:
        """Return the storage of a tensor (None: foreign) and the value it contains (None: unknown).

        A nested tensor is not noticed if its storage is known. The caller notices: it has no strides.
        """
        storage: torch.UntypedStorage | None = None
        if type(tensor) is Tensor:  # the common case
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):
                storage = None
        if storage is None or (entry := self.table.get(storage_key(storage))) is None:
            storage = self.storage_of(tensor)
            if storage is None:
                return None, None
            entry = self.table.get(storage_key(storage))
            if entry is None:
                return storage, None
        value = entry.strong or entry.value()
        if self._verifier is not None and value is not None and self._verifier.changed_unrecorded(value, storage):
            del self.table[entry.key]  # Rule 9
            return storage, None
        return storage, value

    def skip(self, out: Any) -> bool:
        """Note the memory that an op has made which is not recorded. Return False if it has made none."""
        table = self.table
        made_some = False
        for item in out if isinstance(out, (tuple, list)) else (out,):
            storage = self.storage_of(item) if isinstance(item, Tensor) else None
            if storage is not None and (key := storage_key(storage)) not in table:
                table.skipped.add(key)
                made_some = True
        return made_some

    def storage_of(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """Return the storage of a tensor, or None for a foreign one, which is counted (Rule 14)."""
        kind = type(tensor)
        plain = _has_storage.get(kind)
        if plain is None:
            plain = _has_storage[kind] = not is_wrapper(kind)
        if plain:
            try:
                storage = tensor.untyped_storage()
                if has_content(tensor):
                    return storage
            except (NotImplementedError, RuntimeError):  # sparse tensors and functorch wrappers have none
                pass
        self._context.counts.foreign(kind_of(tensor) if plain else kind.__name__)
        return None

    def forget(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remove memory that an unrecorded op is about to write. Recipes that need it get a copy."""
        self.forget_tensors(inplace.written_tensors(facts, args, kwargs))

    def forget_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Remove the memory of tensors that are about to be written. Recipes that need it get a copy."""
        for storage in (storage for tensor in tensors for storage in memory_of(tensor)):  # also of foreign tensors
            entry = self.table.get(storage_key(storage))
            if entry is not None:
                inplace.preserve(entry.value(), self.table, self._context)
                self.table.pop(entry.key, None)

    def delete_unneeded_recipes(self) -> None:
        """Delete the recipes of values that only user code holds, such as a loss when backward begins.

        The inputs of these recipes can then be freed. If such a value is needed after all, it is kept.
        """
        for entry in reversed(list(self.table.values())):  # first the values that are made of others
            value = entry.strong
            if value is not None and value.recipe is not None and is_only_in_table(value):
                value.recipe = None

    def replayed(self, value: Value, tensor: Tensor) -> None:
        """A replay has made `tensor` for `value`. A backward pass that creates a graph may use it."""
        entry = self.table.get(value.key)
        if entry is not None and entry.strong is value:
            entry.put(value)  # user code still holds the original: the table must not hold this copy
        self.table.put(tensor.untyped_storage(), value)

    def made_by(self, op: RecordedOp) -> tuple[list[tuple[Value, Tensor]], list[tuple[Written, Value]]]:
        """Return the values of an op that has just been recorded: in new storages, and in overwritten ones.

        In this order they are the outputs of the op in a trace.
        """
        made = [(v, tensor) for _, tensor, _, key in op.fresh if (v := self._made_at(key, op.number)) is not None]
        written = [(w, v) for w in op.writes if (v := self._made_at(storage_key(w.storage), op.number)) is not None]
        return made, written

    def _made_at(self, key: int, number: int) -> Value | None:
        """Return the value of a storage, if op `number` made it."""
        entry = self.table.get(key)
        value = entry.value() if entry is not None else None
        return value if value is not None and value.origin is not None and value.origin.number == number else None

    def forget_all(self) -> None:
        """Remove all memory. Tensors that are used later are sources."""
        self.table.clear()
        self.table.skipped.clear()

    def recompute_us(self, tensors: list[Tensor]) -> float:
        """Return an upper bound on the time to replay everything that these tensors need."""
        values = set()
        for tensor in tensors:
            # Not `lookup`: the op has just written some of them, which would look like an unrecorded write.
            storage = self.storage_of(tensor)
            entry = self.table.get(storage_key(storage)) if storage is not None else None
            values.add(entry.value() if entry is not None else None)
        return sum(value.recompute_us for value in values if value is not None and value.recipe is not None)
