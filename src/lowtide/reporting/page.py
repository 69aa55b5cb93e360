"""A report as a self-contained HTML page, or as a fragment for notebooks.

The page is complete without scripts. A small script adds a cursor that shows the running op and the live bytes.
The page follows the light or dark setting of the browser.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from .._units import format_time
from .bands import OUTSIDE, stack_by_category, stack_by_module
from .frontier import FRONTIER_TITLE
from .frontier_chart import frontier_chart
from .markup import Markup, join, tag
from .module_totals import ModuleTotals
from .palette import COLOURS, colours_by_category, colours_by_module
from .report import Report
from .stack_chart import stack_chart
from .summary import (
    BY_CATEGORY_CAPTION,
    BY_CATEGORY_TITLE,
    BY_MODULE_CAPTION,
    BY_MODULE_TITLE,
    FRONTIER_CAPTION,
    headlines,
    peak_sentence,
)
from .svg import swatch
from .terminal import extra_decisions, module_cells, module_columns, shorten

_MAX_ROWS = 40
_COLUMNS = 320


def report_page(report: Report) -> str:
    """Return the whole page."""
    head = join(
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("meta", {"name": "color-scheme", "content": "light dark"}),
        tag("title", None, "lowtide report"),
        tag("style", None, Markup("body { margin: 0; } .lowtide-report { min-height: 100vh; }")),
    )
    page = tag("html", {"lang": "en"}, tag("head", None, head), tag("body", None, report_fragment(report)))
    return f"<!doctype html>\n{page}\n"


def report_fragment(report: Report) -> Markup:
    """Return the report as one element that contains its style and script."""
    content = tag("div", {"class": "lt-content"}, *_sections(report))
    return tag(
        "div",
        {"class": "lowtide-report"},
        tag("style", None, Markup(_style())),
        content,
        tag("script", None, Markup(_file("page.js"))),
    )


def _sections(report: Report) -> list[Markup]:
    categories, modules = stack_by_category(report.timeline, _COLUMNS), stack_by_module(report.timeline, _COLUMNS)
    by_category = stack_chart(report, categories, colours_by_category(categories), BY_CATEGORY_TITLE)
    by_module = stack_chart(report, modules, colours_by_module(modules), BY_MODULE_TITLE)
    sections = [
        _header(report),
        _section(BY_CATEGORY_TITLE, by_category, BY_CATEGORY_CAPTION),
        _section(BY_MODULE_TITLE, by_module, BY_MODULE_CAPTION),
    ]
    if report.comparisons:
        sections.append(_section("Predicted and measured", _comparisons(report)))
    if report.frontier is not None:
        sections.append(_section(FRONTIER_TITLE, frontier_chart(report, report.frontier), FRONTIER_CAPTION))
    if report.modules:
        sections.append(_section("Values by module", _modules(report.modules)))
    if report.plan.pinned:
        sections.append(_section("Pinned ops: kept because a replay is not allowed", _pinned(report)))
    return sections


def _section(title: str, body: Markup, caption: str = "") -> Markup:
    paragraph = tag("p", {"class": "lt-caption"}, caption) if caption else Markup("")
    return tag("section", None, tag("h2", None, title), body, paragraph)


def _header(report: Report) -> Markup:
    trace, plan = report.trace, report.plan
    tiles = [
        tag(
            "div",
            {"class": "lt-tile"},
            tag("span", None, headline.label),
            tag("b", None, headline.value),
            tag("span", None, headline.detail),
        )
        for headline in headlines(report)
    ]
    about = (
        f"One training step on {trace.device}: {len(trace.ops):,} ops in forward, {len(trace.unpacks):,} unpacks in "
        f"backward. Plan: {plan.solver}, found in {format_time(plan.solve_s)}."
    )
    note = tag("p", {"class": "lt-about"}, trace.note) if trace.note else Markup("")
    return tag(
        "header",
        None,
        tag("h1", None, "The step fits its budget" if _fits(report) else "The step exceeds its budget"),
        tag("p", {"class": "lt-about"}, about),
        note,
        tag("div", {"class": "lt-tiles"}, *tiles),
        tag("p", None, peak_sentence(report)),
    )


def _fits(report: Report) -> bool:
    return max(report.predicted_peak_bytes, report.measured_peak_bytes or 0) <= report.plan.budget_bytes


def _comparisons(report: Report) -> Markup:
    rows = [(row.name, row.predicted, row.measured, row.percent) for row in report.comparisons]
    return _table(("", "predicted", "measured", "difference"), rows)


def _modules(modules: tuple[ModuleTotals, ...]) -> Markup:
    colours = {c.name: c for c in COLOURS}
    extra = extra_decisions(modules)
    meanings = {
        "kept": "kept: held from forward into backward",
        "recomputed": "recomputed: saved in plain PyTorch, recomputed under the plan",
        "offloaded": "offloaded: in the store between forward and backward",
        "compressed": "compressed: between forward and backward",
    }
    max_bytes = max(1, *(row.saved_bytes for row in modules))
    rows = [
        (row.name or OUTSIDE, *module_cells(row, extra), _bar(row, max_bytes)) for row in shorten(modules, _MAX_ROWS)
    ]
    legend = (
        tag("li", None, swatch(colours[name]), tag("span", None, meanings[name]))
        for name in ("kept", "recomputed", *extra)
    )
    return join(_table(("modules", *module_columns(extra), ""), rows), tag("ul", {"class": "lt-legend"}, *legend))


def _bar(row: ModuleTotals, max_bytes: int) -> Markup:
    by_decision = {
        "kept": row.kept_bytes,
        "offloaded": row.offloaded_bytes,
        "compressed": row.compressed_bytes,
        "recomputed": row.recomputed_bytes,
    }
    parts = [
        tag("i", {"style": f"width:{100 * nbytes / max_bytes:.1f}%;background:var(--{name})"})
        for name, nbytes in by_decision.items()
        if nbytes
    ]
    return tag("div", {"class": "lt-bar"}, *parts)


def _pinned(report: Report) -> Markup:
    rows = [(pin.name, f"{pin.count:,}", pin.module or OUTSIDE, pin.why) for pin in report.plan.pinned]
    return _table(("op", "ops", "module", "reason"), rows, names=(0, 2, 3))


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], names: tuple[int, ...] = (0,)) -> Markup:
    """Return a table. The columns in `names` are aligned left, all others right."""

    def line(cell_tag: str, cells: tuple[str, ...]) -> Markup:
        row = [tag(cell_tag, {"class": "lt-name"} if k in names else None, cell) for k, cell in enumerate(cells)]
        return tag("tr", None, *row)

    body = tag("tbody", None, *(line("td", row) for row in rows))
    return tag("div", {"class": "lt-wide"}, tag("table", None, tag("thead", None, line("th", header)), body))


def _style() -> str:
    light = "".join(f"--{colour.name}:{colour.light};" for colour in COLOURS)
    dark = "".join(f"--{colour.name}:{colour.dark};" for colour in COLOURS)
    return (
        f"{_file('page.css')}.lowtide-report{{{light}}}@media (prefers-color-scheme:dark){{.lowtide-report{{{dark}}}}}"
    )


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
