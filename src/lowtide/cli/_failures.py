"""How commands fail: one sentence and an exit code, never a traceback for what the user can mend."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import click

from .._errors import ArgumentError, BudgetError, LowtideError

FAILED, USAGE, TOO_SMALL = 1, 2, 3
_SHOWN = 400

log = logging.getLogger("lowtide")


class Failure(click.ClickException):
    """A sentence for the user; something went wrong on the way."""

    exit_code = FAILED


class WrongArguments(Failure):
    """Arguments that cannot be meant."""

    exit_code = USAGE


class BudgetTooSmall(Failure):
    """A budget that cannot be met."""

    exit_code = TOO_SMALL


class PlainCommand(click.Command):
    """A command whose errors of lowtide's tree are said in one sentence, and that knows -h also when called alone."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Not from the group, as click does: it keeps the names with which it was called first."""
        return ["-h", "--help"]

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except LowtideError as error:
            kind = BudgetTooSmall if isinstance(error, BudgetError) else Failure
            kind = WrongArguments if isinstance(error, ArgumentError) else kind
            raise kind(str(error)) from error


@contextlib.contextmanager
def others_code(doing: str) -> Iterator[None]:
    """Code of the user runs inside: what it raises is said in a sentence; with -v the log has the traceback."""
    try:
        yield
    except (LowtideError, click.ClickException):
        raise
    except (Exception, SystemExit) as error:
        log.info("where it was raised:", exc_info=True)
        said = " ".join(str(error).split())
        said = said if len(said) <= _SHOWN else said[:_SHOWN] + " …"
        raise Failure(f"{doing} raised {type(error).__name__}: {said or 'no message'} (-v shows where)") from error
