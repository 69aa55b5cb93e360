"""What recording costs is measured without leaving a trace, and is part of what plans predict."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import nn

import lowtide
from lowtide._plan import profile
from lowtide.engine.calibration import calibration
from lowtide.planning import solve

from . import deep


def test_it_is_measured_once_and_disturbs_nothing() -> None:
    calibration.cache_clear()
    x = torch.ones(3, requires_grad=True)
    with lowtide.saving(lowtide.KeepNone()):
        loss = x.sin().sum()
    before, state = lowtide.report(), torch.get_rng_state()
    found = calibration()
    assert 1e-6 < found.op_s < 1e-2
    assert 0 <= found.view_s < 1e-2  # a difference of two times, on a machine that others use
    assert 0 < found.save_s < 1e-2  # of which handing over is no difference
    assert 0 <= found.call_s < 1e-2
    assert 1e-6 < found.replay_s < 1e-2
    assert calibration() is found
    assert lowtide.report() == before
    assert torch.equal(torch.get_rng_state(), state)
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3).cos())


def test_a_plan_that_records_predicts_that_too() -> None:
    model, batch = deep.build("gpt2")
    trace = profile(model, batch)
    found = calibration()
    assert trace.recording_s >= len(trace.ops) * found.op_s  # there are views too
    assert trace.attending_s >= len(trace.saved) * found.save_s + len(list(model.modules())) * found.call_s
    assert trace.replay_s == found.replay_s
    everything = solve(trace, 2**60)
    assert everything.predicted_step_s == everything.plain_step_s
    assert everything.recording_s == 0
    half = solve(trace, everything.predicted_peak_bytes // 2)
    # All ops that a module runs one after the other are seen, or none of them.
    runs = [list(run) for _, run in itertools.groupby(range(len(trace.ops)), lambda j: trace.ops[j].module)]
    seen = sum(len(run) for run in runs if not all(half.keep[j] for j in run))
    assert 0 < seen < len(trace.ops)
    # All that is saved and all calls of modules, once anything is to be noted.
    assert half.recording_s == pytest.approx(trace.recording_s * seen / len(trace.ops) + trace.attending_s)
    assert half.bound_step_s > half.plain_step_s + trace.attending_s
    assert half.predicted_step_s > half.plain_step_s + half.recording_s
    replayed_s = sum(sorted(op.time_s for op in trace.ops)[: half.replayed_ops]) + half.replayed_ops * found.replay_s
    assert half.predicted_step_s > half.plain_step_s + half.recording_s + 0.5 * replayed_s
    assert half.gap == (half.predicted_step_s - half.bound_step_s) / half.plain_step_s


def test_a_verified_op_takes_the_less_of_its_two_times() -> None:
    """Checking the op before has been through the caches, so that the first run is slower than in a plain step."""
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
