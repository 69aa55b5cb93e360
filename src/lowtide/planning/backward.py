"""Backward, as the simulator follows it: live bytes and time from unpack to unpack.

The rules of backward. `Backward` implements them, and so does `UnpackSimulator` for the fast judge, which knows no
offloading. Both cite the numbers.

B1. Users. The users of a value are its handle and the recipes that read it. When a value loses its last user, lowtide
    frees it. When no output of a recomputed op has a user left, its recipe is deleted, and its inputs lose a user.
B2. Start. Kept values with a user are in memory, unless they are offloaded. A recomputed op has a recipe if backward
    needs one of its outputs.
B3. Unpack. A value in memory is returned. An offloaded value is fetched (B8) or decompressed (B9). Any other value is
    replayed: first, by the same rule, the inputs that are missing, the last one first, then its op.
B4. Replay. A replay stores those outputs that have a user and are not in memory. All other outputs and the workspace
    of the kernel (`Op.workspace_bytes`) are scratch: they are live only during the replay.
B5. Retain. Unless its op is released, a recomputed op is replayed at most once: its recipe is deleted after the
    replay, and its outputs stay until they lose their last user (B1).
B6. Release. A released op keeps its recipe. An output of it is freed after the replay; if other replays of the same
    unpack wait for it, after the last of these; if it was itself unpacked, when its handle is freed (B10).
B7. In-place writes. A replay overwrites an input in place if the recorded write was exclusive, and if either the
    recipe is the last user of the input and is deleted after the replay, or the input was replayed for this replay
    only and would be freed after it (B6). Otherwise the replay writes to a copy.
B8. Fetch. Backward waits for a fetch, unless the value was prefetched in time (`PrefetchQueue`). The memory of a
    value is live from the start of its fetch or prefetch.
B9. Decompress. The compressed form is live until the value is decompressed, and at the same time as the result.
B10. Handles. The handles of a backward node are freed after the last unpack of the node, each if its value is not
    unpacked later.
B11. Values that others hold. They are live through the unpack after which others free them. A kept value shares
    this memory. A replay makes a second copy, because a recipe cannot reach the memory that others hold.
B12. Other bytes. During the replays of an unpack, `other_bytes` of the unpack are live without `rise_bytes`, and
    after them all are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from .._errors import LowtideError
from ..records.plan import WHEN_BACKWARD_BEGINS
from .prefetch import Fetch, PrefetchQueue
from .problem import Problem


class TooManyReplaysError(LowtideError):
    """Raised when decisions need more replays than the caller allows."""


class BackwardListener(Protocol):
    """Receives the events of a simulated backward pass, in order."""

    def copies_changed(self, value: int, own: int, others: int) -> None:
        """Copies of a value that lowtide (`own`) and others hold change by these numbers: -1, 0 or 1."""

    def waited(self, seconds: float) -> None:
        """The step waited for the store."""

    def decompressed(self, unpack: int, value: int, seconds: float, scratch_bytes: int) -> None:
        """A value was decompressed for an unpack. Its compressed form is still live."""

    def compressed_freed(self, value: int, compressed_bytes: int) -> None:
        """The compressed form of a value was freed."""

    def replayed(self, unpack: int, op: int, scratch_bytes: int) -> None:
        """An op was replayed for an unpack. Its scratch (B4) and the inputs to be freed are still live."""

    def unpacked(self, unpack: int) -> None:
        """An unpack is complete; the backward node runs next."""


class Backward:
    """State of a simulated backward pass.

    `needed_until` gives by value the last op that needs it; the number of ops or more: it is needed in backward.
    `offloaded` are the values that are in the store or compressed when backward begins.
    """

    def __init__(
        self,
        problem: Problem,
        keep: Sequence[int | bool],
        released: frozenset[int],
        needed_until: list[int],
        max_replays: int | None,
        offloaded: Sequence[int],
        prefetch_after: Mapping[int, int],
    ) -> None:
        n = problem.n_ops
        self.problem = problem
        self.extra_s = self.store_wait_s = 0.0
        self.replayed_ops = 0
        self.replays = [0] * n
        self.listener: BackwardListener | None = None
        self.record_peak_values = False
        self.peak_values: list[int] = []
        """The values in memory when the most bytes were live, since `record_peak_values` was set."""
        self.prefetch_after = prefetch_after
        self.fetches: list[Fetch] = []
        self.unpack_peaks: list[int] = []
        """By unpack: the most live bytes, without other bytes."""
        self.first_prefetch_bytes = 0
        """Bytes of the prefetches that start when backward begins."""
        self._released = released
        self._prefetch_queue = PrefetchQueue(problem, offloaded, prefetch_after)
        self._busy_s = 0.0  # time so far, without waiting for the store
        self._peak_since_fetch = 0  # with other bytes
        self._max_replays = max_replays
        self._unpack = 0  # index of the current unpack
        self._recorded_peak_bytes = -math.inf  # live bytes that belong to `peak_values`
        self._live = 0
        self._resident = [False] * problem.n_values  # held in memory by lowtide
        self._unpacked = [False] * problem.n_values  # unpacked, and the handle is not yet freed
        self._held_by_others = [False] * problem.n_values  # by others only: not resident
        self._freed_by_others: dict[int, list[int]] = {}  # by unpack: values of `_held_by_others` freed after it
        self._shared_until: dict[int, int] = {}  # by resident value that others hold too: the last such unpack
        self._users = [1 if saved else 0 for saved in problem.saved]  # B1: number of users
        self._recipe = [False] * n
        self._waiting: dict[int, int] = {}  # in the current unpack: number of replays that wait for a value
        self._offloaded = frozenset(offloaded)
        self._compressed_bytes = {v: problem.residual_bytes(v) for v in offloaded if problem.codec_cost[v] is not None}
        self._live += sum(self._compressed_bytes.values())
        for j in range(n):
            if not keep[j] and any(needed_until[v] >= n for v in problem.outputs[j]):  # B2
                self._recipe[j] = True
                for v in problem.inputs[j]:
                    self._users[v] += 1
        for v in range(problem.n_values):
            producer = problem.producer[v]
            if producer < 0 or v in self._offloaded:
                continue
            if keep[producer] and self._users[v]:  # B2
                self._resident[v] = True
                self._live += problem.nbytes[v]
                if problem.natural_last_unpack[v] >= 0:
                    self._shared_until[v] = problem.natural_last_unpack[v]
            elif problem.natural_last_unpack[v] >= 0:  # B11
                self._leave_to_others(v)
                self._live += problem.nbytes[v]

    def run(self) -> None:
        """Simulate all of backward."""
        self.begin()
        self.unpack_peaks = [self.unpack(k) for k in range(self.problem.n_unpacks)]

    def begin(self) -> None:
        """Start the first prefetches."""
        before = self._live
        self._start_prefetches(WHEN_BACKWARD_BEGINS)
        self.first_prefetch_bytes = self._live - before

    def unpack(self, k: int) -> int:
        """Simulate unpack k and the backward work after it. Return the most live bytes, without `other_bytes`."""
        problem = self.problem
        self._unpack = k
        peak = self._live
        self._update_peak_since_fetch(peak)
        self._record_peak_values(-problem.rise_bytes[k])
        v = problem.unpack_value[k]
        if problem.producer[v] >= 0:
            self._unpacked[v] = True
            if not self._resident[v]:
                peak = max(peak, self._make_resident(v))
        peak = max(peak - problem.rise_bytes[k], self._live)  # B12
        self._record_peak_values()
        if self.listener is not None:
            self.listener.unpacked(k)
        for freed in problem.freed_after[k]:  # B10
            self._unpacked[freed] = False
            self._free_handle(freed)
            if problem.producer[freed] in self._released:  # B6
                self._free(freed)
        for freed in self._freed_by_others.pop(k, ()):  # B11
            self._held_by_others[freed] = False
            self._live -= problem.nbytes[freed]
            if self.listener is not None:
                self.listener.copies_changed(freed, 0, -1)
        self._advance(problem.trace.unpacks[k].time_s)
        return peak

    def _make_resident(self, value: int) -> int:
        """Bring a value into memory (B3). Return the most live bytes meanwhile."""
        problem, resident, waiting = self.problem, self._resident, self._waiting
        inputs_waited_for: dict[int, list[int]] = {}  # by op
        pending = [value]
        peak = self._live
        while pending:
            v = pending[-1]
            if resident[v]:
                pending.pop()
                continue
            if v in self._offloaded:
                peak = max(peak, self._fetch_or_decompress(v))
                pending.pop()
                continue
            op = problem.producer[v]
            missing = [u for u in problem.inputs[op] if not resident[u]]
            if missing:
                inputs_waited_for[op] = missing
                for u in missing:
                    waiting[u] = waiting.get(u, 0) + 1
                pending.extend(missing)
                continue
            peak = max(peak, self._replay(op))
            for u in inputs_waited_for.pop(op, ()):
                waiting[u] -= 1
                if not waiting[u]:
                    del waiting[u]
                    if problem.producer[u] in self._released:
                        self._free_unless_unpacked(u)
            pending.pop()
        return peak

    def _fetch_or_decompress(self, v: int) -> int:
        """Bring an offloaded value into memory. Return the most live bytes meanwhile."""
        codec_cost, nbytes = self.problem.codec_cost[v], self.problem.nbytes[v]
        if codec_cost is None:
            return self._fetch(v)
        seconds, scratch_bytes = codec_cost.decompression_s(nbytes), codec_cost.workspace_bytes(nbytes)
        self.extra_s += seconds
        self.store_wait_s += seconds
        self._advance(seconds)
        self._resident[v] = True
        self._live += nbytes
        self._record_peak_values(scratch_bytes - self.problem.rise_bytes[self._unpack])
        if self.listener is not None:
            self.listener.copies_changed(v, 1, 0)
            self.listener.decompressed(self._unpack, v, seconds, scratch_bytes)
        peak = self._live + scratch_bytes  # B9
        self._update_peak_since_fetch(peak)
        self._free_compressed(v)
        return peak

    def _fetch(self, v: int) -> int:
        """Fetch a value and start the prefetches that follow this fetch (B8). Return the live bytes."""
        self.fetches.append(Fetch(v, self._busy_s, self._peak_since_fetch))
        was_prefetched = self._prefetch_queue.is_started(v)
        self._wait(self._prefetch_queue.fetch(v))
        self._resident[v] = True
        if not was_prefetched:
            self._live += self.problem.nbytes[v]
            if self.listener is not None:
                self.listener.copies_changed(v, 1, 0)
        self._start_prefetches(self.problem.producer[v])
        self._record_peak_values(-self.problem.rise_bytes[self._unpack])
        self._peak_since_fetch = 0
        self._update_peak_since_fetch(self._live)
        return self._live

    def _start_prefetches(self, event: int) -> None:
        """Start the prefetches that follow an event, for values that have a user and are not in memory."""
        for v in self._prefetch_queue.due_after(event):
            if self._users[v] and not self._resident[v]:
                self._wait(self._prefetch_queue.start(v))
                self._live += self.problem.nbytes[v]  # B8
                if self.listener is not None:
                    self.listener.copies_changed(v, 1, 0)

    def _wait(self, seconds: float) -> None:
        """Add time in which the step waits for the store, or in which the store slows down ops."""
        self.extra_s += seconds
        self.store_wait_s += seconds
        if self.listener is not None and seconds:
            self.listener.waited(seconds)

    def _advance(self, seconds: float) -> None:
        """Add time in which backward computes. Prefetches continue in this time."""
        self._busy_s += seconds
        self._prefetch_queue.advance(seconds)

    def _replay(self, op: int) -> int:
        """Replay an op whose inputs are in memory. Return the live bytes during the replay."""
        problem, listener = self.problem, self.listener
        assert self._recipe[op], "an op without a recipe is needed"
        self._count_replay(op)
        stored = [v for v in problem.outputs[op] if self._users[v] and not self._resident[v]]
        # Outputs that are not stored are scratch (B4).
        scratch_bytes = self._write_in_place(op, stored)
        written = {write.new for write in problem.writes[op]}
        scratch_bytes += sum(problem.nbytes[v] for v in problem.outputs[op] if v not in stored and v not in written)
        scratch_bytes += problem.workspace_bytes[op]
        for v in stored:
            self._resident[v] = True
            self._live += problem.nbytes[v]
        self._record_peak_values(scratch_bytes - problem.rise_bytes[self._unpack])
        if listener is not None:
            for v in stored:
                listener.copies_changed(v, 1, 0)
            listener.replayed(self._unpack, op, scratch_bytes)
        live_bytes = self._live + scratch_bytes
        self._update_peak_since_fetch(live_bytes)
        if op in self._released:  # B6
            for v in stored:
                if v not in self._waiting:
                    self._free_unless_unpacked(v)
        else:  # B5
            self._delete_recipe(op)
        return live_bytes

    def _count_replay(self, op: int) -> None:
        self.replayed_ops += 1
        self.replays[op] += 1
        if self._max_replays is not None and self.replayed_ops > self._max_replays:
            raise TooManyReplaysError(f"more than {self._max_replays} replays")
        self.extra_s += self.problem.replay_s[op]
        self._advance(self.problem.replay_s[op])

    def _write_in_place(self, op: int, stored: list[int]) -> int:
        """Free the inputs that a replay overwrites. Return the bytes of copies written for results not stored."""
        problem = self.problem
        scratch_bytes = 0
        for write in problem.writes[op]:
            if write.old is None:
                continue
            if write.exclusive and self._may_overwrite(write.old, op):
                # The new value takes over this memory (Rule 6).
                self._resident[write.old] = False
                self._live -= problem.nbytes[write.old]
                if self.listener is not None:
                    self.listener.copies_changed(write.old, -1, 0)
            if write.new not in stored:
                scratch_bytes += problem.nbytes[write.old]
        return scratch_bytes

    def _may_overwrite(self, v: int, op: int) -> bool:
        """Return whether a replay of `op` is the last to need v in this place (B7)."""
        if self._users[v] == 1 and op not in self._released:
            return True
        return self.problem.producer[v] in self._released and self._waiting.get(v) == 1 and not self._unpacked[v]

    def _delete_recipe(self, op: int) -> None:
        """Delete a recipe, and all values and recipes that lose their last user by this (B1)."""
        problem = self.problem
        deleted = [op]
        self._recipe[op] = False
        while deleted:
            for u in problem.inputs[deleted.pop()]:
                self._users[u] -= 1
                if not self._users[u]:
                    self._free(u)
                    producer = problem.producer[u]
                    if self._is_useless(producer):
                        self._recipe[producer] = False
                        deleted.append(producer)

    def _free_handle(self, v: int) -> None:
        """Free a handle, and all values and recipes that lose their last user by this (B1)."""
        self._users[v] -= 1
        if not self._users[v]:
            self._free(v)
            if self._is_useless(self.problem.producer[v]):
                self._delete_recipe(self.problem.producer[v])

    def _is_useless(self, op: int) -> bool:
        """Return whether an op has a recipe, and none of its outputs has a user."""
        return self._recipe[op] and not any(self._users[v] for v in self.problem.outputs[op])

    def _free(self, v: int) -> None:
        """Free lowtide's copy of a value in memory, in whatever form."""
        if not self._resident[v]:
            self._free_compressed(v)
            if self._prefetch_queue.is_started(v):
                self._prefetch_queue.cancel(v)
                self._live -= self.problem.nbytes[v]
                if self.listener is not None:
                    self.listener.copies_changed(v, -1, 0)
            return
        self._resident[v] = False
        shared = self._shared_until.get(v, -1) >= self._unpack
        if shared:  # B11: others hold the same memory
            self._leave_to_others(v)
        else:
            self._live -= self.problem.nbytes[v]
        if self.listener is not None:
            self.listener.copies_changed(v, -1, int(shared))

    def _free_unless_unpacked(self, v: int) -> None:
        """Free an output of a released op, unless an unpack returned it (B6)."""
        if not self._unpacked[v]:
            self._free(v)

    def _free_compressed(self, v: int) -> None:
        """Free the compressed form of a value, if there is one."""
        compressed_bytes = self._compressed_bytes.pop(v, 0)
        self._live -= compressed_bytes
        if compressed_bytes and self.listener is not None:
            self.listener.compressed_freed(v, compressed_bytes)

    def _leave_to_others(self, v: int) -> None:
        """Mark a value as held by others only (B11)."""
        self._held_by_others[v] = True
        self._freed_by_others.setdefault(self.problem.natural_last_unpack[v], []).append(v)

    def _update_peak_since_fetch(self, live: int) -> None:
        other_bytes = self.problem.trace.unpacks[self._unpack].other_bytes
        self._peak_since_fetch = max(self._peak_since_fetch, live + other_bytes)

    def _record_peak_values(self, more_bytes: int = 0) -> None:
        """Update `peak_values` if, with `more_bytes`, more bytes are live than before."""
        if self.record_peak_values and self._live + more_bytes > self._recorded_peak_bytes:
            self._recorded_peak_bytes = self._live + more_bytes
            self.peak_values = [
                v
                for v in range(self.problem.n_values)
                if self._resident[v] or self._held_by_others[v] or self._prefetch_queue.is_started(v)
            ]
