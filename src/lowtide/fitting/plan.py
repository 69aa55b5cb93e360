"""`plan` and `frontier`: predict the memory and time of training without training.

One step is run and profiled, forward and backward, within the budget. Afterwards the model, its buffers, its gradients
and all random generators are restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._errors import ArgumentError, BudgetError
from .._units import parse_bytes
from ..codecs.costs import codec_costs_for
from ..engine.runtime import current_runtime
from ..engine.scopes.recording_scope import RecordingScope, make_recorder
from ..engine.strategies.online import WithinBudget
from ..planning import BASELINES, CodecCost, Link, Plan, Problem, Simulator, lower_bound, smallest, solve
from ..records import Trace
from ..reporting.frontier import Frontier, Point
from ..stores import Store
from ..torch_compat import tree_leaves
from .fitted_model import device_of, profile_strategy
from .make_plan import link_to, shift

Loss = Callable[[Any], torch.Tensor]
_UNLIMITED = 2**62


def plan(
    model: nn.Module,
    batch: Any,
    budget: str | int,
    *,
    loss: Loss | None = None,
    stores: str | Store | Sequence[str | Store] | None = ("device",),
    codecs: str | Sequence[str] | None = "exact",
    verify: bool = True,
    deadline_s: float = 20.0,
) -> Plan:
    """Return a plan for training `model` within `budget` on batches like this one. The model is not trained.

    `batch`: a dict is passed as keyword arguments, a tuple or list as positional arguments, anything else as the only
    argument. `loss` returns a scalar from the model's output; the default is the output's `.loss`. `stores`, `codecs`
    and `verify` are as for `fit`, which needs the same `stores` and `codecs` to follow the plan. `deadline_s` limits
    the planning time.

    `print(plan)` prints a table, `plan.save(path)` writes a file, and `lowtide.fit(model, plan=plan)` follows the plan.
    Raises `BudgetError` if no plan fits; its `smallest_bytes` is the smallest budget that works.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> found = lowtide.plan(model, torch.randn(4, 8), "64 MiB", loss=lambda out: out.mean())
    >>> found.predicted_peak_bytes < 64 * 2**20
    True
    """
    limit = parse_bytes(budget)
    link = link_to(current_runtime().store(stores))
    trace = profile_for(limit, model, batch, loss=loss, verify=verify)
    return solve(trace, limit, link=link, codec_costs=codec_costs_for(trace, codecs), deadline_s=deadline_s)


def frontier(
    model: nn.Module,
    batch: Any,
    points: int = 20,
    *,
    loss: Loss | None = None,
    stores: str | Store | Sequence[str | Store] | None = ("device",),
    codecs: str | Sequence[str] | None = "exact",
    deadline_s: float = 10.0,
) -> Frontier:
    """Return step time against peak memory, from the smallest budget that works to everything kept.

    Each of the `points` is a plan and its lower bound. The frontier also has the predictions for simple schemes: a
    checkpoint on every block, √n segments, keeping matrix products. `stores` and `codecs` are as for `plan`.
    `deadline_s` limits the time of each plan.
    """
    if points < 2:
        raise ArgumentError(f"a frontier needs at least two points, not {points}")
    link = link_to(current_runtime().store(stores))
    trace = profile(model, batch, loss=loss)
    return frontier_of(trace, points, link=link, codec_costs=codec_costs_for(trace, codecs), deadline_s=deadline_s)


def frontier_of(
    trace: Trace,
    points: int,
    *,
    link: Link | None = None,
    codec_costs: Sequence[CodecCost] = (),
    deadline_s: float = 10.0,
    progress: Callable[[int], None] | None = None,
) -> Frontier:
    """Return the frontier of a profiled step. `progress` is called with the number of plans made so far."""
    simulator = Simulator(Problem(trace, link, codec_costs))
    plain_simulator = Simulator(Problem(trace.without_copies(), link, codec_costs))
    keep_all = plain_simulator.run([True] * len(trace.ops))
    least = smallest(simulator)
    found = []
    for k in range(points):
        # Points are denser at small budgets, where the step time changes most.
        limit = least.peak_bytes + (keep_all.peak_bytes - least.peak_bytes) * k**2 // (points - 1) ** 2
        with contextlib.suppress(BudgetError):
            one = solve(trace, limit, link=link, codec_costs=codec_costs, deadline_s=deadline_s)
            found.append(Point(limit, one.predicted_peak_bytes, one.predicted_step_s, one.bound_step_s, one.solver))
        if progress is not None:
            progress(k + 1)
    baselines = []
    for name, decide in BASELINES.items():
        simulation = plain_simulator.run(decide(plain_simulator.problem))
        bound = lower_bound(simulator.problem, simulation.peak_bytes)
        baselines.append(Point(simulation.peak_bytes, simulation.peak_bytes, simulation.step_s, bound.step_s, name))
    return Frontier(tuple(found), tuple(baselines), keep_all.peak_bytes, trace.step_s)


def profile_for(limit_bytes: int, model: nn.Module, batch: Any, *, loss: Loss | None = None, verify: bool) -> Trace:
    """Return the trace of a step within `limit_bytes` if possible, else of a step without a limit."""
    with contextlib.suppress(BudgetError):
        return profile(model, batch, loss=loss, limit_bytes=limit_bytes, verify=verify)
    # The step does not fit even with repeated recomputation. A trace is still needed to find the smallest budget. The
    # error is cleared at this point, so its frames no longer hold tensors.
    return profile(model, batch, loss=loss, verify=verify)


def profile(
    model: nn.Module, batch: Any, *, loss: Loss | None = None, limit_bytes: int = _UNLIMITED, verify: bool = False
) -> Trace:
    """Return the trace of one training step under the online budget. Restore the model and the random generators."""
    runtime = current_runtime()
    if runtime.current_recorder() is not None:
        raise ArgumentError("a step cannot be profiled inside a lowtide scope: call plan or frontier before the scope")
    device = device_of(model)
    memory = runtime.memory(device)
    with torch.enable_grad(), _restored_afterwards(model) as spare:
        memory.recount()
        memory.ledger.count_everything()  # profiles are rare, so the full count is worth its time
        memory.ledger.count_module(model)
        memory.ledger.count_all(tree_leaves(batch))
        memory.ledger.count_all(spare)
        spare_bytes = sum(t.untyped_storage().nbytes() for t in spare)
        limit = min(_UNLIMITED, limit_bytes + spare_bytes)
        strategy = profile_strategy(memory, limit, None, None)
        memory_budget = strategy.memory_budget
        recorder = make_recorder(strategy, WithinBudget(limit), memory_budget=memory_budget, verify=verify)
        scope = RecordingScope(runtime, recorder)
        scope.open()
        try:
            value = _loss_of(_call(model, batch), loss)
        finally:
            scope.close()
        value.backward()  # type: ignore[no-untyped-call]
        strategy.profile.ended()
        del value
        return shift(strategy.trace(device.type), -spare_bytes)


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
    devices = list(range(torch.accelerator.device_count())) if torch.accelerator.is_available() else []
    device_type = torch.accelerator.current_accelerator().type if devices else "cuda"  # type: ignore[union-attr]
    with torch.random.fork_rng(devices, device_type=device_type):
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
