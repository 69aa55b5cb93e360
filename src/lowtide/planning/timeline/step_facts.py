"""A timeline trace in the form that planning reads: plain lists, indexed by op, value or event.

Derived once per trace, without decisions. Sources are left out: they are always alive, and their bytes are part of
`other_bytes`.
"""

from __future__ import annotations

from ...records import Op, Trace, Unpack


class StepFacts:
    """The facts about a trace that do not depend on how its backward passes are cut into stages."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.n_events = len(trace.events)
        self.n_ops = len(trace.ops)
        self.n_values = len(trace.values)
        self.op_event = list(trace.op_events)
        """By op: its event."""
        op_at = {event: j for j, event in enumerate(self.op_event)}
        self.op_at = [op_at.get(t, -1) for t in range(self.n_events)]
        """By event: the op, -1 for an unpack."""
        self.nbytes = [value.nbytes for value in trace.values]
        self.producer = [-1 if value.made_at is None else op_at[value.made_at] for value in trace.values]
        """By value: the op that produces it, -1 for a source."""
        self.other_bytes = [event.other_bytes for event in trace.events]
        self.rise_bytes = [event.rise_bytes if isinstance(event, Unpack) else 0 for event in trace.events]
        self._read_ops(trace.ops, trace.replay_overhead_s)
        self._compute_unpacks()
        self._compute_lifetimes()
        self._compute_handles()

    def _read_ops(self, ops: tuple[Op, ...], overhead_s: float) -> None:
        self.pinned = [op.pinned is not None for op in ops]
        self.outputs = [list(op.outputs) for op in ops]
        self.inputs = [[v for v in op.inputs if self.producer[v] >= 0] for op in ops]
        """By op: its inputs, without sources."""
        self.replay_s = [(op.time_s if op.replay_s is None else op.replay_s) + overhead_s for op in ops]
        """By op: time of one replay, kernel and overhead."""
        self.workspace_bytes = [op.workspace_bytes for op in ops]
        self.reads_until = [self.n_events if op.reads_until is None else op.reads_until for op in ops]
        """By op: the event from which on it must not be replayed; the number of events: never."""
        self.writes = [[w for w in op.writes if w.old is None or self.producer[w.old] >= 0] for op in ops]
        self.overwritten_producers = [[self.producer[w.old] for w in op.writes if w.old is not None] for op in ops]
        """By op: the producers of the values that it overwrites and reads, -1 for a source."""
        self.consumers: list[list[int]] = [[] for _ in range(self.n_values)]
        """By value: the ops that read it."""
        for j, inputs in enumerate(self.inputs):
            for v in inputs:
                self.consumers[v].append(j)

    def _compute_unpacks(self) -> None:
        events = self.trace.events
        self.unpacks_of: list[list[int]] = [[] for _ in range(self.n_values)]
        """By value: the events that unpack it. Empty for sources."""
        self.unpack_value = [-1] * self.n_events
        """By event: the unpacked value, -1 for a source or an op."""
        self.node_end = [-1] * self.n_events
        """By unpack event: the last unpack of its node."""
        self.node_busy_until = [-1] * self.n_events
        """By unpack event: the last event during which its node may hold the tensor that it unpacked.

        Ops that a backward pass records run after the unpacks of their node. So a node ends before the next node of
        the same pass unpacks, or with the last event of the pass."""
        last_of_pass: dict[int, int] = {}
        next_of_pass: dict[int, int] = {}  # by pass: the first unpack of the following node
        last_of_node: dict[tuple[int, int], int] = {}
        end_of_node: dict[tuple[int, int], int] = {}
        for t in range(self.n_events - 1, -1, -1):
            event = events[t]
            if event.backward is not None:
                last_of_pass.setdefault(event.backward, t)
            if not isinstance(event, Unpack):
                continue
            node = event.backward, event.node
            if node not in last_of_node:
                last_of_node[node] = t
                end_of_node[node] = max(t, next_of_pass.get(event.backward, last_of_pass[event.backward] + 1) - 1)
            next_of_pass[event.backward] = t
            self.node_end[t], self.node_busy_until[t] = last_of_node[node], end_of_node[node]
        for t, event in enumerate(events):
            if isinstance(event, Unpack) and self.producer[event.value] >= 0:
                self.unpack_value[t] = event.value
                self.unpacks_of[event.value].append(t)

    def _compute_lifetimes(self) -> None:
        """Compute how long others hold each value, and how long the engine knows its memory."""
        trace = self.trace
        overwritten_at = [self.n_events + 1] * self.n_values
        latest: dict[int, int] = {}
        for j, op in enumerate(trace.ops):
            for v in op.outputs:
                storage = trace.values[v].storage
                if storage in latest:
                    overwritten_at[latest[storage]] = self.op_event[j]
                latest[storage] = v
        self.natural_end = [-1] * self.n_values
        """By value: the last event during which others hold it; the number of events: it outlives the step."""
        self.natural_ends_after: list[list[int]] = [[] for _ in range(self.n_events + 1)]
        """By event: the values that others hold until then."""
        self.known_ends_after: list[list[int]] = [[] for _ in range(self.n_events + 1)]
        """By event: the values that a new op or handle cannot refer to any more."""
        self.known_ends_in: list[list[int]] = [[] for _ in range(self.n_events + 1)]
        """The same, if the op at the event overwrites the value: it may still refer to it."""
        last_op = self.op_event[-1] if self.op_event else -1
        for v, value in enumerate(trace.values):
            if self.producer[v] < 0:
                continue
            readers = [self.op_event[w] for w in self.consumers[v] if not self._reads_unpacked(w, v)]
            # An op holds its inputs while it runs, even if the profile saw them freed slightly earlier. From the op
            # that overwrites a value on, the memory belongs to the next value.
            end = min(max([value.held_until, *readers]), overwritten_at[v] - 1)
            self.natural_end[v] = end
            self.natural_ends_after[end].append(v)
            if end + 1 == overwritten_at[v] and overwritten_at[v] in readers:
                self.known_ends_in[end + 1].append(v)
            else:
                # The scope of a single forward pass ends when backward begins.
                self.known_ends_after[min(end, last_op) if trace.is_single_pass else end].append(v)

    def _reads_unpacked(self, op: int, value: int) -> bool:
        """Return whether an op of a backward pass reads the tensor that an earlier unpack of this pass returned."""
        backward, event = self.trace.ops[op].backward, self.op_event[op]
        return backward is not None and any(
            t < event and self.trace.events[t].backward == backward for t in self.unpacks_of[value]
        )

    def _compute_handles(self) -> None:
        self.handles: list[list[tuple[int, int]]] = [[] for _ in range(self.n_values)]
        """By value: by handle, the events after which it was saved and freed. Empty for sources."""
        self.saved_after: list[list[int]] = [[] for _ in range(self.n_events + 1)]
        """By event: the values of the handles that are saved after it."""
        self.freed_after: list[list[int]] = [[] for _ in range(self.n_events + 1)]
        """By event: the values of the handles that are freed after it."""
        saved = set(self.trace.saved)
        for v, value in enumerate(self.trace.values):
            if value.made_at is None:
                continue
            handles = list(value.handles)
            if v in saved and not handles:
                last = self.node_end[self.unpacks_of[v][-1]] if self.unpacks_of[v] else self.n_events
                handles = [(value.made_at, last)]
            self.handles[v] = handles
            for start, end in handles:
                self.saved_after[start].append(v)
                self.freed_after[end].append(v)
