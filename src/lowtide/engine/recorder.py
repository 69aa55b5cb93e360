"""The recorder: sees every op of a forward pass below autograd and notes how each value can be made again.

It only notes; it never changes what an op computes, and it holds the user's memory only for recipes that
need it (Rule 5). Backward passes that run while it is active are left alone. What it cannot understand it
keeps (Rules 9 and 14). This is the hot path: every op of a model comes through `__torch_dispatch__`, so it
is written out flat, and what is rare is elsewhere.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..policies import ByCallable, Decision, OpInfo, Policy, wrong_decision
from . import normalising, overwriting, randomness
from .costs import settled_cost, timed_call
from .course import Passed, Step, ways_of
from .effects import FACTS, OpFacts, facts_of, facts_of_region
from .knowing import ForeignArgumentError, Knowing
from .modes import EngineMode
from .modules import Whereabouts
from .overwriting import Written, tensors_of
from .replay import Handle
from .tape import Tape
from .torch_private import graph_task, never_compile, storage_key
from .values import Kept, Origin, Place, Recipe, Ref, Tensor, Value, Write
from .verification import Verifier

KEEP, RECOMPUTE = Decision.KEEP, Decision.RECOMPUTE
_new_tuple = tuple.__new__  # an OpInfo from its fields in order: a fifth of the time that keywords take
# Position among the results, the result, its storage, the storage's key.
Fresh = tuple[int, Tensor, torch.UntypedStorage, int]


class Recorder(Knowing, EngineMode):  # type: ignore[no-untyped-call]
    """Notes the ops of one scope, and turns the tensors that autograd saves into handles."""

    watches_backward = False
    """Whether it stays during the nodes of a backward pass (see `watching`)."""

    def __init__(self, policy: Policy, tape: Tape, whereabouts: Whereabouts, verify: bool) -> None:
        EngineMode.__init__(self)  # type: ignore[no-untyped-call]
        Knowing.__init__(self, tape, whereabouts, Verifier(tape) if verify else None)
        self.use(policy)

    def use(self, policy: Policy) -> None:
        """Decide by this policy from now on."""
        self.policy = policy
        self._always = policy.always
        self._needs_cost = policy.needs_cost
        self._answer = policy.function if type(policy) is ByCallable else policy.decide
        # What was answered before, by the op's name and place, where that is all that an answer depends on.
        remembers = policy.by_place and not policy.needs_cost
        self._answers: dict[tuple[str, Place], Decision] | None = {} if remembers else None
        # How far this forward has gone a way that is known or settled. Only from the scope's beginning: what comes
        # later may read what another policy decided.
        self._ways = ways_of(policy) if self.tape.ops == 0 else None
        self._step = None if self._ways is None else self._ways.start
        self._times = policy.needs_cost and (self._step is None or self._step.times)

    # -- ops ------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        facts = FACTS.get(id(func)) or facts_of(func)
        if kwargs is None:
            kwargs = {}
        if facts.views:
            return facts.call(*args, **kwargs)
        if graph_task() != -1:
            return self._in_backward(facts, args, kwargs)
        draw = None
        writes: tuple[Written, ...] = ()
        if not facts.simple:
            if facts.region:
                return self._compiled_region(func, args, kwargs)
            if facts.seeded and self._always is not KEEP:
                draw = randomness.note(args, kwargs)
            if facts.rebinds:
                self._forget(facts, args, kwargs)
                return facts.call(*args, **kwargs)
            if facts.writes_now(args):
                if any(self._storage(t) is None for t in overwriting.written_by(facts, args, kwargs)):
                    return facts.call(*args, **kwargs)
                kept = self._always is KEEP
                writes = overwriting.prepare(self.table, self.tape, facts, args, kwargs, kept=kept)
                if self.verifier is not None:
                    self.verifier.before_write(writes)
        cost_us = 0.0
        if self._times:
            out, cost_us = self._timed(facts, args, kwargs)
        else:  # an empty dict of keywords would be unpacked and looked through all the same
            out = facts.call(*args, **kwargs) if kwargs else facts.call(*args)
        if type(out) is Tensor and not writes:
            try:
                storage = out.untyped_storage()
            except (NotImplementedError, RuntimeError):
                self._storage(out)  # to count it
                return out
            key = storage_key(storage)
            if key in self.table:
                return out
            fresh: tuple[Fresh, ...] = ((0, out, storage, key),)
        else:
            fresh = self._fresh(out, writes)
            if not fresh and not writes:
                return out
            if facts.statistics and normalising.applies(facts, args, kwargs):
                fresh = fresh[:1]  # the others are sources
        self._made(facts, args, kwargs, out, fresh, draw, writes, cost_us)
        return out

    def _in_backward(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op of a backward pass: gradients are not ours to remake. What it overwrites is unknown now."""
        if facts.writes:
            self._forget(facts, args, kwargs)
        return facts.call(*args, **kwargs)

    def _compiled_region(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A region compiled by inductor, with `wrap_inductor_compiled_regions`: one op to us."""
        compiled, inputs = args[0], list(args[1])
        facts = facts_of_region(func, compiled)
        to_empty = compiled, list(inputs)  # the callee empties the list that it is given
        cost_us = 0.0
        if self._times:
            out, cost_us = self._timed(facts, to_empty, kwargs)
        else:
            out = func(*to_empty, **kwargs)
        fresh = self._fresh(out, ())
        if fresh:
            self._made(facts, (compiled, inputs), kwargs, out, fresh, None, (), cost_us)
        return out

    def _fresh(self, out: Any, writes: tuple[Written, ...]) -> tuple[Fresh, ...]:
        """The results that have memory of their own."""
        seen = {storage_key(w.storage) for w in writes}
        fresh = []
        for position, item in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
            if isinstance(item, Tensor) and (storage := self._storage(item)) is not None:
                key = storage_key(storage)
                if key not in self.table and key not in seen:
                    seen.add(key)
                    fresh.append((position, item, storage, key))
        return tuple(fresh)

    def _made(
        self,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        fresh: tuple[Fresh, ...],
        draw: randomness.Draw | None,
        writes: tuple[Written, ...],
        cost_us: float,
    ) -> Recipe | None:
        """Note what an op has made: new storages, and new contents of the storages it wrote."""
        tape = self.tape
        number = tape.ops
        tape.ops = number + 1
        place = self.where.place
        origin = Origin(number, facts, place)
        decision, recompute_us = self._always, 0.0
        if decision is not None:
            recompute_us = cost_us
        elif self._needs_cost:
            passed = facts, place, _bytes_made(fresh, writes)
            step = self._step.then.get(passed) if self._step is not None else None
            if step is None:
                step = self._weighed(number, passed, args, kwargs, cost_us)
            else:
                self._step, self._times = step, step.times
            decision, recompute_us = step.decision, step.recompute_us
        else:
            answers = self._answers
            if answers is not None:
                decision = answers.get((facts.name, place))
            if decision is None:
                nbytes = _bytes_made(fresh, writes)
                path, layer, _, outside_layers = place
                told = (number, facts.name, path, layer, outside_layers, nbytes, 0.0, 0.0, facts.func, args, kwargs)
                decision = self._answer(_new_tuple(OpInfo, told))
                if answers is not None:
                    answers[facts.name, place] = decision
        recipe = None
        if decision is not KEEP:
            if decision is not RECOMPUTE:
                raise wrong_decision(self.policy, decision, facts.name)
            if facts.statistics and normalising.applies(facts, args, kwargs):
                origin, args = normalising.from_statistics(origin, args, out)
            recipe = self._recipe(origin, args, kwargs, draw, fresh, writes)
        if recipe is None:
            for _, _, storage, key in fresh:
                self.table.add(key, storage, Value(origin, storage.nbytes(), None))
        else:
            made = []
            for position, tensor, storage, key in fresh:
                if key in self.table:
                    continue  # an alias of an argument that we had not met before
                value = Value(origin, storage.nbytes(), recipe)
                value.blank = facts.blank
                value.stride = tensor.stride()
                value.recompute_us = recompute_us
                made.append((position, weakref.ref(value)))
                self.table.add(key, storage, value)
            recipe.made = made
        if writes:
            self._rewrite(recipe, origin, writes, recompute_us)
        if recipe is not None and self.verifier is not None:
            self.verifier.check(recipe, args, kwargs, out, writes)
        return recipe

    def _timed(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
        """Run an op and learn what it costs."""
        out, cost_us, final = timed_call(facts, args, kwargs)
        if not final:
            self._step = None  # what is decided from here on may yet change
        return out, cost_us

    def _weighed(
        self, number: int, passed: Passed, args: tuple[Any, ...], kwargs: dict[str, Any], cost_us: float
    ) -> Step:
        """What a rule that weighs time says of an op that goes no known way."""
        last = self._step
        facts, (path, layer, _, outside_layers), nbytes = passed
        if not self._times:  # it was expected to go one, so that it ran untimed
            known = settled_cost(facts, args)
            self._times = True
            if known is None:
                if last is not None:
                    last.times = True  # the next one that comes this way
                self._step = None
                return Step(KEEP, 0.0)
            cost_us = known
        told = (number, facts.name, path, layer, outside_layers, nbytes, cost_us, 0.0, facts.func, args, kwargs)
        # By the policy's own account, alone and with all that a replay would run before it.
        own_us = self.policy.own_cost_us(_new_tuple(OpInfo, told), cost_us)
        recompute_us = own_us + self._cost_of_inputs(args, kwargs)
        decision = self._answer(_new_tuple(OpInfo, (*told[:6], own_us, recompute_us, *told[8:])))
        if last is None or self._ways is None:
            return Step(decision, recompute_us)
        self._step = self._ways.add(last, passed, decision, recompute_us)
        return self._step or Step(decision, recompute_us)

    def _cost_of_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """What would have to be replayed before an op with these arguments (an upper bound)."""
        values = set()
        for tensor in tensors_of(args, kwargs):
            # Not by `_known`, which would take what the op has just written for somebody else's doing.
            storage = self._storage(tensor)
            entry = self.table.get(storage_key(storage)) if storage is not None else None
            values.add(entry.value() if entry is not None else None)
        return sum(value.recompute_us for value in values if value is not None and value.recipe is not None)

    # -- recipes --------------------------------------------------------------------------------------

    def _recipe(
        self,
        origin: Origin,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        draw: randomness.Draw | None,
        fresh: tuple[Fresh, ...],
        writes: tuple[Written, ...],
    ) -> Recipe | None:
        """The op as something that can be run again, or None where it must not be."""
        facts = origin.facts
        targets: overwriting.Targets | None = None
        if not facts.simple:
            if not fresh and all(w.replaced is None for w in writes):
                return None  # it only wrote memory that is kept, or from outside
            if facts.pinned:
                self.tape.pin(origin, facts.pinned)
                return None
            if draw is not None and _bytes_made(fresh, writes) <= draw.state.nbytes:
                return None  # the generator's state would be larger than the value: keeping it is the saving
            if writes:
                if any(w.target is None for w in writes):
                    if fresh:
                        self.tape.pin(origin, "it overwrites memory that cannot be made again")
                    return None
                targets = overwriting.Targets(writes)
        recipe = Recipe(origin, draw)
        refs: list[Ref] = []
        noted: list[Any] = []
        try:
            for a in args:
                if isinstance(a, Tensor):
                    ref = (targets and targets.stands_for(a)) or self._refer(a)
                    noted.append(ref)
                    if type(ref) is Ref:
                        refs.append(ref)
                elif type(a) is list or type(a) is tuple:
                    noted.append(self._note_list(a, refs, targets))
                else:
                    noted.append(a)
            if kwargs:
                recipe.kwargs = dict(zip(kwargs, self._note_list(tuple(kwargs.values()), refs, targets), strict=True))
        except ForeignArgumentError as error:
            self.tape.pin(origin, str(error))
            return None
        recipe.args = noted
        recipe.refs = refs
        return recipe

    def _note_list(self, items: Any, refs: list[Ref], targets: overwriting.Targets | None) -> list[Any]:
        noted = []
        for a in items:
            if isinstance(a, Tensor):
                a = (targets and targets.stands_for(a)) or self._refer(a)
                if type(a) is Ref:
                    refs.append(a)
            elif type(a) is list or type(a) is tuple:
                a = self._note_list(a, refs, targets)
            noted.append(a)
        return noted

    # -- writes ---------------------------------------------------------------------------------------

    def _rewrite(self, recipe: Recipe | None, origin: Origin, writes: tuple[Written, ...], recompute_us: float) -> None:
        """The written storages have new values."""
        notes = []
        for w in writes:
            made = None
            if recipe is not None and w.replaced is not None:
                value = Value(origin, w.storage.nbytes(), recipe)
                value.recompute_us = recompute_us
                made = weakref.ref(value)
                self.table.put(w.storage, value)
            elif w.inside or origin.facts.regathers:
                self.table.put(w.storage, Value(origin, w.storage.nbytes(), None))
            else:
                self.table.pop(storage_key(w.storage), None)
            if w.target is not None and origin.facts.writes:  # else the replay is another op, which does not
                notes.append(Write(w.target, made, w.alone))
        if recipe is not None:
            recipe.writes = tuple(notes)

    # -- what autograd saves --------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Handle | Kept:
        """The handle that autograd gets instead of `tensor`."""
        return self._handle_on(tensor, *self._known(tensor))

    def _handle_on(self, tensor: Tensor, storage: torch.UntypedStorage | None, value: Value | None) -> Handle | Kept:
        if value is None or storage is None:
            self.tape.outside_values += 1
            return Kept(tensor, None)
        if value.recipe is not None and (value.blank or (self.where.place.keeps_inputs and self._is_boundary(value))):
            self._keep(value, tensor, storage)
        if not value.counted:
            self.tape.count_saved(value)
        if value.recipe is None:
            kept = Kept(tensor, value.origin)
            if value.tensor is None:
                value.alias = weakref.ref(kept.tensor)
            return kept
        value.claims += 1
        return Handle(Ref(value, tensor), self.tape)


def _bytes_made(fresh: tuple[Fresh, ...], writes: tuple[Written, ...]) -> int:
    if len(fresh) == 1 and not writes:  # the common case
        return fresh[0][2].nbytes()
    return sum(f[2].nbytes() for f in fresh) + sum(w.storage.nbytes() for w in writes)


never_compile(Recorder.__torch_dispatch__)
never_compile(Recorder.pack)
