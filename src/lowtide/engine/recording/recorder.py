"""The recorder: a dispatch mode below autograd that records how each value of a forward pass can be recomputed.

It never changes the result of an op. It holds the user's memory only for recipes that need it (Rule 5). Ops of a
backward pass that runs while it is active are not recorded. Opaque memory and foreign tensors are kept (Rules 9 and
14). Its strategy decides about each op and each saved tensor. This is the hot path: every op of a model passes through
`__torch_dispatch__`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ...policies import Decision
from ...torch_compat import EngineMode, graph_task, is_autocast_inside, never_compile, storage_key, version_of
from ..ops import batch_norm, rng
from ..ops.facts import FACTS, OpFacts, facts_of, facts_of_region
from ..values.handles import AnyHandle, Handle, Kept
from ..values.recipe import Recipe, Write
from ..values.replay_context import ReplayContext
from ..values.value import UNWATCHED, Origin, Tensor, Value
from ..values.view import Ref
from . import inplace
from .inplace import Written
from .known_memory import KnownMemory
from .module_tracker import ModuleTracker
from .recorded_op import Fresh, RecordedOp
from .verifier import Verifier

if TYPE_CHECKING:
    from ..strategies.base import Strategy

KEEP, RECOMPUTE = Decision.KEEP, Decision.RECOMPUTE


class ForeignArgumentError(Exception):
    """An argument has no storage, so the op cannot be recorded."""


class Recorder(EngineMode):  # type: ignore[no-untyped-call]
    """Records the ops of one scope, and turns the tensors that autograd saves into handles."""

    def __init__(
        self, strategy: Strategy, context: ReplayContext, tracker: ModuleTracker, verifier: Verifier | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.strategy = strategy
        """May be replaced at any time, for example when a step leaves its plan."""
        self.context = context
        self.tracker = tracker
        self.verifier = verifier
        self.memory = KnownMemory(context, verifier)
        self.tracks_saves = False
        """Whether the owner of this recorder asks which saved tensors wait for backward (`SavedTensors.waiting`)."""
        self._moved: list[tuple[Written, Value]] = []  # by the latest op
        self._saves = context.saves
        self._table = self.memory.table
        self._counts = context.counts
        strategy.start(self)

    @property
    def watches_backward(self) -> bool:
        """Whether the ops of a backward pass are watched by this mode (see `backward`)."""
        strategy = self.strategy
        return strategy.watches_backward or (strategy.records_double_backward and torch.is_grad_enabled())

    @property
    def observer(self) -> Any:
        """The memory budget that watches a backward pass inside the scope."""
        return self.strategy.memory_budget

    # -- ops ------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        facts = FACTS.get(id(func)) or facts_of(func)
        if kwargs is None:
            kwargs = {}
        strategy = self.strategy
        if not strategy.observes_ops:
            return facts.call(*args, **kwargs) if facts.views else self._dispatch(func, facts, args, kwargs)
        token = strategy.before_op(facts, args, kwargs)
        try:
            out = facts.call(*args, **kwargs) if facts.views else self._dispatch(func, facts, args, kwargs)
        except BaseException:
            strategy.op_failed(token)
            raise
        strategy.after_op(facts, out, token)
        return out

    # Hot path, so not split: a call per op costs more than it clarifies.
    def _dispatch(  # noqa: C901, PLR0912
        self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._moved:
            self.hold_moved()
        strategy = self.strategy
        if self.context.is_replaying or (
            graph_task() != -1 and not (strategy.records_double_backward and torch.is_grad_enabled())
        ):
            return self._run_unrecorded(facts, args, kwargs)
        if facts.name == strategy.skipped_op and facts.skippable:
            out = facts.call(*args, **kwargs)
            if self.memory.skip(out):
                strategy.skipped()
            return out
        draw = None
        writes: tuple[Written, ...] = ()
        if not facts.simple:
            if facts.region:
                return self._run_compiled_region(func, args, kwargs)
            if facts.seeded and strategy.decision is not KEEP and facts.draws_now(args, kwargs):
                draw = rng.capture(args, kwargs)
            if facts.rebinds:
                self.memory.forget(facts, args, kwargs)
                return facts.call(*args, **kwargs)
            if facts.writes_now(args):
                if any(self.memory.storage_of(t) is None for t in inplace.written_tensors(facts, args, kwargs)):
                    self.memory.forget(facts, args, kwargs)
                    return facts.call(*args, **kwargs)
                is_kept = strategy.decision is KEEP
                writes = inplace.prepare(self._table, self.context, facts, args, kwargs, is_kept=is_kept)
                if self.verifier is not None:
                    self.verifier.before_write(facts, args, kwargs, writes)
        cost_us = 0.0
        if strategy.times_ops:
            out, cost_us = strategy.run_timed(facts, args, kwargs)
        else:  # unpacking an empty dict of keywords costs time
            out = facts.call(*args, **kwargs) if kwargs else facts.call(*args)
        if type(out) is Tensor and not writes:
            storage: torch.UntypedStorage | None
            try:
                storage = out.untyped_storage()
                if out.is_nested or not storage.data_ptr():  # raises for zero tensors; meta tensors have no address
                    storage = self.memory.storage_of(out)
            except (NotImplementedError, RuntimeError):
                storage = self.memory.storage_of(out)
            if storage is None:  # foreign, and counted
                return out
            key = storage_key(storage)
            if key in self._table:
                return out
            fresh: tuple[Fresh, ...] = ((0, out, storage, key),)
        else:
            fresh = self._fresh(out, writes)
            if not fresh and not writes:
                return out
            if facts.statistics and batch_norm.applies(facts, args, kwargs):
                fresh = fresh[:1]  # the statistics are sources
        self._record(facts, args, kwargs, out, fresh, draw, writes, cost_us)
        return out

    def _run_unrecorded(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op of a replay, or of a backward pass that is not recorded."""
        if facts.writes:
            self.memory.forget(facts, args, kwargs)
        if self.strategy.times_ops:
            return self.strategy.run_timed(facts, args, kwargs)[0]
        return facts.call(*args, **kwargs)

    def _run_compiled_region(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a region compiled by inductor with `wrap_inductor_compiled_regions`: one op for the recorder."""
        compiled, inputs = args[0], list(args[1])
        facts = facts_of_region(func, compiled)
        call_args = compiled, list(inputs)  # the callee empties its list
        cost_us = 0.0
        if self.strategy.times_ops:
            out, cost_us = self.strategy.run_timed(facts, call_args, kwargs)
        else:
            out = func(*call_args, **kwargs)
        fresh = self._fresh(out, ())
        if fresh:
            self._record(facts, (compiled, inputs), kwargs, out, fresh, None, (), cost_us)
        return out

    def _fresh(self, out: Any, writes: tuple[Written, ...]) -> tuple[Fresh, ...]:
        """Return the results that have new memory."""
        seen = {storage_key(w.storage) for w in writes}
        fresh = []
        for position, item in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
            if isinstance(item, Tensor) and (storage := self.memory.storage_of(item)) is not None:
                key = storage_key(storage)
                if key not in self._table and key not in seen:
                    seen.add(key)
                    fresh.append((position, item, storage, key))
        return tuple(fresh)

    def _record(
        self,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        fresh: tuple[Fresh, ...],
        draw: rng.Draw | None,
        writes: tuple[Written, ...],
        cost_us: float,
    ) -> None:
        """Record the values that an op has made, with a recipe if they are to be recomputed."""
        counts = self._counts
        number = counts.ops
        counts.ops = number + 1
        location = self.tracker.location
        op = RecordedOp(number, facts, location, args, kwargs, out, fresh, draw, writes, cost_us)
        strategy = self.strategy
        decision = strategy.decide(op)
        origin = Origin(op.number, facts, location)  # a plan may have skipped ops
        recipe = None
        if decision is not KEEP:
            if facts.statistics and batch_norm.applies(facts, args, kwargs):
                replayed, args = batch_norm.from_statistics(args, out)
                origin = Origin(number, replayed, location)
            recipe = self._recipe(op, origin, args)
        if recipe is None:
            for _, _, storage, key in fresh:
                self._table.add(key, storage, Value(origin, storage.nbytes(), None))
        else:
            self._add_values(op, recipe)
        if writes:
            self._add_written(op, recipe, origin)
        if recipe is not None and self.verifier is not None:
            self.verifier.check(recipe, args, kwargs, out, writes)
        strategy.recorded(op, recipe)
        for w in writes:
            if w.spared:
                self._move_spared(w)

    def _add_values(self, op: RecordedOp, recipe: Recipe) -> None:
        """Add the new storages of an op that can be replayed."""
        made = []
        blank = op.facts.blank
        for position, tensor, storage, key in op.fresh:
            if key in self._table:
                continue  # an alias of an argument that was unknown before
            value = Value(recipe.origin, storage.nbytes(), recipe)
            value.key = key
            value.blank = blank
            value.stride = tensor.stride()
            value.recompute_us = op.recompute_us
            made.append((position, weakref.ref(value)))
            self._table.add(key, storage, value)
        recipe.made = made

    def _add_written(self, op: RecordedOp, recipe: Recipe | None, origin: Origin) -> None:
        """Set the new values of the storages that an op wrote."""
        recorded = []
        for w in op.writes:
            made = None
            if recipe is not None and w.replaced is not None:
                value = Value(origin, w.storage.nbytes(), recipe)
                value.key = storage_key(w.storage)
                value.recompute_us = op.recompute_us
                made = weakref.ref(value)
                self._table.put(w.storage, value)
            elif w.inside or origin.facts.regathers:
                self._table.put(w.storage, Value(origin, w.storage.nbytes(), None))
            else:
                self._table.pop(storage_key(w.storage), None)
            if w.target is not None and origin.facts.writes:  # a batch norm is replayed by an op that does not write
                recorded.append(Write(w.target, made, w.exclusive))
        if recipe is not None:
            recipe.writes = tuple(recorded)

    def _move_spared(self, written: Written) -> None:
        """Let the handles on parts that an op has not written refer to the new value of the storage."""
        value = self._table[storage_key(written.storage)].value()
        assert value is not None
        for handle in written.spared:
            handle.move_to(value)
        self._moved.append((written, value))

    def hold_moved(self) -> None:
        """Hold the values that handles have moved to. The op that made them has returned, so their version is final."""
        moved, self._moved = self._moved, []
        for written, value in moved:
            self.strategy.moved(written.spared, value, written.tensor, written.storage)

    # -- recipes --------------------------------------------------------------------------------------

    def _recipe(self, op: RecordedOp, origin: Origin, args: tuple[Any, ...]) -> Recipe | None:
        """Return the op as a recipe, or None if it must not be replayed."""
        facts, kwargs = origin.facts, op.kwargs
        targets: inplace.Targets | None = None
        if not facts.simple:
            if not self._may_replay(op, origin):
                return None
            if op.writes:
                targets = inplace.Targets(op.writes)
        recipe = Recipe(origin, op.draw)
        refs: list[Ref] = []
        recorded: list[Any] = []
        try:
            for a in args:
                if isinstance(a, Tensor):
                    ref = (targets and targets.target_of(a)) or self._refer(a)
                    recorded.append(ref)
                    if type(ref) is Ref:
                        refs.append(ref)
                elif type(a) is list or type(a) is tuple:
                    recorded.append(self._recorded_list(a, refs, targets))
                else:
                    recorded.append(a)
            if kwargs:
                values = self._recorded_list(tuple(kwargs.values()), refs, targets)
                recipe.kwargs = dict(zip(kwargs, values, strict=True))
        except ForeignArgumentError as error:
            self._counts.pin(origin, str(error))
            return None
        recipe.args = recorded
        recipe.refs = refs
        return recipe

    def _may_replay(self, op: RecordedOp, origin: Origin) -> bool:
        """Return whether an op with effects may be replayed. If not, its values are kept."""
        if not op.fresh and all(w.replaced is None for w in op.writes):
            return False  # it only wrote kept or outside memory
        if origin.facts.pinned:
            self._counts.pin(origin, origin.facts.pinned)
            return False
        if origin.facts.autocasts_inside and is_autocast_inside():
            self._counts.pin(origin, "autocast applies inside its kernel, and not in a replay")
            return False
        if op.draw is not None and op.bytes_made <= len(op.draw.state):
            return False  # the generator state is larger than the value
        if any(w.target is None for w in op.writes):
            if op.fresh:
                self._counts.pin(origin, "it overwrites memory that cannot be recomputed")
            return False
        return True

    def _recorded_list(self, items: Any, refs: list[Ref], targets: inplace.Targets | None) -> list[Any]:
        recorded = []
        for a in items:
            if isinstance(a, Tensor):
                a = (targets and targets.target_of(a)) or self._refer(a)
                if type(a) is Ref:
                    refs.append(a)
            elif type(a) is list or type(a) is tuple:
                a = self._recorded_list(a, refs, targets)
            recorded.append(a)
        return recorded

    def _refer(self, tensor: Tensor) -> Ref:
        """Return a reference to the present content of `tensor`. A kept value is held from now on (Rule 5)."""
        storage, value = self.memory.lookup(tensor)
        if storage is None:
            raise ForeignArgumentError(f"it takes a {type(tensor).__name__}, which has no storage")
        if value is None:
            value = self._table.put_source(tensor, storage)
        elif (held := value.tensor) is not None:
            if value.version != UNWATCHED and value.version != version_of(held):
                value = self._table.put_source(tensor, storage)
        elif value.recipe is None or value.blank or self._is_layer_input(value):
            self.hold(value, tensor, storage)
        elif value.held:
            self.hold_evictable(value, tensor, storage)
        try:
            ref = Ref(value, tensor)
        except RuntimeError:
            if not tensor.is_nested:
                raise
            raise ForeignArgumentError("it takes a nested tensor, which has no strides") from None
        value.refer()
        return ref

    # -- saved tensors --------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> AnyHandle:
        """Return the handle that autograd holds instead of `tensor`."""
        if self._moved:
            self.hold_moved()
        storage, value = (None, None) if tensor.is_nested else self.memory.lookup(tensor)
        self._saves.count += 1
        handle = self.strategy.save(tensor, storage, value)
        if self.tracks_saves:
            self._saves.add(handle)
        return handle

    def handle(self, tensor: Tensor, storage: torch.UntypedStorage | None, value: Value | None) -> Handle | Kept:
        """Return a handle that follows the decision made when the value was recorded."""
        if value is None or storage is None:
            self._counts.saved_from_outside()
            return Kept(tensor, None, self._saves)
        if value.recipe is not None:
            self.hold_saved(value, tensor, storage)
        if not value.counted:
            self._counts.saved(value)
        if value.recipe is None:
            kept = Kept(tensor, value.origin, self._saves)
            if value.tensor is None:
                value.alias = weakref.ref(kept.tensor)
            return kept
        value.refer()
        return Handle(Ref(value, tensor), self.context)

    def hold_saved(self, value: Value, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Hold a value that a `Handle` refers to, if the decision made when it was recorded says so."""
        if value.recipe is None or value.blank or self._is_layer_input(value):
            if value.tensor is None:
                self.hold(value, tensor, storage)
        elif value.held and value.tensor is None:
            self.hold_evictable(value, tensor, storage)

    def hold(self, value: Value, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Keep a value from now on, regardless of the decision when it was recorded."""
        if self.strategy.take_over(value, tensor):
            return
        if value.counted and value.recipe is not None:
            self._counts.kept_after_all(value)
        value.hold(tensor, storage)
        self._table[storage_key(storage)].put(value)

    def hold_evictable(self, value: Value, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Keep a value in memory until it is evicted."""
        value.hold(tensor, storage, evictable=True)
        self._table[storage_key(storage)].put(value)

    def _is_layer_input(self, value: Value) -> bool:
        """Return whether a value enters a layer whose inputs are kept."""
        location, origin = self.tracker.location, value.origin
        return location.keeps_inputs and origin is not None and origin.location.layer != location.layer

    def close(self) -> None:
        """Forget all storages: the scope has ended."""
        self.memory.forget_all()
        self.context.on_replayed = self.context.observer = None
        self._counts.layers = self.tracker.layers_entered


never_compile(Recorder.__torch_dispatch__)
never_compile(Recorder.pack)
