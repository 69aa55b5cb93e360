"""Every private name of torch that lowtide uses. A failure shows which one a release has broken."""

from __future__ import annotations

import contextlib
import copy
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
    assert p.argument_position(aten.native_dropout.default, "p") == 1
    assert p.argument_position(aten.native_dropout.default, "dropout_p") is None


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


def test_modules_and_their_own_tensors() -> None:
    shared = torch.nn.BatchNorm1d(2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), shared, torch.nn.Sequential(shared, torch.nn.ReLU()))
    assert set(p.modules_of(model)) == set(model.modules())
    assert len(p.modules_of(model)) == len(list(model.modules()))
    parameters = [own for module in p.modules_of(model) for own in p.own_parameters(module)]
    buffers = [own for module in p.modules_of(model) for own in p.own_buffers(module)]
    assert {id(own) for own in parameters} == {id(own) for own in model.parameters()}
    assert {id(own) for own in buffers} == {id(own) for own in model.buffers()}


def test_recorded_allocations() -> None:
    x = torch.zeros(1000)
    assert p.start_recording_allocations()
    y = x.clone()
    z = x.double()
    del y
    assert p.stop_recording_allocations() == [4000, 8000, -4000]
    assert z.nbytes == 8000
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not p.start_recording_allocations()


class Under(TorchDispatchMode):
    """Calls the kernels of ops as lowtide's modes do, or as other modes do."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func)(*args, **(kwargs or {}))


def test_kernels_conjugate_under_a_mode() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.complex128)
    plain = torch.linalg.pinv(x)
    with Under(p.kernel_of):
        assert torch.equal(torch.linalg.pinv(x), plain)
    with Under(lambda func: func):
        assert not torch.allclose(torch.linalg.pinv(x), plain)  # else `_in_state_of_call` is not needed any more


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_has_content() -> None:
    assert p.has_content(torch.ones(3))
    assert p.has_content(torch.empty(0))
    assert not p.has_content(torch.empty(3, device="meta"))
    assert not p.has_content(torch._efficientzerotensor((3,)))
    assert not p.has_content(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_memory_of() -> None:
    def sizes(tensor: torch.Tensor) -> list[int]:
        return [storage.nbytes() for storage in p.memory_of(tensor)]

    x = torch.ones(6)
    assert p.memory_of(x[2:]) == [x.untyped_storage()]
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 5, dtype=torch.long), torch.ones(5), (9,), check_invariants=True)
    assert sizes(sparse) == sizes(sparse.requires_grad_() * 1) == [40, 20]
    assert sizes(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])) == [20]
    assert sizes(torch.empty(3, device="meta")) == []
    assert sizes(torch._efficientzerotensor((3,))) == []
    assert sizes(torch.nn.LazyLinear(3).weight) == []
    assert p.nbytes_of(sparse) == 60
    assert p.nbytes_of(x[2:]) == 16
    assert p.nbytes_of(torch.nn.Parameter(x)) == 24


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_kind_of() -> None:
    x = torch.ones(2, 2)
    assert p.kind_of(x.to_sparse()) == "sparse_coo"
    assert p.kind_of(x.to_mkldnn()) == "mkldnn"
    assert p.kind_of(x.to("meta")) == "meta"
    assert p.kind_of(torch.nested.nested_tensor([x, x])) == "nested"
    assert p.kind_of(torch._efficientzerotensor((2,))) == "zero"
    kinds: list[str] = []
    torch.vmap(lambda row: kinds.append(p.kind_of(row)) or row)(x)  # type: ignore[func-returns-value]
    assert kinds == ["functorch"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_shape_of() -> None:
    assert p.shape_of(torch.ones(2, 3)) == (2, 3)
    parts = [torch.ones(2, 4), torch.ones(3, 4)]
    assert p.shape_of(torch.nested.nested_tensor(parts)) == ((2, 4), (3, 4))
    jagged = [torch.nested.nested_tensor(parts, layout=torch.jagged) for _ in range(2)]
    assert p.shape_of(jagged[0]) == p.shape_of(jagged[1]) == (3, 5, 4)


def test_dual_levels() -> None:
    seen: list[bool] = []
    enter = torch.autograd.forward_ad.enter_dual_level
    undo = p.on_dual_level(lambda: seen.append(p.in_dual_level()))
    with torch.autograd.forward_ad.dual_level():
        pass
    torch.func.jvp(torch.sin, (torch.ones(2),), (torch.ones(2),))
    undo()
    with torch.autograd.forward_ad.dual_level():
        assert p.in_dual_level()
    assert seen == [True, False, True, False]
    assert torch.autograd.forward_ad.enter_dual_level is enter


def test_without_hooks() -> None:
    packed = []

    def hooks(name: str) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(name) or t, lambda t: t)

    x = torch.ones(2, requires_grad=True)
    with hooks("outer"), hooks("inner"):
        assert p.without_hooks(lambda: p.innermost_hooks())() is None
        p.without_hooks(x.sin)()
        assert not packed
        with pytest.raises(ZeroDivisionError):
            p.without_hooks(lambda: 1 // 0)()
        x.sin()
    assert packed == ["inner"]
    assert p.innermost_hooks() is None


def test_hooks_of_a_copied_module() -> None:
    class Before:
        def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
            calls.append("before")

    class After:
        def __call__(self, module: Any, args: Any, output: Any) -> None:
            calls.append("after")

    calls: list[str] = []
    module = torch.nn.Linear(2, 2)
    module.register_forward_pre_hook(Before(), with_kwargs=True)
    module.register_forward_hook(After(), always_call=True)
    module.register_forward_pre_hook(lambda module, args: calls.append("other"))
    copied = copy.deepcopy(module)
    assert [type(hook) for hook in p.forward_pre_hooks_of(copied)][:1] == [Before]
    p.remove_forward_hooks(copied, (Before, After))
    copied(torch.ones(1, 2))
    assert calls == ["other"]
    copied.register_forward_pre_hook(lambda module, args: None)  # a leftover flag would add an argument
    copied(torch.ones(1, 2))
    module(torch.ones(1, 2))
    assert calls == ["other", "other", "before", "other", "after"]


def test_running_node_result_bytes() -> None:
    found = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        found.append(p.running_node_result_bytes())
        return tensor

    x, y = torch.ones(3, 5, requires_grad=True), torch.ones(5, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        (x.double() * y).sum().backward()
    assert found == [(3 * 5) * 8 + 5 * 8] * 2
    assert p.running_node_result_bytes() == 0


def test_before_next_nodes() -> None:
    happened: list[Any] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        happened.append(p.running_node())
        if p.running_node() == "MulBackward0":
            p.before_next_nodes(lambda gradient: happened.append(gradient.tolist()))
        return tensor

    x = torch.zeros(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = (x.sin() * torch.tensor([2.0, 3.0])).sum()
    for _ in range(2):  # the first pass leaves no hook behind
        loss.backward(retain_graph=True)
        assert happened == ["MulBackward0", [2.0, 3.0], "SinBackward0"]
        happened.clear()
    p.before_next_nodes(happened.append)  # outside backward there is no node
    assert not happened


def test_run_backward() -> None:
    def refuse(gradient: torch.Tensor) -> None:
        raise RuntimeError("refused")

    x = torch.ones(3, requires_grad=True)
    p.run_backward((2 * x).sum())
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]

    class Packed(list[torch.Tensor]):
        """A list that can be weakly referenced."""

    packed: list[weakref.ref[Packed]] = []

    def pack(tensor: torch.Tensor) -> Packed:
        found = Packed([tensor.detach()])
        packed.append(weakref.ref(found))
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda found: found[0]):
        waiting, failing = x.sin(), x.cos()
        failing.register_hook(refuse)
        loss = (waiting + failing).sum()
    del waiting, failing
    with pytest.raises(RuntimeError, match="refused"):
        p.run_backward(loss)
    del loss
    assert [reference() for reference in packed] == [None, None]
