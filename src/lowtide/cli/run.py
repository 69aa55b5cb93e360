"""`lowtide run`: run an unmodified training script within a budget. Imports torch only when the script does."""

from __future__ import annotations

from pathlib import Path

import click

from .._errors import ArgumentError
from ..runner.exit_report import ExitReport
from ..runner.program import Program
from ..runner.settings import Settings
from ._failures import LowtideCommand
from ._options import check_output_path, codec_option, parse_size, store_option


@click.command(cls=LowtideCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--budget", required=True, callback=parse_size, metavar="SIZE", help="Memory budget for all live tensors: 8GiB."
)
@store_option
@codec_option
@click.option("--report", callback=check_output_path, metavar="FILE.html", help="Write an HTML report at exit.")
@click.option(
    "--cache", type=click.Path(file_okay=False), metavar="DIR", help="Directory that saves plans for later runs."
)
@click.option("--quiet", "-q", is_flag=True, help="Print no summary at exit.")
@click.option("-m", "is_module", is_flag=True, help="Run a module, like python -m.")
@click.argument("target", metavar="SCRIPT|MODULE")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def run(
    budget: int,
    store: str,
    codecs: tuple[str, ...],
    report: str | None,
    cache: str | None,
    quiet: bool,
    is_module: bool,
    target: str,
    arguments: tuple[str, ...],
) -> None:
    """Run an unmodified training script within a memory budget, with bit-equal gradients.

    A training step is a call of a model in training mode, followed by a backward pass. lowtide finds the steps
    while the script runs. The first step with a given shape is profiled within the budget; later steps with that
    shape follow a plan. All arguments after SCRIPT are passed to the script. A summary is printed to stderr at
    exit.

    \b
    Examples:
      lowtide run --budget 8GiB train.py --lr 3e-4
      lowtide run --budget 8GiB --cache plans/ --report plan.html train.py
      lowtide run --budget 8GiB -m mypackage.train --epochs 3
      torchrun --nproc-per-node 2 -m lowtide run --budget 4GiB train.py

    \b
    Exit codes: those of the script; 2 invalid arguments,
    3 a budget that cannot be met.
    """
    if not is_module and not Path(target).is_file():
        raise ArgumentError(f"there is no script {target!r}: use -m to run a module")
    # Absolute paths, because the script may change the working directory.
    settings = Settings(budget, store, codecs, _absolute(cache))
    ExitReport(settings, _absolute(report), quiet).install()
    Program(target, arguments, is_module).run()


def _absolute(path: str | None) -> Path | None:
    return Path(path).absolute() if path is not None else None
