"""Rule 10: replay each recipe once, right after it was noted, and compare bit for bit.

An op that does not reproduce (atomics, stale state, a hidden input) is pinned: its values are kept, and
the report names it. A value whose memory changes without a recorded op (a raw kernel writing into a zeroed
buffer) is found when it is next read, and is a source from then on. Roughly doubles the forward pass.
Under a budget that leaves no room for a second copy of what an op makes, the op is left unchecked.
"""

from __future__ import annotations

import contextlib
import math
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from . import randomness
from .costs import timed
from .overwriting import Written
from .replay import copy_of_storage
from .tape import Tape
from .torch_private import storage_key, without_modes
from .values import Recipe, Ref, Scratch, Tensor, Value, view_of


class Verifier:
    """Checks the recipes of one scope as they are noted."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.took_us = math.inf
        """The kernel of the op that was checked last, when it was replayed, if it was."""
        self._fingerprints: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()

    def before_write(self, writes: Sequence[Written]) -> None:
        """Copy what an op is about to overwrite, to be able to run it again on that."""
        for w in writes:
            if self._is_room_for(w.storage.nbytes()):
                w.before = copy_of_storage(w.tensor)
                self._count(w.before)

    def _is_room_for(self, nbytes: int) -> bool:
        """Whether so much more can be there; others make room for it if they can."""
        room = self._tape.room
        if room is None:
            return True
        room.clear(nbytes, "an op that is replayed to be compared", strictly=False)
        return room.ledger.live_bytes + nbytes <= room.limit_bytes

    def _count(self, *made: Any) -> None:
        if self._tape.room is not None:
            self._tape.room.ledger.see_all(made)

    def check(
        self,
        recipe: Recipe,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        writes: Sequence[Written],
    ) -> None:
        """Replay a recipe that was just noted; pin what it made unless that is the same to the bit."""
        self.took_us = math.inf
        if recipe.origin.facts.blank:
            return  # nobody may rely on what is in there
        outs = out if isinstance(out, (tuple, list)) else (out,)
        self._count(*outs)
        scratch = sum(w.target.nbytes for w in recipe.writes if isinstance(w.target, Scratch))
        if any(w.before is None for w in writes) or not self._is_room_for(
            scratch + sum(outs[i].untyped_storage().nbytes() for i, _ in recipe.made)
        ):
            return
        private: dict[int, Tensor] = {}
        overwritten = {storage_key(w.storage): w.before for w in writes if w.before is not None}

        again_args = [_build(n, a, private, overwritten) for n, a in zip(recipe.args, args, strict=True)]
        again_kwargs = {
            name: _build(n, kwargs[name], private, overwritten) for name, n in (recipe.kwargs or {}).items()
        }
        with contextlib.nullcontext() if recipe.draw is None else randomness.replaying(recipe.draw):
            again, self.took_us = timed(recipe.origin.facts, tuple(again_args), again_kwargs)

        agains = again if isinstance(again, (tuple, list)) else (again,)
        padded = recipe.origin.facts.padded
        made = [(ref(), i in padded or _same(outs[i], agains[i])) for i, ref in recipe.made]
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
            self._tape.pin(recipe.origin, "replaying it did not give the same bits")
            for value, _ in made:
                if value is not None:
                    value.recipe = None

    def changed_unseen(self, value: Value, storage: torch.UntypedStorage) -> bool:
        """Whether the memory of a value that would be recomputed has changed without a recorded op."""
        known = self._fingerprints.get(value)
        if known is None or value.recipe is None or value.tensor is not None:
            return False
        with without_modes():
            now = _fingerprint(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        if now == known:
            return False
        assert value.origin is not None
        self._tape.pin(value.origin, "its memory was written by something that the recorder does not see")
        return True


# Not a function inside `check`: one that calls itself would be a cycle, and hold the copies until it is collected.
def _build(noted: Any, live: Any, private: dict[int, Tensor], overwritten: dict[int, Tensor]) -> Any:
    """An argument for the replay: the live one, what was there before it was overwritten, or scratch memory."""
    if isinstance(noted, Ref):
        return noted.over(overwritten.get(storage_key(live.untyped_storage()), live))
    if isinstance(noted, Scratch):
        base = private[id(noted)] = torch.zeros(noted.nbytes, dtype=torch.uint8, device=noted.device)
        return view_of(base, noted.dtype, noted.size, noted.stride, noted.offset)
    if isinstance(noted, list):
        return [_build(n, a, private, overwritten) for n, a in zip(noted, live, strict=True)]
    return noted


def _live(value: Value, recipe: Recipe, outs: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The user's tensor that has this value now."""
    for i, ref in recipe.made:
        if ref() is value:
            tensor: Tensor = outs[i]
            return tensor
    write = next(w for w in recipe.writes if w.made is not None and w.made() is value)
    return _find(write.target, recipe, args, kwargs)


def _find(target: Ref | Scratch, recipe: Recipe, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The live argument that stands where the recipe has `target`."""
    for noted, live in [
        *zip(recipe.args, args, strict=True),
        *((n, kwargs[k]) for k, n in (recipe.kwargs or {}).items()),
    ]:
        if noted is target:
            return live  # type: ignore[no-any-return]
        if isinstance(noted, list):
            for n, a in zip(noted, live, strict=True):
                if n is target:
                    return a  # type: ignore[no-any-return]
    raise AssertionError(f"{recipe.origin} writes an argument that it was not given")


def _same(first: Tensor, again: Tensor) -> bool:
    return first.stride() == again.stride() and _same_bytes(first, again)


def _same_bytes(first: Tensor, again: Tensor) -> bool:
    return torch.equal(_bytes(first), _bytes(again))


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _fingerprint(tensor: Tensor) -> int:
    return zlib.crc32(_bytes(tensor).cpu().numpy().data)
