"""`torch.compile`, with and without an activation memory budget: metered allocations, and a deadline for compiling."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from .base import NotApplicableError, Variant
from .steps import Bench, Forward, StepMeter, loss_of, step

DEADLINE_S = 180.0
"""Time limit for compiling one model with one setting."""
_REPEAT_S = 1.0
_meters: list[StepMeter] = []
_guards: Any = torch._C._dynamo.guards


class CompileDeadlineError(Exception):
    """Compiling took too long."""


def meter_inductor_allocations() -> None:
    """Report the allocations of inductor's generated code, which bypass the dispatcher, to the current meter.

    Generated code binds the allocation function when it is loaded, so call this before compiling.
    """
    original = _guards._empty_strided_cpu
    if getattr(original, "is_metered", False):
        return

    @functools.wraps(original)
    def metered(*args: Any) -> torch.Tensor:
        tensor: torch.Tensor = original(*args)
        if _meters:
            _meters[-1].count(tensor)
        return tensor

    metered.is_metered = True  # type: ignore[attr-defined]
    _guards._empty_strided_cpu = metered


@functools.cache
def backend_name() -> str:
    """Return inductor if it works here (it needs a C++ compiler), otherwise the partitioner with eager kernels."""
    meter_inductor_allocations()
    try:
        compiled = torch.compile(lambda x: x.sin() * 2, backend="inductor")
        compiled(torch.ones(4))
    except Exception:
        return "aot_eager_decomp_partition"
    return "inductor"


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `CompileDeadlineError` in this block after `seconds`. Main thread only.

    Compilers wrap or swallow exceptions, so it is raised again every second, and when the block is left.
    """
    timeout = CompileDeadlineError(f"not compiled within {seconds:g} s")
    expired = False

    def on_alarm(number: int, frame: Any) -> None:
        nonlocal expired
        expired = True
        raise timeout

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_S)
    try:
        yield
    except Exception as error:
        if expired and error is not timeout:
            raise timeout from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if expired:
        raise timeout


class Compiled(Variant):
    """`torch.compile(model)` with default settings, and with the partitioner's memory budget if `share` is given.

    `torch._functorch.config.activation_memory_budget` is 1.0 by default. With a smaller share the partitioner
    recomputes until about this share of the activations is saved. It must be set while compiling. The partitioner's
    solver and runtime estimates have their defaults. The C++ compiler takes nearly all of the compile time: kernels
    of layers with dropout differ from layer to layer, so the compiled models have few layers.
    """

    family = "torch compile"

    def __init__(self, name: str, share: float | None = None) -> None:
        super().__init__(name)
        self.share = share
        self._compiled: Any = None

    @property
    def settling_steps(self) -> int:
        """One step, because changes by other variants may trigger a recompilation."""
        return 1

    def prepare(self, bench: Bench) -> None:
        backend = backend_name()
        self.note = f"backend {backend}"
        torch._dynamo.config.recompile_limit = 64
        # dynamo caches compiled code by backend, so each budget needs its own backend object.
        inner = lookup_backend(backend)
        self._compiled = torch.compile(bench.model, backend=lambda graph, inputs: inner(graph, inputs))
        counters.clear()
        started = time.perf_counter()
        with deadline(DEADLINE_S), self._partitioned():
            for _ in range(2):  # the second step recompiles nothing, or fails here
                bench.reset()
                step(lambda: loss_of(self._compiled(**bench.batch)))
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        self.note += f", {graphs} graphs, {breaks} graph breaks, compiled in {time.perf_counter() - started:.0f} s"
        if not graphs:
            raise NotApplicableError("torch.compile compiled no part of this model")

    def _partitioned(self) -> Any:
        if self.share is None:
            return contextlib.nullcontext()
        return functorch_config.patch(activation_memory_budget=self.share)

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        with self._partitioned():
            yield lambda: loss_of(self._compiled(**bench.batch))

    @contextlib.contextmanager
    def metering(self, meter: StepMeter) -> Iterator[None]:
        _meters.append(meter)
        try:
            yield
        finally:
            _meters.pop()

    def finish(self, bench: Bench) -> None:
        self._compiled = None
        torch._dynamo.reset()
