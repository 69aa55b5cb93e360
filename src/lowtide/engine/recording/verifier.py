"""Verification (Rule 10): replay each recipe once, right after it was recorded, and compare bit for bit.

An op that does not reproduce (atomics, stale state, a hidden input) is pinned: its values are kept, and the report
names it. A value whose memory changes without a recorded op (a raw kernel writing into a zeroed buffer) is found
when it is next read, and is a source from then on. Verification roughly doubles the forward pass. Under a budget
without memory for a second copy of the results, the op is not checked.
"""

from __future__ import annotations

import contextlib
import math
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from ...torch_compat import storage_key, without_modes
from ..memory.budget import MemoryBudget
from ..ops import rng
from ..ops.timing import timed
from ..values.recipe import Recipe, Scratch
from ..values.replay_context import ReplayContext
from ..values.value import Tensor, Value
from ..values.view import Ref, copy_of_storage, view_of
from .inplace import Written


class Verifier:
    """Checks the recipes of one scope as they are recorded."""

    def __init__(self, context: ReplayContext, memory_budget: MemoryBudget | None = None) -> None:
        self._counts = context.counts
        self._memory_budget = memory_budget
        self.replay_us = math.inf
        """Kernel time of the last checked op when it was replayed; infinite if it was not."""
        self._fingerprints: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()

    def before_write(self, writes: Sequence[Written]) -> None:
        """Copy the memory that an op is about to overwrite, to replay the op on the copy."""
        for w in writes:
            if self._has_room(w.storage.nbytes()):
                w.before = copy_of_storage(w.tensor)
                self._count(w.before)

    def _has_room(self, nbytes: int) -> bool:
        """Return whether `nbytes` more fit, after evictions."""
        if self._memory_budget is None:
            return True
        self._memory_budget.make_room(nbytes, "an op that is replayed for verification", strictly=False)
        return self._memory_budget.ledger.live_bytes + nbytes <= self._memory_budget.limit_bytes

    def _count(self, *made: Any) -> None:
        if self._memory_budget is not None:
            self._memory_budget.ledger.count_all(made)

    def check(
        self,
        recipe: Recipe,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        writes: Sequence[Written],
    ) -> None:
        """Replay a recipe that was just recorded. Pin its op unless the result is bit-equal."""
        self.replay_us = math.inf
        if recipe.origin.facts.blank:
            return  # the content of empty memory is undefined
        outs = out if isinstance(out, (tuple, list)) else (out,)
        self._count(*outs)
        scratch = sum(w.target.nbytes for w in recipe.writes if isinstance(w.target, Scratch))
        if any(w.before is None for w in writes) or not self._has_room(
            scratch + sum(outs[i].untyped_storage().nbytes() for i, _ in recipe.made)
        ):
            return
        private: dict[int, Tensor] = {}
        overwritten = {storage_key(w.storage): w.before for w in writes if w.before is not None}

        replay_args = [_build(n, a, private, overwritten) for n, a in zip(recipe.args, args, strict=True)]
        replay_kwargs = {
            name: _build(n, kwargs[name], private, overwritten) for name, n in (recipe.kwargs or {}).items()
        }
        with contextlib.nullcontext() if recipe.draw is None else rng.replaying(recipe.draw):
            replayed, self.replay_us = timed(recipe.origin.facts, tuple(replay_args), replay_kwargs)

        replays = replayed if isinstance(replayed, (tuple, list)) else (replayed,)
        padded = recipe.origin.facts.padded
        made = [(ref(), i in padded or _same(outs[i], replays[i])) for i, ref in recipe.made]
        for write in recipe.writes:
            value = write.made() if write.made is not None else None
            if value is not None:
                live = _find(write.target, recipe, args, kwargs)
                key = storage_key(live.untyped_storage())
                base = private[id(write.target)] if isinstance(write.target, Scratch) else overwritten[key]
                made.append((value, _same_bytes(live, base)))
        for value, same in made:
            if value is None:
                continue
            if same:
                self._fingerprints[value] = _fingerprint(_live(value, recipe, outs, args, kwargs))
        if not all(same for _, same in made):
            self._counts.pin(recipe.origin, "replaying it did not give the same bits")
            for value, _ in made:
                if value is not None:
                    value.recipe = None

    def changed_unrecorded(self, value: Value, storage: torch.UntypedStorage) -> bool:
        """Return whether the memory of a value that would be recomputed has changed without a recorded op."""
        known = self._fingerprints.get(value)
        if known is None or value.recipe is None or value.tensor is not None:
            return False
        with without_modes():
            now = _fingerprint(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        if now == known:
            return False
        assert value.origin is not None
        self._counts.pin(value.origin, "its memory was written without a recorded op")
        return True


# Not a closure in `check`: a recursive closure is a reference cycle, which would hold the copies until collected.
def _build(recorded: Any, live: Any, private: dict[int, Tensor], overwritten: dict[int, Tensor]) -> Any:
    """Return an argument for the replay: the live one, a copy of the overwritten one, or scratch memory."""
    if isinstance(recorded, Ref):
        return recorded.over(overwritten.get(storage_key(live.untyped_storage()), live))
    if isinstance(recorded, Scratch):
        base = private[id(recorded)] = torch.zeros(recorded.nbytes, dtype=torch.uint8, device=recorded.device)
        return view_of(base, recorded.dtype, recorded.size, recorded.stride, recorded.offset)
    if isinstance(recorded, list):
        return [_build(n, a, private, overwritten) for n, a in zip(recorded, live, strict=True)]
    return recorded


def _live(value: Value, recipe: Recipe, outs: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the user's tensor that contains this value."""
    for i, ref in recipe.made:
        if ref() is value:
            tensor: Tensor = outs[i]
            return tensor
    write = next(w for w in recipe.writes if w.made is not None and w.made() is value)
    return _find(write.target, recipe, args, kwargs)


def _find(target: Ref | Scratch, recipe: Recipe, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the live argument at the position of `target` in the recipe."""
    for recorded, live in [
        *zip(recipe.args, args, strict=True),
        *((n, kwargs[k]) for k, n in (recipe.kwargs or {}).items()),
    ]:
        if recorded is target:
            return live  # type: ignore[no-any-return]
        if isinstance(recorded, list):
            for n, a in zip(recorded, live, strict=True):
                if n is target:
                    return a  # type: ignore[no-any-return]
    raise AssertionError(f"{recipe.origin} writes an argument that it was not given")


def _same(first: Tensor, replayed: Tensor) -> bool:
    return first.stride() == replayed.stride() and _same_bytes(first, replayed)


def _same_bytes(first: Tensor, replayed: Tensor) -> bool:
    return torch.equal(_bytes(first), _bytes(replayed))


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _fingerprint(tensor: Tensor) -> int:
    return zlib.crc32(_bytes(tensor).cpu().numpy().data)
