"""`torch.compile`, alone and with a budget for activations; its memory made visible, its compiling given a deadline."""

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
"""For compiling one model in one way."""
_RINGS_AGAIN_S = 1.0
_meters: list[StepMeter] = []
_guards: Any = torch._C._dynamo.guards


class CompileDeadlineError(Exception):
    """Compiling took too long."""


def show_allocations() -> None:
    """Have inductor's own allocations, which pass the dispatcher by, shown to the meter of the moment.

    Generated code binds this function when it is loaded, so this comes before any compiling.
    """
    original = _guards._empty_strided_cpu
    if getattr(original, "shows", False):
        return

    @functools.wraps(original)
    def shown(*args: Any) -> torch.Tensor:
        made: torch.Tensor = original(*args)
        if _meters:
            _meters[-1].see(made)
        return made

    shown.shows = True  # type: ignore[attr-defined]
    _guards._empty_strided_cpu = shown


@functools.cache
def backend_name() -> str:
    """Inductor where it works (it needs a C++ compiler), else the partitioner alone, on eager kernels."""
    show_allocations()
    try:
        twice = torch.compile(lambda x: x.sin() * 2, backend="inductor")
        twice(torch.ones(4))
    except Exception:
        return "aot_eager_decomp_partition"
    return "inductor"


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `CompileDeadlineError` in this block when the time is up. Main thread only.

    Compilers wrap or swallow what is raised inside them, so it is raised again every second, and on the way out.
    """
    late = CompileDeadlineError(f"not compiled within {seconds:g} s")
    rang = False

    def ring(number: int, frame: Any) -> None:
        nonlocal rang
        rang = True
        raise late

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, _RINGS_AGAIN_S)
    try:
        yield
    except Exception as error:
        if rang and error is not late:
            raise late from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if rang:
        raise late


class Compiled(Variant):
    """`torch.compile(model)`, whole, with default settings; with a share, also the partitioner's memory budget.

    `torch._functorch.config.activation_memory_budget` is 1.0 by default; below, the partitioner recomputes so that
    about this share of the activations it would save stays saved. It must be set while compiling. Its solver and its
    estimates of run times are as they come. Nearly all of the time for compiling is the C++ compiler's: kernels of
    layers with dropout differ from layer to layer, so a model of few layers is compiled here.
    """

    family = "torch compile"

    def __init__(self, name: str, share: float | None = None) -> None:
        super().__init__(name)
        self.share = share
        self._compiled: Any = None

    @property
    def settling_steps(self) -> int:
        """What other variants did to the model may have it compiled once more."""
        return 1

    def prepare(self, bench: Bench) -> None:
        backend = backend_name()
        self.note = f"backend {backend}"
        torch._dynamo.config.recompile_limit = 64
        # dynamo keeps compiled code with the model's own, by backend: a backend of its own for each budget.
        inner = lookup_backend(backend)
        self._compiled = torch.compile(bench.model, backend=lambda graph, inputs: inner(graph, inputs))
        counters.clear()
        started = time.perf_counter()
        with deadline(DEADLINE_S), self._partitioned():
            for _ in range(2):  # the second step shows that nothing is compiled again
                bench.reset()
                step(lambda: loss_of(self._compiled(**bench.batch)))
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        self.note += f", {graphs} graphs, {breaks} graph breaks, compiled in {time.perf_counter() - started:.0f} s"
        if not graphs:
            raise NotApplicableError(
                "torch.compile compiled nothing of this model: it would be plain under another name"
            )

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
