"""`lowtide run`: an unmodified training script within a budget. Imports torch when the script does, not before."""

from __future__ import annotations

from pathlib import Path

import click

from .._errors import ArgumentError
from ..runner.ending import Ending
from ..runner.program import Program
from ..runner.settings import Settings
from ._failures import PlainCommand
from ._options import codec_option, new_file, size, store_option


@click.command(cls=PlainCommand, context_settings={"allow_interspersed_args": False})
@click.option("--budget", required=True, callback=size, metavar="SIZE", help='For all live tensors, such as "8GiB".')
@store_option
@codec_option
@click.option("--report", callback=new_file, metavar="FILE.html", help="Write a page about the plan at exit.")
@click.option("--cache", type=click.Path(file_okay=False), metavar="DIR", help="Keep plans there for the next run.")
@click.option("--quiet", "-q", is_flag=True, help="No summary at exit.")
@click.option("-m", "is_module", is_flag=True, help="Run a module, as python -m does, instead of a script.")
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
    """Run an unmodified training script inside a budget of memory, with exactly the gradients it had.

    The training steps are found as they happen: a call of a model in training mode, and the backward pass through
    it. The first of each kind is profiled within the budget, the others follow a plan. Everything after SCRIPT
    belongs to the script. A summary is written to stderr at exit.

    \b
    Examples:
      lowtide run --budget 8GiB train.py --lr 3e-4
      lowtide run --budget 8GiB --cache plans/ --report plan.html train.py
      lowtide run --budget 8GiB -m mypackage.train --epochs 3
      torchrun --nproc-per-node 2 -m lowtide run --budget 4GiB train.py

    \b
    Exit codes: those of the script; 2 for wrong arguments, 3 for a budget
    that cannot be met.
    """
    if not is_module and not Path(target).is_file():
        raise ArgumentError(f"there is no script {target!r} here: a module is run with -m")
    settings = Settings(budget, store, codecs, _absolute(cache))
    Ending(settings, _absolute(report), quiet).prepare()
    Program(target, arguments, is_module).run()


def _absolute(path: str | None) -> Path | None:
    """The program may go to another directory."""
    return Path(path).absolute() if path is not None else None
