"""What recording costs is measured without leaving a trace, and is part of what plans predict."""

from __future__ import annotations

import itertools

import pytest
import torch

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
    assert 0 < found.view_s < found.op_s
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
    assert trace.recording_s > len(trace.ops) * found.op_s  # there are views too
    assert trace.replay_s == found.replay_s
    everything = solve(trace, 2**60)
    assert everything.predicted_step_s == everything.plain_step_s
    assert everything.recording_s == 0
    half = solve(trace, everything.predicted_peak_bytes // 2)
    # All ops that a module runs one after the other are seen, or none of them.
    runs = [list(run) for _, run in itertools.groupby(range(len(trace.ops)), lambda j: trace.ops[j].module)]
    seen = sum(len(run) for run in runs if not all(half.keep[j] for j in run))
    assert 0 < seen < len(trace.ops)
    assert half.recording_s == pytest.approx(trace.recording_s * seen / len(trace.ops))
    assert half.predicted_step_s > half.plain_step_s + half.recording_s
    replayed_s = sum(sorted(op.time_s for op in trace.ops)[: half.replayed_ops]) + half.replayed_ops * found.replay_s
    assert half.predicted_step_s > half.plain_step_s + half.recording_s + 0.5 * replayed_s
    assert half.gap == (half.predicted_step_s - half.bound_step_s) / half.plain_step_s
