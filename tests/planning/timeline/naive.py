"""A second simulator of timelines, as simple as possible: it follows the fields of a plan, as the engine would.

It is independent of `lowtide.planning.timeline` and slow. Memory consists of blocks, each with the set of its holders:
user code, lowtide, or a running backward node. Everything else is computed anew whenever it is needed.
"""

from __future__ import annotations

from lowtide.records import Op, Trace, Unpack


class Block:
    """One piece of memory."""

    def __init__(self, nbytes: int, holder: str):
        self.nbytes = nbytes
        self.holders = {holder}


class NaiveStep:
    """One step under the fields of a plan. Call `run`."""

    def __init__(self, trace: Trace, keep, held=(), drops=(), tails=()):
        self.trace, self.keep, self.held, self.tails = trace, keep, set(held), set(tails)
        self.drops = list(drops)
        self.n = len(trace.events)
        self.op_at = {t: j for j, t in enumerate(trace.op_events)}
        self.produced = [v for v, value in enumerate(trace.values) if value.made_at is not None]
        self.handles: list[int] = []  # the values of the live handles
        self.recipes: set[int] = set()
        self.blocks: list[Block] = []
        self.user_block: dict[int, Block] = {}
        self.own_block: dict[int, Block] = {}
        self.dropped: set[int] = set()
        self.node_blocks: list[tuple[int, Block]] = []
        self.unpack_counts: dict[int, int] = {}
        self.extra_s, self.replays, self.late = 0.0, 0, 0
        self.peaks: list[int] = []
        self.known_ends = {v: self.known_until(v) for v in self.produced}
        self.natural_ends = {v: self.natural_end(v) for v in self.produced}

    # -- facts, from their definitions

    def op_of(self, v) -> int:
        return self.op_at[self.trace.values[v].made_at]

    def inputs(self, op):
        return [u for u in self.trace.ops[op].inputs if self.trace.values[u].made_at is not None]

    def overwritten_at(self, v) -> int:
        same = [
            w.made_at for w in self.trace.values if w.storage == self.trace.values[v].storage and w.made_at is not None
        ]
        return min([t for t in same if t > self.trace.values[v].made_at], default=self.n + 1)

    def natural_end(self, v) -> int:
        end = self.trace.values[v].held_until
        for t, op in enumerate(self.trace.events):
            if isinstance(op, Op) and v in op.inputs:
                before = [e for e in self.trace.events[:t] if isinstance(e, Unpack) and e.value == v]
                if op.backward is None or all(e.backward != op.backward for e in before):
                    end = max(end, t)
        return min(end, self.overwritten_at(v) - 1)

    def known_until(self, v) -> tuple[int, str]:
        """The event in or after which no new op and handle can refer to the memory of v."""
        end, over = self.natural_end(v), self.overwritten_at(v)
        if over < self.n and end == over - 1 and v in self.trace.events[over].inputs:
            return over, "in"
        return (min(end, self.trace.op_events[-1]) if self.trace.is_single_pass else end), "after"

    def handles_of(self, v):
        value = self.trace.values[v]
        if value.handles or v not in self.trace.saved:
            return value.handles
        unpacks = [t for t, e in enumerate(self.trace.events) if isinstance(e, Unpack) and e.value == v]
        return ((value.made_at, self.last_unpack_of_node(unpacks[-1]) if unpacks else self.n),)

    def last_unpack_of_node(self, t) -> int:
        node = self.trace.events[t].backward, self.trace.events[t].node
        return max(s for s, e in enumerate(self.trace.events) if isinstance(e, Unpack) and (e.backward, e.node) == node)

    def node_ends(self, t) -> int:
        last, backward = self.last_unpack_of_node(t), self.trace.events[t].backward
        later = [
            s for s, e in enumerate(self.trace.events)
            if s > last and isinstance(e, Unpack) and e.backward == backward
        ]  # fmt: skip
        of_pass = [s for s, e in enumerate(self.trace.events) if e.backward == backward]
        return max(last, min(later) - 1 if later else max(of_pass))

    # -- state

    def live(self) -> int:
        return sum(block.nbytes for block in self.blocks if block.holders)

    def new_block(self, v, holder) -> Block:
        block = Block(self.trace.values[v].nbytes, holder)
        self.blocks.append(block)
        return block

    def users(self, v) -> int:
        return self.handles.count(v) + sum(v in self.inputs(op) for op in self.recipes)

    def is_known(self, v) -> bool:
        end, phase = self.known_ends[v]
        made = self.trace.values[v].made_at <= self.now
        return made and (self.now < end or (self.now == end and not self.known_over[phase]))

    def collect(self) -> None:
        while True:
            dead = {
                op
                for op in self.recipes
                if not any(self.users(o) or self.is_known(o) for o in self.trace.ops[op].outputs)
            }
            self.recipes -= dead
            if not dead:
                break
        for v in list(self.own_block):
            if not self.users(v):
                self.let_go(v)

    def let_go(self, v) -> None:
        block = self.own_block.pop(v, None)
        if block is not None:
            block.holders.discard("lowtide")

    def user_came(self, v) -> None:
        op = self.op_of(v)
        if v in self.own_block or (op in self.recipes and not (op in self.held and v not in self.dropped)):
            return
        block = self.user_block.get(v)
        if block is None or "user" not in block.holders:
            block = self.new_block(v, "lowtide")
        block.holders.add("lowtide")
        self.own_block[v] = block

    def later_drops(self, op) -> bool:
        return any(row[2] == op for row in self.drops)

    # -- the step

    def run(self):
        for now, event in enumerate(self.trace.events):
            self.now = now
            self.known_over = {"in": False, "after": False}
            self.most = self.live()
            if isinstance(event, Op):
                self.run_op(self.op_at[self.now])
            elif event.value in self.produced:
                if event.value not in self.own_block:
                    self.make(event.value)
                self.unpacked_block = self.own_block[event.value]
            for v in self.produced:
                for saved, _ in self.handles_of(v):
                    if saved == self.now:
                        self.handles.append(v)
                        self.user_came(v)
            self.known_over["in"] = True
            self.collect()
            if isinstance(event, Op):
                self.peaks.append(self.live() + event.other_bytes)
            else:
                self.peaks.append(max(self.most - event.rise_bytes, self.live()) + event.other_bytes)
            self.end(event)
        return self.peaks, self.extra_s, self.replays, self.late

    def run_op(self, op) -> None:
        for v in self.trace.ops[op].outputs:
            self.user_block[v] = self.new_block(v, "user")
        if not self.keep[op]:
            self.recipes.add(op)
            for u in self.inputs(op):
                self.user_came(u)

    def end(self, event) -> None:
        for v in self.produced:
            for _, freed in self.handles_of(v):
                if freed == self.now:
                    self.handles.remove(v)
        self.collect()
        for v, block in self.user_block.items():
            if self.natural_ends[v] == self.now:
                block.holders.discard("user")
        self.known_over["after"] = True
        self.collect()
        for until, block in self.node_blocks:
            if until == self.now:
                block.holders.discard("node")
        if isinstance(event, Unpack):
            nth = self.unpack_counts.get(event.save, 0)
            self.unpack_counts[event.save] = nth + 1
            due = [row for row in self.drops if row[:2] == (event.save, nth)]
            self.drops = [row for row in self.drops if row not in due]
            for _, _, op, output in due:
                self.drop(op, self.trace.ops[op].outputs[output])

    def drop(self, op, v) -> None:
        self.dropped.add(v)
        if op not in self.recipes or v not in self.own_block:
            return
        block = self.own_block[v]
        unpacked = [t for t in range(self.now + 1) if isinstance(e := self.trace.events[t], Unpack) and e.value == v]
        until = self.node_ends(unpacked[-1]) if unpacked else -1
        if until > self.now:
            block.holders.add("node")
            self.node_blocks.append((until, block))
        self.let_go(v)
        if "user" in block.holders:
            block.holders.discard("node")

    def make(self, v) -> None:
        while v not in self.own_block:
            op = self.op_of(v)
            missing = [u for u in self.inputs(op) if u not in self.own_block]
            for u in reversed(missing):
                self.make(u)
            if not missing:
                self.replay(op)

    def replay(self, op) -> None:
        record = self.trace.ops[op]
        assert op in self.recipes
        self.extra_s += (record.time_s if record.replay_s is None else record.replay_s) + self.trace.replay_overhead_s
        self.replays += 1
        self.late += record.reads_until is not None and self.now >= record.reads_until
        last = not self.later_drops(op) and op not in self.tails
        stored = [o for o in record.outputs if self.users(o) and o not in self.own_block]
        scratch = record.workspace_bytes
        for write in record.writes:
            if write.old is None or write.old not in self.produced:
                continue
            if write.exclusive and last and self.users(write.old) == 1:
                self.let_go(write.old)
            if write.new not in stored:
                scratch += self.trace.values[write.old].nbytes
        written = [write.new for write in record.writes]
        scratch += sum(self.trace.values[o].nbytes for o in record.outputs if o not in stored and o not in written)
        for o in stored:
            self.own_block[o] = self.new_block(o, "lowtide")
        self.most = max(self.most, self.live() + scratch)
        if last:
            self.recipes.discard(op)
            self.collect()


def naive_simulation(trace: Trace, keep, held=(), drops=(), tails=()):
    """Return live bytes by event, extra seconds, the number of replays, and the number of late replays."""
    return NaiveStep(trace, keep, held, drops, tails).run()
