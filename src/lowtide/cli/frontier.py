"""`lowtide frontier`: step time against memory, from the smallest budget that works to everything kept."""

from __future__ import annotations

from typing import Any

import click

from ._failures import LowtideCommand
from ._options import (
    PRESET_LIST,
    codec_option,
    deadline_option,
    length_option,
    model_options,
    output_options,
    split_options,
    store_option,
    verbosity_options,
)


@click.command(cls=LowtideCommand, epilog=PRESET_LIST)
@model_options
@click.option("--points", type=click.IntRange(min=2), default=12, show_default=True, help="Number of plans.")
@length_option("Show the frontier of the largest length, such as 128..4096. Only short sequences are profiled.")
@store_option
@codec_option
@deadline_option(10.0, "Time limit for each plan.")
@output_options
@verbosity_options
def frontier(
    points: int, store: str, codecs: tuple[str, ...], deadline: float, quiet: bool, verbose: int, **options: Any
) -> None:
    """Show step time against memory, from the smallest budget that works to everything kept.

    One step is profiled without a memory limit, then plans are made for several budgets. The table shows each
    plan next to the proven lower bound on its step time. Below are simple schemes for comparison, such as a
    checkpoint on every block. --html also shows the plan with the middle budget in detail. The model is given as
    for lowtide plan.

    \b
    Examples:
      lowtide frontier --preset gpt2-tiny --points 6
      lowtide frontier train:build --png frontier.png
      lowtide frontier --hf config.json --batch 4 --json - > frontier.json
      lowtide frontier --preset llama-small --length 128..2048
    """
    chosen, outputs = split_options(options)

    from ..fitting.make_plan import link_named
    from ..fitting.plan import frontier_of
    from ..fitting.planner import Planner
    from ..fitting.sized_steps import SizedSteps
    from ..planning import solve
    from ..reporting.report import Report
    from ._model_source import resolve_model
    from ._output import check_plot_package, show, write_file, write_json
    from ._progress import report_progress

    check_plot_package(outputs)
    with report_progress(quiet=quiet, verbosity=verbose) as progress:
        source = resolve_model(chosen)
        if chosen.length is not None:
            trace = SizedSteps(source.step_maker(progress), chosen.length).largest()
        else:
            trace = source.trace(progress)
        solver_options = Planner(deadline, link_named(store), codecs).options(trace)
        progress.start_phase(f"making {points} plans", total=points)
        result = frontier_of(trace, points, **solver_options, progress=progress.completed)
        if outputs.html is not None:
            middle = result.points[len(result.points) // 2]
            progress.start_phase("writing the report")
            report = Report.of(trace, solve(trace, middle.budget_bytes, **solver_options), result)
            write_file(outputs.html, report.save_html)
    show(outputs, str(result))
    write_json(outputs, result.to_json())
    if outputs.png is not None:
        write_file(outputs.png, result.plot)
