"""The model that a command plans for, its batches and its loss; and the trace of one profiled step."""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
from torch import nn

from .._errors import ArgumentError, BudgetError
from .._units import format_bytes
from ..fitting.make_plan import shift
from ..fitting.profile_step import Loss, profile_for, sized_profile
from ..fitting.sized_steps import UNLIMITED, StepMaker
from ..planning.scaling import SizedTrace
from ..records import Trace
from ._failures import user_code
from ._imports import import_function
from ._options import OPTIMIZER_STATE, ModelOptions
from ._presets import PRESETS
from ._progress import ProgressReporter

DEFAULT_BATCH = 8
ModelAndBatch = tuple[nn.Module, Any]

log = logging.getLogger("lowtide")


@dataclass(frozen=True)
class ModelSource:
    """Builds a model and batches of several sizes, and profiles one step."""

    name: str
    build: Callable[[int | None, int | None], ModelAndBatch]
    """Returns the model and a batch of the given size and sequence length; None is the default of the user's function.
    """
    batch: int | None
    loss: Loss | None
    optimizer: str

    def trace(self, progress: ProgressReporter, *, limit: int | None = None, batch: int | None = None) -> Trace:
        """Return the trace of one step, profiled within `limit` bytes if possible, else without a limit.

        With a limit, each op is also checked to be reproducible.
        """

        return self._sized_trace(progress, limit, batch).trace

    def trace_within(self, progress: ProgressReporter, limit: int, batch: int) -> Trace:
        """Return the trace of one step within `limit` bytes. Raise `BudgetError` if the step does not fit."""
        return self._sized_trace_within(progress, limit, batch).trace

    def step_maker(self, progress: ProgressReporter) -> StepMaker:
        """Return what is needed to plan for a range of sequence lengths."""

        def batch(length: int) -> Any:
            return self.build(self.batch, length)[1]

        def profile_length(length: int, limit: int) -> SizedTrace:
            return self._sized_trace(progress, None if limit == UNLIMITED else limit, length=length)

        def profile_length_within(length: int, limit: int) -> SizedTrace:
            return self._sized_trace_within(progress, limit, length=length)

        return StepMaker(batch, profile_length, profile_length_within)

    def _sized_trace(
        self, progress: ProgressReporter, limit: int | None, batch: int | None = None, length: int | None = None
    ) -> SizedTrace:
        def run(model: nn.Module, sample: Any, state_bytes: int) -> SizedTrace:
            if limit is None or limit <= state_bytes:  # a trace is still needed to find the smallest budget
                return sized_profile(model, sample, loss=self.loss, verify=limit is not None)
            return profile_for(limit - state_bytes, model, sample, loss=self.loss, verify=True)

        return self._profile(progress, batch if batch is not None else self.batch, length, run)

    def _sized_trace_within(
        self, progress: ProgressReporter, limit: int, batch: int | None = None, length: int | None = None
    ) -> SizedTrace:
        def run(model: nn.Module, sample: Any, state_bytes: int) -> SizedTrace:
            if limit <= state_bytes:
                raise BudgetError(
                    f"the {self.optimizer} state alone takes {format_bytes(state_bytes)}, and the budget is "
                    f"{format_bytes(limit)}",
                    budget_bytes=limit,
                )
            return sized_profile(model, sample, loss=self.loss, limit_bytes=limit - state_bytes, verify=True)

        return self._profile(progress, batch if batch is not None else self.batch, length, run)

    def _profile(
        self,
        progress: ProgressReporter,
        size: int | None,
        length: int | None,
        run: Callable[[nn.Module, Any, int], SizedTrace],
    ) -> SizedTrace:
        gc.collect()  # an earlier model would be counted as live bytes
        title = self.name if size is None else f"{self.name}, batch {size}"
        if length is not None:
            title += f", length {length}"
        progress.start_phase(f"{title}: building the model")
        model, sample = self.build(size, length)
        trained_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        state_bytes = OPTIMIZER_STATE[self.optimizer] * trained_bytes
        try:
            with progress.measurement(f"{title}: profiling one step"), user_code("the model's training step"):
                found = run(model, sample, state_bytes)
        except ArgumentError as error:
            if self.loss is None and "pass loss=" in str(error):
                raise ArgumentError(f"{error}; on the command line: --loss package.module:function") from error
            raise
        trace = found.trace
        log.info(
            "%s: %d ops, %d saved values, %s trained parameters, %s optimizer state, step time %.3f s",
            title, len(trace.ops), len(trace.saved), format_bytes(trained_bytes), format_bytes(state_bytes),
            trace.step_s,
        )  # fmt: skip
        return SizedTrace(found.sizes, shift(trace, state_bytes), found.bytes_before + state_bytes)


def resolve_model(options: ModelOptions, *, needs_sizes: bool = False) -> ModelSource:
    """Return the model that the options name. `needs_sizes`: batches of several sizes will be built."""
    loss = import_function(options.loss) if options.loss is not None else None
    if options.spec is not None:
        return _from_function(options, options.spec, loss, needs_sizes or options.batch is not None)
    from ._transformers import ConfiguredModel, read_config

    config = PRESETS[options.preset].config if options.preset is not None else read_config(str(options.hf))
    models: list[ConfiguredModel] = []  # built once, on first use

    def build(size: int | None, length: int | None) -> ModelAndBatch:
        if not models:
            models.append(
                ConfiguredModel(
                    config, seq=options.seq, dtype=options.dtype, device=options.device, lengths=options.length
                )
            )
        return models[0].model, models[0].batch(size or DEFAULT_BATCH, length)

    name = options.preset or config["model_type"]
    return ModelSource(name, build, options.batch or DEFAULT_BATCH, loss, options.optimizer)


def _from_function(options: ModelOptions, spec: str, loss: Loss | None, needs_sizes: bool) -> ModelSource:
    function = import_function(spec)
    if needs_sizes and not _takes(function, "batch_size"):
        raise click.UsageError(
            f"--batch and --max-batch need a function with a parameter batch_size, but {spec} has none: add the "
            "parameter, or omit the option."
        )
    if options.length is not None and not _takes(function, "length"):
        raise click.UsageError(
            f"--length needs a function with a parameter length, but {spec} has none: add the parameter, or omit the "
            "option."
        )

    def build(size: int | None, length: int | None) -> ModelAndBatch:
        given = {"batch_size": size, "length": length}
        with user_code(f"calling {spec}"):
            result = function(**{name: number for name, number in given.items() if number is not None})
        if not isinstance(result, (tuple, list)) or len(result) != 2 or not isinstance(result[0], nn.Module):
            raise ArgumentError(
                f"{spec} returned {_describe(result)}: it must return (model, batch), a torch.nn.Module and one batch"
            )
        return result[0], result[1]

    return ModelSource(spec, build, options.batch, loss, options.optimizer)


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _describe(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {', '.join(type(item).__name__ for item in result) or 'length 0'}"
    return f"an object of type {type(result).__name__}"
