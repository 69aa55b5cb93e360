"""`lowtide frontier`: what less memory costs in time, from the smallest budget that works to everything kept."""

from __future__ import annotations

from typing import Any

import click

from ._failures import PlainCommand
from ._options import (
    PRESET_LIST,
    choice_and_outputs,
    codec_option,
    deadline_option,
    model_options,
    output_options,
    store_option,
    talk_options,
)


@click.command(cls=PlainCommand, epilog=PRESET_LIST)
@model_options
@click.option("--points", type=click.IntRange(min=2), default=12, show_default=True, help="How many plans to make.")
@store_option
@codec_option
@deadline_option(10.0, "To search for each plan.")
@output_options
@talk_options
def frontier(
    points: int, store: str, codecs: tuple[str, ...], deadline: float, quiet: bool, verbose: int, **options: Any
) -> None:
    """Time against memory: what every budget costs, from the smallest that works to everything kept.

    One step is run and profiled without a limit; then plans are made. Beside each stands the lower bound, which
    no plan can beat, and below are simple schemes, such as a checkpoint on every block. The page also shows the
    step under the plan in the middle. Models are given as for lowtide plan.

    \b
    Examples:
      lowtide frontier --preset gpt2-tiny --points 6
      lowtide frontier train:build --png frontier.png
      lowtide frontier --hf config.json --batch 4 --json - > frontier.json
    """
    choice, outputs = choice_and_outputs(options)

    from ..codecs.costs import codec_costs_for
    from ..fitting.make_plan import link_named
    from ..fitting.plan import frontier_of
    from ..planning import solve
    from ..reporting.report import Report
    from ._model_choice import find_subject
    from ._output import check_can_draw, save, show, write_json
    from ._progress import telling

    check_can_draw(outputs)
    with telling(quiet=quiet, verbosity=verbose) as teller:
        trace = find_subject(choice).trace(teller)
        ways: dict[str, Any] = {"link": link_named(store), "codec_costs": codec_costs_for(trace, codecs)}
        teller.phase(f"making {points} plans", total=points)
        found = frontier_of(trace, points, **ways, deadline_s=deadline, progress=teller.done)
        if outputs.html is not None:
            middle = found.points[len(found.points) // 2]
            teller.phase("drawing")
            report = Report.of(trace, solve(trace, middle.budget_bytes, **ways, deadline_s=deadline), found)
            save(outputs.html, report.save_html)
    show(outputs, str(found))
    write_json(outputs, found.to_json())
    if outputs.png is not None:
        save(outputs.png, found.plot)
