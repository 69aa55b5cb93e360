"""`lowtide doctor`: what is installed, how fast this machine is, what works here."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ._failures import FAILED, PlainCommand
from ._options import Outputs, new_file, talk_options

if TYPE_CHECKING:
    from ._doctor_checks import Checkup


@click.command(cls=PlainCommand)
@click.option("--json", "path", callback=new_file, metavar="FILE|-", help="Write JSON; - is stdout, alone.")
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, writable=True),
    metavar="DIR",
    help="Measure the disk there.  [default: the system's directory for temporary files]",
)
@talk_options
@click.pass_context
def doctor(ctx: click.Context, path: str | None, directory: str | None, quiet: bool, verbose: int) -> None:
    """Say what is installed, how fast memory, disk and codecs are here, and whether the engine works.

    Takes some seconds and leaves no file behind. Speeds are single measurements on a machine in use. Exits with 1
    if something that has to work does not.

    \b
    Examples:
      lowtide doctor
      lowtide doctor --directory /scratch
      lowtide doctor --json - | python -m json.tool
    """
    from ._doctor_checks import check_up
    from ._output import show, write_json
    from ._progress import telling

    with telling(quiet=quiet, verbosity=verbose) as teller:
        found = check_up(directory, teller.phase)
    outputs = Outputs(path, None, None)
    show(outputs, *_tables(found))
    write_json(outputs, json.dumps({"format": "lowtide checkup", "well": found.well, **asdict(found)}))
    if not found.well:
        ctx.exit(FAILED)


def _tables(found: Checkup) -> list[Any]:
    from rich.text import Text

    from .._units import format_bytes

    def rate(bytes_per_s: float | None) -> str:
        return "–" if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"

    packages = _table("packages", "package", "version", "")
    for package in found.packages:
        part = f"lowtide[{package.extra}]" if package.extra else "lowtide"
        words = f"of {part}" if package.version else f'pip install "{part}"'
        packages.add_row(package.name, package.version or "not installed", Text(words))
    devices = _table("devices", "device", "memory", "free", "")
    for device in found.devices:
        sizes = ["–" if n is None else format_bytes(n) for n in (device.memory_bytes, device.free_bytes)]
        devices.add_row(device.name, *sizes, device.words)
    tiers = _table("where values can wait", "tier", "out", "back", "")
    for tier in found.tiers:
        tiers.add_row(tier.name, rate(tier.out_bytes_per_s), rate(tier.in_bytes_per_s), tier.trouble or tier.where)
    codecs = _table("codecs", "codec", "smaller", "encode", "decode", "")
    for codec in found.codecs:
        words = f"{'exact' if codec.exact else 'lossy'}, on {codec.sample}"
        if codec.ratio is None:
            words = f'{words}: not there, pip install "lowtide[codecs]"'
        smaller = "–" if codec.ratio is None else f"× {codec.ratio:.3g}"
        speeds = rate(codec.encode_bytes_per_s), rate(codec.decode_bytes_per_s)
        codecs.add_row(codec.name, smaller, *speeds, Text(words))
    checks = _table("does it work?", "", "", "")
    for check in found.checks:
        checks.add_row(check.name, "yes" if check.works else "NO", Text(check.words))
    head = f"lowtide {found.lowtide}, Python {found.python}, {found.system}"
    verdict = "all is well" if found.well else "something does not work: see the last table"
    return [head, packages, devices, tiers, codecs, checks, verdict]


def _table(title: str, *headings: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, heading in enumerate(headings):
        number = 0 < place < len(headings) - 1
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    return table
