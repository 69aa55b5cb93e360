"""Run a scenario plain and fitted, and collect what the two runs must have in common."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import lowtide
from lowtide.reporting.fit_report import FitReport
from tests.allocator import allocator_peak, live_bytes

from .training import Build, Fit, Scenario, Training

SHARE = 0.6
"""The budget of the tests, as a share of the plain peak."""

Bits = np.ndarray[Any, Any]
"""A copy of a tensor that torch's allocator does not count."""


@dataclass
class Run:
    """The results of a run."""

    losses: list[list[Bits]]
    """The losses of each iteration."""
    tensors: dict[str, Bits | None]
    """Parameters, gradients and buffers after the last iteration."""
    generator: Bits
    peaks: list[int]
    """The allocator's peak of each iteration, above the bytes that were live before the run."""
    reports: list[list[FitReport]]
    """The reports after each iteration, model by model."""
    warned: list[str]
    """Warnings of lowtide."""

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks)


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return a copy of the elements; bfloat16, which NumPy does not have, as integers."""
    tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def process_bytes() -> int:
    """Return the bytes of all live tensors of the process, which a budget includes."""
    gc.collect()
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu":
            storage = item.untyped_storage()
            if storage.device.type == "cpu":  # that of a fake tensor, as torch.compile leaves them, is on "meta"
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def results_of(training: Training) -> dict[str, Bits | None]:
    found: dict[str, Bits | None] = {}
    for i, model in enumerate(training.models):
        for name, parameter in model.named_parameters():
            found[f"{i}.{name}"] = bits_of(parameter)
            found[f"{i}.{name}.grad"] = bits_of(parameter.grad) if parameter.grad is not None else None
        for name, buffer in model.named_buffers():
            found[f"{i}.{name}"] = bits_of(buffer)
    return found


def run(build: Build, fit: Fit, steps: int, reported: Callable[[Training], Sequence[nn.Module]]) -> Run:
    """Run `steps` iterations. `reported` returns the models whose reports are collected."""
    gc.collect()
    start = live_bytes()
    training = build(fit, 1)
    losses: list[list[Bits]] = []
    peaks: list[int] = []
    reports: list[list[FitReport]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(steps):
            with allocator_peak() as peak:
                found = training.step(i)
            peaks.append(peak.peak_bytes - start)
            losses.append([bits_of(loss) for loss in found])
            del found
            reports.append([lowtide.report(model) for model in reported(training)])
    warned = [str(w.message) for w in caught if issubclass(w.category, lowtide.LowtideWarning)]
    return Run(losses, results_of(training), bits_of(torch.get_rng_state()), peaks, reports, warned)


def run_plain(scenario: Scenario) -> Run:
    def leave(model: nn.Module, **_: Any) -> nn.Module:
        return model

    return run(scenario.build, leave, scenario.steps, lambda training: ())


def run_fitted(scenario: Scenario, budget_bytes: int) -> Run:
    """Run with a budget for the models and data of the scenario; other tensors of the process are added to it."""
    fitted: list[nn.Module] = []
    other_bytes = process_bytes()

    def fit(model: nn.Module, **options: Any) -> nn.Module:
        fitted.append(lowtide.fit(model, budget=budget_bytes + other_bytes, **options))
        return model

    def reported(training: Training) -> Sequence[nn.Module]:
        return fitted if training.reported is None else training.reported

    try:
        return run(scenario.build, fit, scenario.steps, reported)
    finally:
        for model in fitted:
            lowtide.unfit(model)


@dataclass
class Outcome:
    """A plain run and the fitted one, or the error that stopped it."""

    plain: Run
    budget_bytes: int
    other_bytes: int
    """Bytes of other tensors of the process, which the budget and the predictions of lowtide include."""
    result: Run | Exception

    @property
    def fitted(self) -> Run:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def without_frames(error: Exception) -> Exception:
    """Return the error without its tracebacks, whose frames hold the models of the run."""
    found: BaseException | None = error
    while found is not None:
        found.__traceback__, found = None, found.__cause__ or found.__context__
    return error


@functools.cache
def outcome(scenario: Scenario) -> Outcome:
    """Run the scenario plain, and fitted at `SHARE` of its plain peak; once per process."""
    plain = run_plain(scenario)
    budget_bytes = int(SHARE * plain.peak_bytes)
    gc.collect()
    other_bytes = process_bytes()
    result: Run | Exception
    try:
        result = run_fitted(scenario, budget_bytes)
    except Exception as error:
        result = without_frames(error)
    gc.collect()
    return Outcome(plain, budget_bytes, other_bytes, result)
