"""Stages of a step, and which values each of them needs.

A stage is one backward pass, or a part of one: successive unpacks of the same pass. A pass has several stages if
another pass runs inside it, or if it is cut. Decisions are made by stage: the outputs of an op are held into a stage,
or recomputed in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import accumulate, pairwise

from ...records import Unpack
from .step_facts import StepFacts

Drop = tuple[int, int, int]
"""Value, its op, and the position of the next stage among those in which the op matters."""


class StageTable:
    """The stages of one step. `cuts` are additional unpacks at which a stage begins."""

    def __init__(self, facts: StepFacts, cuts: Collection[int] = ()) -> None:
        self.facts = facts
        self.cuts = tuple(sorted(cuts))
        self.first: list[int] = []
        """By stage: its first unpack."""
        self.last: list[int] = []
        """By stage: its last unpack."""
        self.stage_at = [-1] * facts.n_events
        """By event: the stage, from its first to its last unpack; -1 between stages."""
        self._find_stages()
        self.unpacks_of: list[dict[int, list[int]]] = [{} for _ in range(facts.n_values)]
        """By value and stage: the events that unpack the value."""
        for v, events in enumerate(facts.unpacks_of):
            for t in events:
                self.unpacks_of[v].setdefault(self.stage_at[t], []).append(t)
        self._compute_replays()
        self._compute_needs()
        self._find_tails()
        self._find_drops()

    def _find_stages(self) -> None:
        backward: int | None = None
        cuts = set(self.cuts)
        for t, event in enumerate(self.facts.trace.events):
            if not isinstance(event, Unpack):
                continue
            if event.backward != backward or t in cuts:
                backward = event.backward
                self.first.append(t)
                self.last.append(t)
            self.last[-1] = t
        for stage, (first, last) in enumerate(zip(self.first, self.last, strict=True)):
            self.stage_at[first : last + 1] = [stage] * (last + 1 - first)

    def _compute_replays(self) -> None:
        """Compute the stages in which each op matters, and when it is replayed in them."""
        facts = self.facts
        self.replayed_by: list[dict[int, int]] = [{} for _ in range(facts.n_ops)]
        """By op and stage: the unpack by which the op has been replayed in the stage, if it is."""
        self.unpacked_first: list[dict[int, int]] = [{} for _ in range(facts.n_ops)]
        """By op and stage: the first unpack of one of its outputs."""
        for j in range(facts.n_ops - 1, -1, -1):
            by_readers: dict[int, int] = {}
            for v in facts.outputs[j]:
                for stage, events in self.unpacks_of[v].items():
                    first = self.unpacked_first[j].get(stage, events[0])
                    self.unpacked_first[j][stage] = min(first, events[0])
                for w in facts.consumers[v]:
                    if not facts.pinned[w]:
                        for stage, t in self.replayed_by[w].items():
                            by_readers[stage] = max(by_readers.get(stage, t), t)
            self.replayed_by[j] = {**by_readers, **self.unpacked_first[j]}
        self.stages_of = [sorted(by_stage) for by_stage in self.replayed_by]
        """By op: the stages in which it matters."""

    def _compute_needs(self) -> None:
        """Compute until when each stage needs each value."""
        facts = self.facts
        self.last_needed: list[dict[int, int]] = [{} for _ in range(facts.n_values)]
        """By value and stage: the unpack after which the stage does not need the value any more."""
        self.alive_until: list[dict[int, int]] = [{} for _ in range(facts.n_values)]
        """The same, or the event until which a node holds the value, if it is later."""
        for v in range(facts.n_values):
            op = facts.producer[v]
            for stage in self.stages_of[op] if op >= 0 else ():
                unpacks = self.unpacks_of[v].get(stage, ())
                ends = [min(facts.node_end[t], self.last[stage]) for t in unpacks]
                ends += [self.replayed_by[w][stage] for w in facts.consumers[v] if stage in self.replayed_by[w]]
                # An output that the stage does not need is dropped when a replay of its op may have made it.
                last = max(ends, default=self.replayed_by[op][stage])
                self.last_needed[v][stage] = last
                self.alive_until[v][stage] = max([last, *(facts.node_busy_until[t] for t in unpacks)])

    def _find_tails(self) -> None:
        facts = self.facts
        self.tail_end = [-1] * facts.n_values
        """By value: when the last handle is freed that outlives all need for the value (`retain_graph`; saved but
        never unpacked); -1 if there is none."""
        for v, handles in enumerate(facts.handles):
            needed = max(self.alive_until[v].values(), default=-1)
            self.tail_end[v] = max((end for start, end in handles if end > max(needed, start)), default=-1)
        self.tailed = [any(self.tail_end[v] >= 0 for v in outputs) for outputs in facts.outputs]
        """By op: whether an output has a tail."""

    def _find_drops(self) -> None:
        facts = self.facts
        self.drops_after: list[list[Drop]] = [[] for _ in range(facts.n_events)]
        """By unpack event: what can be dropped after it."""
        self._last_drop: list[list[int]] = [[] for _ in range(facts.n_ops)]
        # By op and position of a stage: the last event at which an output is dropped if it is not held into the stage.
        for j in range(facts.n_ops):
            stages = self.stages_of[j]
            self._last_drop[j] = [-1] * (len(stages) + 1)
            for position in range(1, len(stages) + self.tailed[j]):
                for v in facts.outputs[j]:
                    t = self.last_needed[v][stages[position - 1]]
                    if self._save_at(t) >= 0:
                        self.drops_after[t].append((v, j, position))
                        self._last_drop[j][position] = max(self._last_drop[j][position], t)

    def _save_at(self, event: int) -> int:
        unpack = self.facts.trace.events[event]
        assert isinstance(unpack, Unpack)
        return unpack.save

    def best_cut(self, event: int) -> int | None:
        """Return the unpack at which to cut the stage of an event, or None if a cut is of no use.

        It follows the node after which most bytes have been unpacked in the stage and will be unpacked again.
        """
        stage = self.stage_at[event]
        if stage < 0:
            return None
        facts = self.facts
        change = [0] * facts.n_events  # by event: bytes that begin to be, or cease to be, between two unpacks
        for v, by_stage in enumerate(self.unpacks_of):
            events = by_stage.get(stage, ())
            if len(events) > 1:
                change[events[0]] += facts.nbytes[v]
                change[events[-1]] -= facts.nbytes[v]
        between = list(accumulate(change))
        unpacks = [t for t in range(self.first[stage], self.last[stage] + 1) if facts.op_at[t] < 0]
        cuts = [(between[t], following) for t, following in pairwise(unpacks) if facts.node_end[t] == t]
        nbytes, cut = max(cuts, key=lambda found: found[0], default=(0, None))
        return cut if nbytes else None

    def last_drop(self, op: int, held_into: int) -> int:
        """Return the event of the last drop of an output, -1 if there is none, for `held_into` as in `decisions`."""
        drops = self._last_drop[op]
        return max((drops[k] for k in range(1, len(drops)) if not held_into >> k & 1), default=-1)

    def drops(self) -> Iterator[tuple[int, Drop]]:
        """Yield the event and the drop, for every possible drop in order."""
        for t, drops in enumerate(self.drops_after):
            for drop in drops:
                yield t, drop
