"""`lowtide plan`: will it fit, and what does it cost? One step is profiled, nothing is trained."""

from __future__ import annotations

from typing import Any

import click

from ._failures import TOO_SMALL, PlainCommand
from ._options import (
    PRESET_LIST,
    choice_and_outputs,
    codec_option,
    deadline_option,
    model_options,
    output_options,
    size,
    store_option,
    talk_options,
)


@click.command(cls=PlainCommand, epilog=PRESET_LIST)
@model_options
@click.option("--budget", callback=size, required=True, metavar="SIZE", help="A number and a unit: 8GiB, 500MB.")
@click.option("--max-batch", is_flag=True, help="Find the largest batch within the budget, starting at the usual one.")
@store_option
@codec_option
@deadline_option(20.0, "To search for a plan; with --max-batch for each.")
@output_options
@talk_options
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
    """Will training fit into a budget, and what does it cost? Answered without training.

    One step of the model is run and profiled within the budget, and a plan is made: what to keep, what to
    recompute, the peak to expect, the time on top. The budget counts all live tensors: parameters, gradients,
    batch, activations, temporaries; and with --optimizer the optimizer's state.

    The model is your own function, which returns (model, batch) and is imported from the current directory or
    from what is installed; or a configuration of transformers (--hf); or a preset. With a parameter batch_size the
    function can be asked for other batches (--batch, --max-batch).

    \b
    Examples:
      lowtide plan --preset gpt2-tiny --budget 64MiB
      lowtide plan train:build --budget 8GiB --optimizer adam
      lowtide plan train:build --budget 8GiB --loss train:loss --json plan.json
      lowtide plan --hf config.json --batch 4 --seq 512 --budget 6GiB --html plan.html
      lowtide plan --preset vit-small --budget 2GiB --max-batch
      lowtide plan --preset gpt2-tiny --budget 48MiB --store disk

    The JSON is the plan itself: lowtide.fit(model, plan=lowtide.Plan.load("plan.json")) obeys it (with
    stores=("disk",) or codecs="bf16", if it was made with --store disk or --codec bf16).

    \b
    Exit codes: 0 it fits, 3 it does not (the smallest budget that works is said),
    2 wrong arguments, 1 a failure on the way.
    """
    choice, outputs = choice_and_outputs(options)

    from .._errors import BudgetError
    from ..fitting.make_plan import link_named
    from ._model_choice import find_subject
    from ._output import check_can_draw, refusal, show, write_json
    from ._progress import telling
    from ._search import Fits, Search, fits, largest_batch, said_of

    check_can_draw(outputs)
    with telling(quiet=quiet, verbosity=verbose) as teller:
        subject = find_subject(choice, sized=max_batch)
        search = Search(deadline, link_named(store), codecs)
        answer: Fits | BudgetError
        try:
            if max_batch:
                answer = largest_batch(subject, budget, search, teller)
            else:
                answer = fits(subject, budget, search, teller)
        except BudgetError as error:
            answer = error
    if isinstance(answer, BudgetError):
        write_json(outputs, refusal(answer))
        show(outputs, f"does not fit: {answer}")
        ctx.exit(TOO_SMALL)
    show(outputs, said_of(subject, answer), answer.report)
    write_json(outputs, answer.to_json())
    answer.draw(outputs)
