"""A report as tables in a terminal."""

from __future__ import annotations

from dataclasses import replace

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .._units import format_bytes, format_time
from .bands import OUTSIDE
from .frontier import FRONTIER_COLUMNS, FRONTIER_TITLE, Frontier
from .module_totals import ModuleTotals
from .report import Report
from .summary import headlines, peak_sentence
from .timeline import CATEGORIES

_MAX_ROWS = 16


def report_tables(report: Report) -> RenderableType:
    """Return the tables of the report."""
    parts: list[RenderableType] = [_summary(report), Text(peak_sentence(report), style="dim")]
    if report.timeline.intervals:
        parts.append(_categories(report))
    if report.modules:
        parts.append(_modules(report.modules))
    if report.plan.pinned:
        parts.append(_pinned(report))
    if report.frontier is not None:
        parts.append(_frontier(report.frontier))
    return Group(*parts)


def _summary(report: Report) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for headline in headlines(report):
        table.add_row(headline.label, headline.value, headline.detail)
    for comparison in report.comparisons:
        detail = f"measured; {comparison.predicted} predicted, difference {comparison.percent}"
        table.add_row(comparison.name, comparison.measured, detail)
    return table


def _categories(report: Report) -> Table:
    timeline = report.timeline
    table = _table("Live bytes at the peak")
    table.add_column("category")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for name, nbytes in zip(CATEGORIES, timeline.category_bytes[timeline.peak].tolist(), strict=True):
        if nbytes:
            share = 100 * nbytes / report.predicted_peak_bytes
            table.add_row(name, format_bytes(nbytes), f"{share:.0f} %")
    return table


def _modules(modules: tuple[ModuleTotals, ...]) -> Table:
    table = _table("Values by module")
    table.add_column("modules", overflow="fold")
    extra = extra_decisions(modules)
    for name in module_columns(extra):
        table.add_column(name, justify="right", no_wrap=True)
    for row in shorten(modules, _MAX_ROWS):
        table.add_row(Text(row.name or OUTSIDE), *module_cells(row, extra))
    return table


def _pinned(report: Report) -> Table:
    table = _table("Pinned ops: kept because a replay is not allowed")
    table.add_column("ops", justify="right")
    for name in ("op", "module", "reason"):
        table.add_column(name, overflow="fold")
    for pin in report.plan.pinned:
        table.add_row(f"{pin.count:,}", Text(pin.name), Text(pin.module), Text(pin.why))
    return table


def _frontier(frontier: Frontier) -> Table:
    table = _table(FRONTIER_TITLE)
    for name in FRONTIER_COLUMNS:
        table.add_column(name, justify="right")
    table.add_column("plan or scheme")
    for row in frontier.rows():
        table.add_row(*row[:4], Text(row[4]))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def extra_decisions(modules: tuple[ModuleTotals, ...]) -> tuple[str, ...]:
    """Return which of "offloaded" and "compressed" occur. Tables omit columns without values."""
    used = {
        "offloaded": any(row.offloaded_bytes for row in modules),
        "compressed": any(row.compressed_bytes for row in modules),
    }
    return tuple(decision for decision, is_used in used.items() if is_used)


def module_columns(extra: tuple[str, ...]) -> tuple[str, ...]:
    """Return the column titles for `module_cells`."""
    return (
        "ops",
        "kept",
        "bytes",
        *(name for decision in extra for name in (decision, "bytes")),
        "recomputed",
        "bytes",
        "replays",
        "replay time",
    )


def module_cells(row: ModuleTotals, extra: tuple[str, ...]) -> tuple[str, ...]:
    """Return the totals of one module pattern as text, without its name."""
    numbers = {
        "offloaded": (f"{row.values_offloaded:,}", format_bytes(row.offloaded_bytes)),
        "compressed": (f"{row.values_compressed:,}", format_bytes(row.compressed_bytes)),
    }
    return (
        f"{row.ops:,}",
        f"{row.values_kept:,}",
        format_bytes(row.kept_bytes),
        *(cell for decision in extra for cell in numbers[decision]),
        f"{row.values_recomputed:,}",
        format_bytes(row.recomputed_bytes),
        f"{row.replays:,}",
        format_time(row.recompute_s),
    )


def shorten(modules: tuple[ModuleTotals, ...], max_rows: int) -> tuple[ModuleTotals, ...]:
    """Return at most `max_rows` rows; the last one sums up the rest."""
    if len(modules) <= max_rows:
        return modules
    rest = modules[max_rows - 1]
    for row in modules[max_rows:]:
        rest = rest + row
    count = len(modules) - max_rows + 1
    return (*modules[: max_rows - 1], replace(rest, name=f"{count} other patterns"))
