"""Errors of commands: one sentence and an exit code. User errors print no traceback."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import click

from .._errors import ArgumentError, BudgetError, LowtideError

EXIT_FAILURE, EXIT_USAGE, EXIT_BUDGET = 1, 2, 3
_MAX_MESSAGE_CHARACTERS = 400

log = logging.getLogger("lowtide")


class Failure(click.ClickException):
    """A failure, with a sentence for the user."""

    exit_code = EXIT_FAILURE


class InvalidArguments(Failure):
    """Invalid arguments."""

    exit_code = EXIT_USAGE


class BudgetTooSmall(Failure):
    """A budget that cannot be met."""

    exit_code = EXIT_BUDGET


class LowtideCommand(click.Command):
    """A command that prints a `LowtideError` as one sentence, with the matching exit code."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Return -h and --help, also when the command is called without the group."""
        return ["-h", "--help"]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ArgumentError as error:
            raise InvalidArguments(str(error)) from error
        except BudgetError as error:
            raise BudgetTooSmall(str(error)) from error
        except LowtideError as error:
            raise Failure(str(error)) from error


@contextlib.contextmanager
def user_code(action: str) -> Iterator[None]:
    """Convert exceptions of the user's code into a `Failure` that starts with `action`. -v logs the traceback."""
    try:
        yield
    except (LowtideError, click.ClickException):
        raise
    except (Exception, SystemExit) as error:
        log.info("Traceback of the exception:", exc_info=True)
        message = " ".join(str(error).split()) or "no message"
        if len(message) > _MAX_MESSAGE_CHARACTERS:
            message = message[:_MAX_MESSAGE_CHARACTERS] + " …"
        raise Failure(f"{action} raised {type(error).__name__}: {message} (-v shows the traceback)") from error
