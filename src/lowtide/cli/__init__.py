"""The command line: `lowtide COMMAND`. One file a command, imported when it is called.

Exit codes are the same everywhere: 0 for success, 1 for a failure on the way (a package that is not installed,
the model's own code raising), 2 for arguments that cannot be meant, 3 for a budget that cannot be met.
"""

from __future__ import annotations

import click

from .. import __version__
from ._group import LazyGroup, Slot

_SLOTS = {
    "plan": Slot("lowtide.cli.plan:plan", "Will it fit, and what does it cost? Asked without training."),
    "frontier": Slot("lowtide.cli.frontier:frontier", "Time against memory, from the smallest budget that works."),
    "run": Slot("lowtide.cli.run:run", "Run an unmodified training script inside a budget."),
    "demo": Slot("lowtide.cli.demo:demo", "Train a small GPT-2 plainly and under lowtide, side by side."),
    "doctor": Slot("lowtide.cli.doctor:doctor", "What is installed, how fast this machine is, what works here."),
    "completion": Slot("lowtide.cli.completion:completion", "Print the script for completion in a shell."),
}


@click.group(cls=LazyGroup, slots=_SLOTS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lowtide")
def main() -> None:
    """Train PyTorch models in less memory, with exactly the gradients they had.

    \b
    Examples:
      lowtide plan --preset gpt2-small --budget 2GiB    will it fit?
      lowtide plan train:build --budget 8GiB            the model of your own train.py
      lowtide frontier --preset gpt2-tiny               what less memory costs
      lowtide doctor                                    is all well here?

    \b
    Exit codes: 0 success, 1 a failure on the way, 2 wrong arguments,
    3 a budget that cannot be met.
    """
