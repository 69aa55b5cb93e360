"""What recording costs is measured without leaving a trace, and is part of what plans predict."""

from __future__ import annotations

import torch

import lowtide
from lowtide._plan import profile
from lowtide.engine.calibration import recording_s_per_op
from lowtide.planning import solve

from . import deep


def test_it_is_measured_once_and_disturbs_nothing() -> None:
    recording_s_per_op.cache_clear()
    x = torch.ones(3, requires_grad=True)
    with lowtide.saving(lowtide.KeepNone()):
        loss = x.sin().sum()
    before, state = lowtide.report(), torch.get_rng_state()
    seconds = recording_s_per_op()
    assert 1e-6 < seconds < 1e-2
    assert recording_s_per_op() == seconds
    assert lowtide.report() == before
    assert torch.equal(torch.get_rng_state(), state)
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3).cos())


def test_a_plan_that_records_predicts_that_too() -> None:
    model, batch = deep.build("gpt2")
    trace = profile(model, batch)
    assert trace.recording_s == len(trace.ops) * recording_s_per_op()
    everything = solve(trace, 2**60)
    assert everything.predicted_step_s == everything.plain_step_s
    assert everything.recording_s == 0
    half = solve(trace, everything.predicted_peak_bytes // 2)
    assert half.recording_s == trace.recording_s
    assert half.predicted_step_s > half.plain_step_s + half.recording_s
    assert half.gap <= (half.predicted_step_s - half.bound_step_s) / half.plain_step_s
