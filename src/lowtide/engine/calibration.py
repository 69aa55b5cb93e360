"""What recording and replaying cost on this machine beside the kernels, measured once: part of what a plan predicts.

Between two ops of a model a kernel has gone through megabytes, and with them went what the recorder had in the
processor's caches. So everything is timed after such a walk (`coldness`): it then costs two or three times what it does
in a loop of small ops. What is compared is timed in turn, row by row, so that whatever else the machine does falls on
both.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from ..policies import KeepNone
from .coldness import BETWEEN_OPS, BETWEEN_REPLAYS, Walk
from .modules import Whereabouts
from .recorder import Recorder
from .replay import Handle
from .tape import Tape
from .values import Kept, Tensor

_ROUNDS, _IN_A_ROW = 5, 7
_READ_BYTES = 2**22
Action = Callable[[], object]
Around = contextlib.AbstractContextManager[object]


class Calibration(NamedTuple):
    """Seconds."""

    op_s: float
    """To note an op that makes a value."""
    view_s: float
    """To see an op that makes none."""
    save_s: float
    """To hold a kept value in autograd's place, in forward, and to hand it over, in backward."""
    call_s: float
    """To see a module's call begin and end."""
    replay_s: float
    """To replay an op, without its kernel."""
    cold_s_per_byte: float
    """What a kernel takes more to read what is not in the caches."""


@lru_cache(maxsize=1)
def calibration() -> Calibration:
    """What small ops take with a recorder, over what they take without one."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.enable_grad():
            return _measured()
    finally:
        if collects:
            gc.enable()


def _measured() -> Calibration:
    x = torch.ones(8, 8, requires_grad=True)
    sin, turn = partial(torch.sin, x), partial(x.transpose, 0, 1)
    recorder = _new_recorder()
    saved: list[Handle | Kept] = []
    hooks = partial(_hooks, recorder, saved)
    save_s = _more_s(sin, sin, hooks)
    there = iter(list(saved))
    return Calibration(
        op_s=_more_s(sin, sin, lambda: recorder),
        view_s=_more_s(turn, turn, lambda: recorder),
        save_s=save_s + _usual_s(lambda: next(there).unpack()),
        call_s=_more_s(partial(nn.Identity(), x), partial(_watched_module(recorder.where), x)),
        replay_s=_more_s(sin, _one_after_the_other(), moved_bytes=BETWEEN_REPLAYS),
        cold_s_per_byte=_cold_s_per_byte(),
    )


def _more_s(
    plain: Action,
    ours: Action,
    around: Callable[[], Around] = contextlib.nullcontext,
    moved_bytes: int = BETWEEN_OPS,
) -> float:
    """How much longer one takes than the other, of which `around` is what makes it so."""
    walk = Walk(moved_bytes)
    without: list[float] = []
    with_it: list[float] = []
    for _ in range(_ROUNDS):
        without += _row_s(plain, walk)
        with around():
            with_it += _row_s(ours, walk)
    return max(0.0, median(with_it) - median(without))


def _usual_s(action: Action) -> float:
    walk = Walk()
    return median([took_s for _ in range(_ROUNDS) for took_s in _row_s(action, walk)])


def _row_s(action: Action, walk: Walk) -> list[float]:
    """What each of some in a row takes, but for the first, which finds nothing in the caches from the one before."""
    took: list[float] = []
    for _ in range(_IN_A_ROW):
        walk()
        start = time.perf_counter()
        made = action()
        took.append(time.perf_counter() - start)
        del made  # not while the clock runs
    return took[1:]


def _cold_s_per_byte() -> float:
    """What it takes more to read what was made long ago than what was made just now."""
    walk = Walk(BETWEEN_REPLAYS)
    x = torch.ones(_READ_BYTES // 4)
    hot: list[float] = []
    cold: list[float] = []
    for _ in range(_ROUNDS * _IN_A_ROW):
        made = x.neg()
        for moves, took in ((False, hot), (True, cold)):
            if moves:
                walk()
            start = time.perf_counter()
            out = made.neg()
            took.append(time.perf_counter() - start)
            del out
    return max(0.0, median(cold) - median(hot)) / _READ_BYTES


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
