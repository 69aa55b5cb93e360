"""Known issues of checkpointing and offloading in other projects (docs/explanation/faq.md)."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint as torch_checkpoint

import lowtide
from lowtide.profiling.peak_meter import PeakMeter
from lowtide.stores import DiskStore, MemoryDouble, Ticket
from tests.runtimes import ledger

from .engine.budgets import above, random_eviction
from .engine.steps import assert_equal, run_step
from .engine.test_distributed import same, sharded, step, two_processes

RECOMPUTE: dict[str, Any] = {"stores": None, "codecs": None}


@contextlib.contextmanager
def fitted(model: nn.Module, more_bytes: int, **options: Any) -> Iterator[nn.Module]:
    """Fit the model to a budget of `more_bytes` above the bytes that are live now."""
    gc.collect()
    ledger().count_everything()
    yield lowtide.fit(model, budget=f"{ledger().live_bytes + more_bytes} B", **{**RECOMPUTE, **options})
    lowtide.unfit(model)


class ChangingShapes(nn.Module):
    """Each call of a block drops one more row than the previous call, so a second run gives other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.calls = 0
        self.checkpoint: Callable[..., torch.Tensor] = lambda block, x, **options: block(x)

    def body(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return block(x[self.calls :]).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.checkpoint(lambda t, block=block: self.body(block, t), x, use_reentrant=False)
        return x


def test_code_that_behaves_differently_when_run_twice() -> None:
    """pytorch#155171: torch.utils.checkpoint runs the code again, gets tensors of other shapes and raises."""

    def gradients(checkpoint: Callable[..., Any] | None, scope: Any = None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = ChangingShapes()
        if checkpoint is not None:
            model.checkpoint = checkpoint
        with scope or contextlib.nullcontext():
            loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        assert model.calls == 3
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = gradients(None)
    with pytest.raises(CheckpointError, match="different metadata"):
        gradients(torch_checkpoint)
    assert same(plain, gradients(lowtide.checkpoint))
    assert lowtide.report().replayed_ops > 0
    assert same(plain, gradients(None, lowtide.saving(lowtide.KeepNone())))
    assert lowtide.report().replayed_ops > 0


class Experts(nn.Module):
    """A noisy top-1 router that counts its tokens. Every run of its code gives another routing."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
        self.noise = torch.Generator().manual_seed(5)
        self.register_buffer("tokens", torch.zeros(4))
        self.rows_per_expert: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x) + torch.randn(len(x), 4, generator=self.noise)
        weight, chosen = logits.softmax(-1).max(-1)
        self.tokens += torch.bincount(chosen, minlength=4)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero()[:, 0]
            self.rows_per_expert.append(len(rows))
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return x + out


def routed(scope: str, steps: int = 4) -> tuple[list[torch.Tensor], list[int]]:
    """Train a mixture of experts; return losses, gradients and buffers, and the number of rows for each expert."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Experts() for _ in range(3)))
    results = []  # numpy arrays: tensors would count against the budget
    with contextlib.ExitStack() as stack:
        if scope == "fit":
            stack.enter_context(fitted(model, 400_000))
        for seed in range(steps):
            torch.manual_seed(seed)
            with lowtide.saving(lowtide.EveryN(1)) if scope == "rule" else contextlib.nullcontext():
                loss = model(torch.randn(256, 32)).square().mean()
            loss.backward()
            if scope != "plain":
                assert lowtide.report().replayed_ops > 0
            tensors = [loss.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]
            results += [tensor.numpy().copy() for tensor in tensors]
            del loss, tensors
            model.zero_grad()
    results += [b.numpy().copy() for b in model.buffers()]
    return [torch.from_numpy(array) for array in results], [rows for layer in model for rows in layer.rows_per_expert]


@pytest.mark.parametrize("scope", ["rule", "fit"])
def test_a_router_runs_once_and_counts_its_tokens_once(scope: str) -> None:
    """pytorch#171355 and Megatron-LM#1330: routing changes in the recompute, and the load is counted twice."""
    plain, plain_rows = routed("plain")
    ours, our_rows = routed(scope)
    assert same(plain, ours)
    assert our_rows == plain_rows


def test_a_fitted_model_with_a_key_value_cache() -> None:
    """transformers#28056: gradient checkpointing turns `use_cache=True` off with a warning."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=32, use_cache=True)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 64, (8, 32))
    plain = run_step(model, {"input_ids": ids, "labels": ids})
    replayed = []
    with fitted(model, 2 * 2**20):
        for _ in range(3):
            cache = transformers.DynamicCache(config=config)
            ours = run_step(model, {"input_ids": ids, "labels": ids, "past_key_values": cache})
            replayed.append(lowtide.report().replayed_ops)
            assert cache.get_seq_length() == 32
            assert_equal(plain, ours)
    assert replayed[-1] > 0


def test_a_fitted_model_under_autocast_with_gradient_scaling() -> None:
    """pytorch#141896: the weight cache of autocast breaks code that runs a second time."""

    def train(fit: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        losses = []
        with fitted(model, 1_500_000, optimizer=optimizer) if fit else contextlib.nullcontext():
            for _ in range(4):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(torch.randn(512, 64)).float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.detach())
            if fit:
                assert lowtide.report().replayed_ops > 0
        return [*losses, *[p.detach().clone() for p in model.parameters()]]

    assert same(train(False), train(True))


def test_a_fitted_model_with_frozen_layers_and_inputs_without_grad() -> None:
    """transformers#21381: "None of the inputs have requires_grad=True", and gradients are missing."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU())))
    model[:6].requires_grad_(False)
    batch = (torch.randn(512, 64),)
    plain = run_step(model, batch)
    assert [name for name, gradient in plain.grads.items() if gradient is None] == [
        f"{k}.{name}" for k in (0, 2, 4) for name in ("weight", "bias")
    ]
    with fitted(model, 1_100_000):
        for _ in range(3):
            assert_equal(plain, run_step(model, batch))
        assert lowtide.report().replayed_ops > 0


def test_checkpoint_does_not_warn_about_use_reentrant() -> None:
    """pytorch#160534: torch.utils.checkpoint warns unless `use_reentrant` is passed."""
    x = torch.randn(8, requires_grad=True)
    with pytest.warns(UserWarning, match="use_reentrant"):
        torch_checkpoint(torch.sin, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowtide.checkpoint(lambda t: t.sin().exp(), x).sum().backward()
        lowtide.checkpoint_sequential([torch.sin, torch.exp], 2, x).sum().backward()


class AddressStore(MemoryDouble):
    """A store that lists the addresses of the tensors it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def put(self, tensor: torch.Tensor, name: str = "") -> Ticket:
        self.addresses.append(tensor.untyped_storage().data_ptr())
        return super().put(tensor, name)


def test_parameters_and_the_batch_are_never_offloaded() -> None:
    """llama-cookbook#115: autograd saves weights too; offloading them saves no memory."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh())))
    batch = (torch.randn(256, 64),)
    plain = run_step(model, batch)
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), *batch]}
    store = AddressStore()
    assert_equal(plain, run_step(model, batch, random_eviction(1, stores=store, codecs=None)))
    assert store.addresses
    assert not own & set(store.addresses)


def test_offloading_leaks_no_memory() -> None:
    """trl#5700: memory grows from step to step while activations are offloaded."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(128, 128), nn.GELU())))
    x = torch.randn(1024, 128)
    written, live_bytes, stored_values = 0, [], []
    with DiskStore() as store, PeakMeter([*model.parameters(), x]) as meter:
        for _ in range(6):
            with above(4 * 2**20, stores=store, codecs=None):
                loss = model(x).square().mean()
            loss.backward()
            model.zero_grad()
            budget = lowtide.report().budget
            assert budget is not None
            written += budget.bytes_written
            del loss
            gc.collect()
            store.flush()
            live_bytes.append(meter.live_bytes)
            stored_values.append(store.stats().values)
    assert written > 0
    assert set(live_bytes) == {sum(t.nbytes for t in [*model.parameters(), x])}
    assert set(stored_values) == {0}


def count_gathers(rank: int, x: torch.Tensor) -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    gathers = {}
    results = {}
    for name, scope in {"plain": None, "ours": lowtide.saving(lowtide.EveryN(1))}.items():
        model = sharded()
        step(model, x)  # FSDP initializes itself in the first step
        with CommDebugMode() as communication:
            results[name] = step(model, x, scope)
        gathers[name] = communication.get_comm_counts()
    assert lowtide.report().replayed_ops > 0
    assert same(results["plain"], results["ours"])
    assert sum(gathers["plain"].values()) > 0
    assert gathers["ours"] == gathers["plain"]


def test_sharded_parameters_are_not_gathered_again() -> None:
    """pytorch#105635: running forward a second time gathers the parameters a second time."""
    two_processes(count_gathers)
