"""The comparison of `lowtide demo`: a small GPT-2, trained with several methods in turn."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .._errors import MissingPackageError
from .._units import format_bytes
from ..engine.runtime import current_runtime
from ..engine.scopes.saving import saving
from ..fitting.fit import fit, report, unfit
from ..fitting.registry import state_of
from ..policies import EveryN, SaveOps
from ..profiling.peak_meter import PeakMeter

BATCH, LENGTH, VOCABULARY = 4, 192, 2048
Scope = Callable[[], AbstractContextManager[Any]]


class Method:
    """A way to train, with its own copy of the model. `scope` is opened around each forward pass."""

    def __init__(
        self, name: str, model: Any, scope: Scope = contextlib.nullcontext, torch_checkpoint: bool = False
    ) -> None:
        self.name = name
        self.scope = scope
        self.model = copy.deepcopy(model)
        if torch_checkpoint:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.best_s = float("inf")
        self.peak_bytes = 0
        self.losses: list[torch.Tensor] = []
        self.equal = True
        self.prediction = ""
        """Predicted peak and time, if there is a plan."""

    def is_metered(self, k: int, last: int) -> bool:
        """Return whether the peak of step k is measured. The optimizer state exists from step 1 on."""
        return k == 1

    def step(self, ids: torch.Tensor, k: int, last: int) -> list[torch.Tensor]:
        """Run training step k and return its gradients."""
        torch.manual_seed(k)
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        meter = PeakMeter(self.base_tensors(ids)) if self.is_metered(k, last) else None
        start = time.perf_counter()
        with meter or contextlib.nullcontext():
            with self.scope():
                loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
        if meter is not None:
            self.peak_bytes = max(self.peak_bytes, meter.peak_bytes)
        elif 1 < k < last:  # the meter slows steps 1 and last of some methods, so these count for none
            self.best_s = min(self.best_s, time.perf_counter() - start)
        self.losses.append(loss.detach())
        grads = [p.grad.clone() for p in self.model.parameters()]
        self.optimizer.step()
        return grads

    def base_tensors(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that exist before a step."""
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), ids, *state]


class FittedMethod(Method):
    """`lowtide.fit`, from step 2 on. The budget depends on the peaks of other methods, measured in step 1."""

    def __init__(self, name: str, model: Any, budget_bytes: Callable[[], int]) -> None:
        super().__init__(name, model)
        self.budget_bytes = budget_bytes

    def fit(self) -> None:
        """Fit the model. Plans depend on which models are fitted, so all are fitted before the first step of any."""
        fit(self.model, budget=self.budget_bytes(), optimizer=self.optimizer)

    def is_metered(self, k: int, last: int) -> bool:
        return k == last

    def step(self, ids: torch.Tensor, k: int, last: int) -> list[torch.Tensor]:
        if k < 2:
            return super().step(ids, k, last)
        # A budget covers all tensors of the process, so the tensors of the other methods are added to the limit.
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        ledger = current_runtime().memory().ledger
        ledger.count_everything()
        own = {s.data_ptr(): s.nbytes() for t in self.base_tensors(ids) if (s := t.untyped_storage()).nbytes()}
        other_bytes = ledger.live_bytes - sum(own.values())
        limit_bytes = other_bytes + self.budget_bytes()
        state_of(self.model).limit_bytes = limit_bytes
        grads = super().step(ids, k, last)
        if k == last:
            fit_report = report(self.model)
            if fit_report.plan is not None and fit_report.predicted_peak_bytes is not None:
                ratio = fit_report.plan.predicted_step_s / fit_report.plan.plain_step_s
                self.prediction = f"{format_bytes(fit_report.predicted_peak_bytes - other_bytes)}, × {ratio:.2f}"
        return grads


def run(layers: int, steps: int, console: Console | None = None) -> Table:
    """Train with all methods. Print and return the table of results."""
    console = console or Console()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        methods = _train(layers, steps, console)
    finally:
        torch.set_num_threads(threads)
    table = _table(methods, layers, steps)
    console.print(table)
    return table


def _train(layers: int, steps: int, console: Console) -> list[Method]:
    model = _build_model(layers)
    save_matmuls = SaveOps(["mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu"])
    plain = Method("plain PyTorch", model)
    checkpointed = Method("torch.utils.checkpoint", model, torch_checkpoint=True)
    methods = [
        plain,
        checkpointed,
        FittedMethod("lowtide.fit, peak of checkpoint", model, lambda: checkpointed.peak_bytes),
        FittedMethod("lowtide.fit, half the plain peak", model, lambda: plain.peak_bytes // 2),
        Method("lowtide EveryN(1)", model, lambda: saving(EveryN(1))),
        Method("lowtide EveryN(2)", model, lambda: saving(EveryN(2))),
        Method("lowtide SaveOps(matmuls)", model, lambda: saving(save_matmuls)),
    ]
    last = steps + 2
    fitted = [method for method in methods if isinstance(method, FittedMethod)]
    for k in track(range(last + 1), "training", console=console, transient=True):
        if k == 2:
            for each in fitted:
                each.fit()
        ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(k))
        plain_grads: list[torch.Tensor] = []
        for method in methods:
            grads = method.step(ids, k, last)
            plain_grads = plain_grads or grads
            method.equal &= all(torch.equal(a, b) for a, b in zip(plain_grads, grads, strict=True))
            method.equal &= torch.equal(method.losses[-1], plain.losses[-1])
    for each in fitted:
        unfit(each.model)
    return methods


def _build_model(layers: int) -> Any:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingPackageError("transformers", "the demo", extra="demo") from error
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=256, n_head=8, vocab_size=VOCABULARY, n_positions=LENGTH,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def _table(methods: list[Method], layers: int, steps: int) -> Table:
    plain = methods[0]
    table = Table(
        title=f"GPT-2, {layers} layers, width 256, batch {BATCH} × {LENGTH}: {steps} timed steps, one thread",
        caption="peak: live tensor bytes, including parameters and optimizer state; step time: fastest step, relative "
        "to plain; predicted: peak and step time according to the plan",
    )
    table.add_column("")
    for heading in ("peak", "of plain", "step time", "predicted", "gradients"):
        table.add_column(heading, justify="right")
    for method in methods:
        table.add_row(
            method.name,
            format_bytes(method.peak_bytes),
            f"{100 * method.peak_bytes / plain.peak_bytes:.0f} %",
            f"× {method.best_s / plain.best_s:.2f}",
            method.prediction,
            "bit-equal" if method.equal else "DIFFERENT",
        )
    return table
