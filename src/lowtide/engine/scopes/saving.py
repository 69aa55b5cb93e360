"""`saving`: decide by a policy which values are kept.

The outermost scope of a thread owns the recorder. A scope inside it only changes the strategy, so values are recorded
once. With grad disabled a scope does nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType

import torch

from ..._errors import ArgumentError, LowtideWarning
from ...policies import Decision, OpInfo, Policy, as_policy
from ...records.scope_report import ScopeReport
from ..recording.recorder import Recorder
from ..runtime import current_runtime
from ..strategies.base import Strategy
from ..strategies.rule import RuleStrategy
from .recording_scope import RecordingScope, make_recorder


class saving:  # noqa: N801  (used like a function: `with saving(policy):`)
    """Decide by `policy` which values are kept and which are recomputed in this block.

    Backward may run inside the block or after it. Loss, gradients and buffers are bit-equal to those without it.
    Blocks nest: the inner policy decides inside the inner block. With `verify=True` every op that would be replayed
    is replayed once immediately and compared bit for bit. The values of ops that differ are kept, and the ops are
    listed in `lowtide.report()`.

    >>> import torch, lowtide
    >>> x = torch.ones(3, requires_grad=True)
    >>> with lowtide.saving(lowtide.KeepNone()):
    ...     y = x.sin().exp().sum()
    >>> y.backward()
    """

    def __init__(self, policy: Policy | Callable[[OpInfo], Decision], *, verify: bool = False) -> None:
        self.policy = as_policy(policy)
        self.verify = verify
        self._scope: RecordingScope | None = None
        self._nested: tuple[Recorder, Strategy, Strategy] | None = None  # recorder, outer and inner strategy

    def __enter__(self) -> saving:
        if self._scope is not None or self._nested is not None:
            raise ArgumentError("this scope is open already: make a new lowtide.saving(...) for each block")
        if not torch.is_grad_enabled():
            return self
        runtime = current_runtime()
        recorder = runtime.current_recorder()
        if recorder is not None:
            outer = recorder.strategy
            inner = recorder.strategy = outer.nested(self.policy)
            if inner is not outer:
                inner.start(recorder)
            self._nested = recorder, outer, inner
            return self
        recorder = make_recorder(RuleStrategy(self.policy), self.policy, verify=self.verify)
        scope = RecordingScope(runtime, recorder)
        scope.open()
        self._scope = scope
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._nested is not None:
            recorder, outer, inner = self._nested
            self._nested = None
            if recorder.strategy is inner:  # else a planned step has left its plan inside
                recorder.strategy = outer
            return
        scope, self._scope = self._scope, None
        if scope is None:
            return
        scope.close()
        if kind is None and self.policy.needs_layers and not scope.recorder.tracker.layers_entered:
            warnings.warn(
                f"{self.policy!r} found no layers in this scope and had no effect. Call the whole model inside the "
                "scope, or pass the layers: layers=[block, ...]. Layers that are compiled one by one are not found: a "
                "compiled region is recomputed or kept as a whole.",
                LowtideWarning,
                stacklevel=2,
            )


def report() -> ScopeReport:
    """Return the counts of the scope that was opened last. Replays are counted while backward runs.

    Raises `ArgumentError` if no scope has recorded anything yet.
    """
    context = current_runtime().last_context
    if context is None:
        raise ArgumentError("there is nothing to report yet: run a forward pass in lowtide.saving(policy) first")
    return context.report()
