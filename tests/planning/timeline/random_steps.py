"""Random timelines: programs of forward ops and backward passes, as autograd would run them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from lowtide.records import TRACE_VERSION, Op, Trace, Unpack, Value, Write


@dataclass
class Handle:
    value: int
    save: int
    saved: int
    freed: int | None = None


@dataclass
class Program:
    """A step while it is being drawn."""

    draw: object
    max_events: int
    events: list = field(default_factory=list)
    values: list[dict] = field(default_factory=list)
    current: list[int] = field(default_factory=list)  # values that new ops can read
    nodes: list[list[Handle]] = field(default_factory=list)  # backward nodes that have not run
    handles: list[Handle] = field(default_factory=list)
    last_read: dict[int, int] = field(default_factory=dict)
    old_values: set = field(default_factory=set)
    passes: int = 0
    node_numbers: int = 0

    def flip(self, one_in: int) -> bool:
        return self.draw(st.integers(0, one_in - 1)) == 0

    def some(self, items, low, high):
        return self.draw(st.lists(st.sampled_from(items), min_size=low, max_size=high, unique=True)) if items else []

    def source(self) -> None:
        self.values.append({"nbytes": 8, "made_at": None, "storage": len(self.values)})
        self.current.append(len(self.values) - 1)

    def op(self, inputs, backward=None) -> list[int]:
        """Add an op. Save some of what it reads and makes for a new node."""
        t, outputs, writes = len(self.events), [], []
        writable = [v for v in inputs if v in self.current and self.values[v]["made_at"] is not None]
        if writable and self.flip(5):
            old, new = self.draw(st.sampled_from(writable)), len(self.values)
            self.values.append({**self.values[old], "made_at": t})
            self.current.remove(old)
            self.old_values.add(old)
            self.current.append(new)
            outputs.append(new)
            writes.append((old, new))
        for _ in range(self.draw(st.sampled_from((0, 1) if outputs else (1, 1, 1, 2)))):
            self.values.append(
                {"nbytes": self.draw(st.integers(0, 9)), "made_at": t, "storage": 1000 + t * 10 + len(outputs)}
            )
            outputs.append(len(self.values) - 1)
            self.current.append(len(self.values) - 1)
        if backward is None:
            for v in inputs:
                self.last_read[v] = t
        self.events.append(("op", inputs, outputs, writes, backward))
        node = [self.save(v) for v in self.some(sorted({*inputs, *outputs} - self.old_values), 0, 2)]
        self.nodes.append(node)
        return outputs

    def save(self, v) -> Handle:
        handle = Handle(v, len(self.handles), len(self.events) - 1)
        self.handles.append(handle)
        return handle

    def forward(self) -> None:
        for _ in range(self.draw(st.integers(1, 4))):
            if len(self.events) < self.max_events:
                recent = self.current[-5:]
                self.op(self.some(recent, 1, 2))

    def backward(self, nested: bool) -> None:
        """Run the newest nodes. Their handles are freed unless the graph is retained."""
        count = self.draw(st.integers(1, max(1, len(self.nodes))))
        retain, create = self.flip(3), self.flip(3)
        todo, self.nodes = self.nodes[-count:][::-1], self.nodes[:-count]
        number, self.passes = self.passes, self.passes + 1
        kept = []
        for node in todo:
            if len(self.events) >= self.max_events or not node:
                kept.append(node)
                continue
            self.node_numbers += 1
            for handle in node:
                self.events.append(("unpack", handle, self.node_numbers, number))
            if create and self.flip(2):
                self.op(self.some(sorted({handle.value for handle in node} | set(self.current[-2:])), 1, 2), number)
            if nested and self.nodes and self.flip(5):
                self.backward(nested=False)
            if retain:
                kept.append(node)
            else:
                for handle in node:
                    handle.freed = len(self.events) - 1
        self.nodes += [node for node in kept[::-1] if node]


def renumbered(events):
    """Number the backward passes by their first event."""
    order = dict.fromkeys(e[-1] for e in events if e[-1] is not None)
    return {number: k for k, number in enumerate(order)}


@st.composite
def timelines(draw, max_events: int = 16, pins: bool = True) -> Trace:
    """A valid timeline: several passes, retained and created graphs, tails, in-place writes, pinned ops."""
    program = Program(draw, max_events)
    for _ in range(draw(st.integers(1, 2))):
        program.source()
    for _ in range(draw(st.integers(1, 3))):
        program.forward()
        program.backward(nested=draw(st.booleans()))
    return finished(draw, program, pins)


def finished(draw, program: Program, pins: bool) -> Trace:
    n = len(program.events)
    number = renumbered(program.events)
    read_until = {v: max(t, program.values[v]["made_at"] or 0) for v, t in program.last_read.items()}
    handles: dict[int, list] = {}
    for handle in program.handles:
        freed = handle.freed
        if freed is None:
            last = max(
                [handle.saved, *(t for t, e in enumerate(program.events) if e[0] == "unpack" and e[1] is handle)]
            )
            freed = draw(st.integers(last, n))
        handles.setdefault(handle.value, []).append((handle.saved, freed))
    values = []
    for v, value in enumerate(program.values):
        first = max(read_until.get(v, 0), value["made_at"] or 0)
        until = draw(st.integers(first, n)) if draw(st.integers(0, 2)) == 0 else first
        values.append(Value(**value, held_until=until, handles=tuple(handles.get(v, ()))))
    events = []
    for t, event in enumerate(program.events):
        if event[0] == "unpack":
            _, handle, node, backward = event
            other = draw(st.integers(0, 6))
            events.append(
                Unpack(handle.value, node, other, 1.0, draw(st.integers(0, other)), number[backward], handle.save)
            )
            continue
        _, inputs, outputs, writes, backward = event
        readers = [e for e in program.events if e[0] == "op" and any(old in e[1] for old, _ in writes)]
        exclusive = len(readers) == 1 and not any(handles.get(old) for old, _ in writes)
        events.append(
            Op(
                name=f"op{t}",
                module=f"layer.{draw(st.integers(0, 2))}",
                time_s=float(draw(st.integers(0, 9))),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                pinned="random" if pins and draw(st.integers(0, 8)) == 0 else None,
                other_bytes=draw(st.integers(0, 6)),
                writes=tuple(Write(old, new, exclusive and draw(st.booleans())) for old, new in writes),
                replay_s=draw(st.none() | st.just(0.5)),
                backward=None if backward is None else number[backward],
                workspace_bytes=draw(st.sampled_from((0, 0, 3))),
                reads_until=draw(st.integers(t + 1, n - 1)) if t + 1 < n and draw(st.integers(0, 8)) == 0 else None,
            )
        )
    return Trace(
        version=TRACE_VERSION,
        events=tuple(events),
        values=tuple(values),
        saved=tuple(sorted(handles)),
        step_s=100.0,
        peak_bytes=0,
        replay_overhead_s=draw(st.sampled_from((0.0, 0.5))),
    )
