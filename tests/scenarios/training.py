"""A training loop that can be run with plain and with fitted models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn


class Fit(Protocol):
    """Fits a model with the budget of the run and returns it; a plain run returns it unchanged."""

    def __call__(self, model: nn.Module, **options: Any) -> nn.Module: ...


@dataclass
class Training:
    """A training loop that is ready to run."""

    step: Callable[[int], Sequence[torch.Tensor]]
    """Runs one iteration, given its index. Returns detached losses."""
    models: Sequence[nn.Module]
    """Models whose parameters, gradients and buffers must be exact."""
    reported: Sequence[nn.Module] | None = None
    """Fitted models whose reports must show a plan. By default all models that were passed to `fit`."""


Build = Callable[[Fit, int], Training]
"""Builds a loop. The second argument multiplies the batch size: 1 in tests."""
SimpleLoop = Callable[[int], tuple[nn.Module, tuple[Any, ...]]]
"""Builds the same model for a loop with one forward and one backward per step: the model and its inputs."""


@dataclass(frozen=True)
class Scenario:
    """A training loop, and how many steps it runs."""

    name: str
    build: Build
    simple: SimpleLoop
    steps: int
    """Number of iterations of a run."""
    settled_after: int
    """Number of iterations after which all steps follow a plan."""
    period: int
    """Settled iterations repeat after this number. Above 1, they have different peaks and times."""
    bench_scale: int
    """Second argument of `build` in the benchmark."""


@dataclass
class Registry:
    """Scenarios by name."""

    by_name: dict[str, Scenario] = field(default_factory=dict)

    def scenario(
        self,
        simple: SimpleLoop,
        *,
        steps: int = 7,
        settled_after: int = 4,
        period: int = 1,
        bench_scale: int = 16,
    ) -> Callable[[Build], Build]:
        """Register the decorated function under its own name."""

        def register(build: Build) -> Build:
            name = build.__name__
            self.by_name[name] = Scenario(name, build, simple, steps, settled_after, period, bench_scale)
            return build

        return register


SCENARIOS = Registry()
scenario = SCENARIOS.scenario
