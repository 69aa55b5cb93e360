"""Costs of recording and replaying: measured without side effects, and part of a predicted step."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine.strategies.recording_costs import recording_costs
from lowtide.fitting.plan import profile
from lowtide.planning import simulate
from lowtide.profiling.peak_meter import PeakMeter

from . import deep


def test_measuring_has_no_side_effects() -> None:
    x = torch.ones(3, requires_grad=True)
    with lowtide.saving(lowtide.KeepNone()):
        loss = x.sin().sum()
    before, state = lowtide.report(), torch.get_rng_state()
    recording_costs.cache_clear()
    with PeakMeter() as meter:
        costs = recording_costs()
    assert meter.peak_bytes < 2**19  # other fitted models may be in memory
    assert 0 <= costs.dispatch_s < 1e-2
    assert 1e-6 < costs.replay_overhead_s < 1e-2
    assert recording_costs() is costs
    assert lowtide.report() == before
    assert torch.equal(torch.get_rng_state(), state)
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3).cos())


def test_each_replay_costs_the_measured_constant() -> None:
    model, batch = deep.build("gpt2")
    trace = profile(model, batch)
    assert trace.replay_overhead_s == recording_costs().replay_overhead_s
    keep = [op.pinned is not None for op in trace.ops]
    kernels_s = simulate(replace(trace, replay_overhead_s=0.0), keep).extra_s
    judged = simulate(trace, keep)
    assert judged.replayed_ops > 0
    assert judged.extra_s == pytest.approx(kernels_s + judged.replayed_ops * trace.replay_overhead_s)


def test_a_verified_op_has_the_shorter_of_its_two_times() -> None:
    """Verification of the previous op evicts processor caches, so the first run is slower than in a plain step."""
    runs: list[bool] = []

    @torch.library.custom_op("lowtide_test::slow_at_first", mutates_args=())
    def slow_at_first(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.0 if runs else 0.2)
        runs.append(True)
        return x.sin()

    slow_at_first.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    lowtide.allow_replay("lowtide_test::slow_at_first")

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.ops.lowtide_test.slow_at_first(super().forward(x))
            return out.square().mean()

    for verify in (False, True):
        runs.clear()
        trace = profile(Model(4, 4), torch.ones(2, 4), loss=lambda out: out, verify=verify)
        (op,) = (op for op in trace.ops if "slow_at_first" in op.name)
        assert (op.time_s < 0.1) == verify
        assert len(runs) == 1 + verify


def test_a_pause_in_backward_does_not_count_as_its_time() -> None:
    """The median over equal layers is used, so a single pause has no effect."""
    pauses: list[float] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                x = layer(x).tanh()
                if i == 4:
                    x.register_hook(lambda _: pauses.append(0.5) or time.sleep(0.5))
            return x.square().mean()

    trace = profile(Model(), torch.ones(2, 8), loss=lambda out: out)
    assert pauses == [0.5]
    assert 0 < trace.step_s < 0.25
