"""`Checkpointer`: bit-equal gradients, with only the recomputation that the rule requires."""

import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lowtide import (
    ArgumentError,
    BudgetError,
    Decision,
    EveryN,
    KeepAll,
    KeepNone,
    MissingCheckpointError,
    ReplayMismatchError,
    Segments,
    Selective,
)
from lowtide.chain import ActivationStore, Checkpointer

DEPTH = 12
RULES = [KeepAll(), KeepNone(), EveryN(1), EveryN(3), EveryN(5), EveryN(50), Segments.uniform(DEPTH, 3),
         Segments([(0, 4), (6, 6)]), Segments(), Selective(100, cost=lambda op: 40), Selective(0), Selective(1e9),
         EveryN(4) & KeepAll(), KeepNone() | EveryN(6)]  # fmt: skip


def id_of(value):
    """Return a test id without memory addresses: ids must be equal in all pytest workers."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


class Dense:
    """y = tanh(x·W) with its backward. Counts its forward calls."""

    def __init__(self, size, seed):
        self.weight = np.random.default_rng(seed).standard_normal((size, size)) / size**0.5
        self.grad = np.zeros_like(self.weight)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return np.tanh(x @ self.weight)

    def backward(self, x, grad):
        inner = grad * (1 - np.tanh(x @ self.weight) ** 2)
        self.grad += x.T @ inner
        return inner @ self.weight.T


def forward_fn(layer, x):
    return layer.forward(x)


def backward_fn(layer, x, grad):
    return layer.backward(x, grad)


def stack(depth=DEPTH, size=6):
    return [Dense(size, seed) for seed in range(depth)]


def storing_all(layers, x, grad):
    """Return output, input gradient and weight gradients from storing every activation."""
    inputs = []
    for layer in layers:
        inputs.append(x)
        x = layer.forward(x)
    for layer, layer_input in zip(reversed(layers), reversed(inputs), strict=True):
        grad = layer.backward(layer_input, grad)
    return x, grad, [layer.grad for layer in layers]


@pytest.mark.parametrize("rule", RULES, ids=id_of)
def test_gradients_are_bit_equal_to_storing_all(rule):
    x, grad = np.random.default_rng(7).standard_normal((2, 4, 6))
    y, dx, weights = storing_all(stack(), x, grad)
    layers = stack()
    checkpointer = Checkpointer(rule)
    assert np.array_equal(checkpointer.forward(x, layers, forward_fn), y)
    assert np.array_equal(checkpointer.backward(grad, layers, forward_fn, backward_fn), dx)
    assert all(np.array_equal(layer.grad, w) for layer, w in zip(layers, weights, strict=True))
    assert len(checkpointer.store) == 0, "backward must release all activations"
    stats = checkpointer.stats()
    assert sum(layer.calls for layer in layers) == stats.forward_calls + stats.recomputed_calls
    assert all(layer.calls <= 2 for layer in layers), "each layer is recomputed at most once"


@pytest.mark.parametrize(
    ("rule", "stored", "recomputed"),
    [
        (KeepAll(), range(12), []),
        (KeepNone(), [], range(11)),
        (EveryN(4), [3, 7], [0, 1, 2, 4, 5, 6, 8, 9, 10]),
        (EveryN(1), range(11), []),
        (Segments([(2, 4), (9, 9)]), [0, 1, 5, 6, 7, 8, 10, 11], [2, 3, 4, 9]),
        (Selective(100, cost=lambda op: 40), [2, 5, 8, 11], [0, 1, 3, 4, 6, 7, 9, 10]),
    ],
    ids=id_of,
)
def test_stored_and_recomputed_layers(rule, stored, recomputed):
    layers = stack()
    checkpointer = Checkpointer(rule)
    checkpointer.forward(np.ones((2, 6)), layers, forward_fn)
    stats = checkpointer.stats()
    assert stats.stored == tuple(stored)
    assert stats.bytes_stored == (1 + len(stored)) * 96
    assert stats.bytes_avoided == (12 - len(stored)) * 96
    checkpointer.backward(np.ones((2, 6)), layers, forward_fn, backward_fn)
    assert [i for i, layer in enumerate(layers) if layer.calls == 2] == list(recomputed)


def test_stored_layers_follow_the_segments_mask():
    rule = Segments.uniform(DEPTH, 4)
    layers = stack()
    checkpointer = Checkpointer(Segments(rule.ranges[:3]))
    checkpointer.forward(np.ones((1, 6)), layers, forward_fn)
    mask = checkpointer.rule.mask(DEPTH)
    assert checkpointer.stats().stored == tuple(i for i, recomputed in enumerate(mask) if not recomputed)


def test_costs_from_numbers_a_function_or_measured_time():
    layers = stack()
    by_list = Checkpointer(Selective(), costs=[60] * DEPTH)  # the default threshold is 100
    by_list.forward(np.ones((1, 6)), layers, forward_fn)
    assert by_list.stats().stored == (1, 3, 5, 7, 9, 11)
    by_function = Checkpointer(Selective(), costs=lambda layer: 1000 if layer is layers[6] else 1)
    by_function.forward(np.ones((1, 6)), layers, forward_fn)
    assert by_function.stats().stored == (6,)
    by_time = Checkpointer(Selective(0.001))
    by_time.forward(np.ones((1, 6)), layers, forward_fn)
    assert by_time.stats().stored == tuple(range(DEPTH)), "each layer takes longer than a nanosecond"
    with pytest.raises(ArgumentError, match="costs has 2 numbers for 12 layers"):
        Checkpointer(Selective(), costs=[1, 2]).forward(np.ones((1, 6)), layers, forward_fn)


def test_backward_holds_one_segment_beside_the_store():
    """Peak measured by the allocator, for 16 activations of 1 MiB."""
    mib = 2**20
    layers = [1.5] * 16

    def scale(layer, x):
        return x * layer

    def peak(rule):
        x = np.ones(mib // 8)
        checkpointer = Checkpointer(rule)
        tracemalloc.start()
        y = checkpointer.forward(x, layers, scale)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        checkpointer.backward(np.ones_like(y), layers, scale, lambda layer, x, g: g * layer)
        measured = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return held / mib, measured / mib, checkpointer.stats().peak_bytes / mib

    held, measured, counted = peak(KeepAll())
    assert held == pytest.approx(1 + 1 + 16, abs=0.1)  # input, output, all layer outputs
    assert counted == 17
    held, measured, counted = peak(EveryN(4))
    assert held == pytest.approx(1 + 4, abs=0.1)  # output, and inputs of layers 0, 4, 8 and 12
    assert counted == 4 + 3
    # Not counted: y, its gradient, and the private input of the layer being recomputed.
    assert measured == pytest.approx(counted + 3, abs=0.1)
    held, measured, counted = peak(KeepNone())
    assert held == pytest.approx(2, abs=0.1)
    assert counted == 16


def test_stored_activations_are_released_segment_by_segment():
    layers = stack()
    checkpointer = Checkpointer(EveryN(3))
    stored = []

    def recording_backward(layer, x, grad):
        stored.append(checkpointer.store.bytes_stored // x.nbytes)
        return layer.backward(x, grad)

    checkpointer.forward(np.ones((2, 6)), layers, forward_fn)
    checkpointer.backward(np.ones((2, 6)), layers, forward_fn, recording_backward)
    assert stored == [3, 3, 3, 2, 2, 2, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("rule", [KeepAll(), KeepNone(), EveryN(4)], ids=id_of)
def test_recompute_returns_any_activation(rule):
    layers = stack()
    x = np.random.default_rng(1).standard_normal((3, 6))
    expected = x
    checkpointer = Checkpointer(rule)
    checkpointer.forward(x, layers, forward_fn)
    for i, layer in enumerate(layers):
        expected = layer.forward(expected)
        before = [each.calls for each in layers]
        assert np.array_equal(checkpointer.recompute(i, layers, forward_fn), expected)
        recomputed = [k for k, each in enumerate(layers) if each.calls > before[k]]
        start = max((s + 1 for s in checkpointer.stats().stored if s <= i), default=0)
        assert recomputed == list(range(start, i + 1)), "recomputation starts at the nearest stored activation"


def test_layers_may_write_into_their_input():
    def in_place(factor, x):
        x *= factor
        return x

    layers = [2.0, 3.0, 5.0, 7.0]
    for rule in (KeepAll(), KeepNone(), EveryN(2)):
        checkpointer = Checkpointer(rule)
        checkpointer.forward(np.ones(3), layers, in_place)
        inputs = []

        def backward(factor, x, grad):
            inputs.append(float(x[0]))
            grad *= factor
            x[:] = -1
            return grad

        assert checkpointer.backward(np.ones(3), layers, in_place, backward).tolist() == [210.0] * 3
        assert inputs == [30.0, 6.0, 2.0, 1.0]


def test_layers_may_reuse_their_output_buffer():
    class Buffered:
        def __init__(self):
            self.out = np.empty(3)

        def __call__(self, x):
            np.multiply(x, 1.5, out=self.out)
            return self.out

    layers = [Buffered()] * 5

    def backward(layer, x, grad):
        inputs.append(float(x[0]))
        return grad * layer(x) / x

    for rule in (KeepAll(), KeepNone(), EveryN(2)):
        inputs = []
        checkpointer = Checkpointer(rule)
        checkpointer.forward(np.ones(3), layers)
        checkpointer.backward(np.ones(3), layers, None, backward)
        assert inputs == [1.5**k for k in (4, 3, 2, 1, 0)]


def test_evicted_activations_are_recomputed():
    x, grad = np.random.default_rng(7).standard_normal((2, 4, 6))
    _, dx, _ = storing_all(stack(), x, grad)
    for options in ({"budget": 3 * x.nbytes}, {"slots": 4}, {"budget": x.nbytes}, {"slots": 1}):
        layers = stack()
        store = ActivationStore(**options)
        checkpointer = Checkpointer(KeepAll(), store)
        checkpointer.forward(x, layers, forward_fn)
        assert "input" in store, "the input is pinned"
        assert np.array_equal(checkpointer.backward(grad, layers, forward_fn, backward_fn), dx)
        assert store.stats().peak_bytes <= options.get("budget", np.inf)
    with pytest.raises(BudgetError):
        Checkpointer(KeepAll(), ActivationStore(slots=3, evict="error")).forward(x, stack(), forward_fn)


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    slots=st.one_of(st.none(), st.integers(1, 9)),
    activations=st.one_of(st.none(), st.integers(1, 9)),
    evict=st.sampled_from(["oldest", "cheapest", "largest"]),
    tier=st.sampled_from(["memory", "disk"]),
    retain=st.booleans(),
)
def test_every_rule_and_store_gives_bit_equal_gradients(rule, slots, activations, evict, tier, retain):
    x, grad = np.random.default_rng(7).standard_normal((2, 4, 6))
    _, dx, weights = storing_all(stack(), x, grad)
    layers = stack()
    budget = None if activations is None else activations * x.nbytes
    with ActivationStore(slots=slots, budget=budget, evict=evict, tier=tier) as store:
        checkpointer = Checkpointer(rule, store)
        checkpointer.forward(x, layers, forward_fn)
        assert np.array_equal(checkpointer.backward(grad, layers, forward_fn, backward_fn, retain=retain), dx)
        assert all(np.array_equal(layer.grad, w) for layer, w in zip(layers, weights, strict=True))
        assert store.stats().peak_bytes <= (budget or np.inf)
        assert (len(store) > 0) == retain


def test_disabled_checkpointer_stores_everything():
    checkpointer = Checkpointer(KeepNone(), enabled=False)
    layers = stack()
    checkpointer.forward(np.ones((1, 6)), layers, forward_fn)
    checkpointer.backward(np.ones((1, 6)), layers, forward_fn, backward_fn)
    assert checkpointer.stats().recomputed_calls == 0
    checkpointer.enabled = True
    checkpointer.forward(np.ones((1, 6)), layers, forward_fn)
    assert checkpointer.stats().stored == ()


def test_retain_allows_a_second_backward():
    layers = stack()
    x = grad = np.ones((1, 6))
    checkpointer = Checkpointer(EveryN(4))
    checkpointer.forward(x, layers, forward_fn)
    first = checkpointer.backward(grad, layers, forward_fn, backward_fn, retain=True)
    assert np.array_equal(checkpointer.backward(grad, layers, forward_fn, backward_fn), first)
    with pytest.raises(MissingCheckpointError, match="Run forward again, or pass retain=True"):
        checkpointer.backward(grad, layers, forward_fn, backward_fn)


def test_layer_names_and_unknown_layers():
    named = dict(zip("abc", stack(3), strict=True))
    checkpointer = Checkpointer(KeepNone())
    checkpointer.forward(np.ones((1, 6)), named, forward_fn)
    assert np.array_equal(checkpointer.recompute("b", named, forward_fn), checkpointer.recompute(1, named, forward_fn))
    for layer in (3, -1, "d", True):
        with pytest.raises(ArgumentError, match=r"there is no layer .*: the layers are 0 to 2 \(a, b, c\)"):
            checkpointer.recompute(layer, named, forward_fn)
    with pytest.raises(ArgumentError, match="there are no layers to run"):
        checkpointer.forward(np.ones(3), [])


def test_errors_for_missing_forward_and_mismatched_arguments():
    checkpointer = Checkpointer(EveryN(2))
    with pytest.raises(MissingCheckpointError, match=r"nothing is stored yet: run forward\(x, layers, forward_fn\)"):
        checkpointer.recompute(0, stack(), forward_fn)
    layers = stack()
    checkpointer.forward(np.ones((2, 6)), layers, forward_fn)
    with pytest.raises(ArgumentError, match="forward ran 12 layers, but 3 were passed"):
        checkpointer.backward(np.ones((2, 6)), layers[:3], forward_fn, backward_fn)
    with pytest.raises(ArgumentError) as caught:
        checkpointer.backward(np.ones(6), layers, forward_fn, backward_fn)
    assert str(caught.value) == "the output of the chain is float64[2, 6], but its gradient is float64[6]"
    with pytest.raises(ArgumentError, match=r"the input of layer 11 \(Dense\) is float64\[2, 6\], but its gradient"):
        checkpointer.backward(np.ones((2, 6)), layers, forward_fn, lambda layer, x, grad: grad[:1])


def test_layer_with_a_different_output_shape_in_recomputation_raises():
    sizes = iter([4, 4, 4, 5])
    checkpointer = Checkpointer(KeepNone())
    layers = [lambda x: np.ones(next(sizes))] * 3
    checkpointer.forward(np.ones(4), layers)
    message = r"layer 0 \(<lambda>\) returned float64\[4\] in forward and float64\[5\] in recomputation"
    with pytest.raises(ReplayMismatchError, match=message):
        checkpointer.recompute(2, layers)


def test_exceptions_keep_their_type_and_get_a_note_with_the_layer():
    def broken(layer, x):
        if layer == 2:
            raise ZeroDivisionError("no")
        return x

    checkpointer = Checkpointer(KeepAll())
    with pytest.raises(ZeroDivisionError) as caught:
        checkpointer.forward(np.ones(1), [0, 1, 2], broken)
    assert caught.value.__notes__ == ["in the forward of layer 2 (int)"]
    assert len(checkpointer.store) == 0
    checkpointer.forward(np.ones(1), [0, 1], broken)
    with pytest.raises(ZeroDivisionError) as caught:
        checkpointer.backward(np.ones(1), [0, 2], broken, lambda layer, x, g: broken(layer, g))
    assert caught.value.__notes__ == ["in the backward of layer 1 (int)"]


def test_rule_may_be_a_callable():
    checkpointer = Checkpointer(lambda op: Decision.KEEP if op.index % 5 == 0 else Decision.RECOMPUTE)
    checkpointer.forward(np.ones((1, 6)), stack(), forward_fn)
    assert checkpointer.stats().stored == (0, 5, 10)


def test_torch_layers_keep_no_graph_and_match_autograd():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(6)]
    x = torch.randn(3, 8)

    def backward(layer, x, grad):
        x = x.requires_grad_()
        layer(x).backward(grad)
        return x.grad

    leaf = x.clone().requires_grad_()
    torch.nn.Sequential(*layers)(leaf).sum().backward()
    expected = [p.grad.clone() for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    checkpointer = Checkpointer(EveryN(3), ActivationStore(tier="disk"))
    y = checkpointer.forward(x, layers)
    assert y.grad_fn is None
    dx = checkpointer.backward(torch.ones_like(y), layers, None, backward)
    assert torch.equal(dx, leaf.grad)
    assert all(
        torch.equal(p.grad, e)
        for p, e in zip((p for layer in layers for p in layer.parameters()), expected, strict=True)
    )


def test_jax_layers_match_jax_grad():
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    def layer(x):
        return {"u": jnp.sin(x["u"]) * x["v"], "v": x["v"] + x["u"]}

    x = {"u": jnp.arange(3.0), "v": jnp.ones(3)}
    layers = [layer] * 5

    def backward(layer, x, grad):
        return jax.vjp(layer, x)[1](grad)[0]

    def loss(x):
        for each in layers:
            x = each(x)
        return x["u"].sum() + x["v"].sum()

    checkpointer = Checkpointer(EveryN(2))
    y = checkpointer.forward(x, layers)
    dx = checkpointer.backward(jax.tree.map(jnp.ones_like, y), layers, None, backward)
    assert all(jnp.allclose(dx[k], jax.grad(loss)(x)[k], rtol=1e-5) for k in x)
