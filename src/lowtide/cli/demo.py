"""`lowtide demo`."""

from __future__ import annotations

import click

from ._failures import PlainCommand


@click.command(cls=PlainCommand)
@click.option("--layers", default=6, show_default=True, type=click.IntRange(2, 48), help="Layers of the transformer.")
@click.option("--steps", default=8, show_default=True, type=click.IntRange(1, 100), help="Training steps of each way.")
def demo(layers: int, steps: int) -> None:
    """Train a small GPT-2 plainly, in a budget and under rules, and compare peak memory, time and gradients.

    All ways take their steps in turn on one thread, so that the times can be compared. Needs the package
    transformers (pip install "lowtide[demo]"); no weights or data are downloaded.

    \b
    Examples:
      lowtide demo
      lowtide demo --layers 12 --steps 3
    """
    from ._demo_run import run

    run(layers, steps)
