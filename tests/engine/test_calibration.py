"""What recording costs is measured without leaving a trace, and is part of what plans predict."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import lowtide
from lowtide._plan import profile
from lowtide.engine import calibration as calibrating, step_profile
from lowtide.engine.calibration import Calibration, calibration, measure_again
from lowtide.engine.planned import PlannedRecorder
from lowtide.engine.torch_private import graph_task
from lowtide.fitting import registry
from lowtide.planning import simulate, solve
from lowtide.profiling.meter import PeakMeter

from . import deep


def test_it_is_measured_a_few_times_and_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "_times", defaultdict(calibrating._Times))
    monkeypatch.setattr(calibrating, "_moments", 0)
    x = torch.ones(3, requires_grad=True)
    with lowtide.saving(lowtide.KeepNone()):
        loss = x.sin().sum()
    before, state = lowtide.report(), torch.get_rng_state()
    found = calibration()
    assert 1e-6 < found.op_s < 1e-2
    assert 0 <= found.see_s < 1e-2  # a difference of two times, on a machine that others use
    assert 0 <= found.view_s < 1e-2
    assert 0 < found.save_s < 1e-2  # of which handing over is no difference
    assert 0 <= found.call_s < 1e-2
    assert 1e-6 < found.replay_s < 1e-2
    assert 0 <= found.cold_s_per_byte < 1e-8
    assert calibration() == found
    taken = [calibrating._times["op"].with_it[:]]
    for _ in range(4):
        measure_again()
        taken.append(calibrating._times["op"].with_it[:])
    assert len(taken[0]) < len(taken[1]) < len(taken[2]) == len(taken[4])  # it was not asked for in vain
    assert lowtide.report() == before
    assert torch.equal(torch.get_rng_state(), state)
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3).cos())


def test_it_takes_next_to_no_memory_from_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in which it is measured has a budget too."""
    monkeypatch.setattr(calibrating, "_times", defaultdict(calibrating._Times))
    monkeypatch.setattr(calibrating, "_moments", 0)
    with PeakMeter() as meter:
        calibration()
    assert meter.peak_bytes < 3 * 2**19


def test_a_busy_moment_does_not_spoil_it() -> None:
    """Most of the times of one of two moments, and some of the other, are far too long."""
    times = calibrating._Times()
    times.without = [10.0, 11.0, 12.0, 13.0] * 5 + [90.0] * 4 + [60.0, 70.0, 80.0, 90.0] * 6
    times.with_it = [30.0, 31.0, 32.0, 33.0] * 5 + [95.0] * 4 + [150.0, 170.0, 180.0, 190.0] * 6
    assert times.more_s == pytest.approx(20, abs=2)


def test_a_plan_that_records_predicts_that_too() -> None:
    model, batch = deep.build("gpt2")
    calls: list[nn.Module] = []
    hook = register_module_forward_pre_hook(lambda module, args: calls.append(module))
    trace = profile(model, batch)
    hook.remove()
    parts = set(model.modules())  # others are called while it is measured what that takes
    found = calibration()
    assert trace.noting_s == max(0.0, found.op_s - found.see_s)
    assert trace.attending_s == len([module for module in calls if module in parts]) * found.call_s
    assert trace.replay_s == found.replay_s
    assert trace.cold_s_per_byte == found.cold_s_per_byte
    everything = solve(trace, 2**60)
    assert everything.predicted_step_s == everything.plain_step_s
    assert everything.recording_s == 0
    half = solve(trace, everything.predicted_peak_bytes // 2)
    noted = half.keep.count(False)
    assert half.recording_s > noted * trace.noting_s + trace.attending_s
    assert half.bound_step_s > half.plain_step_s + trace.attending_s
    assert half.predicted_step_s > half.plain_step_s + half.recording_s
    replayed_s = sum(sorted(op.time_s for op in trace.ops)[: half.replayed_ops]) + half.replayed_ops * found.replay_s
    assert half.predicted_step_s > half.plain_step_s + half.recording_s + 0.5 * replayed_s
    assert half.gap == (half.predicted_step_s - half.bound_step_s) / half.plain_step_s


class Counted(NamedTuple):
    """What a recorder had to do with in one step."""

    seen: int
    """Ops that it noted, and ops that it only saw."""
    noted: int
    saved: int


def counted(monkeypatch: pytest.MonkeyPatch, model: nn.Module, batch: dict[str, torch.Tensor]) -> Counted:
    """A step of a fitted model, once it is learnt."""
    seen: list[object] = []
    saved: list[torch.Size] = []
    dispatch, pack = PlannedRecorder.__torch_dispatch__, PlannedRecorder.pack

    def seeing(self: PlannedRecorder, func: object, *rest: object) -> object:
        if graph_task() == -1:
            seen.append(func)
        return dispatch(self, func, *rest)

    def saving(self: PlannedRecorder, tensor: torch.Tensor) -> object:
        saved.append(tensor.shape)
        return pack(self, tensor)

    with monkeypatch.context() as patched:
        patched.setattr(PlannedRecorder, "__torch_dispatch__", seeing)
        patched.setattr(PlannedRecorder, "pack", saving)
        model(**batch).loss.backward()
    kind = next(iter(registry.state_of(model).kinds.values()))
    assert kind.learnt is not None
    return Counted(len(seen), len(kind.learnt[1].noted), len(saved))


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "resnet"])
def test_what_is_charged_for_is_what_the_recorder_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Op by op and tensor by tensor: with costs that count them."""
    model, batch = deep.build(name)
    trace = profile(model, batch)
    beside, peak = trace.ops[0].other_bytes, solve(trace, 2**60).predicted_peak_bytes
    plan = solve(trace, beside + int(0.6 * (peak - beside)))
    assert plan.recomputed

    def predicted(op_s: float, see_s: float, save_s: float) -> float:
        """What recording this plan would cost if things cost that much."""
        costs = Calibration(op_s, see_s, see_s, save_s, 0.0, 0.0, 0.0)
        with monkeypatch.context() as patched:
            patched.setattr(step_profile, "calibration", lambda: costs)
            found = profile(model, batch)
        assert found.fingerprint == trace.fingerprint
        return simulate(found, plan.keep).recording_s

    model(**batch).loss.backward()  # so that gradients are there, as in later steps
    lowtide.fit(model, plan=plan, budget=2**40, codecs=None)
    for _ in range(3):
        model(**batch).loss.backward()
    found = counted(monkeypatch, model, batch)
    lowtide.unfit(model)
    # What the first tensor that is saved tells is wanted whatever is decided: it is in a stretch of its own.
    assert predicted(0.0, 0.0, 1.0) == pytest.approx(found.saved, abs=4)
    assert predicted(1.0, 0.0, 0.0) == found.noted
    # Now and then the recorder cannot wake as late as is charged.
    assert predicted(1.0, 1.0, 0.0) == pytest.approx(found.seen, rel=0.15)
    assert found.noted < found.seen < len(trace.ops) or found.noted == found.seen


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


def test_a_pause_in_backward_is_not_taken_for_its_time() -> None:
    """Of layers alike the one in the middle counts: what happened once would not happen in the next step."""
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
