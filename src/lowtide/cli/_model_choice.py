"""What a command is asked about: a model with batches for it, its loss, the optimizer's share; and its profile."""

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
from ..fitting.plan import Loss, profile, profile_for
from ..records import Trace
from ._failures import others_code
from ._imports import import_function
from ._options import OPTIMIZER_STATE, ModelChoice
from ._presets import PRESETS
from ._progress import Teller

BATCH = 8
Made = tuple[nn.Module, Any]

log = logging.getLogger("lowtide")


@dataclass(frozen=True)
class Subject:
    """A model that may be asked about for several batch sizes."""

    name: str
    make: Callable[[int | None], Made]
    """The model and a batch of this size; None for the function's own."""
    batch: int | None
    loss: Loss | None
    optimizer: str

    def trace(self, teller: Teller, *, limit: int | None = None, batch: int | None = None) -> Trace:
        """One step, profiled within `limit` if that can be; with it, every op is checked to be repeatable."""

        def profiled(model: nn.Module, sample: Any, state: int) -> Trace:
            if limit is None or limit <= state:  # then to be able to say what would do
                return profile(model, sample, loss=self.loss, verify=limit is not None)
            return profile_for(limit - state, model, sample, loss=self.loss, verify=True)

        return self._profiled(teller, batch if batch is not None else self.batch, profiled)

    def trace_within(self, teller: Teller, limit: int, batch: int) -> Trace:
        """One step that never takes more than `limit`; `BudgetError` if it cannot be done."""

        def profiled(model: nn.Module, sample: Any, state: int) -> Trace:
            if limit <= state:
                raise BudgetError(f"the state of {self.optimizer} alone is larger", budget_bytes=limit)
            return profile(model, sample, loss=self.loss, limit_bytes=limit - state, verify=True)

        return self._profiled(teller, batch, profiled)

    def _profiled(self, teller: Teller, size: int | None, profiled: Callable[[nn.Module, Any, int], Trace]) -> Trace:
        gc.collect()  # of an earlier model, which would be counted
        title = self.name if size is None else f"{self.name}, batch {size}"
        teller.phase(f"{title}: building the model")
        model, sample = self.make(size)
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        state = OPTIMIZER_STATE[self.optimizer] * trained
        try:
            with teller.still(f"{title}: profiling one step"), others_code("the model's own step"):
                trace = profiled(model, sample, state)
        except ArgumentError as error:
            if self.loss is None and "pass loss=" in str(error):
                raise ArgumentError(f"{error}; here that is --loss package.module:function") from error
            raise
        log.info(
            "%s: %d ops, %d values saved, %s of trained parameters, %s of optimizer state, a step of %.3f s",
            title, len(trace.ops), len(trace.saved), format_bytes(trained), format_bytes(state), trace.step_s,
        )  # fmt: skip
        return shift(trace, state)


def find_subject(choice: ModelChoice, *, sized: bool = False) -> Subject:
    """The model that the options name; `sized`: batches of several sizes will be asked for."""
    loss = import_function(choice.loss) if choice.loss is not None else None
    if choice.spec is not None:
        return _from_function(choice, choice.spec, loss, sized or choice.batch is not None)
    from ._transformers import ConfiguredModel, read_config

    config = PRESETS[choice.preset].config if choice.preset is not None else read_config(str(choice.hf))
    made: list[ConfiguredModel] = []  # made when it is first needed, once

    def make(size: int | None) -> Made:
        if not made:
            made.append(ConfiguredModel(config, seq=choice.seq, dtype=choice.dtype, device=choice.device))
        return made[0].model, made[0].batch(size or BATCH)

    return Subject(choice.preset or config["model_type"], make, choice.batch or BATCH, loss, choice.optimizer)


def _from_function(choice: ModelChoice, spec: str, loss: Loss | None, sized: bool) -> Subject:
    function = import_function(spec)
    if sized and not _takes_batch_size(function):
        raise click.UsageError(
            f"--batch and --max-batch need a function with a parameter batch_size, which {spec} has not: add one, "
            "or leave the option out."
        )

    def make(size: int | None) -> Made:
        with others_code(f"calling {spec}"):
            result = function() if size is None else function(batch_size=size)
        if not isinstance(result, (tuple, list)) or len(result) != 2 or not isinstance(result[0], nn.Module):
            raise ArgumentError(
                f"{spec} gave {_described(result)}: it has to return (model, batch), a torch.nn.Module and one batch"
            )
        return result[0], result[1]

    return Subject(spec, make, choice.batch, loss, choice.optimizer)


def _takes_batch_size(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "batch_size" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _described(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {', '.join(type(one).__name__ for one in result) or 'nothing'}"
    return f"an object of type {type(result).__name__}"
