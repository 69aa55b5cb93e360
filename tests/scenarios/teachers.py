"""Teacher and student: weights change between forward and backward, outputs are used under `no_grad`."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .models import WIDTH, mlp, simple_mlp
from .training import Fit, Training, scenario

ROWS = 512


def update_average(average: nn.Module, model: nn.Module, rate: float = 0.1) -> None:
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, rate)


def frozen_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)


@scenario(simple_mlp(8, ROWS))
def byol(fit: Fit, scale: int) -> Training:
    """The target network is updated between forward and backward, as in BYOL."""
    torch.manual_seed(0)
    online, predictor = mlp(6), mlp(2)
    target = frozen_copy(online)
    online, predictor = fit(online), fit(predictor)
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        views = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
        optimizer.zero_grad()
        with torch.no_grad():
            targets = [F.normalize(target(view), dim=1) for view in views]
        loss = torch.zeros(())
        for view, other in zip(views, reversed(targets), strict=True):
            prediction = F.normalize(predictor(online(view)), dim=1)
            loss = loss + (2 - 2 * (prediction * other).sum(1)).mean()
        with torch.no_grad():
            agreement = (prediction * other).sum(1).mean()
        update_average(target, online)
        loss.backward()
        optimizer.step()
        return loss.detach(), agreement

    return Training(step, [online, predictor, target])


@scenario(simple_mlp(8, ROWS))
def mean_teacher(fit: Fit, scale: int) -> Training:
    """Both models are fitted; the teacher runs after the student and changes before backward."""
    torch.manual_seed(0)
    student = mlp(8)
    teacher = frozen_copy(student)
    student, teacher = fit(student), fit(teacher)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        output = student(x)
        with torch.no_grad():
            wanted = teacher(x + 0.1 * torch.randn_like(x))
        loss = F.mse_loss(output, wanted) + output.square().mean()
        update_average(teacher, student)
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [student, teacher], reported=[student])  # a teacher under `no_grad` needs no plan


@scenario(simple_mlp(8, ROWS))
def distillation(fit: Fit, scale: int) -> Training:
    """A frozen teacher, called without `no_grad`."""
    torch.manual_seed(0)
    teacher = mlp(4).requires_grad_(False)
    student = fit(mlp(8))
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        output = student(x)
        wanted = teacher(x)
        loss = F.kl_div(F.log_softmax(output, 1), F.log_softmax(wanted, 1), reduction="batchmean", log_target=True)
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [student])
