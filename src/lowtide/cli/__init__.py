"""The command line `lowtide COMMAND`: one file per command, imported when the command is called.

All commands use the same exit codes: 0 success, 1 failure (a missing package, an exception in the user's code),
2 invalid arguments, 3 a budget that cannot be met.
"""

from __future__ import annotations

import click

from .. import __version__
from ._group import LazyCommand, LazyGroup

_COMMANDS = {
    "plan": LazyCommand("lowtide.cli.plan:plan", "Predict whether a model fits into a budget, and at what cost."),
    "frontier": LazyCommand("lowtide.cli.frontier:frontier", "Show step time against memory for many budgets."),
    "run": LazyCommand("lowtide.cli.run:run", "Run an unmodified training script within a budget."),
    "demo": LazyCommand("lowtide.cli.demo:demo", "Train a small GPT-2 with and without lowtide, and compare."),
    "doctor": LazyCommand("lowtide.cli.doctor:doctor", "Check the installation and measure memory, disk and codecs."),
    "completion": LazyCommand("lowtide.cli.completion:completion", "Print the completion script for a shell."),
}


@click.group(cls=LazyGroup, lazy_commands=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lowtide")
def main() -> None:
    """Train PyTorch models within a memory budget, with bit-equal gradients.

    \b
    Examples:
      lowtide plan --preset gpt2-small --budget 2GiB    does a built-in model fit?
      lowtide plan train:build --budget 8GiB            does the model of train.py fit?
      lowtide run --budget 8GiB train.py                train within a budget
      lowtide frontier --preset gpt2-tiny               what does less memory cost?
      lowtide doctor                                    does lowtide work here?

    \b
    Exit codes: 0 success, 1 failure, 2 invalid arguments,
    3 a budget that cannot be met.
    """
