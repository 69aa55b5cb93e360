"""Known memory: which value each tensor contains.

Values are looked up in the table of live storages (Rule 3). A storage that is not in the table came from outside. A
storage that was written without a recorded op is removed from the table, and is a source from then on (Rule 9).
Tensors without a storage are foreign (Rule 14).
"""

from __future__ import annotations

from typing import Any

import torch

from ...torch_compat import is_wrapper, storage_key
from ..ops.facts import OpFacts
from ..values.replay_context import ReplayContext
from ..values.storage_table import StorageTable
from ..values.value import Tensor, Value
from . import inplace
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
        """Return the storage of a tensor (None: foreign) and the value it contains (None: unknown)."""
        if type(tensor) is Tensor:  # the common case
            try:
                storage: torch.UntypedStorage | None = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):
                storage = self.storage_of(tensor)
        else:
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
                return tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse tensors and functorch wrappers have none
                pass
        self._context.counts.foreign(kind.__name__)
        return None

    def forget(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remove memory that an unrecorded op is about to write."""
        for tensor in inplace.written_tensors(facts, args, kwargs):
            storage = self.storage_of(tensor)
            entry = self.table.get(storage_key(storage)) if storage is not None else None
            if entry is not None:
                if facts.rebinds:
                    inplace.preserve(entry.value(), self._context)
                self.table.pop(entry.key, None)

    def recompute_us(self, tensors: list[Tensor]) -> float:
        """Return an upper bound on the time to replay everything that these tensors need."""
        values = set()
        for tensor in tensors:
            # Not `lookup`: the op has just written some of them, which would look like an unrecorded write.
            storage = self.storage_of(tensor)
            entry = self.table.get(storage_key(storage)) if storage is not None else None
            values.add(entry.value() if entry is not None else None)
        return sum(value.recompute_us for value in values if value is not None and value.recipe is not None)
