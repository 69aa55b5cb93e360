"""Replay: recompute a value by running only the ops that it depends on.

Each op runs at most once for a value that is still in use, below autograd, with the generator state and settings of
forward. The loop is not recursive, so only memory limits the depth of a program. A replayed recipe is freed, together
with every input that has no other user (Rule 4).
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from ..._errors import ReplayMismatchError, StaleSourceError
from ...torch_compat import set_grad_enabled
from ..ops import numerics, rng
from .recipe import Recipe, Scratch, Write
from .replay_context import ReplayContext
from .value import Tensor, Value
from .view import Ref, copy_of_storage, view_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from .retention import Retention


def materialize(wanted: Value, context: ReplayContext) -> None:
    """Give `wanted` its tensor: replay, fetch or decompress the missing values."""
    run = (
        _materialize_retaining
        if context.memory_budget is None and context.retention is None
        else _materialize_releasing
    )
    now = numerics.current()
    grad_enabled = torch.is_grad_enabled()
    context.replaying_thread = threading.get_ident()
    try:
        if now == context.settings:
            run(wanted, context)
        else:
            with numerics.restored(context.settings, now):
                run(wanted, context)
    finally:
        context.replaying_thread = None
        set_grad_enabled(grad_enabled)


def _materialize_retaining(wanted: Value, context: ReplayContext) -> None:
    """Replay where every recomputed value is retained until its last use."""
    transfers = context.transfers
    missing = [wanted]
    while missing:
        value = missing[-1]
        if value.tensor is not None or (transfers is not None and transfers.fetch(value)):
            missing.pop()
            continue
        recipe = _recipe_of(value)
        is_ready = True
        for ref in recipe.refs:
            if ref.value.tensor is None:
                missing.append(ref.value)
                is_ready = False
        if is_ready:
            _run(recipe, context)
            missing.pop()


def _recipe_of(value: Value) -> Recipe:
    if value.recipe is None:
        raise ReplayMismatchError(
            f"the value made by {value.origin} was lost when an earlier backward pass failed: run forward again"
        )
    return value.recipe


class _Frame:
    """An op whose inputs are being made.

    Inputs that were made for it cannot be evicted. Those that were in memory before can: in a long chain, one of them
    for each op would be too much.
    """

    __slots__ = ("made", "recipe", "transient", "value")

    def __init__(self, value: Value, context: ReplayContext, waiting: Counter[Value]) -> None:
        self.value = value
        self.recipe = _recipe_of(value)
        self.made: list[Tensor | None] = []
        self.transient: list[Value] = []  # released after this op
        retention = context.retention
        if retention is not None:
            missing = dict.fromkeys(r.value for r in self.recipe.refs if r.value.tensor is None)
            self.transient = [value for value in missing if retention.is_released(value)]
            waiting.update(self.transient)

    def missing(self) -> Value | None:
        """Return the last input that is not in memory."""
        for ref in reversed(self.recipe.refs):
            if ref.value.tensor is None:
                return ref.value
        return None


def _materialize_releasing(wanted: Value, context: ReplayContext) -> None:
    """Replay where values may be evicted or released in between: under a budget, or under a plan that releases."""
    transfers = context.memory_budget or context.transfers
    if transfers is not None and transfers.fetch(wanted):
        return
    waiting: Counter[Value] = Counter()  # by released value: the number of frames that need it
    frames = [_Frame(wanted, context, waiting)]
    while frames:
        frame = frames[-1]
        value = frame.missing()
        if value is None:
            retention = context.retention
            frame.made = [ref.value.tensor for ref in frame.recipe.refs]  # now all of them are needed
            _run(frame.recipe, context, () if retention is None else _spare(frame, waiting, retention))
            frames.pop()
            if retention is not None:
                _release_transients(frame, waiting, wanted, retention)
            if frames:
                frames[-1].made.append(frame.value.tensor)
        elif transfers is not None and transfers.fetch(value):
            frame.made.append(value.tensor)
        else:
            frames.append(_Frame(value, context, waiting))


def _spare(frame: _Frame, waiting: Counter[Value], retention: Retention) -> Collection[Value]:
    """Return the inputs that only this op uses and that can be recomputed: it may overwrite them."""
    if not frame.recipe.writes:
        return ()
    return [v for v in frame.transient if waiting[v] == 1 and v not in retention.unpacked and v.recipe is not None]


def _release_transients(frame: _Frame, waiting: Counter[Value], wanted: Value, retention: Retention) -> None:
    """Release the values that the plan releases, unless another frame or a backward node still uses them."""
    for value in frame.transient:
        waiting[value] -= 1
        if not waiting[value]:
            del waiting[value]  # the counter must not hold the value
    made = [m() for _, m in frame.recipe.made] + [w.made() for w in frame.recipe.writes if w.made is not None]
    for value in [*frame.transient, *(v for v in made if v is not None)]:
        if (
            value.recipe is not None
            and not waiting[value]
            and value is not wanted
            and value not in retention.unpacked
            and retention.is_released(value)
        ):
            value.release()


def _run(recipe: Recipe, context: ReplayContext, spare: Collection[Value] = ()) -> None:
    """Replay one op whose inputs are in memory, and give its values their tensors. It may overwrite `spare` values."""
    context.counts.replayed_ops += 1
    # Some kernels read this flag: an LSTM allocates its workspace only if it is set. No graph is built here.
    set_grad_enabled(recipe.grad_enabled)
    if recipe.writes:
        out = _run_in_place(recipe, context, spare)
    else:
        out = _call(recipe, _arguments(recipe.args, recipe, context, None), None, context)
    for position, made in recipe.made:
        value = made()
        if value is not None and value.tensor is None:
            _accept(value, out if type(out) is Tensor else out[position], recipe, context)


def _run_in_place(recipe: Recipe, context: ReplayContext, spare: Collection[Value]) -> Any:
    """Replay an op that writes, on memory that it may overwrite (Rules 6 and 7)."""
    private: dict[int, Tensor] = {}
    number, retention, drops = recipe.origin.number, context.retention, context.drops
    is_retained = retention is None or number not in retention.released_ops
    if drops is not None and drops.keeps_recipe_of(number):
        is_retained = False  # this recipe will be replayed again, and then needs the input again
    taken: list[Value] = []
    for write in recipe.writes:
        over = write.target.value if write.exclusive and isinstance(write.target, Ref) else None
        if over is not None and (is_retained or over in spare):
            assert over.tensor is not None
            taken.append(over)
            private[id(over)] = over.tensor
        else:
            private[_identity(write)] = _memory_for_write(write.target, context)
    args = _arguments(recipe.args, recipe, context, private)
    try:
        out = _call(recipe, args, private, context)
    finally:
        # Also after an error: the memory is overwritten, at least in part.
        for value in taken:
            value.release()
    for write in recipe.writes:
        made = write.made() if write.made is not None else None
        if made is not None and made.tensor is None:
            _own(made, private[_identity(write)], context)
    return out


def _call(recipe: Recipe, args: list[Any], private: dict[int, Tensor] | None, context: ReplayContext) -> Any:
    call, kwargs = recipe.origin.facts.call, recipe.kwargs
    if recipe.draw is None and kwargs is None:  # the common case
        return call(*args)
    named = {}
    if kwargs is not None:
        named = dict(zip(kwargs, _arguments(kwargs.values(), recipe, context, private), strict=True))
    if recipe.draw is None:
        return call(*args, **named)
    if context.memory_budget is not None:
        context.memory_budget.make_room(len(recipe.draw.state), "a generator state", strictly=False)
    with rng.replaying(recipe.draw):
        return call(*args, **named)


def _arguments(recorded: Any, recipe: Recipe, context: ReplayContext, private: dict[int, Tensor] | None) -> list[Any]:
    """Return recorded arguments with tensors instead of references."""
    built: list[Any] = []
    for a in recorded:
        kind = type(a)
        if kind is Ref:
            value = a.value
            base = value.tensor
            if private is not None and id(value) in private:
                base = private[id(value)]  # arguments that shared memory still share it
            elif value.version >= 0 and (why := value.changed()):
                raise stale_error(value, why, f"{recipe.origin} has to be replayed with it", context)
            built.append(a.over(base))
        elif kind is list:
            built.append(_arguments(a, recipe, context, private))
        elif kind is Scratch:
            assert private is not None
            built.append(view_of(private[id(a)], a.dtype, a.size, a.stride, a.offset))
        else:
            built.append(a)
    return built


def _identity(write: Write) -> int:
    return id(write.target.value) if isinstance(write.target, Ref) else id(write.target)


def _memory_for_write(target: Ref | Scratch, context: ReplayContext) -> Tensor:
    """Return private memory that a replayed op may write (Rules 6 and 7)."""
    if isinstance(target, Scratch):
        return torch.zeros(target.nbytes, dtype=torch.uint8, device=target.device)
    tensor = target.value.tensor
    assert tensor is not None
    context.counts.copied(target.value.nbytes)
    return copy_of_storage(tensor)


def _accept(value: Value, tensor: Tensor, recipe: Recipe, context: ReplayContext) -> None:
    """Take the result of a replay. Views have absolute geometries, so the layout must be the same."""
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes != value.nbytes or tensor.stride() != value.stride:
        raise ReplayMismatchError(
            f"replaying {recipe.origin} gave {nbytes} bytes with strides {tensor.stride()} where forward made "
            f"{value.nbytes} bytes with strides {value.stride}. Keep the results of this op, for example with "
            f"policy | lowtide.SaveOps({recipe.origin.facts.name!r}), and please report it."
        )
    _own(value, tensor, context)


def _own(value: Value, tensor: Tensor, context: ReplayContext) -> None:
    if context.memory_budget is not None:
        context.memory_budget.own(value, tensor)
    elif context.drops is not None:
        value.own(tensor, evictable=context.drops.keeps_recipe(value))
    else:
        retention = context.retention
        value.own(tensor, evictable=retention is not None and retention.is_released(value))
    if context.on_replayed is not None:
        context.on_replayed(value, tensor)


def stale_error(value: Value, why: str, need: str, context: ReplayContext) -> StaleSourceError:
    """Return the error for a source that changed between forward and backward (Rule 11)."""
    if value.origin is not None and value.origin.facts.regathers:
        remedy = (
            "Keep the inputs of every module that FSDP wraps, so that no recompute crosses from one to another: "
            "lowtide.EveryN(1, layers=[the wrapped modules])."
        )
    else:
        remedy = "Change a copy instead (x = x + 1, not x += 1), or change it after backward."
    return StaleSourceError(f"{context.name_of(value)} {why} between forward and backward, and {need}. {remedy}")
