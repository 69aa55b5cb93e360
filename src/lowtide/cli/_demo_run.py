"""What `lowtide demo` shows: a small real transformer, trained plainly, in a budget and under rules, side by side."""

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


class Contender:
    """One way to train, with its own copy of the model."""

    def __init__(self, name: str, scope: Scope, model: Any, torch_checkpoint: bool = False) -> None:
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
        self.foreseen = ""
        """What a plan said of it."""

    def is_metered(self, k: int, last: int) -> bool:
        """Whether the peak of step k is taken: with the optimizer's state, which the first step makes."""
        return k == 1

    def step(self, ids: torch.Tensor, k: int, last: int) -> list[torch.Tensor]:
        """One training step; its gradients."""
        torch.manual_seed(k)
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        meter = PeakMeter(self.base(ids)) if self.is_metered(k, last) else None
        start = time.perf_counter()
        with meter or contextlib.nullcontext():
            with self.scope():
                loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
        if meter is not None:
            self.peak_bytes = max(self.peak_bytes, meter.peak_bytes)
        elif 1 < k < last:  # the meter itself takes time
            self.best_s = min(self.best_s, time.perf_counter() - start)
        self.losses.append(loss.detach())
        grads = [p.grad.clone() for p in self.model.parameters()]
        self.optimizer.step()
        return grads

    def base(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """What is there before a step."""
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), ids, *state]


class Budgeted(Contender):
    """`lowtide.fit`, with a budget that is known once others have been metered: from the third step on."""

    def __init__(self, name: str, model: Any, asked_bytes: Callable[[], int]) -> None:
        super().__init__(name, contextlib.nullcontext, model)
        self.asked_bytes = asked_bytes

    def is_metered(self, k: int, last: int) -> bool:
        return k == last

    def step(self, ids: torch.Tensor, k: int, last: int) -> list[torch.Tensor]:
        if k < 2:
            return super().step(ids, k, last)
        # A budget is for all tensors of the process: what the others have does not count against this one.
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        ledger = current_runtime().memory().ledger
        ledger.see_everything()
        own = {s.data_ptr(): s.nbytes() for t in self.base(ids) if (s := t.untyped_storage()).nbytes()}
        beside = ledger.live_bytes - sum(own.values())
        if k == 2:
            fit(self.model, budget=beside + self.asked_bytes(), optimizer=self.optimizer)
        state_of(self.model).limit_bytes = beside + self.asked_bytes()
        grads = super().step(ids, k, last)
        if k == last:
            known = report(self.model)
            if known.plan is not None and known.predicted_peak_bytes is not None:
                slower = known.plan.predicted_step_s / known.plan.plain_step_s
                self.foreseen = f"{format_bytes(known.predicted_peak_bytes - beside)}, × {slower:.2f}"
            unfit(self.model)
        return grads


def run(layers: int, steps: int, console: Console | None = None) -> Table:
    """Train all contenders step by step and print the table."""
    console = console or Console()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        contenders = _train(layers, steps, console)
    finally:
        torch.set_num_threads(threads)
    table = _table(contenders, layers, steps)
    console.print(table)
    return table


def _train(layers: int, steps: int, console: Console) -> list[Contender]:
    model = _model(layers)
    products = SaveOps(["mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu"])
    plainly = Contender("plain PyTorch", contextlib.nullcontext, model)
    checkpointed = Contender("torch.utils.checkpoint", contextlib.nullcontext, model, torch_checkpoint=True)
    contenders = [
        plainly,
        checkpointed,
        Budgeted("lowtide fit, the checkpoint's peak", model, lambda: checkpointed.peak_bytes),
        Budgeted("lowtide fit, half of plain's peak", model, lambda: plainly.peak_bytes // 2),
        Contender("lowtide EveryN(1)", lambda: saving(EveryN(1)), model),
        Contender("lowtide EveryN(2)", lambda: saving(EveryN(2)), model),
        Contender("lowtide SaveOps(matmuls)", lambda: saving(products), model),
    ]
    last = steps + 2
    for k in track(range(last + 1), "training", console=console, transient=True):
        ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(k))
        plain: list[torch.Tensor] = []
        for contender in contenders:
            grads = contender.step(ids, k, last)
            plain = plain or grads
            contender.equal &= all(torch.equal(a, b) for a, b in zip(plain, grads, strict=True))
            contender.equal &= torch.equal(contender.losses[-1], contenders[0].losses[-1])
    return contenders


def _model(layers: int) -> Any:
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


def _table(contenders: list[Contender], layers: int, steps: int) -> Table:
    plain = contenders[0]
    table = Table(
        title=f"GPT-2, {layers} layers, 256 wide, batch {BATCH} × {LENGTH}: {steps} steps each, one thread",
        caption="peak: live tensor bytes, with parameters and the optimizer's state; time: fastest step, against "
        "plain; foreseen: what the plan said",
    )
    table.add_column("")
    for heading in ("peak", "of plain", "step time", "foreseen", "grads equal"):
        table.add_column(heading, justify="right")
    for c in contenders:
        table.add_row(
            c.name,
            format_bytes(c.peak_bytes),
            f"{100 * c.peak_bytes / plain.peak_bytes:.0f} %",
            f"× {c.best_s / plain.best_s:.2f}",
            c.foreseen,
            "to the bit" if c.equal else "NO",
        )
    return table
