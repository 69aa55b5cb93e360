"""One ask of backward, from one state to the next: what is replayed for it, and what all that depended on.

The rules are those of `Backward`. Besides what it comes to, an answer says which bits of the state were looked at: from
every state that has these alike the ask is answered alike. So judges that look at many plans, each not very different
from others before, need not follow most asks again.
"""

from __future__ import annotations

from typing import NamedTuple

from .bit_layout import BitLayout


class UnpackResult(NamedTuple):
    """What an ask comes to. Bytes are counted from what is alive when it comes."""

    looked_at: int
    """The bits of the state that it depends on,"""
    before: int
    """and the state from which it was answered."""
    changed: int
    """The bits that are different afterwards."""
    most_bytes: int
    """While it is answered, with what others have then."""
    more_bytes: int
    """Afterwards."""
    replay_s: float
    """What replays take, without the first one of each op."""
    replays: int

    @classmethod
    def of_no_state(cls, layout: BitLayout) -> UnpackResult:
        """One that never applies."""
        return cls(layout.beyond, layout.beyond, 0, 0, 0, 0.0, 0)


class UnpackJudge:
    """Answers asks of one problem."""

    def __init__(self, layout: BitLayout) -> None:
        problem = layout.problem
        n, m = problem.n_ops, len(layout.values)
        self._layout = layout
        self._ones = [1 << v for v in range(m)]
        self._shared = [1 << (layout.shared + v) if layout.last[v] >= 0 else 0 for v in range(m)]
        self._recipe = [1 << (layout.recipe + j) for j in range(n)]
        self._away = [1 << (layout.away + j) for j in range(n)]
        self._unmade = [1 << (layout.unmade + j) for j in range(n)]
        self._readers: list[list[int]] = [[] for _ in range(m)]
        """By value: the recipes that want it, one that reads it twice twice."""
        for j, read in enumerate(layout.read):
            for v in read:
                self._readers[v].append(self._recipe[j])
        self._wanting = [0] * m
        for v, recipes in enumerate(self._readers):
            for recipe in recipes:
                self._wanting[v] |= recipe
        self._simple = [len(made) == 1 and not problem.writes[j] for j, made in enumerate(layout.made)]
        self._writes = [
            [(layout.number[w.old], layout.number[w.new], w.exclusive) for w in writes if w.old is not None]
            for writes in problem.writes
        ]
        self._written = [frozenset(layout.number[write.new] for write in writes) for writes in problem.writes]
        self._leaving: list[list[int]] = [[] for _ in range(problem.n_unpacks + 1)]
        for v, last in enumerate(layout.last):
            if last >= 0:
                self._leaving[last].append(v)
        self._other = [unpack.other_bytes for unpack in problem.trace.unpacks]

    def answer(self, k: int, before: int, *, most_s: float, most_replays: int) -> UnpackResult | None:
        """Ask k, from this state; None as soon as replays are more, or all but the first take more, than that."""
        layout, problem, ones = self._layout, self._layout.problem, self._ones
        nbytes, producer, read_by, read_bits, made_by = (
            layout.nbytes, layout.producer, layout.read, layout.read_bits, layout.made
        )  # fmt: skip
        recipes, away, wanting = self._recipe, self._away, self._wanting
        state, looked_at, live, most = before, 0, 0, 0
        replay_s, replays = 0.0, 0
        handles, given = layout.handles[k], layout.given[k]

        def drop(v: int) -> None:
            """Nothing of ours holds v any more."""
            nonlocal state, looked_at, live
            looked_at |= ones[v] | self._shared[v]
            if state & ones[v]:
                state ^= ones[v]
                if not state & self._shared[v]:
                    live -= nbytes[v]

        def wanted(v: int) -> bool:
            nonlocal looked_at
            if handles & ones[v]:
                return True
            looked_at |= wanting[v]
            return state & wanting[v] != 0

        def forget(op: int) -> None:
            """The recipe is gone, and with it what only it wanted."""
            nonlocal state, looked_at
            looked_at |= recipes[op]
            state &= ~recipes[op]
            forgotten = [op]
            while forgotten:
                for u in read_by[forgotten.pop()]:
                    if not wanted(u):
                        drop(u)
                        if unwanted(producer[u]):
                            state ^= recipes[producer[u]]
                            forgotten.append(producer[u])

        def unwanted(op: int) -> bool:
            """Whether there is a recipe for nothing."""
            nonlocal looked_at
            looked_at |= recipes[op]
            return state & recipes[op] != 0 and not any(wanted(v) for v in made_by[op])

        pending = []
        asked = layout.asked[k]
        if asked >= 0:
            given |= ones[asked]
            pending.append(asked)
        pushes: dict[int, int] = {}  # ops that wait for a value
        waiting_for: dict[int, list[int]] = {}
        while pending:
            v = pending[-1]
            looked_at |= ones[v]
            if state & ones[v]:
                pending.pop()
                continue
            op = producer[v]
            looked_at |= read_bits[op]
            if read_bits[op] & ~state:
                missing = waiting_for[op] = [u for u in read_by[op] if not state & ones[u]]
                for u in missing:
                    pushes[u] = pushes.get(u, 0) + 1
                pending += missing
                continue
            replays += 1
            looked_at |= self._unmade[op] | away[op]
            if state & self._unmade[op]:
                state ^= self._unmade[op]
            else:
                replay_s += problem.replay_overhead_s[op]
                if replay_s > most_s:
                    return None
            if replays > most_replays:
                return None
            rests = not state & away[op]
            for_good = rests
            scratch = 0
            if self._simple[op]:
                made = [v]
            else:
                for o in made_by[op]:
                    looked_at |= ones[o]
                made = [o for o in made_by[op] if not state & ones[o] and wanted(o)]
                written = self._written[op]
                scratch = sum([nbytes[o] for o in made_by[op] if o not in made and o not in written])
                for old, new, exclusive in self._writes[op]:
                    if exclusive:
                        looked_at |= ones[old] | away[producer[old]] | wanting[old]
                        goes = pushes.get(old) == 1 and state & away[producer[old]] and not given & ones[old]
                        if goes or (for_good and self._wants(old, handles, state) == 1):  # Rule 6
                            state &= ~ones[old]
                            live -= nbytes[old]
                    if new not in made:
                        scratch += nbytes[old]
            for o in made:
                state |= ones[o]
                live += nbytes[o]
            if live + scratch > most:
                most = live + scratch
            if not rests:
                for o in made:
                    if o not in pushes and not given & ones[o]:
                        drop(o)
            elif for_good:
                forget(op)
            for u in waiting_for.pop(op, ()):
                if pushes[u] > 1:
                    pushes[u] -= 1
                    continue
                del pushes[u]
                looked_at |= away[producer[u]]
                if state & away[producer[u]] and not given & ones[u]:
                    drop(u)
            pending.pop()
        most = max(most - problem.rise_bytes[k], live) + self._other[k]
        for v in layout.freed[k]:
            handles &= ~ones[v]
            if not wanted(v):
                drop(v)
                if unwanted(producer[v]):
                    forget(producer[v])
            else:
                looked_at |= away[producer[v]]
                if state & away[producer[v]]:
                    drop(v)
        for v in self._leaving[k]:
            looked_at |= ones[v] | self._shared[v]
            if state & ones[v] and state & self._shared[v]:
                state ^= self._shared[v]  # it is ours alone now
            else:
                live -= nbytes[v]
        return UnpackResult(looked_at, before, before ^ state, most, live, replay_s, replays)

    def _wants(self, v: int, handles: int, state: int) -> int:
        """How many want it."""
        return (handles >> v & 1) + sum([1 for recipe in self._readers[v] if state & recipe])
