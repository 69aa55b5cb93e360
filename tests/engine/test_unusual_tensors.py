"""Tensors that are not the content of one storage, and modes of torch that change what ops compute (Rules 1 and 14)."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import lowtide
from lowtide.engine.memory.ledger import Ledger
from lowtide.torch_compat import innermost_mode

from .budgets import random_eviction

NONE = lowtide.KeepNone()
SCOPES: dict[str, Callable[[], Any]] = {
    "all": lambda: lowtide.saving(lowtide.KeepAll()),
    "none": lambda: lowtide.saving(NONE),
    "verified": lambda: lowtide.saving(NONE, verify=True),
    "budget": lambda: lowtide.budget(2**50),
    "evicting": lambda: random_eviction(5, 0.5, stores=None, codecs=None),
}
in_every_scope = pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)

Step = Callable[[Any], list[torch.Tensor]]
"""Runs forward in a scope, then backward. Returns outputs and gradients."""


def assert_exact(step: Step, scope: Callable[[], Any]) -> None:
    plain, ours = step(contextlib.nullcontext()), step(scope())
    assert len(plain) == len(ours)
    assert all(torch.equal(p, o) for p, o in zip(plain, ours, strict=True))


# -- empty views -----------------------------------------------------------------------------------------


class Expert(nn.Module):
    """A gated layer that overwrites half of its hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden[:, 16:].tanh_()
        return self.second(hidden[:, :16] * hidden[:, 16:])


class Experts(nn.Module):
    """A mixture of experts that sorts its tokens by expert. Some experts get no token."""

    def __init__(self, n_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(8, n_experts)
        self.experts = nn.ModuleList(Expert() for _ in range(n_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self.experts)).tolist()
        tokens = (x * scores[:, None])[order].split(counts)
        made = [expert(part) for expert, part in zip(self.experts, tokens, strict=True)]
        return torch.zeros_like(x).index_copy(0, order, torch.cat(made))


@in_every_scope
def test_experts_without_tokens(scope: Callable[[], Any]) -> None:
    def step(around: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Experts(12)
        x = torch.randn(5, 8, requires_grad=True)
        with around:
            y = model(x)
            loss = y.square().sum()
        loss.backward()
        assert sum(expert.first.weight.grad.count_nonzero() == 0 for expert in model.experts) >= 7
        return [y.detach(), x.grad, *(p.grad for p in model.parameters())]

    assert_exact(step, scope)


@in_every_scope
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_empty_views_at_any_offset(dtype: torch.dtype, scope: Callable[[], Any]) -> None:
    def step(around: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(4, 6, dtype=dtype, requires_grad=True)
        empty = torch.randn(3, 0, 5, dtype=dtype, requires_grad=True)
        with around:
            y, nothing = x.exp(), empty.exp()
            parts = [y[4:], y[2:2], y[:, 6:], nothing[2], nothing.unbind(2)[4], torch.view_as_real(nothing.cfloat())[1]]
            loss = sum((part * part).abs().sum() for part in parts) + (y * y).abs().sum()
        loss.backward()
        return [x.grad, empty.grad]

    assert_exact(step, scope)


# -- nested tensors --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@in_every_scope
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_kept(layout: torch.layout, scope: Callable[[], Any]) -> None:
    def step(around: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        rows = [torch.randn(n, 6, requires_grad=True) for n in (2, 5, 1)]
        linear = nn.Linear(6, 6)
        with around:
            nested = torch.nested.as_nested_tensor([row.sin() for row in rows], layout=layout)
            made = linear(nested)
            made = F.gelu(made * made)
            padded = torch.nested.to_padded_tensor(made, 0.5)
            loss = padded.exp().sum()
        loss.backward()
        return [padded.detach(), *(row.grad for row in rows), *(p.grad for p in linear.parameters())]

    assert_exact(step, scope)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@in_every_scope
def test_writes_to_a_nested_tensor_reach_its_components(scope: Callable[[], Any]) -> None:
    def step(around: Any) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 12, requires_grad=True)
        with around:
            nested = torch.nested.as_nested_tensor([x.detach()[:8].view(4, 2), x.detach()[8:].view(2, 2)])
            nested.mul_(2)
            first, second = nested.unbind()
            before = first.exp()
            nested.add_(1)
            loss = (x[:8].view(4, 2) * first * before).sum() + (x[8:].view(2, 2) * second).sin().sum()
        loss.backward()
        return [x.grad]

    assert_exact(step, scope)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_counted() -> None:
    nested = torch.nested.nested_tensor([torch.randn(100, 3), torch.randn(50, 3)])
    jagged = torch.nested.nested_tensor([torch.randn(100, 3), torch.randn(50, 3)], layout=torch.jagged)
    assert counted(nested) == 150 * 3 * 4
    assert counted(jagged) == 150 * 3 * 4 + 3 * 8  # and the offsets
    with lowtide.saving(NONE):
        nested * 2
    assert lowtide.report().foreign["nested"] > 0


# -- sparse tensors --------------------------------------------------------------------------------------


def counted(*tensors: torch.Tensor) -> int:
    ledger = Ledger(torch.device("cpu"))
    ledger.count_all(tensors)
    return ledger.live_bytes


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    ("make", "index_bytes"),
    [
        (lambda: torch.sparse_coo_tensor(torch.arange(200).view(2, 100) % 100, torch.ones(100)), 200 * 8),
        (lambda: torch.sparse_csr_tensor(torch.arange(101), torch.arange(100), torch.ones(100)), 201 * 8),
        (lambda: torch.sparse_csc_tensor(torch.arange(101), torch.arange(100), torch.ones(100)), 201 * 8),
        (lambda: torch.sparse_bsr_tensor(torch.arange(101), torch.arange(100), torch.ones(100, 1, 1)), 201 * 8),
        (lambda: torch.sparse_bsc_tensor(torch.arange(101), torch.arange(100), torch.ones(100, 1, 1)), 201 * 8),
    ],
    ids=["coo", "csr", "csc", "bsr", "bsc"],
)
def test_sparse_tensors_are_counted_until_they_are_freed(make: Any, index_bytes: int) -> None:
    sparse = make()
    ledger = Ledger(torch.device("cpu"))
    ledger.count_all([sparse, [sparse]])
    assert ledger.live_bytes == 100 * 4 + index_bytes
    del sparse
    gc.collect()
    assert ledger.live_bytes == 0


def test_a_sparse_gradient_counts_against_the_budget() -> None:
    """The gradient of an embedding has as many rows as the batch, not as the table."""
    table = nn.Embedding(50_000, 64, sparse=True)
    tokens = torch.arange(1000)
    with lowtide.budget("64 MiB"):
        loss = table(tokens).sin().sum()
        base = lowtide.report().budget.peak_bytes
        loss.backward()
    assert table.weight.grad.is_sparse
    grad_bytes = 1000 * 64 * 4 + 1000 * 8
    ledger = Ledger(torch.device("cpu"))
    ledger.count(table.weight.grad)
    assert ledger.live_bytes == grad_bytes
    assert base < lowtide.report().budget.peak_bytes < base + 4 * grad_bytes
    assert lowtide.report().budget.values_dropped == 0


@in_every_scope
def test_formulas_of_sparse_tensors(scope: Callable[[], Any]) -> None:
    def step(around: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        sparse = torch.randn(6, 6).relu().to_sparse().requires_grad_()
        with around:
            loss = torch.sparse.sum(sparse * sparse) + sparse.to_dense().prod(0).sum()
        loss.backward()
        return [loss.detach(), sparse.grad.to_dense()]

    assert_exact(step, scope)


@in_every_scope
def test_sparse_parameters_and_products(scope: Callable[[], Any]) -> None:
    def step(around: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        dense = torch.randn(6, 5, requires_grad=True)
        sparse = torch.randn(6, 6).relu().to_sparse().requires_grad_()
        with around:
            y = torch.sparse.mm(sparse * 2, dense.sin())
            loss = (y.exp() * torch.sparse.mm(sparse, y)).sum()
        loss.backward()
        return [y.detach(), dense.grad, sparse.grad.to_dense()]

    assert_exact(step, scope)


# -- forward-mode AD -------------------------------------------------------------------------------------


def dual_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3), nn.Softplus())


def dual_step(around: Any, *, level_outside: bool = False) -> list[torch.Tensor]:
    model = dual_model()
    x, tangent = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    before = contextlib.nullcontext() if level_outside else around
    inside = around if level_outside else contextlib.nullcontext()
    with before:
        scaled = x.exp() if not level_outside else x
        with forward_ad.dual_level(), inside:
            primal, jvp = forward_ad.unpack_dual(model(forward_ad.make_dual(scaled, tangent)))
            loss = primal.square().sum() + jvp.square().sum()
        if not level_outside:
            loss = loss + (scaled.sin() * scaled).sum()
    loss.backward()
    return [primal.detach(), jvp.detach(), x.grad, *(p.grad for p in model.parameters())]


@in_every_scope
@pytest.mark.parametrize("level_outside", [False, True])
def test_forward_mode_ad(level_outside: bool, scope: Callable[[], Any]) -> None:
    """It crashed the interpreter: missing tangents are zero tensors, which have no memory."""
    assert_exact(lambda around: dual_step(around, level_outside=level_outside), scope)
    assert innermost_mode() is None


@in_every_scope
def test_forward_over_reverse(scope: Callable[[], Any]) -> None:
    """The Hessian-vector product of a model whose forward ran in a scope."""

    def step(around: Any) -> list[torch.Tensor]:
        model = dual_model()
        x, vector = torch.randn(4, 6), torch.randn(4, 6)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, vector).requires_grad_()
            with around:
                loss = model(dual).square().sum()
            (grad,) = torch.autograd.grad(loss, dual)
            gradient, product = forward_ad.unpack_dual(grad)
        return [gradient, product]

    assert_exact(step, scope)


@in_every_scope
def test_torch_func_jvp(scope: Callable[[], Any]) -> None:
    model = dual_model()
    x, tangent = torch.randn(4, 6), torch.randn(4, 6)

    def step(around: Any) -> list[torch.Tensor]:
        with around:
            out, jvp = torch.func.jvp(model, (x,), (tangent,))
        return [out.detach(), jvp.detach()]

    assert_exact(step, scope)


def test_memory_written_in_a_dual_level_is_a_source() -> None:
    """Recording is off there, so a value recorded before must not be recomputed afterwards."""

    def step(around: Any) -> list[torch.Tensor]:
        x = torch.linspace(0, 1, 50, requires_grad=True)
        with around:
            buffer = x.detach().cos()
            with forward_ad.dual_level():
                buffer.mul_(3)
            loss = (x * buffer).sin().sum()
        loss.backward()
        return [x.grad]

    assert_exact(step, SCOPES["none"])


def test_the_functions_of_torch_are_restored() -> None:
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    for scope in SCOPES.values():
        with scope(), forward_ad.dual_level():
            pass
        assert (forward_ad.enter_dual_level, forward_ad.exit_dual_level) == (enter, leave)


@in_every_scope
def test_zero_tensors(scope: Callable[[], Any]) -> None:
    def step(around: Any) -> list[torch.Tensor]:
        x = torch.linspace(0, 1, 5, requires_grad=True)
        with around:
            zero = torch._efficientzerotensor((5,))
            loss = ((x + zero).sin() * (zero * 2) * x).sum() + (x.view(5, 1) * zero).exp().sum()
        loss.backward()
        return [x.grad]

    assert_exact(step, scope)


# -- meta tensors ----------------------------------------------------------------------------------------


@in_every_scope
def test_meta_tensors_have_no_memory(scope: Callable[[], Any]) -> None:
    x = torch.randn(100, requires_grad=True)
    with scope():
        model = nn.Sequential(nn.Linear(2**17, 2**17, device="meta"), nn.Dropout(0.5), nn.Tanh())  # 64 GiB
        out = model(torch.empty(2**10, 2**17, device="meta"))
        out = (out * 2).add_(1)
        loss = x.sin().exp().sum()
        out.sum().backward()
    loss.backward()
    assert model[0].weight.grad.is_meta
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert lowtide.report().bytes_kept < 2**20
    assert lowtide.report().bytes_recomputed < 2**20


def test_a_budget_does_not_count_meta_tensors() -> None:
    with lowtide.budget("256 MiB"):
        big = torch.empty(2**36, device="meta", requires_grad=True)
        (big * 2).sin().sum().backward()
    assert lowtide.report().budget.peak_bytes < 2**28
    assert counted(big) == 0


def test_a_fitted_model_on_the_meta_device_runs() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**16, 2**16), nn.GELU(), nn.Linear(2**16, 8))  # 16 GiB
    lowtide.fit(model, budget="1 MiB")
    for _ in range(3):
        model(torch.empty(4, 2**16, device="meta")).sum().backward()
    assert model[0].weight.grad.is_meta
    lowtide.unfit(model)


def test_a_model_fitted_on_the_meta_device_trains_after_it_is_moved() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    lowtide.fit(model, budget="256 MiB")
    model(torch.empty(4, 64, device="meta")).sum().backward()
    model.zero_grad()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = torch.randn(4, 64)
    for _ in range(3):
        model.zero_grad()
        model(x).square().sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    assert lowtide.report(model).steps == 3
    lowtide.unfit(model)
    model.zero_grad()
    model(x).square().sum().backward()
    assert all(torch.equal(o, p.grad) for o, p in zip(ours, model.parameters(), strict=True))


# -- other tensors ---------------------------------------------------------------------------------------


def test_uninitialised_parameters() -> None:
    lazy = nn.LazyLinear(3)
    assert counted(lazy.weight) == 0
    with lowtide.budget("1 GiB"):
        loss = lazy(torch.ones(2, 5)).sin().sum()
    loss.backward()
    assert lazy.weight.grad.shape == (3, 5)


def test_verified_tensors_can_be_resized() -> None:
    with lowtide.saving(NONE, verify=True):
        y = torch.ones(3, requires_grad=True).detach().exp()
        y.resize_(1000)
    assert y.shape == (1000,)


class Outer(torch.Tensor):
    """A wrapper subclass of two tensors."""

    @staticmethod
    def __new__(cls, low: torch.Tensor, high: torch.Tensor) -> Outer:
        return torch.Tensor._make_wrapper_subclass(cls, (1_000_000,), dtype=torch.float32)

    def __init__(self, low: torch.Tensor, high: torch.Tensor) -> None:
        self.low, self.high = low, high

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["low", "high"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_the_parts_of_a_wrapper_subclass_are_counted() -> None:
    low, high = torch.zeros(10), torch.zeros(20)
    assert counted(Outer(low, high)) == 120
    assert counted(low, Outer(low, high), high) == 120


# -- ops that compute something else under a dispatch mode ------------------------------------------------


@in_every_scope
def test_complex_linear_algebra(scope: Callable[[], Any]) -> None:
    """Inside a dispatch mode these kernels ignored lazy conjugation."""
    torch.manual_seed(0)
    a, b = torch.randn(5, 3, dtype=torch.complex128), torch.randn(5, 2, dtype=torch.complex128)

    def step(around: Any) -> list[torch.Tensor]:
        with around:
            least = torch.linalg.lstsq(a, b, driver="gels")
            return [
                torch.linalg.pinv(a),
                least.solution,
                least.residuals,
                torch.linalg.eigvals(a[:3]),
                a[0].conj().var(),
            ]

    assert_exact(step, scope)
    with scope():
        pseudo = torch.linalg.pinv(a)
    assert torch.allclose(pseudo, torch.from_numpy(np.linalg.pinv(a.numpy())))


@in_every_scope
def test_autocast_inside_a_kernel(scope: Callable[[], Any]) -> None:
    """The kernel of `bilinear` calls `bmm`, which autocast casts. Under a dispatch mode torch does not cast it."""

    def step(around: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.Bilinear(4, 5, 6)
        x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 5, requires_grad=True)
        with around, torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x.sin(), y.sin())
            loss = out.exp().sum() + torch.linalg.pinv(layer.weight.detach()).sum()
        loss.backward()
        return [out.detach(), loss.detach(), x.grad, y.grad, *(p.grad for p in layer.parameters())]

    assert_exact(step, scope)


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "prod": lambda x: x.prod(),
    "cumprod_ on a view": lambda x: (x * 1)[1:].cumprod_(0).sin(),
    "cumprod_ on a transposed view": lambda x: (x * 1).view(40, 5).t().cumprod_(0).sin(),
    "masked_fill": lambda x: x.masked_fill(x.detach() > 0.3, x.mean()),
    "masked_fill_ on a view": lambda x: (x * 1)[2:].masked_fill_(x.detach()[2:] > 0.3, x.mean()),
    "amax": lambda x: x.round(decimals=1).amax(),
}


@in_every_scope
@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_gradient_formulas_that_differ_under_a_mode(
    has_zeros: bool, formula: Callable[[torch.Tensor], torch.Tensor], scope: Callable[[], Any]
) -> None:
    def step(around: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(200)
        if has_zeros:
            x[3] = 0
        x.requires_grad_()
        with around:
            y = formula(x.sin() * 1.3)
            (y * y).sum().backward()
        return [y.detach(), x.grad]

    assert_exact(step, scope)
