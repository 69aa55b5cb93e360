"""Following a plan: each op is kept or recomputed as the plan says, as long as the step goes as planned (Rule 13).

Ops are matched by number and name. At the first difference the rest of the step is recorded under the online
budget instead: still exact, still within the limit as far as what was already kept allows. Following a plan makes
no room and looks at no bytes, so it costs no more than a rule, and nothing where `attention` has it sleep. A gauge,
where there is one, measures the peak; a ferry, where values wait elsewhere, takes them there and back.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..planning import Plan
from ..policies import Decision
from . import randomness, watching
from .attention import Attention, Learner, Lesson
from .budgeting import BudgetedRecorder, WithinBudget
from .effects import FACTS, OpFacts, facts_of
from .ferrying import Ferry
from .ledger import Ledger
from .modules import Whereabouts
from .overwriting import Written
from .recorder import Fresh, Recorder
from .replay import Handle, HeardHandle
from .room import LEDGER, Room
from .tape import Tape
from .torch_private import graph_task, never_compile, storage_key
from .turning import Turning
from .values import UNWATCHED, Kept, Recipe, Ref, Tensor, Value, version_if_counted

_DECISIONS = {True: Decision.KEEP, False: Decision.RECOMPUTE}


class Gauge:
    """Measures live bytes, and makes no room."""

    def __init__(self, ledger: Ledger = LEDGER) -> None:
        self.ledger = ledger
        self.peak_bytes = ledger.live_bytes

    def saw(self, out: Any, beside_bytes: int = 0) -> None:
        """An op has made this, with so many bytes more while it ran."""
        self.ledger.see_all(out if isinstance(out, (tuple, list)) else (out,))
        self.peak_bytes = max(self.peak_bytes, self.ledger.live_bytes + beside_bytes)

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and see what it makes."""
        out = facts.call(*args, **kwargs)
        self.saw(out)
        return out

    def passes(self) -> None:
        """A view goes by: it takes no memory."""

    def clear(self, nbytes: int, what: str, strictly: bool = True) -> None:
        """No room is made."""


class PlannedRecorder(BudgetedRecorder):  # type: ignore[no-untyped-call]
    """Records by a plan, and by the budget once the step differs from it."""

    def __init__(self, plan: Plan, tape: Tape, whereabouts: Whereabouts, room: Room, gauge: Gauge | None) -> None:
        super().__init__(WithinBudget(room.limit_bytes), tape, whereabouts, room)
        self.differs_at: int | None = None
        self.gauge = gauge
        self._plan = plan
        self._names = plan.op_names
        self._decisions = [_DECISIONS[kept] for kept in plan.keep]
        self._turning = tape.turning = Turning(plan.again, plan.turns) if plan.again or plan.turns else None
        self._ferry = _ferry_of(plan, room, gauge)
        tape.ferry = self._ferry
        self._times = False
        self.resume(0)
        self._learner = whereabouts if isinstance(whereabouts, Learner) else None
        self._away = frozenset(plan.offload)
        self._stored = self._away.difference(plan.compress)
        self._due = frozenset(plan.departures[op] - 1 for op in self._stored)
        self._attention = whereabouts if isinstance(whereabouts, Attention) else None
        self._counted_only: frozenset[int] = frozenset()
        self._ends_spells: frozenset[int] = frozenset()
        if self._attention is not None:
            self._attention.serve(self)
            self._doubts = True
            self._counted_only = self._attention.counted
            self._ends_spells = self._attention.ends_spells

    @property
    def watches_backward(self) -> bool:  # type: ignore[override]
        """Only what makes or measures room has to stay in backward."""
        return self.differs_at is not None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.differs_at is not None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        facts = FACTS.get(id(func)) or facts_of(func)
        if facts.views and self._attention is not None:
            return facts.call(*args, **kwargs) if kwargs else facts.call(*args)
        number = self.tape.ops
        if number in self._counted_only and facts.name == self._names[number] and graph_task() == -1:
            out = facts.call(*args, **kwargs) if kwargs else facts.call(*args)
            self.tape.ops = number + 1
            self.resume(number + 1)
            if number in self._ends_spells and kwargs is not None:
                self._attention.ends_spell(number, kwargs)  # type: ignore[union-attr]
            return out
        out = Recorder.__torch_dispatch__(self, func, types, args, kwargs)
        if number in self._ends_spells and kwargs is not None and self.differs_at is None:
            self._attention.ends_spell(number, kwargs)  # type: ignore[union-attr]
        if self.gauge is not None:
            self.gauge.saw(out)
        if self._learner is not None and self.tape.ops == number:
            self._learner.passed(facts)
        return out

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
        number = self.tape.ops
        # What comes after all that was planned is kept, as it would be without a plan.
        if self.differs_at is None and number < len(self._names) and self._names[number] != facts.name:
            decision = self._always
            self._leave_the_plan(number)
            # This op has run by the plan: if that kept it, nobody has looked at what a replay would need (Rule 8).
            from_now_on, self._always = self._always, decision
            recipe = super()._made(facts, args, kwargs, out, fresh, draw, writes, cost_us)
            self._always = from_now_on
            self.resume(number + 1)
            return recipe
        attention = self._attention if self._attention is not None and self._attention.may_sleep else None
        if attention is not None and number not in attention.noted:
            self.tape.ops = number + 1
            self.resume(number + 1)
            return None
        overwrites = self._learner is not None and any(self._wants(w) for w in writes)
        away = number in self._away
        if attention is not None and away and not fresh:
            for written in writes:
                written.inside = True  # who made that memory was not noted: its content waits elsewhere, whoever did
        recipe = super()._made(facts, args, kwargs, out, fresh, draw, writes, cost_us)
        self.resume(number + 1)
        if self._learner is not None:
            stored = number in self._stored
            whole = recipe is not None or overwrites or facts.region or facts.regathers or (stored and bool(fresh))
            keys = [storage_key(w.storage) for w in writes]
            simple = facts.simple and number < len(self._names)
            self._learner.made([key for _, _, _, key in fresh], keys, whole=whole, simple=simple)
            if stored or number in self._due:
                self._learner.must_note(number)
        if attention is not None:
            self._note_versions(attention, fresh, writes)
        return recipe

    def _keep(self, value: Value, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Hold a value from now on, or have it wait in the store."""
        if self._ferry is not None and self.differs_at is None and self._ferry.takes(value, tensor):
            if self._learner is not None:
                self._learner.must_note_maker(value)
            self._ferry.put(value, tensor)
        else:
            super()._keep(value, tensor, storage)

    @property
    def copies_gradients(self) -> bool:
        """Whether the plan has gradients copied that wait as a part of a larger one."""
        return self._plan.copies and self.differs_at is None

    def backward_begins(self) -> None:
        """A backward pass through the step is about to run."""
        if self._ferry is not None and self.differs_at is None:
            self._ferry.backward_begins()

    # -- sleeping -------------------------------------------------------------------------------------

    @property
    def sleeps(self) -> bool:
        """Whether it did not see all of the step."""
        return self._attention is not None

    def learnt(self) -> Lesson | None:
        """Where such steps need a recorder, if this one has seen all of one that went as planned."""
        return self._learner.learnt() if self._learner is not None and self.differs_at is None else None

    def resume(self, number: int) -> None:
        """The next op that it sees has this number."""
        if self.differs_at is None:
            # Asked for before the op runs too, so it is set one op ahead; beyond the plan there is nothing to keep for.
            self._always = self._decisions[number] if number < len(self._decisions) else Decision.KEEP
        if self._ferry is not None and self._ferry.store is not None:
            self._ferry.made(number - 1)

    def lost(self) -> None:
        """The step is not the one that was learnt."""
        if self.differs_at is None:
            self._leave_the_plan(self.tape.ops)

    def _wants(self, written: Written) -> bool:
        """Whether what an op overwrites is there for recipes, or can be made again."""
        entry = self.table.get(storage_key(written.storage))
        value = entry.value() if entry is not None else None
        return value is not None and (value.claims > 0 or value.recipe is not None or value.tensor is not None)

    def _note_versions(self, attention: Attention, fresh: tuple[Fresh, ...], writes: tuple[Written, ...]) -> None:
        for _, tensor, _, key in fresh:
            entry = self.table.get(key)
            if entry is not None and entry.strong is not None:
                entry.strong.version = version_if_counted(tensor)
        for w in writes:
            entry = self.table.get(storage_key(w.storage))
            if entry is not None and entry.strong is not None:
                attention.rewritten(entry, entry.strong, w.tensor)

    def _changed_unseen(self, value: Value, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether it was overwritten while nobody looked: it is known only at the version that it was noted with."""
        return value.tensor is None and value.version not in (UNWATCHED, version_if_counted(tensor))

    def _forget(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._learner is not None:
            self._learner.must_record()
        super()._forget(facts, args, kwargs)

    # -- differing ------------------------------------------------------------------------------------

    def _leave_the_plan(self, number: int) -> None:
        self.differs_at = number
        if self._attention is not None:
            self._attention.see_all()
        self.room.strict = not self.sleeps  # what was saved unseen cannot be evicted, and is no reason to stop
        self.tape.room = self.room
        self.tape.lock = self.room.lock
        LEDGER.see_everything()
        watching.begin(self.room, slept=self.sleeps)
        self.use(self.policy)

    def pack(self, tensor: Tensor) -> Handle | Kept:
        """The handle that autograd gets instead of `tensor`."""
        if self.differs_at is not None:
            return super().pack(tensor)
        storage, value = self._known(tensor)
        if value is None and self._attention is not None and (met := self._attention.meets()) is not None:
            if storage is None or not met.looks_like(tensor, storage.nbytes()):
                self.lost()
                return super().pack(tensor)
            # In a step that differs unseen it may be another value still: that is packed instead, as exactly.
            value = Value(met.origin, met.nbytes, None)
            self.table.add(storage_key(storage), storage, value)
        if value is not None and self._ferry is not None and self._ferry.takes(value, tensor):
            if self._learner is not None:
                if self._ferry.packs_exactly(value, tensor):
                    self._learner.meets(value, tensor)
                else:
                    self._learner.must_note_maker(value)
            handle: Handle | Kept = self._put_elsewhere(tensor, value, self._ferry)
        else:
            handle = self._handle_on(tensor, storage, value)
        if self._learner is not None:
            self._learner.saved()
            if self.tape.first_handle is None or type(handle) is not Kept:
                self._learner.must_save()
        elif self._attention is not None:
            self._attention.saved()
        if self.tape.first_handle is None:
            self.tape.first_handle = weakref.ref(handle)
        if self._turning is not None and type(handle) is Handle:
            origin = handle.ref.value.origin
            if origin is not None and origin.number in self._turning.watched:
                return HeardHandle(handle.ref, self.tape, self._turning)
        return handle

    def _put_elsewhere(self, tensor: Tensor, value: Value, ferry: Ferry) -> Handle:
        """The handle on a value that waits elsewhere."""
        ferry.put(value, tensor)
        if self.sleeps and value.tensor is None:
            value.version = version_if_counted(tensor)  # its memory may be gone when that is asked for (`_settle`)
        if not value.counted:
            packed = value.seat is not None and value.seat.encoded is not None
            if packed or value.tensor is None:
                self.tape.count_elsewhere(value, packed)
            else:
                self.tape.count_saved(value)  # the codecs that the plan names could not
        value.claims += 1
        return Handle(Ref(value, tensor), self.tape)


def _ferry_of(plan: Plan, room: Room, gauge: Gauge | None) -> Ferry | None:
    if not plan.offload:
        return None
    # Without the store everything that was to be there is kept: `fit` has seen to that.
    return Ferry(plan, None if room.offloading is None else room.offloading.store, gauge)


never_compile(PlannedRecorder.__torch_dispatch__)
never_compile(PlannedRecorder.pack)
