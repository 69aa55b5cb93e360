"""The command line of the benchmarks: `python -m benchmarks COMMAND`.

Everything heavy is imported by the command that needs it, so that `compare` and `report` start without torch.
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


def say(sentence: str) -> None:
    """Progress."""
    click.echo(sentence, err=True)


def names(value: str | None) -> list[str] | None:
    return [part.strip() for part in value.split(",") if part.strip()] if value else None


def list_everything(context: click.Context, option: click.Parameter, value: bool) -> None:
    if not value:
        return
    from .harness import models, variants

    catalogues = {"models": models.STANDARD, "models with --large": models.LARGE, "models with --quick": models.TINY}
    for title, catalogue in catalogues.items():
        click.echo(f"{title}:")
        for name, case in catalogue.items():
            click.echo(f"  {name:12}{case.title}")
    click.echo(f"variants:\n  {', '.join(variants.STANDARD)}")
    for name in models.STANDARD:
        if more := [way for way in variants.standard(name) if way not in variants.STANDARD]:
            click.echo(f"and of {name}:\n  {', '.join(more)}")
    click.echo(f"variants with --large:\n  {', '.join(with_plain(list(variants.DECIDED)))}")
    click.echo(f"variants with --quick:\n  {', '.join(variants.QUICK)}")
    click.echo(f"and any of these forms:\n  {', '.join(variants.FORMS)}")
    context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=list_everything, help="Models and variants."
)
def main() -> None:
    """lowtide beside what a user would pick instead: the same models, one thread, all variants in turn."""


@main.command()
@click.option("--quick", is_flag=True, help="Tiny models and few variants: does it run?")
@click.option("--large", is_flag=True, help="Models whose plain step takes 1 to 3 s, checkpoint, SAC and plans only.")
@click.option("--models", "chosen_models", help="Some of the models, with commas between.")
@click.option("--variants", "chosen_variants", help="Some of the variants, with commas between; plain is added.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    help=f"Rounds of timed steps.  [{ROUNDS} for the main comparisons and {FEW_ROUNDS} elsewhere, or {QUICK_ROUNDS} "
    "with --quick]",
)
@click.option("--minutes", type=float, help="For all models: fewer rounds are taken where it would take longer.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Where results go.  [benchmarks/results/{RESULTS.name}, or {LARGE_RESULTS.name} with --large]",
)
@click.option(
    "--rss/--no-rss",
    default=None,
    help="Measure resident memory of a few variants, each in a process of its own.  [yes, or no with --quick, --large "
    "or --models]",
)
@click.option("--compile-seconds", type=float, help="Deadline for compiling one model in one way.  [180]")
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
    """Measure, and write results.json, RESULTS.md and a picture for each model; after each model what there is."""
    from .harness import machine

    machine.keep_freed_memory("benchmarks")  # before torch is imported: it starts this program anew
    from .harness import compiled, models, pages, resident, running, variants

    if quick and large:
        raise click.UsageError("either --quick or --large")
    catalogue = "tiny" if quick else "large" if large else "standard"
    out = out or (LARGE_RESULTS if large else RESULTS)
    cases = models.CATALOGUES[catalogue]
    wanted = names(chosen_models) or list(cases)
    if unknown := [name for name in wanted if name not in cases]:
        raise click.UsageError(f"no such model: {', '.join(unknown)}; there are {', '.join(cases)}")
    usual = list(variants.QUICK) if quick else list(variants.DECIDED) if large else None
    chosen = names(chosen_variants) or usual
    ways = {name: variants.standard(name) if chosen is None else with_plain(chosen) for name in wanted}
    try:
        for way in dict.fromkeys(way for each in ways.values() for way in each):
            variants.named(way)
    except variants.UnknownVariantError as error:
        raise click.UsageError(str(error)) from error
    if compile_seconds is not None:
        compiled.DEADLINE_S = compile_seconds
    timing = running.Timing(
        rounds or (QUICK_ROUNDS if quick else ROUNDS),
        rounds or (QUICK_ROUNDS if quick else FEW_ROUNDS),
        decided_on=models.DECIDED_ON,
        seconds=None if minutes is None else 60 * minutes,
    )
    file = out / "results.json"
    page = (Path(__file__).parent if out == RESULTS else out) / "RESULTS.md"  # the headline page is beside the code

    def finished(run: Run, name: str) -> None:
        pages.write_page(run, page, out, drawn=run.models.keys() - {name})

    found = running.run_models(
        {name: cases[name] for name in wanted}, ways, timing, file, say, {"catalogue": catalogue}, finished
    )
    if rss if rss is not None else not quick and not large and chosen_models is None:
        resident.measure_resident(found, catalogue, say)
        found.save(file)
    pages.write_page(found, page, out)
    click.echo(str(page))


def with_plain(ways: list[str]) -> list[str]:
    return ["plain", *(way for way in ways if way != "plain")]


@main.command("all")
@click.option("--minutes", type=float, default=MINUTES, show_default=True, help="For everything.")
@click.option("--quick", is_flag=True, help="All parts on tiny models, into --out: do they run?")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Where results go.")
def everything(minutes: float, quick: bool, out: Path) -> None:
    """What `make bench` does: recording's cost, chain schedules, scaling, then all models beside their peers."""
    from .harness import everything as parts

    out = out.resolve()  # parts run in the directory of the project
    sys.exit(parts.run_parts(parts.parts_of(out, quick), out, minutes, say))


@main.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
def compare(old: Path, new: Path) -> None:
    """What became slower or larger from OLD to NEW results, beyond noise; exit code 1 if anything did."""
    from .harness.records import ResultsError, Run
    from .harness.regressions import compare as compared

    try:
        found = compared(Run.load(old), Run.load(new))
    except ResultsError as error:
        raise click.ClickException(str(error)) from error
    click.echo(str(found))
    sys.exit(1 if found.regressed else 0)


@main.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), help="The page.  [RESULTS.md beside the file]")
def report(results: Path, page: Path | None) -> None:
    """Write the page and the pictures of a results.json again; reasons are taken from benchmarks/why.md."""
    from .harness.pages import write_page
    from .harness.records import ResultsError, Run

    try:
        found = Run.load(results)
    except ResultsError as error:
        raise click.ClickException(str(error)) from error
    page = page or results.parent / "RESULTS.md"
    write_page(found, page, results.parent)
    click.echo(str(page))


@main.command()
@click.option("--quick", is_flag=True, help="The two smallest points of each axis.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Where results go.")
def scaling(quick: bool, rounds: int, out: Path) -> None:
    """Cost against depth, batch and length; planning, recording and our own records against ops."""
    from .harness import machine

    machine.keep_freed_memory("benchmarks")
    from .harness import scaling as scales

    click.echo(str(scales.measure(quick, rounds, out, say)))


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
