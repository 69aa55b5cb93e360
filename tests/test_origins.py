"""Features of five Rust checkpointing modules, tested under their original names.

The modules are scirs2-neural `training/backprop_efficient` (RecomputationPolicy,
GradientCheckpointManager, EfficientBackprop, CpuActivationStore), kizzasi-model `gradient_checkpoint`
(ActivationCheckpointer, CheckpointConfig), numr `autograd/checkpoint` (checkpoint), yscv-autograd `checkpoint`
(CheckpointConfig, plan_recomputation) and ferrotorch-core `autograd/checkpoint` (checkpoint, checkpoint_multi).
"""

import numpy as np
import pytest
import torch

import lowtide
from lowtide import BudgetError, EveryN, KeepAll, KeepNone, MissingCheckpointError, Segments, Selective
from lowtide.chain import ActivationStore, Checkpointer

X = np.random.default_rng(0).standard_normal((4, 8)).astype("float32")
LAYERS = [np.float32(1 + 0.01 * k) for k in range(12)]


def forward(layer, x):
    return np.tanh(layer * x)


def backward(layer, x, grad):
    return grad * layer * (1 - np.tanh(layer * x) ** 2)


def activations():
    values = [X]
    for layer in LAYERS:
        values.append(forward(layer, values[-1]))
    return values


def full_gradient():
    values, grad = activations(), np.ones_like(X)
    for layer, x in zip(reversed(LAYERS), reversed(values[:-1]), strict=True):
        grad = backward(layer, x, grad)
    return grad


class TestScirs2Neural:
    """training/backprop_efficient."""

    @pytest.mark.parametrize(
        ("rule", "kept"),
        [
            (KeepAll(), 12),  # RecomputationPolicy::CheckpointAll
            (KeepNone(), 0),  # ::CheckpointNone
            (
                Selective(cost=lambda op: 30),
                3,
            ),  # ::Selective with the default threshold: every fourth layer, as 4 × 30 ≥ 100
            (Selective(60, cost=lambda op: 30), 6),  # ::Selective { cost_threshold }
            (EveryN(3), 3),  # ::EveryN { n }: the inputs of layers 3, 6 and 9; the input of the chain is not counted
        ],
    )
    def test_recomputation_policy(self, rule, kept):
        checkpointer = Checkpointer(rule)
        checkpointer.forward(X, LAYERS, forward)
        assert len(checkpointer.stats().stored) == kept

    def test_recomputation_policy_default_threshold(self):
        assert Selective().min_cost_us == 100

    def test_checkpoint_activation_is_a_true_copy(self):
        """The original stored an empty buffer."""
        store = ActivationStore(budget="1 GiB")
        activation = X.copy()
        store.put(3, activation, cost=50)
        activation[:] = 0
        assert np.array_equal(store.get(3), X)

    def test_get_checkpoint_removes_the_entry_and_its_bytes(self):
        """The original kept counting the bytes."""
        store = ActivationStore()
        store.put(3, X)
        assert np.array_equal(store.take(3), X)
        assert 3 not in store  # has_checkpoint
        assert store.bytes_stored == 0  # memory_usage

    def test_evict_oldest_checkpoint_until_the_new_one_fits(self):
        """The original evicted one entry, even if the new one still did not fit."""
        store = ActivationStore(budget=4 * X.nbytes, evict="oldest")
        for layer in range(4):
            store.put(layer, X)
        assert store.put(4, np.tile(X, 3)) == (0, 1, 2)
        assert store.bytes_stored == store.budget_bytes  # memory_budget

    def test_the_same_layer_twice_counts_once(self):
        store = ActivationStore()
        store.put(0, X)
        store.put(0, X)
        assert store.bytes_stored == X.nbytes
        assert len(store) == 1  # num_checkpoints

    def test_activation_checkpoint_metadata(self):
        store = ActivationStore()
        store.put(0, X, cost=1)
        store.put(5, X, cost=42)
        entry = store.entry(5)
        assert entry.key == 5  # layer_id
        assert entry.stored_at >= store.entry(0).stored_at  # timestamp
        assert entry.nbytes == X.nbytes  # memory_size
        assert entry.cost == 42  # recomputation_cost
        assert entry.tier == "memory"  # in_memory
        assert 5 in store

    def test_get_statistics(self):
        store = ActivationStore(budget=4 * X.nbytes)
        for layer in range(6):
            store.put(layer, X)
        store.remove(5)  # remove_checkpoint
        stats = store.stats()
        assert stats.stored == 6  # total_checkpoints
        assert stats.resident == 3  # in_memory_checkpoints
        assert stats.bytes_stored == 3 * X.nbytes  # total_memory
        assert stats.budget_bytes == 4 * X.nbytes  # memory_budget
        assert stats.utilisation == 0.75  # memory_utilization
        store.clear()
        assert store.stats().utilisation == 0

    def test_forward_with_checkpoint_and_backward_with_recomputation(self):
        """The original recomputed a placeholder."""
        checkpointer = Checkpointer(EveryN(4), ActivationStore(budget="1 MiB"))
        output = checkpointer.forward(X, LAYERS, forward)
        assert np.array_equal(output, activations()[-1])
        assert np.array_equal(checkpointer.backward(np.ones_like(X), LAYERS, forward, backward), full_gradient())
        assert checkpointer.stats().recomputed_calls == 9

    def test_set_enabled(self):
        checkpointer = Checkpointer(KeepNone())
        checkpointer.enabled = False
        checkpointer.forward(X, LAYERS, forward)
        assert np.array_equal(checkpointer.backward(np.ones_like(X), LAYERS, forward, backward), full_gradient())
        assert checkpointer.stats().recomputed_calls == 0
        assert not checkpointer.enabled  # is_enabled

    def test_cpu_activation_store(self):
        store = ActivationStore()
        store.put(1, X)  # store
        assert np.array_equal(store.get(1), X)  # retrieve
        assert store.bytes_stored == X.nbytes  # memory_usage
        store.remove(1)
        assert store.bytes_stored == 0
        with pytest.raises(MissingCheckpointError):
            store.get(1)


class TestKizzasiModel:
    """gradient_checkpoint."""

    def test_checkpoint_config_defaults(self):
        assert Checkpointer().rule == EveryN(4)  # checkpoint_every_n_layers
        assert ActivationStore(slots=64).slots == 64  # max_checkpoints

    def test_save_and_get(self):
        store = ActivationStore()
        store.put(2, X)
        assert np.array_equal(store.get(2), X)
        with pytest.raises(MissingCheckpointError, match="nothing is stored under 5"):
            store.get(5)

    def test_max_checkpoints(self):
        store = ActivationStore(slots=2, evict="error")
        store.put(0, X)
        store.put(1, X)
        store.put(1, X)  # replacing an entry needs no new slot
        with pytest.raises(BudgetError, match="2 of 2 slots are in use"):
            store.put(2, X)
        checkpointer = Checkpointer(EveryN(2), ActivationStore(slots=3))
        checkpointer.forward(X, LAYERS, forward)
        assert len(checkpointer.store) == 3  # num_checkpoints, including the input
        assert np.array_equal(checkpointer.backward(np.ones_like(X), LAYERS, forward, backward), full_gradient())

    @pytest.mark.parametrize(("precision", "part"), [("float16", 1 / 2), ("bfloat16", 1 / 2), ("int8", 17 / 64)])
    def test_use_mixed_precision(self, precision, part):
        """The original rounded values to three decimals and stored them at full size."""
        x = np.random.default_rng(1).standard_normal((64, 64)).astype("float32")
        store = ActivationStore(precision=precision)
        store.put(0, x)
        assert store.bytes_stored == part * x.nbytes  # memory_stored_bytes
        assert store.bytes_avoided == (1 - part) * x.nbytes  # memory_saved_bytes due to the lower precision
        assert store.get(0).dtype == np.float32
        assert np.abs(store.get(0) - x).max() < 0.02

    def test_memory_accounting(self):
        checkpointer = Checkpointer(EveryN(3))
        checkpointer.forward(X, LAYERS[:6], forward)
        stats = checkpointer.stats()
        assert stats.bytes_stored == 2 * X.nbytes  # memory_stored_bytes: the inputs of layers 0 and 3
        assert stats.bytes_avoided == 5 * X.nbytes  # memory_saved_bytes: the other five outputs
        checkpointer.clear()
        assert checkpointer.stats().bytes_stored == checkpointer.stats().bytes_avoided == 0

    def test_is_checkpoint_layer(self):
        assert [layer for layer in range(12) if EveryN(3).keeps_input_of(layer)] == [0, 3, 6, 9]

    def test_checkpointed_forward(self):
        assert np.array_equal(Checkpointer(EveryN(2)).forward(X, LAYERS, forward), activations()[-1])

    def test_recompute_from_checkpoint_at_every_layer(self):
        """The original did not store the input, so the first layers could not be recomputed."""
        checkpointer = Checkpointer(EveryN(5))
        checkpointer.forward(X, LAYERS, forward)
        for layer, expected in enumerate(activations()[1:]):
            assert np.array_equal(checkpointer.recompute(layer, LAYERS, forward), expected)

    def test_arrays_of_any_rank_and_dtype(self):
        """The original supports one-dimensional float32 arrays only."""
        store = ActivationStore()
        store.put(0, {"hidden": X.astype("float64"), "mask": X > 0, "ids": [np.arange(3)]})
        assert store.get(0)["mask"].dtype == bool


class TestYscvAutograd:
    """checkpoint."""

    def test_uniform_segments(self):
        assert Segments.uniform(10, 2).ranges == ((0, 4), (5, 9))
        assert Segments.uniform(11, 3).ranges == ((0, 2), (3, 5), (6, 10)), "the last range includes the remainder"
        assert Segments.uniform(0, 3).ranges == Segments.uniform(3, 0).ranges == Segments.uniform(2, 3).ranges == ()

    def test_should_checkpoint(self):
        config = Segments([(2, 4), (7, 9)])
        assert [node for node in range(11) if config.recomputes(node)] == [2, 3, 4, 7, 8, 9]

    def test_plan_recomputation(self):
        assert Segments([(1, 3)]).mask(5) == [False, True, True, True, False]
        assert Segments().mask(3) == [False] * 3

    def test_the_mask_is_executed(self):
        """The original only computes the mask."""
        rule = Segments([(1, 3), (6, 9)])
        calls = [0] * len(LAYERS)

        def counted_forward(layer, x):
            calls[LAYERS.index(layer)] += 1
            return forward(layer, x)

        checkpointer = Checkpointer(rule)
        checkpointer.forward(X, LAYERS, counted_forward)
        grad = checkpointer.backward(np.ones_like(X), LAYERS, counted_forward, backward)
        assert np.array_equal(grad, full_gradient())
        assert [count == 2 for count in calls] == rule.mask(len(LAYERS))


class TestNumr:
    """autograd/checkpoint: a function that is recomputed in backward."""

    def test_single_input(self):
        x = torch.randn(5, requires_grad=True)
        lowtide.checkpoint(lambda t: t.sin().exp(), x).sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
        assert lowtide.report().replayed_ops > 0

    def test_multiple_inputs(self):
        a, b, c = (torch.randn(5, requires_grad=True) for _ in range(3))
        f = lambda p, q, r: (p * q).tanh() * r.exp()
        ours = torch.autograd.grad(lowtide.checkpoint(f, a, b, c).sum(), (a, b, c))
        for gradient, plain in zip(ours, torch.autograd.grad(f(a, b, c).sum(), (a, b, c)), strict=True):
            assert torch.equal(gradient, plain)

    def test_chained(self):
        x = torch.randn(5, requires_grad=True)
        y = lowtide.checkpoint(torch.sin, lowtide.checkpoint(torch.exp, lowtide.checkpoint(torch.tanh, x)))
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(x.tanh().exp().sin().sum(), x)[0])

    def test_vector_output(self):
        x, v = torch.randn(5, requires_grad=True), torch.randn(5)
        ours = torch.autograd.grad(lowtide.checkpoint(lambda t: t.sin().exp(), x), x, v)[0]
        assert torch.equal(ours, torch.autograd.grad(x.sin().exp(), x, v)[0])

    def test_several_outputs(self):
        """The original supports one output."""
        x = torch.randn(5, requires_grad=True)
        a, b = lowtide.checkpoint(lambda t: (t.sin(), t.exp().cos()), x)
        ours = torch.autograd.grad(a.sum() + b.sum(), x)[0]
        assert torch.equal(ours, torch.autograd.grad(x.sin().sum() + x.exp().cos().sum(), x)[0])

    def test_captured_parameters(self):
        """The original loses the gradients of captured parameters."""
        w = torch.randn(5, requires_grad=True)
        lowtide.checkpoint(lambda t: (t * w).sin(), torch.ones(5)).sum().backward()
        assert torch.equal(w.grad, w.detach().cos())

    def test_leaf_hooks_fire(self):
        x, gradients = torch.randn(5, requires_grad=True), []
        x.register_hook(gradients.append)
        lowtide.checkpoint(lambda t: t.sin().exp(), x).sum().backward()
        assert len(gradients) == 1

    def test_a_checkpoint_without_tensors_runs_the_function(self):
        """The original raises. torch.utils.checkpoint runs the function."""
        assert torch.equal(lowtide.checkpoint(lambda: torch.ones(3)), torch.ones(3))


class TestYscvAutogradInTheEngine:
    """checkpoint: the mask of recomputed nodes. The original does not execute it."""

    def test_the_engine_recomputes_segments(self):
        x = torch.randn(10, requires_grad=True)
        rule = Segments.uniform(6, 2)  # ops 0 to 2 and 3 to 5
        with lowtide.saving(rule):
            y = x
            for _ in range(6):
                y = y.sin()
            loss = y.sum()
        assert rule.mask(7) == [True] * 6 + [False]
        assert lowtide.report().values_recomputed == 5  # all saved values except x
        loss.backward()
        assert lowtide.report().replayed_ops == 5


class TestFerrotorchCore:
    """autograd/checkpoint."""

    def test_checkpoint_multi_computes_gradients_only_where_required(self):
        a, b, c = torch.randn(4, requires_grad=True), torch.randn(4), torch.randn(4, requires_grad=True)
        f = lambda p, q, r: (p * q).sin() * r
        lowtide.checkpoint(f, a, b, c).sum().backward()
        plain = torch.autograd.grad(f(a, b, c).sum(), (a, c))
        assert torch.equal(a.grad, plain[0])
        assert b.grad is None
        assert torch.equal(c.grad, plain[1])

    def test_random_numbers_on_the_cpu_are_reproduced(self):
        x = torch.randn(3000, requires_grad=True)
        f = lambda t: torch.nn.functional.dropout(t.exp(), 0.5, True)
        torch.manual_seed(2)
        plain = torch.autograd.grad(f(x).square().sum(), x)[0]
        torch.manual_seed(2)
        y = lowtide.checkpoint(f, x)
        torch.rand(5)  # other code draws random numbers in between
        assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], plain)

    def test_generator_state_is_restored_after_the_recompute(self):
        x = torch.randn(3000, requires_grad=True)
        y = lowtide.checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5, True).exp(), x)
        before = torch.get_rng_state()
        y.sum().backward()
        assert lowtide.report().replayed_ops > 0
        assert torch.equal(torch.get_rng_state(), before)

    def test_generator_state_is_restored_after_an_error(self):
        x = torch.randn(3000, requires_grad=True)
        y = lowtide.checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5, True).exp() * t.sin(), x)
        with torch.no_grad():
            x.zero_()
        before = torch.get_rng_state()
        with pytest.raises(lowtide.StaleSourceError):
            y.sum().backward()
        assert torch.equal(torch.get_rng_state(), before)

    def test_worker_threads_keep_the_no_grad_flag(self):
        """The original loses the flag. A scope in one thread does not affect other threads."""
        from concurrent.futures import ThreadPoolExecutor

        x = torch.randn(4, requires_grad=True)

        def work():
            with torch.no_grad():
                return lowtide.checkpoint(torch.sin, x).requires_grad

        with ThreadPoolExecutor(1) as pool, lowtide.saving(KeepNone()):
            assert pool.submit(work).result() is False

    def test_an_input_changed_between_forward_and_backward_raises(self):
        x = torch.randn(4, requires_grad=True)
        y = lowtide.checkpoint(lambda t: t.sin().exp(), x)
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(lowtide.StaleSourceError, match="was modified in place"):
            y.sum().backward()
