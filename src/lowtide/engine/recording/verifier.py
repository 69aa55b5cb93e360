"""Verification (Rule 10): replay each recipe once, right after it was recorded, and compare bit for bit.

An op that does not reproduce (atomics, stale state, a hidden input) is pinned: its values are kept, and the report
names it. A value whose memory changes without a recorded op (a raw kernel writing into a zeroed buffer) is found
when it is next read, and is a source from then on. Verification roughly doubles the forward pass. Under a budget
without memory for a second copy of the results, the op is not checked.

The profiled steps of fitted models check less, because a step has many ops that are alike. Calls with the signature
of a call that has reproduced are trusted, unless they read indices: then several threads may add to one element. Of
values that were made from tensors, a sample of the memory is compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from ...torch_compat import storage_key, without_modes
from ..memory.budget import MemoryBudget
from ..ops import rng
from ..ops.facts import OpFacts
from ..ops.output_sizes import shapes_of
from ..ops.timing import timed
from ..values.recipe import Recipe, Scratch
from ..values.replay_context import ReplayContext
from ..values.value import Tensor, Value
from ..values.view import Ref, copy_of_storage, view_of
from .inplace import Written, tensors_of

_SAMPLE_BYTES = 2**12
"""Size of a sample of a value's memory. Doubled: raw kernels that write little are found more often."""


class Verifier:
    """Checks the recipes of one scope as they are recorded."""

    def __init__(
        self,
        context: ReplayContext,
        memory_budget: MemoryBudget | None = None,
        reproduced: dict[Any, float] | None = None,
    ) -> None:
        """Check every op, or trust calls with the signatures in `reproduced`, to which the checked ones are added.

        `reproduced` has the kernel time of the replay in microseconds, by signature.
        """
        self._counts = context.counts
        self._memory_budget = memory_budget
        self._reproduced = reproduced
        self.replay_us = math.inf
        """Kernel time of a replay of the last op; infinite if it is not known."""
        self._fingerprints: weakref.WeakKeyDictionary[Value, tuple[int, bool]] = weakref.WeakKeyDictionary()

    def _signature_to_trust(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the signature of a call that one check is enough for, or None."""
        if self._reproduced is None or facts.region or not facts.name.startswith("aten."):
            return None
        tensors = tensors_of(args, kwargs)
        if not tensors or not all(t.is_floating_point() or t.dtype is torch.bool for t in tensors):
            return None
        return facts.name, shapes_of(args), shapes_of(tuple(kwargs.items()))

    def before_write(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], writes: Sequence[Written]
    ) -> None:
        """Copy the memory that an op is about to overwrite, to replay the op on the copy."""
        if self._reproduced and self._signature_to_trust(facts, args, kwargs) in self._reproduced:
            return
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

    def _bytes_to_replay(self, recipe: Recipe, outs: Sequence[Any]) -> int:
        """Return the bytes that a replay of the op that has just run allocates."""
        nbytes: int = sum(outs[i].untyped_storage().nbytes() for i, _ in recipe.made)
        nbytes += sum(w.target.nbytes for w in recipe.writes if isinstance(w.target, Scratch))
        if recipe.draw is not None:
            nbytes += len(recipe.draw.state)  # while the present state is captured
        return nbytes + (self._memory_budget.workspace_bytes if self._memory_budget is not None else 0)

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
        facts = recipe.origin.facts
        if facts.blank:
            return  # the content of empty memory is undefined
        outs = out if isinstance(out, (tuple, list)) else (out,)
        signature = self._signature_to_trust(facts, args, kwargs)
        if self._reproduced is not None and signature in self._reproduced:
            self.replay_us = self._reproduced[signature]
            for ref in [*(ref for _, ref in recipe.made), *(w.made for w in recipe.writes if w.made is not None)]:
                if (value := ref()) is not None:
                    self._store_fingerprint(value, _live(value, recipe, outs, args, kwargs), sampled=True)
            return
        self._count(*outs)
        if any(w.before is None for w in writes) or not self._has_room(self._bytes_to_replay(recipe, outs)):
            return
        made = self._replay(recipe, args, kwargs, outs, writes)
        if not all(same for _, same in made):
            self._counts.pin(recipe.origin, "replaying it did not give the same bits")
            for value, _ in made:
                value.recipe = None
            return
        if self._reproduced is not None and signature is not None:
            self._reproduced[signature] = self.replay_us
        for value, _ in made:
            self._store_fingerprint(value, _live(value, recipe, outs, args, kwargs), sampled=signature is not None)

    def _replay(
        self,
        recipe: Recipe,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outs: Sequence[Any],
        writes: Sequence[Written],
    ) -> list[tuple[Value, bool]]:
        """Replay a recipe. Return its values, and whether each has the same bits."""
        facts = recipe.origin.facts
        private: dict[int, Tensor] = {}
        overwritten = {storage_key(w.storage): w.before for w in writes if w.before is not None}
        replay_args = [_build(n, a, private, overwritten) for n, a in zip(recipe.args, args, strict=True)]
        replay_kwargs = {
            name: _build(n, kwargs[name], private, overwritten) for name, n in (recipe.kwargs or {}).items()
        }
        with contextlib.nullcontext() if recipe.draw is None else rng.replaying(recipe.draw):
            replayed, self.replay_us = timed(facts, tuple(replay_args), replay_kwargs)
        replays = replayed if isinstance(replayed, (tuple, list)) else (replayed,)
        made = [(ref(), i in facts.padded or _same(outs[i], replays[i])) for i, ref in recipe.made]
        for write in recipe.writes:
            if write.made is not None:
                live = _find(write.target, recipe, args, kwargs)
                key = storage_key(live.untyped_storage())
                base = private[id(write.target)] if isinstance(write.target, Scratch) else overwritten[key]
                made.append((write.made(), _same_bytes(live, base)))
        return [(value, same) for value, same in made if value is not None]

    def _store_fingerprint(self, value: Value, tensor: Tensor, *, sampled: bool) -> None:
        self._fingerprints[value] = _fingerprint(tensor.untyped_storage(), sampled), sampled

    def changed_unrecorded(self, value: Value, storage: torch.UntypedStorage) -> bool:
        """Return whether the memory of a value that would be recomputed has changed without a recorded op."""
        known = self._fingerprints.get(value)
        if known is None or value.recipe is None or value.tensor is not None:
            return False
        fingerprint, sampled = known
        with without_modes():
            if _fingerprint(storage, sampled) == fingerprint:
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


def _fingerprint(storage: torch.UntypedStorage, sampled: bool) -> int:
    """Return a checksum of the bytes, or of a sample of them. On CPU this allocates no tensor."""
    n = storage.nbytes()
    step = max(1, n // _SAMPLE_BYTES) if sampled else 1
    if storage.device.type != "cpu":
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        storage, n, step = content[::step].cpu().untyped_storage(), -(-n // step), 1
    # Not `numpy()`: after it, user code could not resize the tensor.
    raw = memoryview((ctypes.c_char * n).from_address(storage.data_ptr()))
    return zlib.crc32(raw if step == 1 else raw[::step].tobytes())
