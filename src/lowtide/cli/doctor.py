"""`lowtide doctor`: check the installation and measure memory, disk and codecs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ._failures import EXIT_FAILURE, LowtideCommand
from ._options import Outputs, check_output_path, verbosity_options

if TYPE_CHECKING:
    from ._doctor_checks import Checkup


@click.command(cls=LowtideCommand)
@click.option(
    "--json", "path", callback=check_output_path, metavar="FILE|-", help="Write JSON; - prints only the JSON."
)
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, writable=True),
    metavar="DIR",
    help="Directory in which the disk is measured.  [default: the system's temporary directory]",
)
@verbosity_options
@click.pass_context
def doctor(ctx: click.Context, path: str | None, directory: str | None, quiet: bool, verbose: int) -> None:
    """Check the installation, and measure the speed of memory, disk and codecs.

    Lists packages and devices, and checks that lowtide works with the installed torch. Takes a few seconds and
    leaves no files. Each speed is a single measurement. The exit code is 1 if a check fails.

    \b
    Examples:
      lowtide doctor
      lowtide doctor --directory /scratch
      lowtide doctor --json - | python -m json.tool
    """
    from ._doctor_checks import run_checks
    from ._output import show, write_json
    from ._progress import report_progress

    with report_progress(quiet=quiet, verbosity=verbose) as progress:
        checkup = run_checks(directory, progress.start_phase)
    outputs = Outputs(path, None, None)
    show(outputs, *_tables(checkup))
    write_json(outputs, json.dumps({"format": "lowtide checkup", "well": checkup.well, **asdict(checkup)}))
    if not checkup.well:
        ctx.exit(EXIT_FAILURE)


def _tables(checkup: Checkup) -> list[Any]:
    from rich.text import Text

    from .._units import format_bytes

    def rate(bytes_per_s: float | None) -> str:
        return "–" if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"

    packages = _table("packages", "package", "version", "")
    for package in checkup.packages:
        requirement = f"lowtide[{package.extra}]" if package.extra else "lowtide"
        note = f"required by {requirement}" if package.version else f'pip install "{requirement}"'
        packages.add_row(package.name, package.version or "not installed", Text(note))
    devices = _table("devices", "device", "memory", "free", "")
    for device in checkup.devices:
        sizes = ["–" if n is None else format_bytes(n) for n in (device.memory_bytes, device.free_bytes)]
        devices.add_row(device.name, *sizes, device.words)
    tiers = _table("memory and stores", "tier", "write", "read", "")
    for tier in checkup.tiers:
        tiers.add_row(tier.name, rate(tier.out_bytes_per_s), rate(tier.in_bytes_per_s), tier.trouble or tier.where)
    codecs = _table("codecs", "codec", "ratio", "compress", "decompress", "")
    for codec in checkup.codecs:
        note = f"{'lossless' if codec.exact else 'lossy'}, measured on {codec.sample}"
        if codec.ratio is None:
            note = f'{note}: not installed, pip install "lowtide[codecs]"'
        ratio = "–" if codec.ratio is None else f"× {codec.ratio:.3g}"
        speeds = rate(codec.encode_bytes_per_s), rate(codec.decode_bytes_per_s)
        codecs.add_row(codec.name, ratio, *speeds, Text(note))
    checks = _table("checks", "check", "works", "")
    for check in checkup.checks:
        checks.add_row(check.name, "yes" if check.works else "NO", Text(check.words))
    heading = f"lowtide {checkup.lowtide}, Python {checkup.python}, {checkup.system}"
    verdict = "all checks passed" if checkup.well else "some checks failed: see the last table"
    return [heading, packages, devices, tiers, codecs, checks, verdict]


def _table(title: str, *headings: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, heading in enumerate(headings):
        is_number = 0 < index < len(headings) - 1
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    return table
