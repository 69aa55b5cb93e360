"""A report as one HTML page, or as a fragment of one for notebooks: nothing is loaded from anywhere.

Everything is there without scripts; a little script adds a cursor that tells what runs and who holds memory.
Light or dark follows the reader's setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from .._units import format_time
from .accounts import ModuleAccount
from .bands import OUTSIDE, stack_by_kind, stack_by_module
from .charts import stack_chart, swatch
from .frontier_chart import frontier_chart
from .markup import Markup, join, tag
from .palette import COLOURS, colours_by_kind, colours_by_module
from .report import Report
from .summary import FRONTIER_CAPTION, KINDS_CAPTION, MODULES_CAPTION, headlines, peak_sentence
from .terminal import elsewhere_in, module_cells, module_columns, shorten

_MOST_ROWS = 40
_COLUMNS = 320


def report_page(report: Report) -> str:
    """The whole page."""
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
    """The same as one element, with its style and script inside it."""
    inside = tag("div", {"class": "lt-inside"}, *_sections(report))
    return tag(
        "div",
        {"class": "lowtide-report"},
        tag("style", None, Markup(_style())),
        inside,
        tag("script", None, Markup(_file("page.js"))),
    )


def _sections(report: Report) -> list[Markup]:
    kinds, modules = stack_by_kind(report.timeline, _COLUMNS), stack_by_module(report.timeline, _COLUMNS)
    found = [
        _header(report),
        _section(
            "Memory over the step, by kind",
            stack_chart(report, kinds, colours_by_kind(kinds), "Memory over the step, by kind"),
            KINDS_CAPTION,
        ),
        _section(
            "Memory over the step, by module",
            stack_chart(report, modules, colours_by_module(modules), "Memory over the step, by module"),
            MODULES_CAPTION,
        ),
    ]
    if report.comparisons:
        found.append(_section("Predicted and measured", _comparisons(report)))
    if report.frontier is not None:
        found.append(_section("What less memory costs", frontier_chart(report, report.frontier), FRONTIER_CAPTION))
    if report.modules:
        found.append(_section("Values by module", _modules(report.modules)))
    if report.plan.pinned:
        found.append(_section("Pinned: kept, because a replay is not allowed", _pinned(report)))
    return found


def _section(title: str, body: Markup, caption: str = "") -> Markup:
    note = tag("p", {"class": "lt-caption"}, caption) if caption else Markup("")
    return tag("section", None, tag("h2", None, title), body, note)


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
        f"One training step on {trace.device}: {len(trace.ops):,} ops of forward, {len(trace.unpacks):,} asks of "
        f"backward. The plan was found by {plan.solver} in {format_time(plan.solve_s)}."
    )
    note = tag("p", {"class": "lt-about"}, trace.note) if trace.note else Markup("")
    return tag(
        "header",
        None,
        tag("h1", None, "A step within its budget" if _fits(report) else "A step above its budget"),
        tag("p", {"class": "lt-about"}, about),
        note,
        tag("div", {"class": "lt-tiles"}, *tiles),
        tag("p", None, peak_sentence(report)),
    )


def _fits(report: Report) -> bool:
    return max(report.predicted_peak_bytes, report.measured_peak_bytes or 0) <= report.plan.budget_bytes


def _comparisons(report: Report) -> Markup:
    rows = [(one.name, one.predicted, one.measured, one.percent) for one in report.comparisons]
    return _table(("", "predicted", "measured", "difference"), rows)


def _modules(modules: tuple[ModuleAccount, ...]) -> Markup:
    colours = {c.name: c for c in COLOURS}
    shown = {"kept": "held from forward into backward", "recomputed": "saved by plain PyTorch, made again here"}
    elsewhere = elsewhere_in(modules)
    meaning_of = {
        "offloaded": "in the store between forward and backward",
        "compressed": "held packed between forward and backward",
    }
    shown |= {way: meaning_of[way] for way in elsewhere}
    most = max(1, *(row.saved_bytes for row in modules))
    rows = [
        (row.name or OUTSIDE, *module_cells(row, elsewhere), _bar(row, most)) for row in shorten(modules, _MOST_ROWS)
    ]
    meanings = (tag("li", None, swatch(colours[name]), tag("span", None, meaning)) for name, meaning in shown.items())
    return join(_table(("modules", *module_columns(elsewhere), ""), rows), tag("ul", {"class": "lt-legend"}, *meanings))


def _bar(row: ModuleAccount, most: int) -> Markup:
    by_kind = {
        "kept": row.kept_bytes,
        "offloaded": row.offloaded_bytes,
        "compressed": row.compressed_bytes,
        "recomputed": row.recomputed_bytes,
    }
    parts = [
        tag("i", {"style": f"width:{100 * nbytes / most:.1f}%;background:var(--{name})"})
        for name, nbytes in by_kind.items()
        if nbytes
    ]
    return tag("div", {"class": "lt-bar"}, *parts)


def _pinned(report: Report) -> Markup:
    rows = [(pin.name, f"{pin.count:,}", pin.module or OUTSIDE, pin.why) for pin in report.plan.pinned]
    return _table(("op", "ops", "module", "why"), rows, names=(0, 2, 3))


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], names: tuple[int, ...] = (0,)) -> Markup:
    """Numbers to the right, the columns of `names` to the left."""

    def line(kind: str, cells: tuple[str, ...]) -> Markup:
        made = [tag(kind, {"class": "lt-name"} if k in names else None, cell) for k, cell in enumerate(cells)]
        return tag("tr", None, *made)

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
