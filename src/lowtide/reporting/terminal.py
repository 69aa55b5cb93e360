"""A report as tables in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .._units import format_bytes, format_time
from .accounts import ModuleAccount
from .bands import OUTSIDE
from .frontier import Frontier
from .report import Report
from .summary import headlines, peak_sentence
from .timeline import KINDS

_MOST_ROWS = 16


def report_tables(report: Report) -> RenderableType:
    """Everything but the pictures."""
    parts: list[RenderableType] = [_summary(report), Text(peak_sentence(report), style="dim")]
    if report.timeline.moments:
        parts.append(_kinds(report))
    if report.modules:
        parts.append(_modules(report.modules))
    if report.plan.pinned:
        parts.append(_pinned(report))
    if report.frontier is not None:
        parts.append(_frontier(report, report.frontier))
    return Group(*parts)


def _summary(report: Report) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for headline in headlines(report):
        table.add_row(headline.label, headline.value, headline.detail)
    for one in report.comparisons:
        detail = f"measured; {one.predicted} predicted, {one.percent}"
        table.add_row(one.name, one.measured, detail)
    return table


def _kinds(report: Report) -> Table:
    timeline = report.timeline
    table = _table("bytes at the peak")
    table.add_column("kind")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for name, nbytes in zip(KINDS, timeline.kind_bytes[timeline.peak].tolist(), strict=True):
        if nbytes:
            share = 100 * nbytes / report.predicted_peak_bytes
            table.add_row(name, format_bytes(nbytes), f"{share:.0f} %")
    return table


def _modules(modules: tuple[ModuleAccount, ...]) -> Table:
    table = _table("values by module")
    table.add_column("modules", overflow="fold")
    elsewhere = elsewhere_in(modules)
    for name in module_columns(elsewhere):
        table.add_column(name, justify="right", no_wrap=True)
    for row in shorten(modules, _MOST_ROWS):
        table.add_row(Text(row.name or OUTSIDE), *module_cells(row, elsewhere))
    return table


def _pinned(report: Report) -> Table:
    table = _table("pinned: kept, because a replay is not allowed")
    table.add_column("ops", justify="right")
    for name in ("op", "module", "why"):
        table.add_column(name, overflow="fold")
    for pin in report.plan.pinned:
        table.add_row(f"{pin.count:,}", Text(pin.name), Text(pin.module), Text(pin.why))
    return table


def _frontier(report: Report, frontier: Frontier) -> Table:
    table = _table("frontier")
    for name in ("peak", "of plain", "time", "bound"):
        table.add_column(name, justify="right")
    table.add_column("plan or scheme")
    for row in frontier.rows():
        table.add_row(*row[:4], Text(row[4]))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def elsewhere_in(modules: tuple[ModuleAccount, ...]) -> tuple[str, ...]:
    """Where values wait other than whole in memory, if any do: where nothing is offloaded nothing is said of it."""
    used = {
        "offloaded": any(row.offloaded_bytes for row in modules),
        "compressed": any(row.compressed_bytes for row in modules),
    }
    return tuple(way for way, is_used in used.items() if is_used)


def module_columns(elsewhere: tuple[str, ...]) -> tuple[str, ...]:
    """What the numbers of an account are."""
    return (
        "ops",
        "kept",
        "bytes",
        *(name for way in elsewhere for name in (way, "bytes")),
        "recomputed",
        "bytes",
        "replays",
        "time",
    )


def module_cells(row: ModuleAccount, elsewhere: tuple[str, ...]) -> tuple[str, ...]:
    """The numbers of one account as text, without its name."""
    numbers = {
        "offloaded": (f"{row.values_offloaded:,}", format_bytes(row.offloaded_bytes)),
        "compressed": (f"{row.values_compressed:,}", format_bytes(row.compressed_bytes)),
    }
    return (
        f"{row.ops:,}",
        f"{row.values_kept:,}",
        format_bytes(row.kept_bytes),
        *(cell for way in elsewhere for cell in numbers[way]),
        f"{row.values_recomputed:,}",
        format_bytes(row.recomputed_bytes),
        f"{row.replays:,}",
        format_time(row.recompute_s),
    )


def shorten(modules: tuple[ModuleAccount, ...], most: int) -> tuple[ModuleAccount, ...]:
    """The first accounts, and one for all that would be too many."""
    if len(modules) <= most:
        return modules
    rest = modules[most - 1]
    for row in modules[most:]:
        rest = rest + row
    count = len(modules) - most + 1
    return (*modules[: most - 1], ModuleAccount(**{**vars(rest), "name": f"{count} other kinds"}))
