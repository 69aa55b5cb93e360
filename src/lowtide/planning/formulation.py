"""The mixed integer programme of the planner: which values to hold, recompute, offload or compress."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import Problem
from .rows import Floats, Rows, Terms, sum_terms


class Formulation:
    """Variables and rows of one problem, for plans that replay every op at most once.

    An op i or j, a value v, and an unpack k are indices. "Stored" means offloaded or compressed. All variables are
    between 0 and 1:

    V1. `held[j]`, binary: the saved outputs of j are held in memory until backward.
    V2. `replayed[j]`: j is replayed in backward. 0 for pinned ops.
    V3. `stored[j]`, binary: the outputs of j are stored. Only for ops whose outputs can be stored.
    V4. `held_output[v]`: v is held too. Only for unsaved outputs of ops with several outputs. A lone output is held
        if `held[j]`.
    V5. `early[j, k]`: j has been replayed by unpack k, and none of its outputs has been unpacked by k. Far from k, one
        variable for all ops with the same label.
    V6. `fetched[v, k]`: v is stored and has been fetched or decompressed by unpack k for a replay, and v itself has
        not been unpacked by k.
    V7. `write_wait`, `read_wait`: waiting time in forward and backward, as a share of all write and read time.

    Only V1 and V3 are binary. If they are integral, the smallest feasible values of V2 and V4 to V6 are integral too.
    Minimize Σ replay time · V2 + Σ round trip time · V3 + waiting time (V7), subject to these rows:

    R1. j makes a saved value: `held[j] + stored[j] + replayed[j] ≥ 1`
    R2. j overwrites a value that i makes: `held[i] + replayed[j] ≤ 1`; a source: `replayed[j] ≤ 0`
    R3. j reads a value that i makes: `held[i] + stored[i] + replayed[i] ≥ replayed[j]`
    R4. j reads v, an output of i with a V4: `held_output[v] ≥ held[i] + replayed[j] - 1`
    R5. Live bytes at one event ≤ budget (`byte_rows`). The rows at unpack k use V5 and V6, and `done(j, k)`:
        `replayed[j]` if an output of j has been unpacked by k, otherwise `early[j, k]`.
    R6. j reads a value that i makes: `early[i, k] ≥ done(j, k) - held[i] - stored[i]`
    R7. j reads v, an output of i: `fetched[v, k] ≥ done(j, k) + stored[i] - 1`
    R8. Writes run beside forward, prefetches beside backward and replays; the rest is waited for:
        `Σ write time · stored ≤ forward time + write wait`,
        `Σ read time · stored ≤ backward time + Σ replay time · replayed + read wait`

    The variables of ops with equal labels in `ties` are shared, so that a model of repeated blocks stays small.
    """

    def __init__(self, problem: Problem, ties: Sequence[int] | None = None) -> None:
        self.problem = problem
        n = problem.n_ops
        self.replayed_by = _replayed_by(problem)
        """By op: the unpack by which it has been replayed, if it is. `n_unpacks + 1`: no saved value depends on it."""
        self.relevant = [k <= problem.n_unpacks for k in self.replayed_by]
        """By op: whether a saved value depends on it. Other ops have no variables."""
        self.last_needed = self._last_needed()
        """By value: the last unpack at which its handle or a replay may need it."""
        labels = list(range(n)) if ties is None else list(ties)
        groups: dict[int, int] = {}
        self._group = [groups.setdefault(labels[j], len(groups)) if self.relevant[j] else -1 for j in range(n)]
        self.n_groups = len(groups)
        storable = sorted({self._group[j] for j in range(n) if self.relevant[j] and problem.offloadable[j]})
        self._stored = {group: 2 * self.n_groups + i for i, group in enumerate(storable)}
        self._first_v4 = 2 * self.n_groups + len(storable)
        self.n_variables = self._first_v4
        """Number of V1 to V4."""
        self.binary = [*range(self.n_groups), *self._stored.values()]
        self.held_variable = self._held_variables()
        """By value: its V4, or the V1 of its op. -1 if no plan holds it."""
        self.byte_unit = max(1.0, float(max(problem.nbytes, default=1)) / 1000.0)
        self.time_unit = max(sum(problem.time_s) / 1000.0, 1e-12)

    # Variables

    def held(self, op: int) -> int:
        """Return the number of V1 for `op`."""
        return self._group[op]

    def replayed(self, op: int) -> int:
        """Return the number of V2 for `op`."""
        return self.n_groups + self._group[op]

    def stored(self, op: int) -> int:
        """Return the number of V3 for `op`, whose outputs must be storable."""
        return self._stored[self._group[op]]

    def held_or_stored(self, op: int) -> Terms:
        """Return the terms V1 + V3 for `op`."""
        return {self.held(op): 1.0, **({self.stored(op): 1.0} if self.problem.offloadable[op] else {})}

    def _held_variables(self) -> list[int]:
        problem = self.problem
        variables = [-1] * problem.n_values
        v4: dict[tuple[int, int], int] = {}
        for j in range(problem.n_ops):
            if not self.relevant[j]:
                continue
            for position, v in enumerate(problem.outputs[j]):
                if problem.saved[v] or len(problem.outputs[j]) == 1:
                    variables[v] = self.held(j)
                elif any(self.relevant[w] and not problem.pinned[w] for w in problem.consumers[v]):
                    key = (self._group[j], position)
                    if key not in v4:
                        v4[key] = self.n_variables
                        self.n_variables += 1
                    variables[v] = v4[key]
        return variables

    def upper_limits(self) -> Floats:
        """Return the upper limits of V1 to V4."""
        upper = np.ones(self.n_variables)
        for j in range(self.problem.n_ops):
            if self.relevant[j] and self.problem.pinned[j]:
                upper[self.replayed(j)] = 0.0
        return upper

    # Cost

    def cost(self) -> Floats:
        """Return the least time of replays and round trips by variable (V1 to V4), in units of `time_unit`."""
        problem = self.problem
        cost = np.zeros(self.n_variables)
        for j in range(problem.n_ops):
            if self.relevant[j]:
                cost[self.replayed(j)] += problem.replay_s[j] / self.time_unit
                if problem.offloadable[j]:
                    cost[self.stored(j)] += self.round_trip_s(j) / self.time_unit
        return cost

    def round_trip_s(self, op: int) -> float:
        """Return the least time to offload and fetch the outputs of `op`, or to compress and decompress them."""
        problem, link = self.problem, self.problem.link
        if problem.uses_codec[op]:
            unpacked = [v for v in problem.offloaded_outputs(op) if problem.saved[v] and problem.last_unpack[v] >= 0]
            trips_s = [
                codec_cost.compression_s(problem.nbytes[v]) + codec_cost.decompression_s(problem.nbytes[v])
                for v in unpacked or problem.offloaded_outputs(op)
                if (codec_cost := problem.codec_cost[v]) is not None
            ]
            return sum(trips_s) if unpacked else min(trips_s)
        assert link is not None
        nbytes = self._transferred_bytes(op)
        return link.put_slowdown_s(nbytes) + min(link.blocking_fetch_s(nbytes), link.prefetch_slowdown_s(nbytes))

    def _transferred_bytes(self, op: int) -> int:
        """Return the least bytes that offloading `op` transfers: unpacked values, or one value if none is unpacked."""
        problem = self.problem
        unpacked = [problem.nbytes[v] for v in problem.outputs[op] if problem.saved[v] and problem.last_unpack[v] >= 0]
        return sum(unpacked) or min(problem.nbytes[v] for v in problem.outputs[op])

    # Rows

    def add_structure(self, rows: Rows, *, unpacked_only: bool = False) -> None:
        """Add rows R1 to R4. With `unpacked_only`, for lower bounds, R1 omits values that are never unpacked."""
        problem = self.problem
        for j in range(problem.n_ops):
            if not self.relevant[j]:
                continue
            if any(problem.saved[v] and (problem.last_unpack[v] >= 0 or not unpacked_only) for v in problem.outputs[j]):
                rows.add(self.held_or_stored(j) | {self.replayed(j): 1.0}, 1.0, np.inf)  # R1
            if not problem.pinned[j]:
                self._add_replay_rows(rows, j)

    def _add_replay_rows(self, rows: Rows, j: int) -> None:
        """Add rows R2 to R4 for a replay of `j`."""
        problem, replayed = self.problem, self.replayed(j)
        for i in problem.overwritten_producers[j]:
            if i < 0:
                rows.add({replayed: 1.0}, -np.inf, 0.0)  # R2
            else:
                rows.add({self.held(i): 1.0, replayed: 1.0}, -np.inf, 1.0)  # R2
        for v in problem.inputs[j]:
            i = problem.producer[v]
            if self.held(i) != self.held(j):
                rows.add(self.held_or_stored(i) | {self.replayed(i): 1.0, replayed: -1.0}, 0.0, np.inf)  # R3
            held = self.held_variable[v]
            if held >= self._first_v4:
                rows.add(sum_terms([(held, 1.0), (self.held(i), -1.0), (replayed, -1.0)]), -1.0, np.inf)  # R4

    def add_wait_rows(self, rows: Rows) -> list[tuple[int, float]]:
        """Add rows R8. Return each V7 with the seconds that it stands for.

        These rows are not valid in lower bounds: they assume that all offloaded values are prefetched if that pays.
        """
        problem, link = self.problem, self.problem.link
        if link is None or not self._stored:
            return []
        relevant = [j for j in range(problem.n_ops) if self.relevant[j]]
        nbytes = {
            j: self._transferred_bytes(j) for j in relevant if problem.offloadable[j] and not problem.uses_codec[j]
        }
        write_s = {j: link.write_s(size) for j, size in nbytes.items()}
        read_s = {j: link.prefetch_read_s(size) for j, size in nbytes.items() if link.prefetch_pays(size)}
        forward_s, backward_s = sum(problem.time_s), sum(unpack.time_s for unpack in problem.trace.unpacks)
        replay_s = {self.replayed(j): 0.0 for j in relevant}
        for j in relevant:
            replay_s[self.replayed(j)] -= problem.replay_s[j]
        waits = []
        for transfer_s, beside_s, hidden_s in ((write_s, forward_s, {}), (read_s, backward_s, replay_s)):
            total_s = sum(transfer_s.values())
            if not total_s:
                continue
            wait = rows.new_variable()
            waits.append((wait, total_s))
            terms = [*((self.stored(j), seconds) for j, seconds in transfer_s.items()), *hidden_s.items()]
            shares = [(variable, seconds / total_s) for variable, seconds in terms]
            rows.add(sum_terms([*shares, (wait, -1.0)]), -np.inf, beside_s / total_s)
        return waits

    def _last_needed(self) -> list[int]:
        problem = self.problem
        last = []
        for v in range(problem.n_values):
            ends = [problem.handle_end[v]] if problem.saved[v] else [-1]
            ends += [self.replayed_by[w] for w in problem.consumers[v] if self.relevant[w]]
            last.append(max(ends))
        return last


def _replayed_by(problem: Problem) -> list[int]:
    """Return `Formulation.replayed_by`.

    An op with saved outputs is replayed at their first unpack at the latest, any other op for the last of its readers.
    """
    never = problem.n_unpacks + 1
    by = [never] * problem.n_ops
    for j in range(problem.n_ops - 1, -1, -1):
        unpacked = [problem.first_unpack[v] for v in problem.outputs[j] if problem.saved[v]]
        if unpacked:
            by[j] = min(unpacked)
        else:
            readers = [by[w] for v in problem.outputs[j] for w in problem.consumers[v] if not problem.pinned[w]]
            by[j] = max((reader for reader in readers if reader < never), default=never)
    return by
