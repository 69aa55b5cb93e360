"""The judge in a hurry: bytes and time of a plan, and nothing else, for searches that look at thousands of plans.

It follows the same rules as `Simulator` and comes to the same numbers (a test compares them), several times as fast:
one loop, no watchers, nothing recorded; and it gives a plan up as soon as that is worse than the caller would accept.
It knows no stores and no packing. Whatever is found with it is judged by the simulator before it is handed on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from .candidate import most_replays
from .problem import Problem
from .turns import NO_TURNS, Turns, by_ask


class Trial(NamedTuple):
    """What a plan takes and needs."""

    extra_s: float
    peak_bytes: int
    excess_bytes: int
    """Bytes above the budget: the most of forward, and of every ask, added up."""


class Trials:
    """Judges decisions for one problem whose values are all kept in memory or recomputed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        n = problem.n_ops
        self._ops = [
            (j, problem.outputs[j], problem.inputs[j])
            for j in range(n - 1, -1, -1)
            if problem.outputs[j] or problem.inputs[j]
        ]
        self._saved_until = [n if saved else -1 for saved in problem.saved]
        self._handles = [1 if saved else 0 for saved in problem.saved]
        self._recipe_end = [min(end, n - 1) for end in problem.natural_end]
        self._natural = [v for v in range(problem.n_values) if problem.natural_last_ask[v] >= 0]
        # By op: bytes that come with it and go before it if nothing is held.
        self._change = [0] * (n + 2)
        for v in range(problem.n_values):
            if problem.maker[v] >= 0:
                self._change[problem.maker[v]] += problem.nbytes[v]
                self._change[min(problem.natural_end[v], n) + 1] -= problem.nbytes[v]
        self._forward_other = [op.other_bytes for op in problem.trace.ops]
        self._asks = [
            (
                k,
                ask.value if problem.maker[ask.value] >= 0 else -1,
                problem.freed_after[k],
                ask.other_bytes,
                ask.rise_bytes,
            )
            for k, ask in enumerate(problem.trace.asks)
        ]
        self._plain = [len(outputs) == 1 and not problem.writes[j] for j, outputs in enumerate(problem.outputs)]
        self._most_replays = most_replays(n)
        self._written = [frozenset(write.new for write in writes) for writes in problem.writes]

    def judge(
        self,
        keep: Sequence[int | bool],
        again: Sequence[int | bool],
        budget_bytes: int,
        *,
        turns: Turns = NO_TURNS,
        price_s: float = 0.0,
        limit_s: float = math.inf,
    ) -> Trial | None:
        """Follow the decisions, by op: what is kept, as the engine obeys it, and what is recomputed more than once.

        `turns` are of recomputed ops only.

        None as soon as the extra time, with `price_s` for each byte too many, is above `limit_s`; or if there are more
        replays than anybody would want.
        """
        problem = self.problem
        n, nbytes, maker, replay_s = problem.n_ops, problem.nbytes, problem.maker, problem.replay_s
        inputs, outputs = problem.inputs, problem.outputs
        natural_end, natural_last_ask, recipe_end = problem.natural_end, problem.natural_last_ask, self._recipe_end
        plain = self._plain
        wanted_until, wants, change = self._saved_until[:], self._handles[:], self._change[:]
        resident, answered = [False] * problem.n_values, [False] * problem.n_values
        recipe = [False] * n
        noted: list[int] = []
        live = 0

        # Forward, from its end: who wants what, and until when.
        for j, made_here, read_here in self._ops:
            if keep[j]:
                for v in made_here:
                    until = wanted_until[v]
                    if until > natural_end[v]:
                        change[natural_end[v] + 1] += nbytes[v]
                        change[until + 1] -= nbytes[v]
                    if wants[v]:
                        resident[v] = True
                        live += nbytes[v]
                continue
            noted.append(j)
            end = -1
            for v in made_here:
                end = max(end, wanted_until[v], recipe_end[v])
            for v in read_here:
                if end > wanted_until[v]:
                    wanted_until[v] = end
            if end >= n:
                recipe[j] = True
                for v in read_here:
                    wants[v] += 1
        peak = max(map(add, accumulate(change), self._forward_other), default=0)
        excess = max(0, peak - budget_bytes)
        extra = problem.recording_s(noted)
        if extra + price_s * excess > limit_s:
            return None

        leaves_after: dict[int, list[int]] = {}
        stays_until: dict[int, int] = {}
        for v in self._natural:
            if resident[v]:
                stays_until[v] = natural_last_ask[v]
            else:
                live += nbytes[v]
                leaves_after.setdefault(natural_last_ask[v], []).append(v)
        pushes: dict[int, int] = {}  # ops that wait for a value
        k = replays = 0
        away = list(again)  # by op: what it makes does not rest now
        turns_at = by_ask(turns)
        turning: set[int] = set()
        last_turn = {op: asks[-1] for op, asks in turns.items()}

        def drop(v: int) -> None:
            """Nothing of ours holds v any more."""
            nonlocal live
            if resident[v]:
                resident[v] = False
                if stays_until and stays_until.get(v, -1) >= k:
                    leaves_after.setdefault(natural_last_ask[v], []).append(v)
                else:
                    live -= nbytes[v]

        def forget(op: int) -> None:
            """The recipe is gone, and with it what only it wanted."""
            recipe[op] = False
            forgotten = [op]
            while forgotten:
                for u in inputs[forgotten.pop()]:
                    wants[u] -= 1
                    if not wants[u]:
                        drop(u)
                        if unwanted(maker[u]):
                            recipe[maker[u]] = False
                            forgotten.append(maker[u])

        def unwanted(op: int) -> bool:
            """Whether there is a recipe for nothing."""
            if not recipe[op]:
                return False
            for v in outputs[op]:  # noqa: SIM110 - any() is slower
                if wants[v]:
                    return False
            return True

        for k, asked, freed, other, rise in self._asks:
            if k in turns_at:
                turning.symmetric_difference_update(turns_at[k])
            if turning and asked >= 0 and not keep[maker[asked]]:
                for op in turning:
                    away[op] = not away[op]
                    if away[op]:
                        for v in outputs[op]:
                            if not answered[v]:
                                drop(v)
                turning.clear()
            most = live
            pending = []
            if asked >= 0:
                answered[asked] = True
                if not resident[asked]:
                    pending.append(asked)
            waiting_for: dict[int, list[int]] = {}
            while pending:
                v = pending[-1]
                if resident[v]:
                    pending.pop()
                    continue
                op = maker[v]
                missing = [u for u in inputs[op] if not resident[u]]
                if missing:
                    waiting_for[op] = missing
                    for u in missing:
                        pushes[u] = pushes.get(u, 0) + 1
                    pending += missing
                    continue
                extra += replay_s[op]
                replays += 1
                if extra + price_s * excess > limit_s or replays > self._most_replays:
                    return None
                if plain[op]:
                    made = [v]
                    scratch = 0
                    resident[v] = True
                    live += nbytes[v]
                else:
                    made = [o for o in outputs[op] if wants[o] and not resident[o]]
                    scratch = sum([nbytes[o] for o in outputs[op] if o not in made and o not in self._written[op]])
                    for write in problem.writes[op]:
                        if write.old is None:
                            continue
                        goes = away[maker[write.old]] and pushes.get(write.old) == 1 and not answered[write.old]
                        for_good = not away[op] and last_turn.get(op, -1) <= k
                        if write.alone and (goes or (for_good and wants[write.old] == 1)):  # Rule 6
                            resident[write.old] = False
                            live -= nbytes[write.old]
                        if write.new not in made:
                            scratch += nbytes[write.old]
                    for o in made:
                        resident[o] = True
                        live += nbytes[o]
                if live + scratch > most:
                    most = live + scratch
                if away[op]:
                    for o in made:
                        if o not in pushes and not answered[o]:
                            drop(o)
                elif not last_turn or last_turn.get(op, -1) <= k:
                    forget(op)
                for u in waiting_for.pop(op, ()):
                    if pushes[u] > 1:
                        pushes[u] -= 1
                        continue
                    del pushes[u]
                    if away[maker[u]] and not answered[u]:
                        drop(u)
                pending.pop()
            most = max(most - rise, live) + other
            if most > peak:
                peak = most
            if most > budget_bytes:
                excess += most - budget_bytes
                if extra + price_s * excess > limit_s:
                    return None
            for v in freed:
                answered[v] = False
                wants[v] -= 1
                if not wants[v]:
                    drop(v)
                    if unwanted(maker[v]):
                        forget(maker[v])
                elif away[maker[v]]:
                    drop(v)
            for v in leaves_after.pop(k, ()):
                live -= nbytes[v]
        return Trial(extra, peak, excess)
