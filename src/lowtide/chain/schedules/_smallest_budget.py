"""The smallest budget in which a chain of unequal states can be reversed.

A dynamic programme over segments, like that of `heterogeneous`, which minimises the peak bytes instead of
the cost. It needs no grid, so it is exact: the result is the minimum over memory-persistent schedules.
Time O(n²) in vector operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Chain:
    """Bytes of the states and tapes of a chain, and of the work space of its steps."""

    states: npt.NDArray[np.int64]
    tapes: npt.NDArray[np.int64]
    work: npt.NDArray[np.int64]
    can_store_tapes: bool
    """False if a tape exists only while its step is reversed."""

    def bytes_of(self, step: int, content: str) -> int:
        """Return the bytes of the state x_step or of the tape of `step`."""
        return int((self.states if content == "state" else self.tapes)[step])


def smallest_budget(chain: Chain) -> tuple[int, npt.NDArray[np.int32]]:
    """Return the smallest peak bytes, and [start, stop]: the distance to the next checkpoint, 0 for a tape."""
    n = len(chain.work)
    peaks = np.zeros((n + 1, n + 1), dtype=np.int64)
    choices = np.zeros((n + 1, n + 1), dtype=np.int32)
    for start in range(n - 1, -1, -1):
        taped = int(chain.work[start] + chain.tapes[start])
        peaks[start, start + 1] = taped
        state = chain.states[start]
        work = np.maximum.accumulate(chain.work[start:])
        for stop in range(start + 2, n + 1):
            # Peak while x_start is stored: the advance to the next checkpoint, or the segment after it.
            right = np.maximum(peaks[start + 1 : stop, stop], work[: stop - start - 1]) + state
            sides = np.maximum(right, peaks[start, start + 1 : stop])
            k = int(sides.argmin())
            best = int(sides[k])
            choices[start, stop] = k + 1
            if chain.can_store_tapes:
                after = max(taped, int(chain.tapes[start] + peaks[start + 1, stop]))
                if after <= best:
                    best, choices[start, stop] = after, 0
            peaks[start, stop] = best
    return int(peaks[0, n]), choices


def sums_in_use(chain: Chain, choices: npt.NDArray[np.int32]) -> list[int]:
    """Return all sums of stored bytes that occur in the schedule of `choices`."""
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
