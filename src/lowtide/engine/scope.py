"""Scopes: where recording begins and ends, and how scopes nest.

The outermost scope of a thread owns the recorder and the hooks; a scope inside it only changes the policy
for a while, so that values are noted once, whoever asked. With grad disabled a scope does nothing at all.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from .._errors import ArgumentError, LowtideWarning
from ..policies import Decision, OpInfo, Policy, as_policy
from ..reporting.scope_report import ScopeReport
from . import modules
from .recorder import Recorder
from .replay import Handle
from .tape import Tape
from .torch_private import graph_task, innermost_mode, leave_hooks, leave_mode, step_aside
from .values import Kept, Tensor
from .watching import yield_to_formula

_recorders: dict[int, Recorder] = {}
_last: list[Tape] = []


def _unpack(handle: Handle | Kept) -> Tensor:
    mode: Any = innermost_mode() if graph_task() != -1 else None
    watches = getattr(mode, "watches_backward", None)
    if watches is None:  # none of ours
        return handle.unpack()
    if not watches:
        step_aside()
        return handle.unpack()
    tensor = handle.unpack()
    yield_to_formula(mode.room, tensor)
    return tensor


def current_recorder() -> Recorder | None:
    """The recorder of the scope that is open in this thread."""
    return _recorders.get(threading.get_ident())


class saving:  # noqa: N801  (used like a function: `with saving(policy):`)
    """Decide by `policy` what becomes of the values that autograd saves in this block.

    Backward may run inside the block or after it. Loss, gradients and buffers are bit-equal to those
    without it. Blocks nest: the inner policy decides inside the inner block. With `verify=True` every op
    that would be replayed is replayed once at once and compared bit for bit; what does not reproduce is
    kept and named in `lowtide.report()`.

    >>> import torch, lowtide
    >>> x = torch.ones(3, requires_grad=True)
    >>> with lowtide.saving(lowtide.KeepNone()):
    ...     y = x.sin().exp().sum()
    >>> y.backward()
    """

    def __init__(self, policy: Policy | Callable[[OpInfo], Decision], *, verify: bool = False) -> None:
        self.policy = as_policy(policy)
        self.verify = verify
        self._recorder: Recorder | None = None
        self._outer: Policy | None = None
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def __enter__(self) -> saving:
        if self._recorder is not None:
            raise ArgumentError("this scope is open already: make a new lowtide.saving(...) for each block")
        if not torch.is_grad_enabled():
            return self
        thread = threading.get_ident()
        recorder = _recorders.get(thread)
        if recorder is not None and self._nests:
            self._recorder, self._outer = recorder, recorder.policy
            recorder.use(self.policy)
            return self
        recorder = self._open()
        hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, _unpack)
        hooks.__enter__()
        try:
            recorder.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            hooks.__exit__()
            raise
        modules.track(recorder.where)
        _recorders[thread] = recorder
        _last[:] = [recorder.tape]
        self._recorder, self._hooks = recorder, hooks
        return self

    _nests = True
    """Inside another scope, whether this one only changes its policy."""

    def _open(self) -> Recorder:
        """The recorder of an outermost scope."""
        tape = Tape(repr(self.policy))
        return Recorder(self.policy, tape, modules.Whereabouts(self.policy, tape), self.verify)

    def _closed(self, recorder: Recorder) -> None:
        """Called when an outermost scope has ended."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        if self._outer is not None:
            recorder.use(self._outer)
            self._outer = None
            return
        assert self._hooks is not None
        _recorders.pop(threading.get_ident(), None)
        modules.untrack()
        leave_mode(recorder)
        leave_hooks(recorder.pack)
        self._hooks = None
        recorder.table.clear()
        recorder.tape.layers = recorder.where.layers_entered
        self._closed(recorder)
        if kind is None and self.policy.needs_layers and not recorder.where.layers_entered:
            warnings.warn(
                f"{self.policy!r} met no layers in this scope, so it had nothing to go by. Call the whole model "
                "inside the scope, or name the layers: layers=[block, ...]. (Layers compiled one by one are not "
                "seen; a compiled region is recomputed or kept as a whole.)",
                LowtideWarning,
                stacklevel=2,
            )


def last_tape() -> Tape | None:
    """The tape of the scope that was opened last, in any thread."""
    return _last[0] if _last else None


def report() -> ScopeReport:
    """What happened in the scope that was opened last, up to now: recomputes are counted as backward runs.

    Raises `ArgumentError` if no scope has recorded anything yet.
    """
    tape = last_tape()
    if tape is None:
        raise ArgumentError("there is nothing to report yet: run a forward pass in lowtide.saving(policy) first")
    return tape.report()
