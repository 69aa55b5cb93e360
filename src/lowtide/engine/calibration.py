"""What recording and replaying cost on this machine beside the kernels: part of what a plan predicts.

Between two ops of a model a kernel has gone through megabytes, and with them went what the recorder had in the
processor's caches. So nearly everything is timed after such a walk (`coldness`): it then costs two or three times what
it does in a loop of small ops. What is compared is timed in turn, row by row, so that whatever else the machine does
falls on both. It can only make times longer, and sometimes does so for a whole second: so of all times the lower
quartile counts, and some more are taken at other moments of the process, a few times.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ..policies import KeepNone
from .coldness import BETWEEN_OPS, BETWEEN_REPLAYS, Walk
from .modules import Whereabouts
from .recorder import Recorder
from .replay import Handle
from .tape import Tape
from .values import Kept, Tensor

_ROUNDS, _IN_A_ROW = 3, 7
_MOMENTS = 3
"""At how many moments times are taken, at the most."""
_READ_BYTES = 2**22
Action = Callable[[], object]
Around = contextlib.AbstractContextManager[object]


class Calibration(NamedTuple):
    """Seconds."""

    op_s: float
    """To note an op that makes a value."""
    see_s: float
    """To see an op of which nothing is noted."""
    view_s: float
    """To see one that comes right after another was seen, as views do."""
    save_s: float
    """To hold a kept value in autograd's place, in forward, and to hand it over, in backward."""
    call_s: float
    """To see a module's call begin and end."""
    replay_s: float
    """To replay an op, without its kernel."""
    cold_s_per_byte: float
    """What a kernel takes more to read what is not in the caches."""


class _Times:
    """What something takes without what is to be measured, and with it."""

    def __init__(self) -> None:
        self.without: list[float] = []
        self.with_it: list[float] = []

    @property
    def more_s(self) -> float:
        """How much longer it takes with it."""
        return max(0.0, _undisturbed_s(self.with_it) - _undisturbed_s(self.without))


def _undisturbed_s(took: list[float]) -> float:
    """The lower quartile."""
    return sorted(took)[len(took) // 4] if took else 0.0


_times: defaultdict[str, _Times] = defaultdict(_Times)
_moments = 0


def calibration() -> Calibration:
    """What small ops take with a recorder, over what they take without one, by all that was measured so far."""
    if not _moments:
        measure_again()
    return Calibration(
        op_s=_times["op"].more_s,
        see_s=_times["see"].more_s,
        view_s=_times["view"].more_s,
        save_s=_times["save"].more_s + _times["hand over"].more_s,
        call_s=_times["call"].more_s,
        replay_s=_times["replay"].more_s,
        cold_s_per_byte=_times["read"].more_s / _READ_BYTES,
    )


def measure_again() -> None:
    """Take some more times, at this moment; unless that was done often enough."""
    global _moments
    if _moments == _MOMENTS:
        return
    _moments += 1
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.enable_grad():
            _measure()
    finally:
        if collects:
            gc.enable()


def _measure() -> None:
    x = torch.ones(8, 8, requires_grad=True)
    sin, turn = partial(torch.sin, x), partial(x.transpose, 0, 1)
    recorder = _new_recorder()
    saved: list[Handle | Kept] = []
    long_walk = Walk(BETWEEN_REPLAYS)
    walk = partial(long_walk, BETWEEN_OPS)
    _in_turn("op", sin, sin, walk, around=lambda: recorder)
    _in_turn("see", turn, turn, walk, around=lambda: recorder)
    _in_turn("view", turn, turn, None, around=lambda: recorder)
    _in_turn("save", sin, sin, walk, around=partial(_hooks, recorder, saved))
    there = iter(list(saved))
    _in_turn("hand over", None, lambda: next(there).unpack(), walk)
    _in_turn("call", partial(nn.Identity(), x), partial(_watched_module(recorder.where), x), walk)
    _in_turn("replay", sin, _one_after_the_other(), long_walk)
    _read(long_walk)


def _in_turn(
    what: str,
    plain: Action | None,
    ours: Action,
    walk: Action | None,
    around: Callable[[], Around] = contextlib.nullcontext,
) -> None:
    """Time one with the other, of which `around` is what makes the difference."""
    times = _times[what]
    for _ in range(_ROUNDS):
        if plain is not None:
            times.without += _row_s(plain, walk)
        with around():
            times.with_it += _row_s(ours, walk)


def _row_s(action: Action, walk: Action | None) -> list[float]:
    """What each of some in a row takes, but for the first, which finds nothing in the caches from the one before."""
    took: list[float] = []
    for _ in range(_IN_A_ROW):
        if walk is not None:
            walk()
        start = time.perf_counter()
        made = action()
        took.append(time.perf_counter() - start)
        del made  # not while the clock runs
    return took[1:]


def _read(walk: Action) -> None:
    """Read what was made just now, and what was made long ago.

    Not tensors: these would count against the budget of a model that is there.
    """
    times = _times["read"]
    x = np.ones(_READ_BYTES // 4, dtype=np.float32)
    for _ in range(_ROUNDS * _IN_A_ROW):
        made = np.negative(x)
        for moves, took in ((False, times.without), (True, times.with_it)):
            if moves:
                walk()
            start = time.perf_counter()
            out = np.negative(made)
            took.append(time.perf_counter() - start)
            del out


def _new_recorder() -> Recorder:
    policy = KeepNone()
    tape = Tape(repr(policy))
    return Recorder(policy, tape, Whereabouts(policy, tape), verify=False)


def _hooks(recorder: Recorder, saved: list[Handle | Kept]) -> Around:
    """Autograd's handles come to the list."""

    def pack(tensor: Tensor) -> Handle | Kept:
        saved.append(recorder.pack(tensor))
        return saved[-1]

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle.unpack())


def _watched_module(where: Whereabouts) -> nn.Module:
    """One whose calls are seen, by hooks of its own: those for all modules belong to open scopes."""
    module = nn.Identity()
    module.register_forward_pre_hook(lambda module, args: where.enter(module))
    module.register_forward_hook(lambda module, args, output: where.leave(), always_call=True)
    return module


def _one_after_the_other() -> Action:
    """Has the next value made again, in the order of forward, so that each takes the replay of one op."""
    recorder = _new_recorder()
    saved: list[Handle | Kept] = []
    y = torch.ones(8, 8, requires_grad=True)
    with _hooks(recorder, saved), recorder:
        for _ in range(_ROUNDS * _IN_A_ROW + 1):
            y = torch.sin(y)

    def handles() -> Iterator[Tensor]:
        for handle in saved[1:]:  # the first is on a source
            yield handle.unpack()

    return partial(next, handles())
