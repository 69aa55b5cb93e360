"""Every private name of torch that lowtide uses. A failure shows which one a release has broken."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import torch_compat as p


def test_a_storage_is_one_object_while_it_lives() -> None:
    x = torch.zeros(4)
    gone = []
    ref = weakref.ref(x.untyped_storage(), gone.append)
    view = x[1:]
    key = p.storage_key(x.untyped_storage())
    assert p.storage_key(view.untyped_storage()) == key
    assert ref() is view.untyped_storage()
    del x
    assert not gone
    del view
    assert gone == [ref]


def test_version_of() -> None:
    x = torch.zeros(4)
    before = p.version_of(x)
    x.add_(1)
    assert p.version_of(x) == before + 1


def test_graph_task() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: seen.append(p.graph_task()))
    x.sum().backward()
    assert p.graph_task() == -1
    assert seen[0] != -1


def test_watched_alias_below_autograd() -> None:
    aliases: list[torch.Tensor] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.sin.default:
                aliases.append(p.watched_alias(args[0]))
            return func(*args, **(kwargs or {}))

    y = torch.ones(3, requires_grad=True) * 2
    with Mode():
        y.sin()
    (alias,) = aliases
    assert alias.grad_fn is None
    assert not alias.requires_grad
    with torch.no_grad():
        y.add_(1)
    assert p.version_of(alias) == p.version_of(y) == 1
    assert torch.equal(alias, y)


def test_below_autograd() -> None:
    w = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (w @ w).dtype is torch.bfloat16
        with p.below_autograd():
            out = torch.ops.aten.mm.default(w, w)
        assert out.dtype is torch.float32
        assert not out.requires_grad
        assert (w @ w).dtype is torch.bfloat16


def test_modes_step_aside_for_one_backward_node() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    depths = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, aside: bool) -> torch.Tensor:
            ctx.aside = aside
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
            if ctx.aside:
                assert p.innermost_mode() is mode
                p.suspend_innermost_mode()
            depths.append(torch._C._len_torch_dispatch_stack())
            return g, None

    x = torch.ones(2, requires_grad=True)
    with Mode() as mode:
        Probe.apply(Probe.apply(x, False), True).sum().backward()
        assert torch._C._len_torch_dispatch_stack() == 1
    assert depths == [0, 1]


def test_without_modes() -> None:
    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError

    with Refuses(), p.without_modes():
        torch.zeros(2) + 1


def test_is_wrapper() -> None:
    from torch.distributed.tensor import DTensor

    class Plain(torch.Tensor):
        pass

    assert not p.is_wrapper(torch.Tensor)
    assert not p.is_wrapper(torch.nn.Parameter)
    assert not p.is_wrapper(Plain)
    assert p.is_wrapper(DTensor)


def test_schemas() -> None:
    aten = torch.ops.aten
    assert p.written_arguments(aten.add_.Tensor) == ((0, "self"),)
    assert p.written_arguments(aten.mm.out) == ((2, "out"),)
    assert p.written_arguments(aten.mm.default) == ()
    assert p.returns_only_views(aten.transpose.int)
    assert p.returns_only_views(aten.split.Tensor)
    assert not p.returns_only_views(aten.clone.default)
    assert not p.returns_only_views(aten.add_.Tensor)


def test_never_compile() -> None:
    p.never_compile(test_schemas)  # takes a function and does not raise


def test_wrap_backward_and_makes_graph() -> None:
    seen = []

    def make(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.append(p.creates_graph(args))
            return original(*args, **kwargs)

        return run

    x = torch.ones(2, requires_grad=True)
    undo = p.wrap_backward(make)
    (g,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    g.sum().backward()
    torch.autograd.backward(x.square().sum(), create_graph=False)
    undo()
    x.square().sum().backward()
    assert seen == [True, False, False]


def test_is_unshared() -> None:
    x = torch.ones(3)
    assert p.is_unshared(x)
    view = x[1:]
    assert not p.is_unshared(x)
    del view
    assert p.is_unshared(x)
    y = x * torch.ones(3, requires_grad=True)  # saved in C++
    assert not p.is_unshared(x)
    del y
    assert p.is_unshared(x)


def test_running_node() -> None:
    names = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: names.append(p.running_node()) or t):
        y = x.exp().sum()
    y.backward()
    assert names == ["ExpBackward0"]
    assert p.running_node() == ""


def test_saving_hooks_allowed() -> None:
    seen = []
    x = torch.ones(2)
    torch.func.grad(lambda x: seen.append(p.saved_tensor_hooks_allowed()) or x.sum())(x)
    torch.func.vmap(lambda x: seen.append(p.saved_tensor_hooks_allowed()) or x)(x)
    assert seen == [False, False]
    assert p.saved_tensor_hooks_allowed()


def test_only_traced() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = []
    with FakeTensorMode():
        seen.append(p.is_tracing_only())
    make_fx(lambda x: seen.append(p.is_tracing_only()) or x + 1)(torch.ones(2))
    assert seen == [True, True]
    assert not p.is_tracing_only()


def test_reinstall_hook() -> None:
    from torch.nn.modules.module import register_module_forward_hook

    calls: list[str] = []

    class Fails(torch.nn.Module):
        def forward(self) -> None:
            raise OSError("as planned")

    def hook(module: torch.nn.Module, args: object, out: object) -> None:
        calls.append(type(module).__name__)

    handle = register_module_forward_hook(hook, always_call=True)
    number = handle.id
    handle.remove()
    p.reinstall_hook(handle, hook)
    torch.nn.Identity()(1)
    with pytest.raises(OSError, match="as planned"):
        Fails()()
    handle.remove()
    torch.nn.Identity()(1)
    assert calls == ["Identity", "Fails"]
    assert handle.id == number


def test_hidden_views_share_memory() -> None:
    x = torch.randn(4, 4)
    for made in (
        torch.ops.aten._unsafe_view(x, (16,)),
        *torch.ops.aten.unsafe_split.Tensor(x, 2),
        *torch.ops.aten.unsafe_split_with_sizes(x, [1, 3]),
        *torch.ops.aten.unsafe_chunk(x, 2),
    ):
        assert made.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_kernels_called_from_a_mode_increase_versions_like_without_one() -> None:
    class Through(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return p.kernel_of(func)(*args, **(kwargs or {}))

    def versions(scope: Any) -> list[int]:
        a, b = torch.rand(2, 3), torch.rand(2, 3)
        with scope:
            a.add_(1)
            torch._foreach_add_([a, b], 1.0)
            torch.unbind_copy(torch.zeros(2, 2, 3), out=(a, b))
            torch.mul(a, 2, out=b)
            torch._fused_sgd_(
                [a], [b], [torch.zeros(2, 3)], weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0,
                nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
        return [a._version, b._version]

    assert versions(Through()) == versions(contextlib.nullcontext())


def test_settings_by_their_private_names() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for deterministic, warn_only, precision in (
            (True, True, "high"),
            (True, False, "medium"),
            (False, False, "highest"),
        ):
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            torch.set_float32_matmul_precision(precision)
            now = p.is_deterministic(), p.only_warns_if_not_deterministic(), p.matmul_precision()
            assert now == (deterministic, warn_only, precision)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before)


def test_ops_are_told_from_functions_and_higher_order_ops() -> None:
    assert p.is_op(torch.ops.aten.sin.default)
    assert not p.is_op(torch.sin)
    assert not p.is_op(torch.ops.higher_order.cond)
    assert p.is_pure(torch.ops.aten.sin.default)
    assert not p.is_pure(torch.ops.aten.sin_.default)


def test_negated_view_shares_memory() -> None:
    x = torch.ones(3)
    view = p.negated_view(x)
    assert view.is_neg()
    assert view.untyped_storage() is x.untyped_storage()
    assert torch.equal(view.resolve_neg(), -x)


def test_tree_leaves_of_nested_arguments() -> None:
    assert p.tree_leaves(((1, {"a": [2, None]}), {"b": 3})) == [1, 2, None, 3]


def test_a_mode_receives_ops_below_autograd() -> None:
    names: list[str] = []

    class Mode(p.EngineMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    with Mode():  # type: ignore[no-untyped-call]
        torch.nn.functional.linear(x, torch.ones(2, 3))
    assert names[-1] != "aten.linear.default"  # a composite op is received as its parts
    assert Mode.ignore_compile_internals()
    assert not Mode._should_skip_dynamo()
