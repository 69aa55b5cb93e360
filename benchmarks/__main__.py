"""Command line of the benchmarks: `python -m benchmarks COMMAND`.

Each command imports its modules itself, so that `compare` and `report` start without torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .harness.records import Run

RESULTS = Path(__file__).parent / "results" / "peers"
LARGE_RESULTS = RESULTS.parent / "large"
ROUNDS, FEW_ROUNDS, QUICK_ROUNDS = 15, 5, 2
MINUTES = 38.0


def log(line: str) -> None:
    """Print progress."""
    click.echo(line, err=True)


def split_names(value: str | None) -> list[str] | None:
    return [part.strip() for part in value.split(",") if part.strip()] if value else None


def with_plain(variants: list[str]) -> list[str]:
    """Return the variants with plain as the first one."""
    return ["plain", *(variant for variant in variants if variant != "plain")]


def print_names(context: click.Context, option: click.Parameter, value: bool) -> None:
    """Print all models and variants, and exit."""
    if not value:
        return
    from .harness import models, variants

    catalogues = {"Models": models.STANDARD, "Models with --large": models.LARGE, "Models with --quick": models.TINY}
    for title, catalogue in catalogues.items():
        click.echo(f"{title}:")
        for name, case in catalogue.items():
            click.echo(f"  {name:17}{case.title}")
    click.echo(f"Variants of all models except the compiled ones:\n  {', '.join(variants.STANDARD)}")
    for name in models.STANDARD:
        if more := [variant for variant in variants.standard(name) if variant not in variants.STANDARD]:
            click.echo(f"More variants of {name}:\n  {', '.join(more)}")
    click.echo(f"Variants with --large:\n  {', '.join(with_plain(list(variants.MAIN)))}")
    click.echo(f"Variants with --quick:\n  {', '.join(variants.QUICK)}")
    click.echo(f"All names that --variants accepts:\n  {', '.join(variants.FORMS)}")
    click.echo(variants.LIMITS)
    context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_names,
    help="Print all models and variants, and exit.",
)
def main() -> None:
    """Compare lowtide with other ways to save memory, on the same models with one thread."""


@main.command()
@click.option("--quick", is_flag=True, help="Tiny models and few variants, to check that all code runs.")
@click.option("--large", is_flag=True, help="Models with steps of 1 to 3 s; plain, checkpoint, SAC and plans only.")
@click.option("--models", "chosen_models", help="Names of models, separated by commas.  [all]")
@click.option("--variants", "chosen_variants", help="Names of variants, separated by commas; plain is added.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    help=f"Rounds of timed steps.  [{ROUNDS} for the main variants of the main models, {FEW_ROUNDS} for all others, "
    f"{QUICK_ROUNDS} with --quick]",
)
@click.option("--minutes", type=float, help="Time limit for all models: fewer rounds run if it is reached.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Directory of the results.  [benchmarks/results/{RESULTS.name}, or {LARGE_RESULTS.name} with --large]",
)
@click.option(
    "--rss/--no-rss",
    default=None,
    help="Measure the resident memory of some variants, each in its own process.  [yes; no with --quick, --large or "
    "--models]",
)
@click.option("--compile-seconds", type=float, help="Time limit for compiling one model with one setting.  [180]")
def run(
    quick: bool,
    large: bool,
    chosen_models: str | None,
    chosen_variants: str | None,
    rounds: int | None,
    minutes: float | None,
    out: Path | None,
    rss: bool | None,
    compile_seconds: float | None,
) -> None:
    """Measure models; write results.json, RESULTS.md and one plot per model, after each model."""
    from .harness import machine

    machine.keep_freed_memory("benchmarks")  # before torch is imported, because it restarts the program
    from .harness import compiled, measurement, models, pages, resident, variants

    if quick and large:
        raise click.UsageError("--quick and --large exclude each other")
    catalogue = "tiny" if quick else "large" if large else "standard"
    out = out or (LARGE_RESULTS if large else RESULTS)
    cases = models.CATALOGUES[catalogue]
    wanted = split_names(chosen_models) or list(cases)
    if unknown := [name for name in wanted if name not in cases]:
        raise click.UsageError(f"no such model: {', '.join(unknown)}; the models are {', '.join(cases)}")
    default = list(variants.QUICK) if quick else list(variants.MAIN) if large else None
    chosen = split_names(chosen_variants) or default
    by_model = {name: variants.standard(name) if chosen is None else with_plain(chosen) for name in wanted}
    try:
        for name in dict.fromkeys(name for names in by_model.values() for name in names):
            variants.named(name)
    except variants.UnknownVariantError as error:
        raise click.UsageError(str(error)) from error
    if compile_seconds is not None:
        compiled.DEADLINE_S = compile_seconds
    timing = measurement.Timing(
        rounds or (QUICK_ROUNDS if quick else ROUNDS),
        rounds or (QUICK_ROUNDS if quick else FEW_ROUNDS),
        main_models=models.MAIN_MODELS,
        seconds=None if minutes is None else 60 * minutes,
    )
    file = out / "results.json"
    page = (Path(__file__).parent if out == RESULTS else out) / "RESULTS.md"  # the main page is beside the code

    def finished(run: Run, name: str) -> None:
        pages.write_page(run, page, out, plotted=run.models.keys() - {name})

    results = measurement.run_models(
        {name: cases[name] for name in wanted}, by_model, timing, file, log, {"catalogue": catalogue}, finished
    )
    if rss if rss is not None else not quick and not large and chosen_models is None:
        resident.measure_resident(results, catalogue, log)
        results.save(file)
    pages.write_page(results, page, out)
    click.echo(str(page))


@main.command("all")
@click.option("--minutes", type=float, default=MINUTES, show_default=True, help="Time limit for all parts.")
@click.option("--quick", is_flag=True, help="Run all parts on tiny models, to check that all code runs.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Directory of the results."
)
def run_all(minutes: float, quick: bool, out: Path) -> None:
    """Run the suite of `make bench`: cost of recording, chain schedules, scaling, and all models with their peers."""
    from .harness import suite

    out = out.resolve()  # parts run in the directory of the project
    sys.exit(suite.run_parts(suite.suite_parts(out, quick), out, minutes, log))


@main.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Also write a Markdown page.")
def compare(old: Path, new: Path, output: Path | None) -> None:
    """Compare two results.json files, beyond noise. The exit code is 1 if any result of NEW is worse."""
    from .harness.records import ResultsError, Run
    from .harness.regressions import compare as compare_runs

    try:
        old_run, new_run = Run.load(old), Run.load(new)
    except ResultsError as error:
        raise click.ClickException(str(error)) from error
    comparison = compare_runs(old_run, new_run)
    click.echo(str(comparison))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(comparison.page(old_run, new_run), encoding="utf-8")
    sys.exit(1 if comparison.regressed else 0)


@main.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), help="The page.  [RESULTS.md beside the file]")
def report(results: Path, page: Path | None) -> None:
    """Write page and plots of a results.json again; reasons come from benchmarks/why.md."""
    from .harness.pages import write_page
    from .harness.records import ResultsError, Run

    try:
        loaded = Run.load(results)
    except ResultsError as error:
        raise click.ClickException(str(error)) from error
    page = page or results.parent / "RESULTS.md"
    write_page(loaded, page, results.parent)
    click.echo(str(page))


@main.command()
@click.option("--quick", is_flag=True, help="The two smallest points of each axis.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Rounds of timed steps.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Directory of the results."
)
@click.option("--report", is_flag=True, help="Write scaling.md and scaling.png again from scaling.json.")
def scaling(quick: bool, rounds: int, out: Path, report: bool) -> None:
    """Measure step time by depth, batch and length, and planning and recording by number of ops."""
    from .harness import machine

    if not report:
        machine.keep_freed_memory("benchmarks")
    from .harness import scaling

    click.echo(str(scaling.rewrite(out) if report else scaling.measure(quick, rounds, out, log)))


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def shapes(arguments: tuple[str, ...]) -> None:
    """Train with batches of variable shapes; `shapes --help` has the options."""
    from .harness import machine

    machine.keep_freed_memory("benchmarks")
    from . import shapes

    shapes.main(arguments)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
