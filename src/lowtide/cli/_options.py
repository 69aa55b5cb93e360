"""Options that several commands share. Does not import torch."""

from __future__ import annotations

import re
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
"""Bytes of the optimizer state, as a multiple of the bytes of the trained parameters."""


def parse_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Return the bytes of a size with a unit, such as "8GiB"."""
    try:
        return parse_bytes(value)
    except ArgumentError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def parse_lengths(ctx: click.Context, param: click.Parameter, value: str | None) -> range | None:
    """Return the lengths of a text such as "128..4096"."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", value)
    if match is None:
        raise click.BadParameter(
            f"{value!r} is not a range: write the smallest and the largest length, for example 128..4096", ctx, param
        )
    smallest, largest = int(match[1]), int(match[2])
    if smallest < 2:
        raise click.BadParameter(f"{value!r}: the smallest length must be at least 2", ctx, param)
    if smallest > largest:
        raise click.BadParameter(
            f"{value!r} is empty: write the smallest length first, {largest}..{smallest}", ctx, param
        )
    return range(smallest, largest + 1)


def length_option(help_text: str) -> Callable[[F], F]:
    """Return a decorator that adds --length."""
    return click.option("--length", callback=parse_lengths, metavar="SMALLEST..LARGEST", help=help_text)


def store_option(command: F) -> F:
    """Add --store."""
    return click.option(
        "--store",
        type=click.Choice(STORES),
        default="device",
        show_default=True,
        help="Where activations may be held between forward and backward. host and disk allow offloading, which is "
        "used where it is faster than recomputing.",
    )(command)


def codec_option(command: F) -> F:
    """Add --codec."""
    return click.option(
        "--codec",
        "codecs",
        type=click.Choice(CODECS),
        multiple=True,
        default=("exact",),
        show_default=True,
        callback=lambda ctx, param, names: () if "none" in names else names,
        help="Codec that may compress activations; can be repeated. exact allows all lossless codecs, none allows no "
        "compression. bf16, fp16, fp8 and int8 are lossy: they change gradients.",
    )(command)


def check_output_path(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return the path of an output file. Reject a path that cannot be written before the work starts."""
    if value is not None and value != "-":
        path = Path(value)
        if path.is_dir():
            raise click.BadParameter(f"{value!r} is a directory: name a file in it", ctx, param)
        if not path.parent.is_dir():
            raise click.BadParameter(f"there is no directory {str(path.parent)!r} for {path.name!r}", ctx, param)
    return value


@dataclass(frozen=True)
class ModelOptions:
    """Options for the model and its batch. Exactly one of `spec`, `hf` and `preset` is given."""

    spec: str | None
    hf: str | None
    preset: str | None
    loss: str | None
    batch: int | None
    seq: int | None
    dtype: str | None
    device: str | None
    optimizer: str
    length: range | None

    def __post_init__(self) -> None:
        given = [option for option in (self.spec, self.hf, self.preset) if option is not None]
        if len(given) != 1:
            raise click.UsageError(
                "give one model: package.module:function, --hf FILE.json or --preset NAME; "
                f"{len(given) or 'none'} given."
            )
        unusable = [f"--{name}" for name in ("seq", "dtype", "device") if getattr(self, name) is not None]
        if self.spec is not None and unusable:
            raise click.UsageError(
                f"{' and '.join(unusable)} can only be used with --hf and --preset: {self.spec} builds its own model "
                "and batch, so change the function."
            )
        if self.length is not None and self.seq is not None:
            raise click.UsageError("--length and --seq exclude each other: --length is a range of sequence lengths.")


@dataclass(frozen=True)
class Outputs:
    """Output files, or None for each file that is not written. "-" is stdout."""

    json: str | None
    html: str | None
    png: str | None


PRESET_LIST = "\b\nPresets:\n" + "\n".join(f"  {name:12} {preset.summary}" for name, preset in PRESETS.items())
"""Epilog of a help text."""

_MODEL = (
    click.argument("spec", required=False, metavar="[PACKAGE.MODULE:FUNCTION]"),
    click.option(
        "--hf",
        metavar="FILE.json",
        help="config.json of a transformers model, with its model_type. The weights are random.",
    ),
    click.option("--preset", type=click.Choice(tuple(PRESETS)), metavar="NAME", help="Built-in model, listed below."),
    click.option(
        "--loss",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="Function from the model's output to a scalar loss.  [default: the output's .loss]",
    ),
    click.option(
        "--batch", type=click.IntRange(min=1), help="Batch size.  [default: 8, or the default of your FUNCTION]"
    ),
    click.option(
        "--seq",
        type=click.IntRange(min=2),
        help="Sequence length in tokens.  [default: 128, or the model's maximum if smaller]",
    ),
    click.option(
        "--dtype",
        type=click.Choice(("float32", "bfloat16", "float16")),
        help="Dtype of the parameters.  [default: float32]",
    ),
    click.option("--device", metavar="NAME", help="Device for the profiled step.  [default: the accelerator, or cpu]"),
    click.option(
        "--optimizer",
        type=click.Choice(tuple(OPTIMIZER_STATE)),
        default="none",
        show_default=True,
        help="Add the optimizer state to the peak: momentum adds the bytes of the parameters once, adam twice.",
    ),
)
_OUTPUT = (
    click.option("--json", callback=check_output_path, metavar="FILE|-", help="Write JSON; - prints only the JSON."),
    click.option("--html", callback=check_output_path, metavar="FILE", help="Write a self-contained HTML report."),
    click.option(
        "--png", callback=check_output_path, metavar="FILE", help='Write a plot (pip install "lowtide[plots]").'
    ),
)
_VERBOSITY = (
    click.option("--quiet", "-q", is_flag=True, help="Show no progress."),
    click.option("--verbose", "-v", count=True, help="Show the log; -vv shows debug messages."),
)


def model_options(command: F) -> F:
    """Add the fields of `ModelOptions`."""
    return _add(_MODEL, command)


def output_options(command: F) -> F:
    """Add the fields of `Outputs`."""
    return _add(_OUTPUT, command)


def verbosity_options(command: F) -> F:
    """Add `quiet` and `verbose`."""
    return _add(_VERBOSITY, command)


def deadline_option(seconds: float, help_text: str) -> Callable[[F], F]:
    """Return a decorator that adds `deadline`."""
    return click.option(
        "--deadline",
        type=click.FloatRange(min=0, min_open=True),
        default=seconds,
        show_default=True,
        metavar="SECONDS",
        help=help_text,
    )


def split_options(options: dict[str, Any]) -> tuple[ModelOptions, Outputs]:
    """Return the values of `model_options` and `output_options` as records."""
    files = {name: options.pop(name) for name in ("json", "html", "png")}
    return ModelOptions(**options), Outputs(**files)


def _add(options: tuple[Callable[[F], F], ...], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command
