"""What is made more than once, or rests for a part of backward only: exact, and let go of when the plan says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide._plan import profile
from lowtide.planning import Problem, simulate, solve
from lowtide.planning.turns import Turn, from_plan


class Forked(nn.Module):
    """One value, written in place, that several branches read: each branch has to have it made again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = (self.stem(x) + 1).mul_(3)  # saved by nobody: it is made only for the branches
        return sum(((stem + branch).tanh().square().sum() for branch in range(4)), start=x.sum())


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def fitted(again: tuple[str, ...] = (), turns: dict[str, tuple[int, ...]] | None = None) -> Any:
    """The model with a plan that recomputes all it can; ops by name, turns with the asks of the tanhs."""
    model, x = Forked(), torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    plain = gradients(model, x)
    trace = profile(model, (x,))
    names = [op.name for op in trace.ops]
    tanhs = [j for j, name in enumerate(names) if name == "aten.tanh.default"]
    keep = tuple(op.pinned is not None for op in trace.ops)
    plan = replace(
        solve(trace, 2**60),
        keep=keep,
        again=tuple(sorted(names.index(name) for name in again)),
        turns=tuple(
            Turn(names.index(name), tanhs[len(tanhs) - 1 - branch], 0)
            for name, branches in (turns or {}).items()
            for branch in branches
        ),
    )
    predicted = simulate(trace, plan.keep, plan.again, turns=from_plan(Problem(trace), plan.turns))
    lowtide.fit(model, plan=plan, budget=2**60)
    ours = gradients(model, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    report = lowtide.report()
    assert report is not None
    assert report.replayed_ops == predicted.replayed_ops
    lowtide.unfit(model)
    return {name: predicted.replays[names.index(name)] for name in (BEFORE, INSIDE)}, report


SIZE = 16 * 32 * 4
INSIDE, BEFORE = "aten.mul_.Tensor", "aten.add.Tensor"


def test_without_turns_it_is_made_once_in_the_memory_of_what_it_overwrites() -> None:
    replays, report = fitted()
    assert (replays[INSIDE], replays[BEFORE]) == (1, 1)
    assert report.bytes_copied == 0


def test_what_is_made_again_is_made_on_a_copy_of_what_rests() -> None:
    replays, report = fitted(again=(INSIDE,))
    assert (replays[BEFORE], replays[INSIDE]) == (1, 4)
    assert report.bytes_copied == replays[INSIDE] * SIZE


def test_and_on_what_goes_anyway_without_a_copy() -> None:
    replays, report = fitted(again=(INSIDE, BEFORE))
    assert replays[BEFORE] == replays[INSIDE] == 4
    assert report.bytes_copied == 0


@pytest.mark.parametrize("branch", [1, 2, 3])
def test_it_rests_from_an_ask_on(branch: int) -> None:
    """What overwrites may do so for good only once it will not be made again."""
    replays, report = fitted(again=(INSIDE,), turns={INSIDE: (branch,)})
    assert (replays[BEFORE], replays[INSIDE]) == (1, branch + 1)
    assert report.bytes_copied == branch * SIZE


@pytest.mark.parametrize("branch", [1, 2, 3])
def test_it_rests_until_an_ask(branch: int) -> None:
    replays, report = fitted(turns={INSIDE: (branch,)})
    assert (replays[BEFORE], replays[INSIDE]) == (1, 1 + 4 - branch)  # what it overwrites is there for the next time
    assert report.bytes_copied == replays[INSIDE] * SIZE


def test_it_comes_and_goes() -> None:
    replays, report = fitted(turns={INSIDE: (1, 2), BEFORE: (1, 3)})
    assert (replays[BEFORE], replays[INSIDE]) == (3, 3)
    assert report.bytes_copied == SIZE  # the first time what it overwrites rests, too
