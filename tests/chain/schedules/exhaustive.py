"""The minimal cost of reversing a chain, by a shortest-path search over all execution states.

Independent of `lowtide`: no recursion over segments, no assumption that checkpoints persist. A search node is
(working state, next step to reverse, states in memory, states on disk, tapes in memory), the last three as
bit sets. Freeing costs nothing, so slots are freed only to make space, and values after the next step to
reverse are dropped. Exponential in n.
"""

import heapq
from collections.abc import Iterator

NONE = -1
"""There is no working state."""


def least_cost(
    n,
    memory_slots=None,
    disk_slots=0,
    *,
    write_cost=0,
    read_cost=0,
    tapes=False,
    costs=None,
    sizes=None,
    tape_sizes=None,
    work_sizes=None,
    budget=None,
    persistent=False,
):
    """Return the cost of the cheapest schedule, or None if no schedule fits.

    Memory is limited by a number of slots, or with `sizes` by a budget. `persistent` restricts the search to
    schedules that free a stored state only when its own step is reversed or taped, and run no step before a
    stored state or tape.
    """
    costs = costs or [1] * n
    work = work_sizes or [0] * n
    tape_bytes = tape_sizes or [0 if sizes else 1] * n
    state_bytes = sizes or [1] * (n + 1)
    capacity = budget if sizes else memory_slots

    def used(states, taped):
        return sum(state_bytes[i] for i in _bits(states)) + sum(tape_bytes[i] for i in _bits(taped))

    def freeing_one(states, taped):
        """Yield every way to free one slot in memory."""
        for i in _bits(states):
            yield states & ~(1 << i), taped
        for i in _bits(taped):
            yield states, taped & ~(1 << i)

    # During Reverse from a state, the tape counts in bytes but takes no slot.
    reverse_bytes = [w + (t if sizes else 0) for w, t in zip(work, tape_bytes, strict=True)]

    start = (0, n - 1, 0, 0, 0)
    best = {start: 0}
    queue = [(0, start)]
    while queue:
        cost, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        working, last, memory, disk, taped = state
        if last < 0:
            return cost
        moves = []
        held = used(memory, taped)
        idle = working == NONE or (persistent and (memory >> (working + 1) or taped >> working))
        if not idle:
            if working < last and held + work[working] <= capacity:
                moves.append((costs[working], (working + 1, last, memory, disk, taped)))
            bit = 1 << working
            freed = state_bytes[working] if memory & bit else 0
            if working == last and held - freed + reverse_bytes[last] <= capacity:
                moves.append((costs[last], (NONE, last - 1, memory, disk, taped)))
            if not memory & bit and held + state_bytes[working] <= capacity:
                moves.append((0, (working, last, memory | bit, disk, taped)))
            if not disk & bit and disk_slots:
                choices = [disk] if disk.bit_count() < disk_slots else [disk & ~(1 << i) for i in _bits(disk)]
                moves.extend((write_cost, (working, last, memory, others | bit, taped)) for others in choices)
            if tapes and working < last and not taped & bit:
                if held + tape_bytes[working] + work[working] <= capacity:
                    moves.append((costs[working], (working + 1, last, memory, disk, taped | bit)))
                if held - freed + tape_bytes[working] + work[working] <= capacity:
                    moves.append((costs[working], (working + 1, last, memory & ~bit, disk, taped | bit)))
        if taped >> last & 1:
            moves.append((0, (working, last - 1, memory, disk, taped)))
        moves.extend((0, (i, last, memory, disk, taped)) for i in _bits(memory))
        moves.extend((read_cost, (i, last, memory, disk, taped)) for i in _bits(disk))
        if not persistent:
            moves.extend((0, (working, last, m, disk, t)) for m, t in freeing_one(memory, taped))
        for extra, (w, next_last, m, d, t) in moves:
            useful = (1 << (next_last + 1)) - 1
            after = (w if w <= next_last else NONE, next_last, m & useful, d & useful, t & useful)
            total = cost + extra
            if total < best.get(after, total + 1):
                best[after] = total
                heapq.heappush(queue, (total, after))
    return None


def _bits(mask) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
