"""`lowtide demo`: train a small GPT-2 with and without lowtide, and compare."""

from __future__ import annotations

import click

from ._failures import LowtideCommand


@click.command(cls=LowtideCommand)
@click.option("--layers", default=6, show_default=True, type=click.IntRange(2, 48), help="Layers of the model.")
@click.option("--steps", default=8, show_default=True, type=click.IntRange(1, 100), help="Timed steps per method.")
def demo(layers: int, steps: int) -> None:
    """Train a small GPT-2 with and without lowtide, and compare peak memory, step time and gradients.

    The methods are plain PyTorch, torch.utils.checkpoint, lowtide.fit with two budgets, and three lowtide
    policies. They take turns step by step on one thread, so that their times are comparable. Needs transformers
    (pip install "lowtide[demo]"). Downloads no weights and no data.

    \b
    Examples:
      lowtide demo
      lowtide demo --layers 12 --steps 3
    """
    from ._demo_run import run

    run(layers, steps)
