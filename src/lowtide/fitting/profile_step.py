"""Profile one training step of a model, forward and backward, without training it.

Afterwards the model, its buffers, its gradients and all random generators are restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .._errors import ArgumentError, BudgetError
from ..engine.memory.ledger import Ledger
from ..engine.runtime import current_runtime
from ..engine.scopes.recording_scope import RecordingScope, make_recorder
from ..engine.strategies.online import WithinBudget
from ..planning.scaling import SizedTrace
from ..records import Trace
from ..torch_compat import run_backward, tree_leaves
from .fitted_model import device_of, profile_strategy
from .make_plan import shift
from .signature import sizes_of
from .sized_steps import UNLIMITED, StepMaker

Loss = Callable[[Any], torch.Tensor]


def step_maker(model: nn.Module, batch: Callable[[int], Any], loss: Loss | None, verify: bool) -> StepMaker:
    """Return what `SizedSteps` needs to know about the steps of a model."""

    def profile_size(size: int, limit_bytes: int) -> SizedTrace:
        return profile_for(limit_bytes, model, batch(size), loss=loss, verify=verify)

    def profile_size_within(size: int, limit_bytes: int) -> SizedTrace:
        return sized_profile(model, batch(size), loss=loss, limit_bytes=limit_bytes, verify=verify)

    return StepMaker(batch, profile_size, profile_size_within)


def profile_for(
    limit_bytes: int, model: nn.Module, batch: Any, *, loss: Loss | None = None, verify: bool
) -> SizedTrace:
    """Return the profile of a step within `limit_bytes` if possible, else of a step without a limit."""
    with contextlib.suppress(BudgetError):
        return sized_profile(model, batch, loss=loss, limit_bytes=limit_bytes, verify=verify)
    # The step does not fit even with repeated recomputation. A trace is still needed to find the smallest budget. The
    # error is cleared at this point, so its frames no longer hold tensors.
    return sized_profile(model, batch, loss=loss, verify=verify)


def profile(
    model: nn.Module, batch: Any, *, loss: Loss | None = None, limit_bytes: int = UNLIMITED, verify: bool = False
) -> Trace:
    """Return the trace of one training step under the online budget. Restore the model and the random generators."""
    return sized_profile(model, batch, loss=loss, limit_bytes=limit_bytes, verify=verify).trace


def sized_profile(
    model: nn.Module, batch: Any, *, loss: Loss | None = None, limit_bytes: int = UNLIMITED, verify: bool = False
) -> SizedTrace:
    """Return the same as `profile`, with the dimensions of the batch and the bytes alive before the step.

    The batch is not among these bytes, because it grows with its dimensions.
    """
    runtime = current_runtime()
    if runtime.current_recorder() is not None:
        raise ArgumentError("a step cannot be profiled inside a lowtide scope: call plan or frontier before the scope")
    device = device_of(model)
    memory = runtime.memory(device)
    with torch.enable_grad(), _restored_afterwards(model) as spare:
        memory.recount(always=True)  # a profile is rare, and worth an exact count
        memory.ledger.count_module(model)
        memory.ledger.count_all(tree_leaves(batch))
        memory.ledger.count_all(spare)
        spare_bytes = sum(t.untyped_storage().nbytes() for t in spare)
        of_batch = Ledger(device)
        of_batch.count_all(tree_leaves(batch))
        bytes_before = memory.ledger.live_bytes - spare_bytes - of_batch.live_bytes
        limit = min(UNLIMITED, limit_bytes + spare_bytes)
        strategy = profile_strategy(memory, limit, None, None)
        memory_budget = strategy.memory_budget
        recorder = make_recorder(strategy, WithinBudget(limit), memory_budget=memory_budget, verify=verify)
        scope = RecordingScope(runtime, recorder)
        scope.open()
        try:
            value = _loss_of(_call(model, batch), loss)
        finally:
            scope.close()
        strategy.backward_begins()
        run_backward(value)
        strategy.backward_ended()
        del value
        return SizedTrace(sizes_of(batch), shift(strategy.trace(device.type), -spare_bytes), bytes_before)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def _loss_of(output: Any, loss: Loss | None) -> torch.Tensor:
    value = loss(output) if loss is not None else getattr(output, "loss", None)
    if value is None and isinstance(output, Mapping):
        value = output.get("loss")
    if value is None and isinstance(output, torch.Tensor) and output.numel() == 1:
        value = output
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        problem = "loss(output) is not" if loss is not None else "the output has no .loss and is not"
        raise ArgumentError(
            f"{problem} a scalar that requires grad: pass loss=, a function from the model's output to a scalar, "
            "such as loss=lambda out: torch.nn.functional.cross_entropy(out, labels)"
        )
    return value


@contextlib.contextmanager
def _restored_afterwards(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Restore the model and the random generators afterwards. Yield the tensors that are held for this."""
    modes = {module: module.training for module in model.modules()}
    gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    with generators_restored():
        model.train()
        for p, _ in gradients:
            p.grad = None
        try:
            yield [*(g for _, g in gradients), *(copy for _, copy in buffers)]
        finally:
            for p in model.parameters():
                p.grad = None
            for p, gradient in gradients:
                p.grad = gradient
            with torch.no_grad():
                for buffer, copy in buffers:
                    if buffer.shape == copy.shape:
                        buffer.copy_(copy)
            for module, training in modes.items():
                module.training = training


@contextlib.contextmanager
def generators_restored() -> Iterator[None]:
    """Restore all random generators afterwards."""
    devices = list(range(torch.accelerator.device_count())) if torch.accelerator.is_available() else []
    device_type = torch.accelerator.current_accelerator().type if devices else "cuda"  # type: ignore[union-attr]
    with torch.random.fork_rng(devices, device_type=device_type):
        yield
