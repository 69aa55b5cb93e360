"""`lowtide completion`: click's own completion, as a script to be kept."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ._failures import Failure, PlainCommand

SHELLS = ("bash", "zsh", "fish")


@click.command(cls=PlainCommand)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and presets of lowtide in a shell.

    Nothing is installed: keep the script where your shell reads it, and start a new shell.

    \b
    Examples:
      lowtide completion bash > ~/.local/share/bash-completion/completions/lowtide
      lowtide completion zsh > ~/.zfunc/_lowtide     (a directory in $fpath)
      lowtide completion fish > ~/.config/fish/completions/lowtide.fish
    """
    made = get_completion_class(shell)
    if made is None:
        raise Failure(f"this version of click has no completion for {shell}: pip install --upgrade click")
    click.echo(made(ctx.find_root().command, {}, "lowtide", "_LOWTIDE_COMPLETE").source())
