"""`lowtide plan`: predict whether a model fits into a budget, and at what cost, from one profiled step."""

from __future__ import annotations

from typing import Any

import click

from ._failures import EXIT_BUDGET, LowtideCommand
from ._options import (
    PRESET_LIST,
    codec_option,
    deadline_option,
    length_option,
    model_options,
    output_options,
    parse_size,
    split_options,
    store_option,
    verbosity_options,
)


@click.command(cls=LowtideCommand, epilog=PRESET_LIST)
@model_options
@click.option("--budget", callback=parse_size, required=True, metavar="SIZE", help="Memory budget: 8GiB, 500MB.")
@click.option("--max-batch", is_flag=True, help="Find the largest batch that fits. The search starts at --batch.")
@length_option("Find the longest sequences that fit, such as 128..4096. Only short ones are profiled.")
@store_option
@codec_option
@deadline_option(20.0, "Time limit for planning; with --max-batch and --length, for each size.")
@output_options
@verbosity_options
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    budget: int,
    max_batch: bool,
    store: str,
    codecs: tuple[str, ...],
    deadline: float,
    quiet: bool,
    verbose: int,
    **options: Any,
) -> None:
    """Predict whether training fits into a memory budget, and how much slower it will be.

    One training step is profiled within the budget. The resulting plan says which activations to keep and which
    to recompute, and predicts the peak memory and the step time. The budget covers all live tensors: parameters,
    gradients, batch, activations, temporaries and, with --optimizer, the optimizer state.

    The model is one of: a function of yours that returns (model, batch), from an installed module or a module in
    the current directory; a transformers configuration (--hf); a preset (--preset). For --batch and --max-batch
    your function needs a parameter batch_size, for --length a parameter length.

    \b
    Examples:
      lowtide plan --preset gpt2-tiny --budget 64MiB
      lowtide plan train:build --budget 8GiB --optimizer adam
      lowtide plan train:build --budget 8GiB --loss train:loss --json plan.json
      lowtide plan --hf config.json --batch 4 --seq 512 --budget 6GiB --html plan.html
      lowtide plan --preset vit-small --budget 2GiB --max-batch
      lowtide plan --preset llama-small --budget 8GiB --length 128..2048
      lowtide plan --preset gpt2-tiny --budget 48MiB --store disk

    The file of --json can be used for training: lowtide.fit(model, plan=lowtide.Plan.load("plan.json")). If the
    plan was made with --store disk or --codec bf16, also pass stores=("disk",) or codecs="bf16".

    \b
    Exit codes: 0 fits, 1 failure, 2 invalid arguments,
    3 does not fit (the smallest budget that works is printed).
    """
    chosen, outputs = split_options(options)
    if max_batch and chosen.length is not None:
        raise click.UsageError("--max-batch and --length exclude each other: search for one of them.")

    from .._errors import BudgetError
    from ..fitting.make_plan import link_named
    from ..fitting.planner import Planner
    from ._model_source import resolve_model
    from ._output import budget_error_json, check_plot_package, show, write_json
    from ._progress import report_progress
    from ._search import describe, find_largest_batch, find_longest, find_plan

    check_plot_package(outputs)
    try:
        with report_progress(quiet=quiet, verbosity=verbose) as progress:
            source = resolve_model(chosen, needs_sizes=max_batch)
            planner = Planner(deadline, link_named(store), codecs)
            if chosen.length is not None:
                result = find_longest(source, chosen.length, budget, planner, progress)
            else:
                find = find_largest_batch if max_batch else find_plan
                result = find(source, budget, planner, progress)
    except BudgetError as error:
        write_json(outputs, budget_error_json(error))
        length = "" if chosen.length is None else f"length {chosen.length[0]} "
        show(outputs, f"{length}does not fit: {error}")
        ctx.exit(EXIT_BUDGET)
    show(outputs, describe(source, result), *([] if result.longest is not None else [result.report]))
    write_json(outputs, result.to_json())
    result.write_reports(outputs)
