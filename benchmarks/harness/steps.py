"""One training step of one model: its peak, its bits, its seconds. The same for every variant."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lowtide.fitting.make_plan import shift
from lowtide.fitting.plan import profile
from lowtide.profiling.peak_meter import PeakMeter
from lowtide.records import Trace

from .models import Case

Forward = Callable[[], torch.Tensor]
"""Calls the model and gives the loss."""
_SEED = 7


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes behind these tensors, each storage once."""
    return sum({s.data_ptr(): s.nbytes() for t in tensors if (s := t.untyped_storage()).nbytes()}.values())


def process_bytes() -> int:
    """All tensors that are alive now, as a budget counts them."""
    gc.collect()
    there = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    return storage_bytes(x for x in there if x.device.type != "meta")


def base_of(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """What is there before a step: parameters, buffers and batch."""
    return [*model.parameters(), *model.buffers(), *tree_leaves(batch)]


def clear(model: nn.Module) -> None:
    """No gradients, no garbage."""
    model.zero_grad(set_to_none=True)
    gc.collect()


def loss_of(out: Any) -> torch.Tensor:
    """The output itself, with its logits, is not held through backward: a plan does not count that."""
    return out if isinstance(out, torch.Tensor) else out.loss


def step(forward: Forward) -> str:
    """Forward and backward with the same dropout each time; the loss's bits."""
    torch.manual_seed(_SEED)
    loss = forward()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach().numpy().tobytes().hex()


def hashed(tensors: Iterable[torch.Tensor | None]) -> str:
    """Equal if and only if all bits are."""
    digest = hashlib.blake2b()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes() if tensor is not None else b"none")
    return digest.hexdigest()


def gradients_hash(model: nn.Module) -> str:
    return hashed(p.grad for p in model.parameters())


class StepMeter(PeakMeter):  # type: ignore[no-untyped-call]
    """The meter of all variants; it can be shown what does not go through the dispatcher."""

    def see(self, tensor: torch.Tensor) -> None:
        self._ledger.count(tensor)


class Seconds(NamedTuple):
    """Of the processor (all threads), and of the clock."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True)
class Bits:
    """What a step must give again, to the bit."""

    loss: str
    gradients: str
    buffers: str


class Bench:
    """A model on the bench: built once, and the same at the beginning of every step."""

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.title = name, case.title
        self.model, self.batch = case.build()
        self.base_bytes = storage_bytes(base_of(self.model, self.batch))
        self.peaks: dict[str, int] = {}
        """By variant, as far as measured."""
        self.smallest_bytes: int | None = None
        """The least that the planner can do with, once asked for."""
        self._profiled: tuple[Trace, int] | None = None
        self._parameters = list(self.model.parameters())  # a variant may put other modules around them
        self._buffers = [(b, b.detach().clone()) for b in self.model.buffers()]

    @property
    def other_bytes(self) -> int:
        """Live tensors of the process that are not the model's or the batch's: budgets count them too."""
        self.reset()  # gradients of an earlier step are neither
        return max(0, process_bytes() - self.base_bytes)

    def trace(self) -> Trace:
        """Of a step, profiled once as `lowtide.plan` does, with what lives beside the model now."""
        beside = self.other_bytes
        if self._profiled is None:
            self._profiled = profile(self.model, self.batch, verify=True), beside
        trace, then = self._profiled
        return shift(trace, beside - then)

    def loss(self) -> torch.Tensor:
        """Forward, plainly."""
        return loss_of(self.model(**self.batch))

    def reset(self) -> None:
        """As at the beginning."""
        clear(self.model)
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)

    def metered(self, forward: Forward, metering: Callable[[StepMeter], Any] | None = None) -> tuple[int, Bits]:
        """The peak of live tensor bytes in a step, and what the step gave."""
        self.reset()
        meter = StepMeter(base_of(self.model, self.batch))
        with metering(meter) if metering is not None else contextlib.nullcontext(), meter:
            loss = step(forward)
        return meter.peak_bytes, self.bits(loss)

    def bits(self, loss: str) -> Bits:
        """Of the step that has just been taken."""
        return Bits(loss, hashed(p.grad for p in self._parameters), hashed(b for b, _ in self._buffers))

    def timed(self, forward: Forward) -> tuple[Seconds, str]:
        """How long a step takes, with its own garbage collected in it; the loss's bits."""
        self.reset()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step(forward)
        return Seconds(time.process_time() - cpu, time.perf_counter() - wall), loss
