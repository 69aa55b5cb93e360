"""`lowtide completion`: the shell completion script of click."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ._failures import Failure, LowtideCommand

SHELLS = ("bash", "zsh", "fish")


@click.command(cls=LowtideCommand)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that completes lowtide's commands, options and presets in a shell.

    The script is only printed. Save it where your shell reads completions, then start a new shell.

    \b
    Examples:
      lowtide completion bash > ~/.local/share/bash-completion/completions/lowtide
      lowtide completion zsh > ~/.zfunc/_lowtide     (a directory in $fpath)
      lowtide completion fish > ~/.config/fish/completions/lowtide.fish
    """
    completion_class = get_completion_class(shell)
    if completion_class is None:
        raise Failure(f"this version of click has no completion for {shell}: pip install --upgrade click")
    click.echo(completion_class(ctx.find_root().command, {}, "lowtide", "_LOWTIDE_COMPLETE").source())
