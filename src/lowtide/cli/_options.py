"""Options that several commands have, and the words of each. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from .._errors import ArgumentError
from .._units import parse_bytes
from ._presets import PRESETS

STORES = ("device", "host", "disk")
CODECS = ("exact", "none", "constant", "mask", "narrow", "sparse", "bytes", "bf16", "fp16", "fp8", "int8")
F = TypeVar("F", bound=Callable[..., Any])

OPTIMIZER_STATE = {"none": 0, "sgd": 0, "momentum": 1, "adam": 2}
"""How many times the bytes of the trained parameters an optimizer keeps beside them."""


def size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """The bytes that a size with its unit means: "8GiB"."""
    try:
        return parse_bytes(value)
    except ArgumentError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def store_option(command: F) -> F:
    """Where values may wait between forward and backward."""
    return click.option(
        "--store",
        type=click.Choice(STORES),
        default="device",
        show_default=True,
        help="Where values may wait between forward and backward, if that is quicker than making them again.",
    )(command)


def codec_option(command: F) -> F:
    """What values may be held packed by."""
    return click.option(
        "--codec",
        "codecs",
        type=click.Choice(CODECS),
        multiple=True,
        default=("exact",),
        show_default=True,
        callback=lambda ctx, param, names: () if "none" in names else names,
        help="What values may be held packed by; may be given several times. bf16, fp16, fp8 and int8 are lossy: they "
        "change gradients, and are used only if named.",
    )(command)


def new_file(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A file to be written, in a directory that is there: better known before an hour of work than after it."""
    if value is not None and value != "-":
        path = Path(value)
        if path.is_dir():
            raise click.BadParameter(f"{value!r} is a directory: name a file in it", ctx, param)
        if not path.parent.is_dir():
            raise click.BadParameter(
                f"there is no directory {str(path.parent)!r} to write {path.name!r} in", ctx, param
            )
    return value


@dataclass(frozen=True)
class ModelChoice:
    """What the options say about the model and its batch; one of the first three is given."""

    spec: str | None
    hf: str | None
    preset: str | None
    loss: str | None
    batch: int | None
    seq: int | None
    dtype: str | None
    device: str | None
    optimizer: str

    def __post_init__(self) -> None:
        given = [one for one in (self.spec, self.hf, self.preset) if one is not None]
        if len(given) != 1:
            raise click.UsageError(
                "a model is given in one of three ways: package.module:function, --hf FILE.json or --preset NAME; "
                + ("here it is not given at all." if not given else f"here are {len(given)} of them.")
            )
        shaped = [f"--{name}" for name in ("seq", "dtype", "device") if getattr(self, name) is not None]
        if self.spec is not None and shaped:
            raise click.UsageError(
                f"{' and '.join(shaped)} can only be used with --hf and --preset: {self.spec} makes its own model "
                "and batch, so say it there."
            )


@dataclass(frozen=True)
class Outputs:
    """Where the answer is written beside the terminal."""

    json: str | None
    html: str | None
    png: str | None


PRESET_LIST = "\b\nPresets:\n" + "\n".join(f"  {name:12} {preset.words}" for name, preset in PRESETS.items())
"""For the end of a help text."""

_MODEL = (
    click.argument("spec", required=False, metavar="[PACKAGE.MODULE:FUNCTION]"),
    click.option("--hf", metavar="FILE.json", help="A transformers configuration, with its model_type; no weights."),
    click.option("--preset", type=click.Choice(tuple(PRESETS)), metavar="NAME", help="A built-in model, see below."),
    click.option("--loss", metavar="PACKAGE.MODULE:FUNCTION", help="From the model's output to a scalar, if no .loss."),
    click.option("--batch", type=click.IntRange(min=1), help="Samples in a batch.  [default: 8, or FUNCTION's own]"),
    click.option("--seq", type=click.IntRange(min=2), help="Tokens in a sample.  [default: 128, or all it has]"),
    click.option(
        "--dtype", type=click.Choice(("float32", "bfloat16", "float16")), help="Of parameters.  [default: float32]"
    ),
    click.option("--device", metavar="NAME", help="Where to run the one step.  [default: the accelerator, or cpu]"),
    click.option(
        "--optimizer",
        type=click.Choice(tuple(OPTIMIZER_STATE)),
        default="none",
        show_default=True,
        help="Count its state in the peak: momentum takes the parameters' bytes once, adam twice.",
    ),
)
_OUTPUT = (
    click.option("--json", callback=new_file, metavar="FILE|-", help="Write JSON; - is stdout, alone."),
    click.option("--html", callback=new_file, metavar="FILE", help="Write a page that needs nothing else."),
    click.option("--png", callback=new_file, metavar="FILE", help='Write a picture (pip install "lowtide[plots]").'),
)
_TALK = (
    click.option("--quiet", "-q", is_flag=True, help="No progress."),
    click.option("--verbose", "-v", count=True, help="Show the log; twice for every detail."),
)


def model_options(command: F) -> F:
    """The model, its batch and its loss: the fields of `ModelChoice`."""
    return _with(_MODEL, command)


def output_options(command: F) -> F:
    """Files to write: the fields of `Outputs`."""
    return _with(_OUTPUT, command)


def talk_options(command: F) -> F:
    """How much is said while it works: `quiet` and `verbose`."""
    return _with(_TALK, command)


def deadline_option(seconds: float, words: str) -> Callable[[F], F]:
    """The time a search may take: `deadline`."""
    positive = click.FloatRange(min=0, min_open=True)
    return click.option("--deadline", type=positive, default=seconds, show_default=True, metavar="SECONDS", help=words)


def choice_and_outputs(options: dict[str, Any]) -> tuple[ModelChoice, Outputs]:
    """The records of what `model_options` and `output_options` have read."""
    files = {name: options.pop(name) for name in ("json", "html", "png")}
    return ModelChoice(**options), Outputs(**files)


def _with(options: tuple[Callable[[F], F], ...], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command
