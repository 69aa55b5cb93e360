"""Each training loop is exact, holds its budget in every step, reaches planned steps and predicts its peak."""

from __future__ import annotations

import pytest
import torch

from lowtide.reporting.fit_report import FitReport

from .catalogue import ALL, GROUPS
from .running import SHARE, Bits, outcome
from .training import Scenario

MAX_PREDICTION_ERROR = 0.03
MIB = 2**20
FIRST_UNPACKED = 11
"""The number of the op, in `partial_backward`, whose result is the first one that backward unpacks."""

every_scenario = pytest.mark.parametrize("scenario", ALL.values(), ids=ALL.keys())


def equal(plain: Bits | None, fitted: Bits | None) -> bool:
    if plain is None or fitted is None:
        return plain is fitted
    return torch.equal(torch.from_numpy(plain), torch.from_numpy(fitted))


def test_every_group_has_scenarios() -> None:
    groups = {scenario.build.__module__ for scenario in ALL.values()}
    assert groups == {group.__name__ for group in GROUPS}


@every_scenario
def test_exact(scenario: Scenario) -> None:
    found = outcome(scenario)
    plain, fitted = found.plain, found.fitted
    for i, (theirs, ours) in enumerate(zip(plain.losses, fitted.losses, strict=True)):
        assert len(theirs) > 0
        assert all(equal(a, b) for a, b in zip(theirs, ours, strict=True)), f"losses of step {i}"
    assert plain.tensors.keys() == fitted.tensors.keys()
    assert [name for name, bits in plain.tensors.items() if not equal(bits, fitted.tensors[name])] == []
    assert equal(plain.generator, fitted.generator)


@every_scenario
def test_every_step_is_within_the_budget(scenario: Scenario) -> None:
    found = outcome(scenario)
    assert found.budget_bytes >= MIB  # a smaller budget is refused
    shares = [round(peak / found.budget_bytes, 3) for peak in found.fitted.peaks]
    assert max(found.fitted.peaks) <= found.budget_bytes, f"peak over budget, step by step: {shares}"


@every_scenario
def test_steps_are_planned(scenario: Scenario) -> None:
    fitted = outcome(scenario).fitted
    reports = fitted.reports
    assert fitted.warned == []
    assert len(reports[-1]) > 0
    for report in reports[-1]:
        assert report.plan is not None
        assert report.steps > report.online_steps
    settled = [[report.online_steps for report in step] for step in reports[scenario.settled_after - 1 :]]
    assert all(counts == settled[0] for counts in settled), [[r.online_steps for r in step] for step in reports]


@every_scenario
def test_predicted_peak(scenario: Scenario) -> None:
    found = outcome(scenario)
    for report in found.fitted.reports[-1]:
        assert report.predicted_peak_bytes is not None
        assert report.measured_peak_bytes is not None
        predicted = report.predicted_peak_bytes - found.other_bytes
        measured = report.measured_peak_bytes - found.other_bytes
        # Settled steps that differ have different peaks: the prediction belongs to the one that was measured last.
        peaks = found.fitted.peaks[scenario.settled_after :] if scenario.period > 1 else found.fitted.peaks[-1:]
        for bytes_of_torch in (measured, min(peaks, key=lambda peak: abs(predicted - peak))):
            error = predicted / bytes_of_torch - 1
            assert -MAX_PREDICTION_ERROR <= error <= MAX_PREDICTION_ERROR + codec_bytes(report) / bytes_of_torch


def codec_bytes(report: FitReport) -> int:
    """Return the temporary bytes of codecs. Predictions include them. NumPy allocates them, not torch."""
    if report.plan is None or not report.plan.compress or report.trace is None:
        return 0
    costs, values = report.plan.codec_costs, report.trace.values
    return max(c.workspace_bytes(v.nbytes) for c in costs for v in values if c.accepts(v.dtype, v.nbytes, v.binary))


@every_scenario
def test_plain_peak_leaves_room_for_a_plan(scenario: Scenario) -> None:
    """Parameters, gradients and buffers are at most half of the budget: a budget that fails is not too small."""
    found = outcome(scenario)
    held = sum(bits.nbytes for bits in found.plain.tensors.values() if bits is not None)
    assert held <= found.budget_bytes / 2
    assert found.budget_bytes == int(SHARE * found.plain.peak_bytes)


def test_values_that_backward_never_unpacks_need_no_replays() -> None:
    """Backward stops before the op `FIRST_UNPACKED`. The values of earlier ops are dropped and never replayed."""
    plan = outcome(ALL["partial_backward"]).fitted.reports[-1][0].plan
    assert plan is not None
    dropped = [j for j in plan.recomputed if j < FIRST_UNPACKED]
    assert dropped
    assert plan.replayed_ops <= len(plan.recomputed) - len(dropped)
