"""The least memory in which a chain of unequal states can be reversed at all, at whatever cost.

A programme over segments like that of `heterogeneous`, with the peak in bytes in the place of the cost; it
is exact, because a peak needs no grid. Guarantee: no memory-persistent schedule needs less, and one needs
just this. Time O(n²) in vector operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Chain:
    """The bytes of a chain's states, of its tapes, and of what its steps need while they run."""

    states: npt.NDArray[np.int64]
    tapes: npt.NDArray[np.int64]
    work: npt.NDArray[np.int64]
    tapes_can_wait: bool
    """Whether a tape may be stored, or is only there while its step is reversed."""

    def bytes_of(self, step: int, what: str) -> int:
        """What storing this state or tape takes."""
        return int((self.states if what == "state" else self.tapes)[step])


def smallest_budget(chain: Chain) -> tuple[int, npt.NDArray[np.int32]]:
    """The least peak in bytes, and for [start, stop] the distance to the next checkpoint (0: a tape)."""
    n = len(chain.work)
    peaks = np.zeros((n + 1, n + 1), dtype=np.int64)
    choices = np.zeros((n + 1, n + 1), dtype=np.int32)
    for start in range(n - 1, -1, -1):
        taped = int(chain.work[start] + chain.tapes[start])
        peaks[start, start + 1] = taped
        state = chain.states[start]
        work = np.maximum.accumulate(chain.work[start:])
        for stop in range(start + 2, n + 1):
            # While x_start is stored: the way to the next checkpoint, then all that comes after it.
            right = np.maximum(peaks[start + 1 : stop, stop], work[: stop - start - 1]) + state
            sides = np.maximum(right, peaks[start, start + 1 : stop])
            k = int(sides.argmin())
            best = int(sides[k])
            choices[start, stop] = k + 1
            if chain.tapes_can_wait:
                after = max(taped, int(chain.tapes[start] + peaks[start + 1, stop]))
                if after <= best:
                    best, choices[start, stop] = after, 0
            peaks[start, stop] = best
    return int(peaks[0, n]), choices


def sums_in_use(chain: Chain, choices: npt.NDArray[np.int32]) -> list[int]:
    """The bytes stored at each moment of the schedule that `choices` describes."""
    sums = {0}
    todo = [(0, len(chain.work), 0)]
    while todo:
        start, stop, used = todo.pop()
        if stop - start == 1:
            continue
        k = int(choices[start, stop])
        more = used + chain.bytes_of(start, "state" if k else "tape")
        sums.add(more)
        todo.append((start + max(k, 1), stop, more))
        if k:
            todo.append((start, start + k, used))
    return sorted(sums)
