"""What following a plan takes beside its replays, as charges for a planner to weigh.

Steps that were learnt are seen in part only (`attention`): a recorder that has something to note is awake from the last
place where it could wake until it has noted it, and only counts what it need not note. After an op that may write
memory it stays for the next one too. Where something is saved that is not simply kept, all that autograd saves in that
stretch goes through the recorder's hooks; what is only packed then need not be noted.

Left out, as they are rare: what has to be seen whatever is decided (compiled regions, memory that is written unseen),
and stretches in which a recorder cannot wake late because nothing is saved there that is not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from ..trace import Charge
from .calibration import Calibration
from .stretches import Stretches


class Traffic:
    """What went by in each stretch of a step, beside the ops that made something."""

    def __init__(self) -> None:
        self.views: Counter[tuple[int, int]] = Counter()
        """By stretch and the op that came next: ops that made no value."""
        self.restless: set[int] = set()
        """Ops after which a recorder stays awake for the next, as they may have written memory."""
        self.handed_over: Counter[int] = Counter()
        """By stretch: tensors that autograd saved."""
        self.saved: dict[int, dict[int, None]] = {}
        """By stretch: the ops that made what autograd saved."""

    def saves(self, stretch: int, maker: int | None) -> None:
        """Autograd saves what an op has made; None: what came from outside."""
        if maker is not None:
            self.saved.setdefault(stretch, {})[maker] = None


def charges_of(where: Stretches, traffic: Traffic, n_ops: int, costs: Calibration) -> tuple[Charge, ...]:
    """What it takes that parts of a step are seen, where some of their ops are not simply kept."""
    charges: list[Charge] = []
    firsts = [first_op for _, _, first_op in where.begins]
    for stretch, (first, end) in enumerate(zip(firsts, [*firsts[1:], n_ops], strict=True)):
        for start, stop in _parts(where, stretch, first, end):
            later: int | None = None
            for j in range(stop - 1, start - 1, -1):
                seeing_s = costs.see_s + traffic.views[stretch, j] * costs.view_s
                charges.append(Charge(_seen_with(j, start, traffic.restless), seeing_s, later))
                later = len(charges) - 1
    for stretch, makers in traffic.saved.items():
        charges.append(Charge(tuple(sorted(makers)), traffic.handed_over[stretch] * costs.save_s, saving=True))
    return tuple(charges)


def _seen_with(op: int, start: int, restless: set[int]) -> tuple[int, ...]:
    """The op itself, and those before it after which a recorder stays awake for it."""
    first = op
    while first > start and first - 1 in restless:
        first -= 1
    return tuple(range(first, op + 1))


def _parts(where: Stretches, stretch: int, first: int, end: int) -> Iterator[tuple[int, int]]:
    """A stretch cut where a recorder could wake."""
    cuts = [first, *sorted({wait.next_op for wait in where.waits.get(stretch, ()) if first < wait.next_op < end}), end]
    return ((start, stop) for start, stop in pairwise(cuts) if start < stop)
