"""`lowtide.checkpoint`: a drop-in replacement for `torch.utils.checkpoint.checkpoint`.

Values that are produced inside the function are recomputed in backward; tensors from outside are kept. Backward replays
kernels only. The function runs once, so its side effects happen once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from ..._errors import ArgumentError
from ...policies import ByCallable, Decision, KeepNone, OpInfo, Policy
from .saving import saving

R = TypeVar("R")
_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def checkpoint(
    function: Callable[..., R],
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    determinism_check: str | Callable[..., Any] = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> R:
    """Return `function(*args, **kwargs)`. Its values are recomputed in backward instead of kept.

    `context_fn`: as in `torch.utils.checkpoint`. The first context is entered around the call. A context from
    `create_selective_checkpoint_contexts` decides which values are kept. The other keywords are accepted for
    compatibility and have no effect: only the needed kernels are replayed (`use_reentrant`, `early_stop`), random
    numbers are always reproduced (`preserve_rng_state`), and layouts are always checked (`determinism_check`, `debug`).

    Inputs and outputs may be any objects. Gradients reach inputs, parameters and tensors captured by closure.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    policy, around = _from_context_fn(context_fn)
    with saving(policy), around:
        return function(*args, **kwargs)


def checkpoint_sequential(
    functions: torch.nn.Sequential | Iterable[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run `functions` one after another in `segments` parts. Only the tensors between the parts are kept.

    Like `torch.utils.checkpoint.checkpoint_sequential`, except that the last part is recomputed too. This costs its
    kernels and often lowers the peak.
    """
    stages: Sequence[Callable[..., Any]] = list(
        functions.children() if isinstance(functions, torch.nn.Sequential) else functions
    )
    if not 1 <= segments <= max(len(stages), 1):
        raise ArgumentError(
            f"checkpoint_sequential: segments must be between 1 and the number of functions ({len(stages)}), "
            f"not {segments}"
        )

    def run(part: Sequence[Callable[..., Any]], x: Any) -> Any:
        for stage in part:
            x = stage(x)
        return x

    length = len(stages) // segments
    for k in range(segments):
        part = stages[k * length : (k + 1) * length if k < segments - 1 else None]
        input = checkpoint(run, part, input, **kwargs)
    return input


def _from_context_fn(
    context_fn: Callable[[], tuple[Any, Any]] | None,
) -> tuple[Policy, contextlib.AbstractContextManager[Any]]:
    if context_fn is None:
        return KeepNone(), contextlib.nullcontext()
    forward, _recompute = context_fn()
    sac = getattr(forward, "policy_fn", None)
    if sac is None:
        return KeepNone(), forward

    def decide(op: OpInfo) -> Decision:
        decision = sac(SelectiveCheckpointContext(is_recompute=False), op.func, *op.args, **op.kwargs)
        return Decision.KEEP if decision in _SAVED or decision is True else Decision.RECOMPUTE

    return ByCallable(decide), contextlib.nullcontext()
