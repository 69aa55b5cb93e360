"""Rules 1 and 2 for unusual models and training loops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide

from .steps import assert_equal, every_rule, run_step

D = lowtide.Decision


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(12, 16, num_layers=2, batch_first=True, dropout=0.2, **options)
        self.head = nn.Linear(32 if options.get("bidirectional") else 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.rnn(x)
        return self.head(out)


class ConvNet(nn.Module):
    def __init__(self, momentum: float | None, inplace: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1),
                nn.BatchNorm2d(8, momentum=momentum),
                nn.ReLU(inplace=inplace),
                nn.Dropout2d(0.2),
            )
            for i in range(3)
        )
        self.pool = nn.AdaptiveAvgPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.pool(x)


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True) for _ in range(2))
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y, weights = layer(x, x, x, **self.options)
            x = x + y if weights is None else x + y + weights.mean()
        return x


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16, padding_idx=0, max_norm=1.0)
        self.bags = nn.EmbeddingBag(40, 16, mode="mean", padding_idx=0)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids).mean(1) + self.bags(ids))


class LoRA(nn.Module):
    """Frozen base weights, small trained adapters; the input needs no grad."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(24, 24) for _ in range(3)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(24, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, 24, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = F.gelu(base(x) + up(down(x)))
        return x


class Stateful(nn.Module):
    """Counts its calls in a buffer, and keeps a running mean of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return F.silu(self.linear(x) - self.mean) * self.calls


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.blocks[0](x)
        for block in self.blocks:
            x = torch_checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x.sin()


class ScaledSin(torch.autograd.Function):
    """Saves through autograd and on ctx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        s = torch.sin(x)
        ctx.save_for_backward(x, s)
        ctx.cos = torch.cos(x)
        ctx.scale = scale
        ctx.mark_non_differentiable(s)
        return s * scale, s

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
        x, s = ctx.saved_tensors
        return g * ctx.scale * ctx.cos + 0 * s + 0 * x, None


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, s = ScaledSin.apply(self.linear(x), 2.0)
        return y * s


CASES: dict[str, tuple[Any, Any]] = {
    "lstm": (lambda: Recurrent(nn.LSTM), lambda: (torch.randn(3, 7, 12),)),
    "lstm, both ways, projected": (lambda: Recurrent(nn.LSTM, bidirectional=True), lambda: (torch.randn(3, 7, 12),)),
    "gru": (lambda: Recurrent(nn.GRU), lambda: (torch.randn(3, 7, 12),)),
    "rnn": (lambda: Recurrent(nn.RNN), lambda: (torch.randn(3, 7, 12),)),
    "batch norm": (lambda: ConvNet(0.1, False), lambda: (torch.randn(4, 3, 16, 16),)),
    "batch norm without momentum, in place": (lambda: ConvNet(None, True), lambda: (torch.randn(4, 3, 16, 16),)),
    "channels last": (
        lambda: ConvNet(0.1, True).to(memory_format=torch.channels_last),
        lambda: (torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last),),
    ),
    "attention": (lambda: Attention(), lambda: (torch.randn(2, 6, 16),)),
    "attention, fused": (lambda: Attention(need_weights=False), lambda: (torch.randn(2, 6, 16),)),
    "embeddings": (Bag, lambda: (torch.randint(0, 40, (5, 6)),)),
    "lora": (LoRA, lambda: (torch.randn(5, 24),)),
    "state in buffers": (Stateful, lambda: (torch.randn(5, 8),)),
    "torch checkpoint inside": (lambda: Checkpointed(False), lambda: (torch.randn(5, 8),)),
    "reentrant torch checkpoint inside": (lambda: Checkpointed(True), lambda: (torch.randn(5, 8, requires_grad=True),)),
    "autograd function": (WithFunction, lambda: (torch.randn(5, 8),)),
    "transformer encoder layer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2),
        lambda: (torch.randn(2, 6, 16),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_under_every_rule(name: str) -> None:
    torch.manual_seed(0)
    model, batch = CASES[name][0]().train(), CASES[name][1]()
    plain = run_step(model, batch)
    for rule, policy in every_rule().items():
        for inside in (False, True):
            ours = run_step(model, batch, lowtide.saving(policy, verify=inside), backward_inside=inside)
            try:
                assert_equal(plain, ours)
            except AssertionError as error:
                raise AssertionError(f"{rule}, backward {'inside' if inside else 'after'}: {error}") from error


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2)) for _ in range(4))
    )


def test_several_training_steps_with_an_optimizer_and_accumulation() -> None:
    def train(scope: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(5)
        losses = []
        for _ in range(3):
            for _ in range(2):
                with scope():
                    loss = model(torch.randn(8, 16)).square().mean() / 2
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return losses, model.state_dict()

    plain, weights = train(lambda: lowtide.saving(lowtide.KeepAll()))
    reference, reference_weights = train(__import__("contextlib").nullcontext)
    ours, our_weights = train(lambda: lowtide.saving(lowtide.EveryN(1)))
    for a, b, c in zip(reference, plain, ours, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    for name in reference_weights:
        assert torch.equal(reference_weights[name], weights[name])
        assert torch.equal(reference_weights[name], our_weights[name])


@pytest.mark.parametrize("backward_under_autocast", [False, True])
def test_autocast(backward_under_autocast: bool) -> None:
    """Casts are recorded as ops. Autocast during backward must not cast a second time."""
    model = small_model()
    x = torch.randn(8, 16)

    def step(scope: Any) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with scope:
                loss = sum(model(x).float().square().mean() for _ in range(2))
            if backward_under_autocast:
                (loss * 1024).backward()
        if not backward_under_autocast:
            (loss * 1024).backward()
        return [loss.detach(), *(p.grad / 1024 for p in model.parameters())]

    import contextlib

    plain = step(contextlib.nullcontext())
    for policy in every_rule().values():
        for a, b in zip(plain, step(lowtide.saving(policy)), strict=True):
            assert torch.equal(a, b)


def test_replay_ignores_an_autocast_that_began_after_forward() -> None:
    w = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(16, 16)
    plain = torch.autograd.grad((x @ w).sin().sum(), w)[0]
    with lowtide.saving(lowtide.KeepNone()):
        loss = (x @ w).sin().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        handle = loss.grad_fn.next_functions[0][0]._saved_self  # a replay under autocast
    assert handle.dtype == torch.float32
    assert torch.equal(torch.autograd.grad(loss, w)[0], plain)


@pytest.mark.parametrize("policy", [lowtide.KeepNone(), lowtide.EveryN(1), lowtide.Selective()])
def test_double_backward_retain_and_repeated_backward(policy: lowtide.Policy) -> None:
    model = small_model().eval()
    x = torch.randn(4, 16, requires_grad=True)

    def run(scope: Any) -> list[torch.Tensor]:
        with scope:
            y = model(x).square().sum()
        first = torch.autograd.grad(y, x, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), x, retain_graph=True)[0]
        third = torch.autograd.grad(y, x, retain_graph=True)[0]
        fourth = torch.autograd.grad(y, x)[0]
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y, x)
        return [first.detach(), second, third, fourth]

    import contextlib

    for a, b in zip(run(contextlib.nullcontext()), run(lowtide.saving(policy)), strict=True):
        assert torch.equal(a, b)


def test_two_losses_of_one_graph() -> None:
    w = torch.randn(8, 8, requires_grad=True)

    def run(scope: Any) -> list[torch.Tensor]:
        with scope:
            shared = (w @ w).tanh().exp()
            a, b = shared.sin().sum(), (shared * shared).sum()
        a.backward(retain_graph=True)
        first = w.grad.clone()
        b.backward()
        both, w.grad = w.grad.clone(), None
        return [first, both]

    import contextlib

    for p, o in zip(run(contextlib.nullcontext()), run(lowtide.saving(lowtide.KeepNone())), strict=True):
        assert torch.equal(p, o)


def test_user_hooks_fire_once_and_in_order() -> None:
    """Rule 2: hooks on modules, tensors and graph nodes, and prints, happen as often as without lowtide."""

    def run(scope: Any, seen: list[str]) -> None:
        model = small_model()
        block = model[1]
        model.register_forward_pre_hook(lambda *a: seen.append("pre"))
        model.register_forward_hook(lambda *a: seen.append("post"))
        block.register_forward_hook(lambda *a: seen.append("block"))
        block.register_full_backward_pre_hook(lambda *a: seen.append("backward pre"))
        block.register_full_backward_hook(lambda *a: seen.append("backward"))
        block[0].weight.register_hook(lambda g: seen.append("tensor"))
        block[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
        with scope:
            y = model(torch.randn(3, 16, requires_grad=True))
            y.register_hook(lambda g: seen.append("output"))
            y.grad_fn.register_hook(lambda *a: seen.append("node"))
            y.grad_fn.register_prehook(lambda *a: seen.append("node pre"))
            loss = y.sum()
        loss.backward()

    import contextlib

    plain: list[str] = []
    run(contextlib.nullcontext(), plain)
    assert len(plain) >= 10
    for policy in every_rule().values():
        ours: list[str] = []
        run(lowtide.saving(policy), ours)
        assert ours == plain


def test_forward_code_runs_once() -> None:
    calls = []

    class Loud(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x.sin().exp()

    x = torch.randn(4, requires_grad=True)
    with lowtide.saving(lowtide.KeepNone()):
        y = nn.Sequential(Loud(), Loud())(x).sum()
    y.backward()
    assert len(calls) == 2
    assert lowtide.report().replayed_ops > 0


def test_functions_with_own_generators() -> None:
    """Rule 8 with an explicit generator: its draws are replayed and its present state is restored."""
    size = 2000

    def run(scope: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        w = torch.ones(size, requires_grad=True)
        g = torch.Generator().manual_seed(3)
        with scope:
            noise = torch.rand(size, generator=g)
            y = (w * noise.sin()).exp() * torch.empty(size).normal_(generator=g)
            loss = y.sum()
        after_forward = torch.rand(3, generator=g)
        loss.backward()
        return w.grad, after_forward, torch.rand(3, generator=g)

    import contextlib

    for p, o in zip(run(contextlib.nullcontext()), run(lowtide.saving(lowtide.KeepNone())), strict=True):
        assert torch.equal(p, o)
    assert lowtide.report().replayed_ops > 0


def test_generator_is_restored_if_a_replay_fails() -> None:
    x = torch.randn(3000, requires_grad=True)
    with lowtide.saving(lowtide.KeepNone()):
        y = (F.dropout(x, 0.5, True).sin() * x).sum()
    with torch.no_grad():
        x.add_(1)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    with pytest.raises(lowtide.StaleSourceError):
        y.backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_replay_uses_the_settings_of_forward() -> None:
    """A factory op without a dtype uses the default dtype of forward, not of backward."""
    x = torch.ones(3, requires_grad=True)
    with lowtide.saving(lowtide.KeepNone()):
        y = (x * torch.ops.aten.ones.default([3])).sin().sum()
    torch.set_default_dtype(torch.float64)
    try:
        y.backward()
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert x.grad.dtype == torch.float32
    assert torch.equal(x.grad, torch.ones(3).cos())


def test_a_model_has_no_new_hooks_or_attributes() -> None:
    model = small_model()
    before = copy.deepcopy(model.__dict__), list(model.state_dict())
    with lowtide.saving(lowtide.EveryN(1)):
        model(torch.randn(2, 16)).sum().backward()
    model.zero_grad()
    assert before[0].keys() == model.__dict__.keys()
    assert before[1] == list(model.state_dict())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_scope_values_used_outside_it() -> None:
    """pytorch#129867: values of a recomputed region are used later outside of it."""
    w = torch.randn(8, 8, requires_grad=True)

    def run(scope: Any) -> torch.Tensor:
        x = w * 2
        with scope:
            a = (x @ w).sin()
            b = a.exp()
        c = (b * a).tanh()
        return torch.autograd.grad((c @ w).sum() + b.sum(), w)[0]

    import contextlib

    assert torch.equal(run(contextlib.nullcontext()), run(lowtide.saving(lowtide.KeepNone())))
    assert lowtide.report().replayed_ops > 0


def test_nested_scopes_share_recorded_values() -> None:
    w = torch.randn(64, 64, requires_grad=True)

    def run(outer: Any, inner: Any) -> torch.Tensor:
        with outer:
            a = (w @ w).sin()
            with inner:
                b = a.exp().tanh()
            c = b * a
            loss = c.sum()
        return torch.autograd.grad(loss, w)[0]

    import contextlib

    plain = run(contextlib.nullcontext(), contextlib.nullcontext())
    assert torch.equal(plain, run(lowtide.saving(lowtide.KeepAll()), lowtide.saving(lowtide.KeepNone())))
    inner_only = lowtide.report()
    assert 0 < inner_only.values_recomputed < inner_only.values_recomputed + inner_only.values_kept
    assert torch.equal(plain, run(lowtide.saving(lowtide.KeepNone()), lowtide.saving(lowtide.KeepAll())))


def test_threads_have_their_own_scopes() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def work(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.set_num_threads(1)
        model = small_model().eval()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        plain = torch.autograd.grad(model(x).square().sum(), x)[0]
        for _ in range(5):
            with lowtide.saving(lowtide.EveryN(1)):
                loss = model(x).square().sum()
            ours = torch.autograd.grad(loss, x)[0]
        return plain, ours

    with ThreadPoolExecutor(4) as pool:
        for plain, ours in pool.map(work, range(8)):
            assert torch.equal(plain, ours)
