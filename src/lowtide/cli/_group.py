"""A group of commands that are imported when they are called: help and completion need no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem


class Slot(NamedTuple):
    """Where a command is, and what the list of commands says of it."""

    target: str
    """"package.module:command" """
    words: str


class LazyGroup(click.Group):
    """Commands by name; nothing of a command but its words is known until it is asked for."""

    def __init__(self, *args: Any, slots: Mapping[str, Slot], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slots = dict(slots)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order in which they are told."""
        return list(self.slots)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now."""
        slot = self.slots.get(cmd_name)
        if slot is None:
            return None
        module, _, name = slot.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in the help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, slot.words) for name, slot in self.slots.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands that begin like this, and the group's own options."""
        names = [
            CompletionItem(name, help=slot.words) for name, slot in self.slots.items() if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)
