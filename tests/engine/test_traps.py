"""Incomplete schemas, unusual memory and foreign tensor classes (Rules 6 to 14)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.engine.ops.facts import facts_of
from lowtide.profiling.peak_meter import PeakMeter

NONE = lowtide.KeepNone()
aten = torch.ops.aten


class Count(TorchDispatchMode):
    """Counts kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def grad_of(f: Any, *leaves: torch.Tensor, scope: Any = None) -> tuple[torch.Tensor, ...]:
    with scope or lowtide.saving(NONE):
        loss = f()
    return torch.autograd.grad(loss, leaves)


def test_replay_runs_each_needed_kernel_once_and_no_other() -> None:
    x = torch.randn(8, requires_grad=True)
    with lowtide.saving(NONE):
        a = x.sin()
        b = a.exp()
        c = b.tanh()
        x.cos()  # not needed in backward
        loss = c.sum()
    with Count() as count:
        loss.backward()
    forward = [n for n in count.names if n in ("aten::sin", "aten::exp", "aten::tanh")]
    assert sorted(forward) == ["aten::exp", "aten::sin", "aten::tanh"]
    assert count.names.count("aten::cos") == 1  # the derivative of sin
    assert lowtide.report().replayed_ops == 3


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_statistics_are_updated_once(training: bool) -> None:
    """pytorch#96136: `native_batch_norm` writes the statistics without declaring it in its schema."""
    assert not aten.native_batch_norm.default._schema.is_mutable
    assert facts_of(aten.native_batch_norm.default).writes
    norm, plain_norm = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    norm.train(training), plain_norm.train(training)
    x = torch.randn(10, 6, requires_grad=True)
    ours = grad_of(lambda: norm(x.sin()).exp().sum(), x)[0]
    plain = torch.autograd.grad(plain_norm(x.sin()).exp().sum(), x)[0]
    assert torch.equal(ours, plain)
    assert lowtide.report().replayed_ops > 0
    for name, buffer in plain_norm.named_buffers():
        assert torch.equal(buffer, norm.get_buffer(name)), name


def test_replay_in_training_ignores_changed_statistics() -> None:
    norm = nn.BatchNorm1d(6)
    x = torch.randn(10, 6, requires_grad=True)
    with lowtide.saving(NONE):
        first = norm(x.sin()).exp().sum()
        second = norm(x.cos()).exp().sum()
    ours = torch.autograd.grad(first + second, x)[0]
    plain = torch.autograd.grad(norm(x.sin()).exp().sum() + norm(x.cos()).exp().sum(), x)[0]
    assert torch.equal(ours, plain)


def test_a_view_outside_its_storage_is_an_error() -> None:
    """`Tensor.set_` grows a storage that is too small. The engine must prevent this."""
    from lowtide.engine.values.view import view_of

    base = torch.zeros(4)
    with pytest.raises(lowtide.ReplayMismatchError, match="does not fit into 16 bytes"):
        view_of(base, torch.float32, torch.Size([2, 4]), (4, 1), 0)
    assert base.untyped_storage().nbytes() == 16
    assert view_of(base, torch.float32, torch.Size([0, 4]), (4, 1), 0).shape == (0, 4)


def test_a_source_whose_storage_was_freed_is_an_error() -> None:
    """FSDP2 frees the storage of a parameter like this. Here it is not gathered again."""
    w = torch.randn(8, 8, requires_grad=True)
    with lowtide.saving(NONE):
        loss = (w.sin() @ w.cos()).exp().sum()
    content = w.detach().clone()
    w.untyped_storage().resize_(0)
    with pytest.raises(lowtide.StaleSourceError, match="has another size \\(0 bytes, forward used 256\\)"):
        loss.backward()
    w.untyped_storage().resize_(256)
    with torch.no_grad():
        w.copy_(content)


def test_a_source_that_moved_is_an_error() -> None:
    x = torch.randn(64, requires_grad=True)
    with lowtide.saving(NONE):
        loss = x.sin().exp().sum()
    was = x.data_ptr()
    fillers = []
    while x.data_ptr() == was and len(fillers) < 100:
        x.untyped_storage().resize_(1_000_000)  # too large for the old address
        fillers.append(torch.zeros(64))  # may get the old address
        x.untyped_storage().resize_(256)
    assert x.data_ptr() != was
    with pytest.raises(lowtide.StaleSourceError, match="was moved to other memory"):
        loss.backward()


def test_empty_memory_that_is_filled_can_be_recomputed() -> None:
    x = torch.randn(2000, requires_grad=True)

    def f() -> torch.Tensor:
        mask = torch.empty_like(x).bernoulli_(0.5)
        scale = torch.empty(2000).fill_(3.0)
        return (x * mask * scale).sum()

    torch.manual_seed(0)
    plain = torch.autograd.grad(f(), x)[0]
    torch.manual_seed(0)
    ours = grad_of(f, x)[0]
    assert torch.equal(plain, ours)
    report = lowtide.report()
    assert report.values_kept == 0
    assert report.values_recomputed >= 2


def test_empty_memory_that_is_read_is_opaque() -> None:
    """Rule 9: NumPy fills the buffer without a recorded op, as a raw kernel would."""
    x = torch.randn(500, requires_grad=True)

    def f() -> torch.Tensor:
        buffer = torch.empty(500)
        buffer.numpy()[:] = 7.0
        return (x * buffer).sin().sum()

    plain = torch.autograd.grad(f(), x)[0]
    junk = [torch.full((500,), float("nan")) for _ in range(20)]
    del junk
    assert torch.equal(grad_of(f, x)[0], plain)


def test_verification_detects_an_unrecorded_write_to_a_zeroed_buffer() -> None:
    x = torch.randn(500, requires_grad=True)

    def f() -> torch.Tensor:
        buffer = torch.zeros(500)
        buffer.numpy()[::2] = 7.0
        return (x * buffer).sin().sum()

    plain = torch.autograd.grad(f(), x)[0]
    assert torch.equal(grad_of(f, x, scope=lowtide.saving(NONE, verify=True))[0], plain)
    assert [(p.op, p.count) for p in lowtide.report().pinned] == [("aten.zeros.default", 1)]
    assert "written without a recorded op" in lowtide.report().pinned[0].why


def test_verification_accepts_the_writes_of_recorded_ops() -> None:
    x = torch.randn(3000, requires_grad=True)
    with lowtide.saving(lowtide.Selective(min_cost_us=1e9, cost=lambda op: 1.0), verify=True):
        loss = (F.dropout(x, 0.5, True).sin().relu_() * x).sum()
    assert lowtide.report().pinned == ()
    loss.backward()


def test_partly_written_empty_memory_is_kept() -> None:
    x = torch.randn(4, 500, requires_grad=True)

    def f() -> torch.Tensor:
        y = torch.empty(4, 500)
        y.numpy()[3] = 2.0
        for i in range(3):
            y[i] = x[i] * i
        return (y.sin() * x).sum()

    assert torch.equal(grad_of(f, x)[0], torch.autograd.grad(f(), x)[0])


def test_out_variants() -> None:
    x = torch.randn(300, requires_grad=True)

    def f() -> torch.Tensor:
        with torch.no_grad():
            out = torch.empty(300)
            torch.add(x, 1, out=out)
            torch.mul(out, 2, out=out)  # the output is also an input
            torch.sub(out, out, out=out[:])
            torch.add(out, x, out=out)
        return (out * x).sum()

    assert torch.equal(grad_of(f, x)[0], torch.autograd.grad(f(), x)[0])
    assert lowtide.report().values_recomputed >= 1


def test_a_tensor_copied_onto_itself() -> None:
    x = torch.randn(300, requires_grad=True)

    def f() -> torch.Tensor:
        y = x.sin()
        y.copy_(y)
        with torch.no_grad():
            z = x.cos()
            torch.add(z, z, out=z)
        return (y.sin() * z).sum()

    assert torch.equal(grad_of(f, x)[0], torch.autograd.grad(f(), x)[0])


@pytest.mark.parametrize("alias", [lambda t: t, lambda t: t.view_as(t), lambda t: t.flip(0).flip(0)])
def test_a_layer_that_overwrites_its_input_through_an_alias(alias: Any) -> None:
    """The alias refers to the input of the layer before the op overwrites it."""

    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(alias(x))
            x[1:].mul_(x[:-1].detach().view(-1).view_as(x[:-1]).clone())
            return x.sin()

    blocks = [Doubling() for _ in range(3)]
    w = torch.randn(6, 5, requires_grad=True)

    def f() -> torch.Tensor:
        x = w * 2
        for block in blocks:
            x = block(x)
        return x.square().sum()

    plain = torch.autograd.grad(f(), w)[0]
    for policy in (
        lowtide.EveryN(1, layers=Doubling),
        lowtide.EveryN(2, layers=Doubling),
        lowtide.SaveOps("sin", layers=Doubling),
        NONE,
    ):
        assert torch.equal(grad_of(f, w, scope=lowtide.saving(policy))[0], plain)


def test_an_in_place_op_copies_a_value_that_a_recipe_needs() -> None:
    buffer = torch.ones(100)
    x = torch.randn(100, requires_grad=True)

    def f() -> torch.Tensor:
        y = (x + buffer).sin()
        buffer.mul_(2)
        z = (x + buffer).sin()
        buffer.mul_(2)
        return (y * z).sum()

    plain = torch.autograd.grad(f(), x)[0]
    buffer.fill_(1)
    ours = grad_of(f, x)[0]
    assert torch.equal(plain, ours)
    assert torch.equal(buffer, torch.full((100,), 4.0))
    assert lowtide.report().bytes_copied == 2 * 400


def test_ops_are_allowed_by_name() -> None:
    with pytest.raises(lowtide.ArgumentError, match=r'such as "mylib::op".*not OpOverload aten.sin.default'):
        lowtide.allow_replay(torch.ops.aten.sin.default)  # type: ignore[arg-type]


def test_custom_ops_are_kept_unless_allowed() -> None:
    calls = []

    @torch.library.custom_op("lowtide_test::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 3

    triple.register_autograd(lambda ctx, g: g * 3)
    x = torch.randn(50, requires_grad=True)

    def f() -> torch.Tensor:
        return triple(x.sin()).exp().sum()

    plain = torch.autograd.grad(f(), x)[0]
    calls.clear()
    assert torch.equal(grad_of(f, x)[0], plain)
    assert len(calls) == 1
    pins = lowtide.report().pinned
    assert [p.op for p in pins] == ["lowtide_test.triple.default"]
    assert "lowtide.allow_replay('lowtide_test::triple')" in pins[0].why

    lowtide.allow_replay("lowtide_test::triple")
    calls.clear()
    assert torch.equal(grad_of(f, x)[0], plain)
    assert lowtide.report().pinned == ()
    assert len(calls) == 2  # the output of exp is unpacked; its replay needs the output of triple, which runs once more
    assert lowtide.report().values_kept == 0


def test_ops_that_do_not_reproduce_are_pinned() -> None:
    """Rule 10 with an op that has an undeclared state."""
    state = {"n": 0}

    @torch.library.custom_op("lowtide_test::drift", mutates_args=())
    def drift(x: torch.Tensor) -> torch.Tensor:
        state["n"] += 1
        return x + state["n"]

    drift.register_autograd(lambda ctx, g: g)
    lowtide.allow_replay("lowtide_test::drift")
    x = torch.randn(50, requires_grad=True)
    with lowtide.saving(NONE, verify=True):
        y = drift(x.sin())
        loss = y.square().sum()
    expected = 2 * y.detach() * x.detach().cos()
    loss.backward()
    assert torch.allclose(x.grad, expected)
    (pin,) = lowtide.report().pinned
    assert pin.op == "lowtide_test.drift.default"
    assert pin.why == "replaying it did not give the same bits"


def test_foreign_tensors_pass_through() -> None:
    """Rule 14 for a wrapper subclass and sparse tensors."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Wrapper:
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
            )

        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            unwrap = lambda a: a.inner if isinstance(a, Wrapper) else a
            out = func(*[unwrap(a) for a in args], **(kwargs or {}))
            return Wrapper(out) if isinstance(out, torch.Tensor) else out

    x = torch.randn(20, requires_grad=True)
    plain = torch.autograd.grad(x.sin().exp().sum(), x)[0]

    w = Wrapper(x.detach())
    w.requires_grad_()
    with lowtide.saving(NONE):
        loss = w.sin().exp().sum()
    loss.backward()
    assert torch.equal(w.grad.inner, plain)
    assert lowtide.report().foreign["Wrapper"] > 0

    dense = torch.randn(5, 5, requires_grad=True)
    with lowtide.saving(NONE):
        s = torch.eye(5).to_sparse()
        loss = torch.sparse.mm(s, dense.sin()).exp().sum()
    ours = torch.autograd.grad(loss, dense)[0]
    assert torch.equal(
        ours, torch.autograd.grad(torch.sparse.mm(torch.eye(5).to_sparse(), dense.sin()).exp().sum(), dense)[0]
    )


def test_conjugate_and_negative_views() -> None:
    x = torch.randn(6, 6, dtype=torch.complex64, requires_grad=True)

    def f() -> torch.Tensor:
        y = (x * 2).conj() @ x.sin().mH
        return (y.imag * x.conj().imag).sin().sum() + torch.view_as_real(y.resolve_conj()).square().sum()

    assert torch.equal(grad_of(f, x)[0], torch.autograd.grad(f(), x)[0])
    assert lowtide.report().values_recomputed > 2


def test_small_random_values_are_kept_rather_than_their_generator_state() -> None:
    x = torch.randn(10, requires_grad=True)
    with lowtide.saving(NONE):
        loss = (x * torch.rand(10)).sum()
    report = lowtide.report()
    assert report.values_kept == 1
    loss.backward()


def test_values_survive_set_and_resize() -> None:
    x = torch.randn(100, requires_grad=True)

    def f() -> torch.Tensor:
        y = x.detach() * 2
        z = (x + y).sin()
        y.resize_(50)
        y.fill_(1)
        return (z[:50] * y).exp().sum()

    assert torch.equal(grad_of(f, x)[0], torch.autograd.grad(f(), x)[0])


def test_ops_of_a_backward_inside_the_scope_are_not_recorded() -> None:
    x = torch.randn(100, requires_grad=True)
    with lowtide.saving(NONE):
        x.sin().exp().sum().backward()
        ops = lowtide.report().ops
        x.grad.mul_(2)  # a result of backward is a source
        y = (x * x.grad).sin().sum()
    plain = torch.autograd.grad((x * x.grad).sin().sum(), x)[0]
    assert ops == 4  # sin, exp, sum, and the gradient of the loss that backward() starts from
    assert torch.equal(torch.autograd.grad(y, x)[0], plain)


def test_kv_cache_is_appended_once() -> None:
    """transformers#28056: caches and recomputation."""
    import transformers

    from .zoo import build

    model, batch = build("gpt2_with_cache")
    cache = transformers.DynamicCache(config=model.config)
    with lowtide.saving(lowtide.EveryN(1)):
        loss = model(**batch, past_key_values=cache).loss
    assert cache.get_seq_length() == 24
    loss.backward()
    assert cache.get_seq_length() == 24


def test_the_residual_stream_is_kept_at_layers() -> None:
    """Without kept layer inputs one unpack replays all earlier blocks. With them it replays its own block only."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    model = Residual()
    x = torch.randn(4, 16, requires_grad=True)
    for policy, replayed_first in ((NONE, True), (lowtide.EveryN(1), False)):
        with lowtide.saving(policy):
            loss = model(x).square().sum()
        assert loss.grad_fn.next_functions[0][0]._saved_self is not None  # unpacks the last value
        assert (lowtide.report().replayed_ops > 8) is replayed_first


def test_each_dropout_is_drawn_once() -> None:
    """pytorch#190758: a recompute that draws other dropout masks gives wrong gradients without an error."""
    x = torch.randn(64, 64, requires_grad=True)

    def f() -> torch.Tensor:
        y = F.dropout(x.sin(), 0.5, True)
        y = F.alpha_dropout(y.exp(), 0.3, True)
        y = F.feature_alpha_dropout(y[None], 0.3, True)[0]
        return (F.dropout1d(y, 0.5, True) * F.rrelu(x, training=True)).tanh().sum()

    torch.manual_seed(4)
    plain = torch.autograd.grad(f(), x)[0]
    state = torch.get_rng_state()
    torch.manual_seed(4)
    assert torch.equal(grad_of(f, x)[0], plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_inference_tensors_and_quantised_ones() -> None:
    x = torch.randn(200, requires_grad=True)

    def f() -> torch.Tensor:
        with torch.inference_mode():
            shift = torch.arange(200) * 0.5
        q = torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)
        return ((x + shift).sin() * q.dequantize()).exp().sum()

    plain = torch.autograd.grad(f(), x)[0]
    for policy in (NONE, lowtide.KeepAll(), lowtide.Segments([(0, 2)]), lowtide.Segments([(2, 9)])):
        assert torch.equal(grad_of(f, x, scope=lowtide.saving(policy))[0], plain)


def test_facts_hold_their_op_so_that_ids_stay_unique() -> None:
    assert facts_of(aten.sin.default).func is aten.sin.default


def test_ops_tagged_nondeterministic_are_never_replayed() -> None:
    assert "hidden generator" in (facts_of(aten._cudnn_rnn.default).pinned or "")
    assert facts_of(aten.mm.default).pinned is None

    torch.library.define("lowtide_test::shaky", "(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_bitwise,))
    lowtide.allow_replay("lowtide_test::shaky")
    assert "nondeterministic" in (facts_of(torch.ops.lowtide_test.shaky.default).pinned or "")


def test_the_workspace_of_an_lstm_is_not_compared() -> None:
    """oneDNN leaves some bytes of the workspace unwritten. They differ between calls and are never read."""
    torch.manual_seed(0)
    model = nn.LSTM(128, 128, num_layers=4, batch_first=True)
    x = torch.randn(16, 64, 128, requires_grad=True)
    junk = [torch.randn(2**k) for k in range(10, 22)]  # so that new memory is not all zeros

    def grads(scope: Any) -> list[torch.Tensor]:
        with scope:
            loss = model(x)[0].square().sum()
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    plain = grads(contextlib.nullcontext())
    del junk
    for _ in range(3):
        ours = grads(lowtide.saving(NONE, verify=True))
        assert not lowtide.report().pinned
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_random_ops_on_the_meta_device_draw_nothing() -> None:
    """A model may be built on the meta device while a scope is open."""
    before = torch.get_rng_state()
    with lowtide.saving(NONE):
        layer = nn.Linear(4, 4, device="meta")
        out = F.dropout(layer(torch.ones(2, 4, device="meta")), 0.5)
    assert out.is_meta
    assert torch.equal(torch.get_rng_state(), before)


WRITTEN_LISTS = {
    "_foreach_mul_": lambda view, other: torch._foreach_mul_([view, other], 3.0),
    "_foreach_exp_": lambda view, other: torch._foreach_exp_([other, view]),
    "_foreach_addcmul_": lambda view, other: torch._foreach_addcmul_([view], [other], [view.detach().clone()]),
}


@pytest.mark.parametrize("name", WRITTEN_LISTS)
@pytest.mark.parametrize("view", [lambda y: y.transpose(0, 1), lambda y: y[:, :3], lambda y: y])
@pytest.mark.parametrize(
    "scope",
    [
        lambda: lowtide.saving(lowtide.KeepAll()),
        lambda: lowtide.saving(NONE),
        lambda: lowtide.saving(NONE, verify=True),
        lambda: lowtide.budget(2**60),
        PeakMeter,
    ],
    ids=["all", "none", "verified", "budget", "meter"],
)
def test_a_list_of_tensors_written_in_place_counts_as_written(name: str, view: Any, scope: Any) -> None:
    """Under a dispatch mode torch does not count these writes, and autograd would use the graph before the write."""

    def step(around: Any) -> tuple[torch.Tensor, int]:
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)
        with around:
            y = x.sin()
            viewed = view(y)
            WRITTEN_LISTS[name](viewed, x.cos()[:, : viewed.shape[1]])
            loss = (viewed.sin() * y.sum()).sum()
        loss.backward()
        assert x.grad is not None
        return x.grad, y._version

    grad, version = step(contextlib.nullcontext())
    ours, our_version = step(scope())
    assert torch.equal(ours, grad)
    assert our_version == version


@pytest.mark.parametrize("scope", [lambda: lowtide.saving(NONE), PeakMeter])
def test_a_saved_tensor_in_a_list_written_in_place_is_an_error_as_in_plain_torch(scope: Any) -> None:
    def step(around: Any) -> None:
        weight = torch.randn(4, requires_grad=True)
        with around:
            x = torch.randn(4)
            loss = (weight * x).sum()
            torch._foreach_add_([x], 1.0)
            loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(contextlib.nullcontext())
    with pytest.raises((RuntimeError, lowtide.LowtideError)):
        step(scope())
