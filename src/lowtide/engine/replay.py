"""Making a value again by running just the ops that it needs.

Each op runs at most once for a value that is still wanted, below autograd, with the generator state and
settings of forward. Iterative, so that the depth of a program is bounded by memory alone. A replayed op
is forgotten at once, and with it every input that nobody else wants (Rule 4).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from .._errors import ReplayMismatchError, StaleSourceError
from . import numerics, randomness
from .tape import Tape
from .torch_private import below_autograd, set_grad_enabled
from .values import Recipe, Ref, Scratch, Tensor, Value, Write, view_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from .room import Room
    from .turning import Turning


class Handle:
    """What autograd holds instead of a tensor that can be made again."""

    __slots__ = ("__weakref__", "ref", "tape")

    def __init__(self, ref: Ref, tape: Tape) -> None:
        self.ref = ref
        self.tape = tape

    def unpack(self) -> Tensor:
        """The tensor that autograd saved."""
        ref, tape = self.ref, self.tape
        value = ref.value
        with tape.lock:
            if tape.room is not None:
                return self._within(tape.room)
            tensor = value.tensor
            if tensor is None:
                with below_autograd():
                    make(value, tape)
                    assert value.tensor is not None
                    return ref.over(value.tensor)
            if value.version >= 0 and (why := value.changed()):
                raise _stale(value, why, "it was saved for backward", tape)
            if ref.is_all_of(tensor):
                return tensor
            with below_autograd():
                return ref.laid_over(tensor)

    def _within(self, room: Room) -> Tensor:
        """The same under a budget."""
        ref, tape = self.ref, self.tape
        value = ref.value
        with below_autograd():
            room.asks()
            if value.tensor is None:
                make(value, tape)
            elif value.version >= 0 and (why := value.changed()):
                raise _stale(value, why, "it was saved for backward", tape)
            tensor = value.tensor  # held here, it is not evicted
            assert tensor is not None
            room.asked(value)
            return ref.over(tensor)


class HeardHandle(Handle):
    """A handle on a value that a plan may want made more than once, or with whose asks others turn."""

    __slots__ = ("turning",)

    def __init__(self, ref: Ref, tape: Tape, turning: Turning) -> None:
        super().__init__(ref, tape)
        self.turning = turning
        turning.handed_out(ref.value)

    def unpack(self) -> Tensor:
        """The tensor that autograd saved."""
        with self.tape.lock:
            self.turning.hears(self.ref.value)
        return super().unpack()

    def __del__(self) -> None:
        self.turning.handed_back(self.ref.value)


def make(wanted: Value, tape: Tape) -> None:
    """Give `wanted` its tensor, replaying whatever is missing on the way to it."""
    run = _make_for_good if tape.room is None and tape.turning is None else _make_for_now
    now = numerics.current()
    grad_enabled = torch.is_grad_enabled()
    try:
        if now == tape.settings:
            run(wanted, tape)
        else:
            with numerics.restored(tape.settings, now):
                run(wanted, tape)
    finally:
        set_grad_enabled(grad_enabled)


def _make_for_good(wanted: Value, tape: Tape) -> None:
    """Where nothing is ever let go: each value on the way stays until nobody wants it."""
    ferry = tape.ferry
    missing = [wanted]
    while missing:
        value = missing[-1]
        if value.tensor is not None or (ferry is not None and ferry.bring_back(value)):
            missing.pop()
            continue
        recipe = _recipe_of(value)
        waits = False
        for ref in recipe.refs:
            if ref.value.tensor is None:
                missing.append(ref.value)
                waits = True
        if not waits:
            _run(recipe, tape)
            missing.pop()


def _recipe_of(value: Value) -> Recipe:
    if value.recipe is None:
        raise ReplayMismatchError(
            f"the value made by {value.origin} was lost when an earlier backward pass failed: run forward again"
        )
    return value.recipe


class _Frame:
    """An op that waits for its inputs. Those that are there are held, so that none is evicted meanwhile."""

    __slots__ = ("inputs", "missing", "recipe", "transient")

    def __init__(self, value: Value, tape: Tape, waiting: Counter[Value]) -> None:
        self.recipe = _recipe_of(value)
        self.missing = len(self.recipe.refs)
        self.inputs: list[Tensor] = []
        self.transient: list[Value] = []  # to be let go after it
        turning = tape.turning
        if turning is not None:
            missing = dict.fromkeys(r.value for r in self.recipe.refs if r.value.tensor is None)
            self.transient = [value for value in missing if turning.is_transient(value)]
            waiting.update(self.transient)


def _make_for_now(wanted: Value, tape: Tape) -> None:
    """Where values come and go: under a budget, or under a plan that has some made more than once."""
    elsewhere = tape.room or tape.ferry
    if elsewhere is not None and elsewhere.bring_back(wanted):
        return
    waiting: Counter[Value] = Counter()  # how many ops wait for a value that is not to be retained
    frames = [_Frame(wanted, tape, waiting)]
    while frames:
        frame = frames[-1]
        refs = frame.recipe.refs
        while frame.missing:
            value = refs[frame.missing - 1].value
            tensor = value.tensor
            if tensor is None:
                if elsewhere is not None and elsewhere.bring_back(value):
                    continue
                frames.append(_Frame(value, tape, waiting))
                break
            frame.inputs.append(tensor)
            frame.missing -= 1
        else:
            turning = tape.turning
            _run(frame.recipe, tape, () if turning is None else _spare(frame, waiting, turning))
            frames.pop()
            if turning is not None:
                _let_go_of_transients(frame, waiting, wanted, turning)


def _spare(frame: _Frame, waiting: Counter[Value], turning: Turning) -> Collection[Value]:
    """What is there for this op alone, and can be made again: it may write over that."""
    if not frame.recipe.writes:
        return ()
    return [v for v in frame.transient if waiting[v] == 1 and v not in turning.asked and v.recipe is not None]


def _let_go_of_transients(frame: _Frame, waiting: Counter[Value], wanted: Value, turning: Turning) -> None:
    """What a plan says is to be made more than once stays only for the ops that wait for it, and its own asks."""
    for value in frame.transient:
        waiting[value] -= 1
        if not waiting[value]:
            del waiting[value]  # or it would hold the value, and what that is made from
    made = [m() for _, m in frame.recipe.made] + [w.made() for w in frame.recipe.writes if w.made is not None]
    for value in [*frame.transient, *(v for v in made if v is not None)]:
        if (
            value.recipe is not None
            and not waiting[value]
            and value is not wanted
            and value not in turning.asked
            and turning.is_transient(value)
        ):
            value.let_go()


def _run(recipe: Recipe, tape: Tape, spare: Collection[Value] = ()) -> None:
    """Run one op again, all of whose inputs are there, and give its values their tensors.

    What is `spare` it may write over, as well as what nobody wants.
    """
    tape.replayed_ops += 1
    # Kernels may look at this (an LSTM makes its workspace only then), though no graph is built here.
    set_grad_enabled(recipe.grad_enabled)
    if recipe.writes:
        out = _run_in_place(recipe, tape, spare)
    else:
        out = _call(recipe, _arguments(recipe.args, recipe, tape, None), None, tape)
    for position, made in recipe.made:
        value = made()
        if value is not None and value.tensor is None:
            _accept(value, out if type(out) is Tensor else out[position], recipe, tape)


def _run_in_place(recipe: Recipe, tape: Tape, spare: Collection[Value]) -> Any:
    """Run an op that writes, on memory that it may write, which then has the values it makes."""
    private: dict[int, Tensor] = {}
    for_good = tape.turning is None or tape.turning.stays_for_good(recipe.origin.number)
    taken: list[Value] = []
    for write in recipe.writes:
        over = write.target.value if write.alone and isinstance(write.target, Ref) else None
        if over is not None and (for_good or over in spare):
            assert over.tensor is not None
            taken.append(over)
            private[id(over)] = over.tensor
        else:
            private[_identity(write)] = _base_for_write(write.target, tape)
    args = _arguments(recipe.args, recipe, tape, private)
    try:
        out = _call(recipe, args, private, tape)
    finally:
        # Overwritten, or half so: either way its memory is not that value any more.
        for value in taken:
            value.let_go()
    for write in recipe.writes:
        made = write.made() if write.made is not None else None
        if made is not None and made.tensor is None:
            _own(made, private[_identity(write)], tape)
    return out


def _call(recipe: Recipe, args: list[Any], private: dict[int, Tensor] | None, tape: Tape) -> Any:
    call, kwargs = recipe.origin.facts.call, recipe.kwargs
    if recipe.draw is None and kwargs is None:  # nearly always
        return call(*args)
    named = {}
    if kwargs is not None:
        named = dict(zip(kwargs, _arguments(kwargs.values(), recipe, tape, private), strict=True))
    with contextlib.nullcontext() if recipe.draw is None else randomness.replaying(recipe.draw):
        return call(*args, **named)


def _arguments(noted: Any, recipe: Recipe, tape: Tape, private: dict[int, Tensor] | None) -> list[Any]:
    """What a recipe noted, with tensors in place of references again."""
    built: list[Any] = []
    for a in noted:
        kind = type(a)
        if kind is Ref:
            value = a.value
            base = value.tensor
            if private is not None and id(value) in private:
                base = private[id(value)]  # memory that was shared by several arguments stays shared
            elif value.version >= 0 and (why := value.changed()):
                raise _stale(value, why, f"{recipe.origin} has to be replayed with it", tape)
            built.append(a.over(base))
        elif kind is list:
            built.append(_arguments(a, recipe, tape, private))
        elif kind is Scratch:
            assert private is not None
            built.append(view_of(private[id(a)], a.dtype, a.size, a.stride, a.offset))
        else:
            built.append(a)
    return built


def _identity(write: Write) -> int:
    return id(write.target.value) if isinstance(write.target, Ref) else id(write.target)


def _base_for_write(target: Ref | Scratch, tape: Tape) -> Tensor:
    """Memory of its own for a replayed op to write (Rules 6 and 7)."""
    if isinstance(target, Scratch):
        return torch.zeros(target.nbytes, dtype=torch.uint8, device=target.device)
    tensor = target.value.tensor
    assert tensor is not None
    tape.copied_bytes += target.value.nbytes
    return copy_of_storage(tensor)


def _accept(value: Value, tensor: Tensor, recipe: Recipe, tape: Tape) -> None:
    """Take what a replay made, if it is laid out as it was: geometries are absolute."""
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes != value.nbytes or tensor.stride() != value.stride:
        raise ReplayMismatchError(
            f"replaying {recipe.origin} gave {nbytes} bytes with strides {tensor.stride()} where forward made "
            f"{value.nbytes} bytes with strides {value.stride}. Keep what this op makes, for example with "
            f"policy | lowtide.SaveOps({recipe.origin.facts.name!r}), and please report it."
        )
    _own(value, tensor, tape)


def _own(value: Value, tensor: Tensor, tape: Tape) -> None:
    """A value has been made again: for good, or under a budget until it has to make room."""
    if tape.room is not None:
        tape.room.own(value, tensor)
    else:
        turning = tape.turning
        stays = turning is None or value.origin is None or turning.stays_for_good(value.origin.number)
        value.own(tensor, for_now=not stays)
        if turning is not None:
            turning.made(value)


def copy_of_storage(tensor: Tensor) -> Tensor:
    """All bytes behind `tensor`, copied into memory of their own."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()


def _stale(value: Value, why: str, need: str, tape: Tape) -> StaleSourceError:
    if value.origin is not None and value.origin.facts.regathers:
        remedy = (
            "Keep the inputs of every module that FSDP wraps, so that no recompute crosses from one to another: "
            "lowtide.EveryN(1, layers=[the wrapped modules])."
        )
    else:
        remedy = "Change a copy instead (x = x + 1, not x += 1), or change it after backward."
    return StaleSourceError(f"{tape.name_of(value)} {why} between forward and backward, and {need}. {remedy}")
