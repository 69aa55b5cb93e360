"""The command line: `lowtide COMMAND`. One file a command, imported when it is called."""

from __future__ import annotations

import click

from .. import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lowtide")
def main() -> None:
    """Train PyTorch models in less memory, with exactly the gradients they had."""


@main.command()
@click.option("--layers", default=6, show_default=True, type=click.IntRange(2, 48), help="Layers of the transformer.")
@click.option("--steps", default=5, show_default=True, type=click.IntRange(1, 100), help="Training steps of each way.")
def demo(layers: int, steps: int) -> None:
    """Train a small GPT-2 plainly and under lowtide, and compare peak memory, time and gradients.

    All ways take their steps in turn on one thread, so that the times can be compared. Needs the package
    transformers (pip install "lowtide[demo]"); no weights or data are downloaded.
    """
    from .demo import run

    run(layers, steps)
