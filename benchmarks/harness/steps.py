"""One training step of one model, in the same way for every variant: peak, bits and time."""

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
"""Runs the model and returns the loss."""
_SEED = 7


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    return sum({s.data_ptr(): s.nbytes() for t in tensors if (s := t.untyped_storage()).nbytes()}.values())


def process_bytes() -> int:
    """Return the bytes of all live tensors of the process, as a budget counts them."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    return storage_bytes(x for x in tensors if x.device.type != "meta")


def base_tensors(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """Return the tensors that exist before a step: parameters, buffers and batch."""
    return [*model.parameters(), *model.buffers(), *tree_leaves(batch)]


def clear(model: nn.Module) -> None:
    """Delete gradients and collect garbage."""
    model.zero_grad(set_to_none=True)
    gc.collect()


def loss_of(out: Any) -> torch.Tensor:
    """Return the loss of a model's output. The logits are freed before backward, because plans do not count them."""
    return out if isinstance(out, torch.Tensor) else out.loss


def step(forward: Forward) -> str:
    """Run forward and backward with the same seed each time; return the bits of the loss."""
    torch.manual_seed(_SEED)
    loss = forward()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach().numpy().tobytes().hex()


def digest_of(tensors: Iterable[torch.Tensor | None]) -> str:
    """Return a digest that is equal only if all bits are equal."""
    digest = hashlib.blake2b()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes() if tensor is not None else b"none")
    return digest.hexdigest()


class StepMeter(PeakMeter):  # type: ignore[no-untyped-call]
    """Peak meter of all variants, which also accepts tensors that bypass the dispatcher."""

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that did not come from the dispatcher."""
        self._ledger.count(tensor)


class Seconds(NamedTuple):
    """Processor time of all threads, and wall-clock time."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True)
class Bits:
    """Results of a step that must be bit-equal in all variants."""

    loss: str
    gradients: str
    buffers: str


class Bench:
    """A model and its batch, built once and reset to the same state before every step."""

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.title = name, case.title
        self.model, self.batch = case.build()
        self.base_bytes = storage_bytes(base_tensors(self.model, self.batch))
        self.peaks: dict[str, int] = {}
        """Measured peak by variant."""
        self.smallest_bytes: int | None = None
        """The smallest budget with a plan; None until it is needed."""
        self._profiled: tuple[Trace, int] | None = None
        self._parameters = list(self.model.parameters())  # variants may wrap the modules
        self._buffers = [(b, b.detach().clone()) for b in self.model.buffers()]

    @property
    def other_bytes(self) -> int:
        """Bytes of live tensors outside of the model and its batch; budgets count them too."""
        self.reset()  # gradients of an earlier step do not count
        return max(0, process_bytes() - self.base_bytes)

    def trace(self) -> Trace:
        """Return the trace of a step, profiled once as by `lowtide.plan`, with the current bytes of other tensors."""
        other_bytes = self.other_bytes
        if self._profiled is None:
            self._profiled = profile(self.model, self.batch, verify=True), other_bytes
        trace, profiled_other_bytes = self._profiled
        return shift(trace, other_bytes - profiled_other_bytes)

    def loss(self) -> torch.Tensor:
        """Run a plain forward pass."""
        return loss_of(self.model(**self.batch))

    def reset(self) -> None:
        """Restore the initial state."""
        clear(self.model)
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)

    def metered(self, forward: Forward, metering: Callable[[StepMeter], Any] | None = None) -> tuple[int, Bits]:
        """Return the peak of live tensor bytes in a step, and the bits of its results."""
        self.reset()
        meter = StepMeter(base_tensors(self.model, self.batch))
        with metering(meter) if metering is not None else contextlib.nullcontext(), meter:
            loss = step(forward)
        return meter.peak_bytes, self.bits(loss)

    def bits(self, loss: str) -> Bits:
        """Return the bits of the results of the last step."""
        return Bits(loss, digest_of(p.grad for p in self._parameters), digest_of(b for b, _ in self._buffers))

    def timed(self, forward: Forward) -> tuple[Seconds, str]:
        """Return the time of a step, and the bits of its loss."""
        self.reset()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step(forward)
        return Seconds(time.process_time() - cpu, time.perf_counter() - wall), loss
