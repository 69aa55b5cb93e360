"""Where in a step its plan needs the recorder: elsewhere it sleeps, and ops cost what they cost without lowtide.

Every op that a dispatch mode sees costs tens of microseconds of Python, and every tensor that a hook is handed some
more; over a step that is several per cent, most of it for ops of which a plan wants nothing. So a step that goes as
planned is watched as a whole once, as a row of stretches from one beginning or end of a module call to the next.
From then on the recorder is awake in the stretches where there is something to note (what will be made again or waits
in a store, what is written into memory that it knows), and its hooks in those where such a value is saved. It sleeps
again as soon as that is noted. Where its hooks are in place it also wakes as late as it can, and more than once: when
autograd has saved what an op gave, before there is one to note. What is only packed when it is saved need not be seen
before: it is known by when that is.

What happens while it sleeps is plain PyTorch: what is made then is a source to recipes that read it later, and what
is saved is kept. Only unforeseen writes could hurt. They change the version of a tensor: recipes find that out when
they are replayed (Rule 11), and a value is known again only at the version that it was noted with. The row of module
calls, the number of ops in each stretch that is seen and of tensors saved where one is known by that have to be those
that were learnt, or the plan is left (Rule 13).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ..policies import Policy
from .effects import OpFacts
from .modules import Whereabouts
from .stretches import Stretches, Wait
from .tape import Tape
from .torch_private import (
    is_compiled,
    lay_down_hooks,
    lay_down_mode,
    once_returned,
    take_up_hooks,
    take_up_mode,
)
from .values import Origin, Place, StorageEntry, Tensor, Value, version_if_counted


class Spell(NamedTuple):
    """A part of a stretch whose ops have to be seen."""

    wait: Wait | None
    """What happens before it; None: nothing, the stretch begins with it."""
    last_op: int | None
    """What it ends with; None: with the stretch."""


class Met(NamedTuple):
    """A value that nobody notes, and that is known by when autograd saves it."""

    origin: Origin
    nbytes: int
    dtype: torch.dtype

    def looks_like(self, tensor: Tensor, nbytes: int) -> bool:
        """Whether it may be this one."""
        return nbytes == self.nbytes and tensor.dtype is self.dtype


class Stretch(NamedTuple):
    """What a step does from one beginning or end of a module call to the next."""

    module: int | type[nn.Module] | None
    """The id of the module whose call begins here, or its class if it is no part of the model; None where one ends."""
    place: Place
    first_op: int
    spells: tuple[Spell, ...]
    """When its ops have to be seen."""
    saves: bool
    """Whether autograd saves something in it that is not simply kept."""
    met: dict[int, Met]
    """What is known by when it is saved, by how many tensors are then saved."""
    saved: int
    """How many tensors autograd saves."""

    @property
    def records(self) -> bool:
        """Whether an op of it has to be seen."""
        return bool(self.spells)


class Lesson(NamedTuple):
    """What was learnt of a step."""

    stretches: tuple[Stretch, ...]
    noted: frozenset[int]
    """The ops that have to be noted."""
    counted: frozenset[int]
    """Those that are only counted, without a look at what they take and make; at the rest it looks for writes."""


class Learner(Stretches):
    """Sees a whole step, and in which of its stretches there was something to note."""

    def __init__(self, policy: Policy, tape: Tape) -> None:
        super().__init__(policy, tape)
        self._records: set[int] = set()
        self._saves: set[int] = set()
        self._noted: set[int] = set()
        self._of_op: list[int] = []  # the stretch that each op is in
        self._simple: set[int] = set()  # the ops that need not be looked at unless they are to be noted
        self._uneven: set[int] = set()  # stretches with such an op that made nothing, and so has no number
        self._overwrites: list[list[int]] = []  # by op: the ops that wrote that memory before
        self._trails_off: set[int] = set()  # stretches whose last op has no number
        self._maker: dict[int, int] = {}  # by the key of a storage: the op that wrote it last
        self._met: defaultdict[int, dict[int, Met]] = defaultdict(dict)  # by stretch
        self._compiled = 0  # how many of the running modules are

    def enter(self, module: nn.Module) -> None:
        """A module's forward begins."""
        super().enter(module)
        if self._compiled or is_compiled(module):
            self._compiled += 1
            self._must_not_change()

    def leave(self) -> None:
        """A module's forward ends."""
        super().leave()
        self._compiled = max(0, self._compiled - 1)
        if self._compiled:
            self._must_not_change()

    def _must_not_change(self) -> None:
        """Code is compiled again where modes and hooks are others."""
        self.must_record()
        self.must_save()

    def must_record(self) -> None:
        """Something happens here that has to be seen."""
        self._records.add(self.at)

    def must_save(self) -> None:
        """Something is saved here that is not simply kept."""
        self._saves.add(self.at)

    def must_note_maker(self, value: Value) -> None:
        """What waits elsewhere from now on has to be known from its op on."""
        assert value.origin is not None
        if not _is_put(value):
            self.must_note(value.origin.number)

    def meets(self, value: Value, tensor: Tensor) -> None:
        """Autograd is saving what waits packed from now on: whatever it is, that is exact."""
        assert value.origin is not None
        if not _is_put(value):
            self._met[self.at][self.saves[-1] + 1] = Met(value.origin, value.nbytes, tensor.dtype)

    def passed(self, facts: OpFacts) -> None:
        """An op has gone by that has no number."""
        self.ran(writes=bool(facts.writes))
        self._trails_off.add(self.at)
        if facts.simple and not facts.views:
            self._uneven.add(self.at)

    def must_note(self, number: int) -> None:
        """What this op has made matters, but not what was in that memory before."""
        self._noted.add(number)

    def made(self, fresh: Sequence[int], written: Sequence[int], *, whole: bool, simple: bool) -> None:
        """An op has made and written the storages with these keys; `whole`: that matters, and all that was there.

        `simple`: it is one that plans know, and can do nothing but make something.
        """
        self.ran(writes=bool(written))
        number = len(self._of_op)
        self._of_op.append(self.at)
        self._trails_off.discard(self.at)
        if simple:
            self._simple.add(number)
        self._overwrites.append([self._maker[key] for key in written if key in self._maker])
        if whole:
            pending = [number]
            while pending:  # whose memory it is has to be known from the beginning
                self._noted.update(pending)
                pending = [before for op in pending for before in self._overwrites[op] if before not in self._noted]
        for key in (*fresh, *written):
            self._maker[key] = number

    def learnt(self) -> Lesson:
        """Where the recorder is needed."""
        noted: dict[int, list[int]] = {stretch: [] for stretch in self._records}
        for number in sorted(self._noted):
            noted.setdefault(self._of_op[number], []).append(number)
        stretches = tuple(
            Stretch(module, place, first_op, spells, i in self._saves, self._met.get(i, {}), self.saves[i])
            for i, (module, place, first_op) in enumerate(self.begins)
            for spells in (self._spells(i, noted[i]) if i in noted else (),)
        )
        counted = {j for j in self._simple - self._noted if self._of_op[j] not in self._uneven}
        return Lesson(stretches, frozenset(self._noted), frozenset(counted))

    def _spells(self, stretch: int, noted: list[int]) -> tuple[Spell, ...]:
        """When a recorder has to be awake in a stretch in which these ops, in their order, have to be noted."""
        if stretch in self._records:
            return (Spell(None, None),)
        wait = self._last_wait(stretch, noted[0])
        spells: list[Spell] = []
        for number, following in pairwise(noted):
            last, next_wait = self._quiet(stretch, number), self._last_wait(stretch, following)
            if last is not None and next_wait is not None and last < next_wait.next_op - 1:
                spells.append(Spell(wait, last))
                wait = next_wait
        last = self._quiet(stretch, noted[-1])
        if last is not None and self._of_op[last + 1 : last + 2] != [stretch] and stretch not in self._trails_off:
            last = None  # nothing comes after it
        return (*spells, Spell(wait, last))

    def _quiet(self, stretch: int, number: int) -> int | None:
        """The first op from this one on that writes no memory, after which it can be asked at which version that is."""
        while number < len(self._of_op) and self._of_op[number] == stretch:
            if number in self._simple:
                return number
            number += 1
        return None

    def _last_wait(self, stretch: int, first_noted: int) -> Wait | None:
        """Until when a recorder can sleep that has to note this op."""
        if stretch not in self._saves:
            return None
        in_time = [wait for wait in self.waits.get(stretch, ()) if wait.next_op <= first_noted]
        return in_time[-1] if in_time else None


def _is_put(value: Value) -> bool:
    return value.tensor is not None or (value.seat is not None and value.seat.is_away)


class Sleeper(Protocol):
    """A recorder that need not see everything."""

    def pack(self, tensor: Tensor) -> object:
        """What autograd holds instead of a tensor."""

    def resume(self, number: int) -> None:
        """The next op that it sees has this number."""

    def lost(self) -> None:
        """The step is not the one that was learnt."""


class Attention(Whereabouts):
    """Has a recorder awake only where a step that was learnt needs it."""

    def __init__(self, policy: Policy, tape: Tape, lesson: Lesson) -> None:
        super().__init__(policy, tape)
        self._stretches: tuple[Stretch, ...] | None = lesson.stretches  # None: everything is seen
        self.noted = lesson.noted
        self.counted = lesson.counted
        self._at = 0
        self._root: weakref.ref[nn.Module] | None = None
        self._recorder: Sleeper | None = None
        self._sees = self._saves = True
        self._saved = 0  # since this stretch began
        self._spell = 0  # in this stretch, the one that it is in, or waits for
        self.ends_spells = frozenset(
            spell.last_op for stretch in lesson.stretches for spell in stretch.spells if spell.last_op is not None
        )
        self._depth: int | None = None  # in the stack of modes, while it is not on it
        self._hooks: Any = None  # while they are not in place
        self._below: Any = None  # the hooks under them
        self._unsettled: list[tuple[StorageEntry, weakref.ref[Value], weakref.ref[Tensor]]] = []

    def serve(self, recorder: Sleeper) -> None:
        """Wake and send to sleep this recorder, which is open now."""
        self._recorder = recorder

    @property
    def may_sleep(self) -> bool:
        """Whether values have to be noted with their versions."""
        return self._stretches is not None

    def rewritten(self, entry: StorageEntry, value: Value, tensor: Tensor) -> None:
        """An op that is seen writes this memory, whose version is known only afterwards."""
        self._unsettled.append((entry, weakref.ref(value), weakref.ref(tensor)))

    def enter(self, module: nn.Module) -> None:
        """A module's forward begins."""
        if self._stretches is None:
            super().enter(module)
            return
        if self._root is None:
            self._root = weakref.ref(module)
            self._tape.saw_root(module)
        if not self._goes_on(module):
            super().enter(module)

    def leave(self) -> None:
        """A module's forward ends, also by an exception."""
        if self._stretches is None or not self._goes_on(None):
            super().leave()

    def meets(self) -> Met | None:
        """What autograd is saving now, if that is known by when it does."""
        return self._stretches[self._at].met.get(self._saved + 1) if self._stretches is not None else None

    def saved(self) -> None:
        """Autograd has saved a tensor."""
        if self._stretches is None:
            return
        self._saved += 1
        wait = None if self._sees else self._next_wait()
        if wait is not None and self._saved == wait.saves:
            self._tape.ops = wait.next_op
            self._look()

    def _next_wait(self) -> Wait | None:
        """What happens before this stretch has an op again that has to be seen."""
        assert self._stretches is not None
        spells = self._stretches[self._at].spells
        return spells[self._spell].wait if self._spell < len(spells) else None

    def ends_spell(self, number: int, kwargs: dict[str, Any]) -> None:
        """An op that is being seen, with these keywords, is one of `ends_spells`: sleep once it has returned."""
        once_returned(kwargs, partial(self._rest, number))

    def _rest(self, number: int) -> None:
        if self._stretches is None or not self._sees or self._recorder is None or self._tape.ops != number + 1:
            return
        spells = self._stretches[self._at].spells
        is_last = self._spell + 1 == len(spells)
        # Without its hooks it would not wake again.
        if self._spell < len(spells) and spells[self._spell].last_op == number and (is_last or self._saves):
            self._look_away()
            self._spell += not self._sees

    def see_all(self) -> None:
        """Be awake from now on, and know by itself which modules are running."""
        stretches, self._stretches = self._stretches, None
        if stretches is None:
            return
        self._wake()
        root = self._root() if self._root is not None else None
        if root is not None:
            self._map = self._map_of(root)
        here = stretches[0].place
        for stretch in stretches[1 : self._at + 1]:
            if stretch.module is not None:
                self._stack.append(here)
            elif self._stack:
                self._stack.pop()
            here = stretch.place
        self.place = here

    def ended(self) -> None:
        """The scope ends."""
        self._wake()
        self._recorder = None

    def _goes_on(self, module: nn.Module | None) -> bool:
        """The next stretch begins; whether it is the one that was learnt."""
        stretches = self._stretches
        assert stretches is not None
        at = self._at + 1
        if at == len(stretches):  # beyond what is planned, all is kept
            self.see_all()
            return False
        last, stretch = stretches[self._at], stretches[at]
        alike = module is None if stretch.module is None else stretch.module in (id(module), type(module))
        # Asleep, it must not have missed a part that it should have seen.
        missed = self._tape.ops != stretch.first_op if self._sees else self._spell < len(last.spells)
        # Nor may it have taken one saved tensor for another: counts are all that it knows those by.
        mistaken = bool(last.met) and self._saves and self._saved != last.saved
        if not alike or missed or mistaken:
            self.see_all()
            if self._recorder is not None:
                self._recorder.lost()
            return False
        self._at = at
        self._saved = self._spell = 0
        self.place = stretch.place
        if self._recorder is not None:
            if not self._sees:
                self._tape.ops = stretch.first_op
            if stretch.saves != self._saves:
                if stretch.saves:
                    self._take_up_hooks()
                else:
                    self._lay_down_hooks()
            # To wake late it takes the hooks, which could not be taken up where somebody else's are above.
            records = stretch.records and (stretch.spells[0].wait is None or not self._saves)
            if records != self._sees:
                if records:
                    self._look()
                else:
                    self._look_away()
        return True

    def _look(self) -> None:
        assert self._recorder is not None
        assert self._depth is not None
        take_up_mode(self._recorder, self._depth)
        self._depth = None
        self._sees = True
        self._recorder.resume(self._tape.ops)

    def _look_away(self) -> None:
        if not self._settle():
            return
        depth = lay_down_mode(self._recorder)
        if depth is not None:  # else somebody else's mode is above
            self._depth = depth
            self._sees = False

    def _take_up_hooks(self) -> None:
        if take_up_hooks(self._hooks, self._below):
            self._hooks = self._below = None
            self._saves = True

    def _lay_down_hooks(self) -> None:
        assert self._recorder is not None
        laid_down = lay_down_hooks(self._recorder.pack)
        if laid_down is not None:
            self._hooks, self._below = laid_down
            self._saves = False

    def _settle(self) -> bool:
        """Note at which versions rewritten memory is; whether all of it can be asked."""
        while self._unsettled:
            storage, value_ref, tensor_ref = self._unsettled[-1]
            value, tensor = value_ref(), tensor_ref()
            if value is not None and value.tensor is None:  # else it is held by now, or a copy of it
                if tensor is not None:
                    value.version = version_if_counted(tensor)
                elif storage() is not None and (value.seat is None or not value.seat.is_away):
                    return False  # somebody has that memory, by a tensor that we do not know
            self._unsettled.pop()
        return True

    def _wake(self) -> None:
        if self._recorder is not None:
            if not self._sees:
                self._look()
            if not self._saves:
                self._take_up_hooks()
