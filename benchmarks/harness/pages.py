"""A run as a page: tables, what lowtide is behind in and why, a picture for each model. Markdown; no torch."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from .noise import FLOOR, LEAST_ROUNDS, SURE
from .plots import frontier
from .records import ModelResult, Run, VariantResult
from .standing import Standing, at_equal_overhead, at_equal_peak, first_sentence, over_budget, peers, where_behind
from .targets import TARGETS, outcome

MIB = 2**20
WHY = Path(__file__).parents[1] / "why.md"


def write_page(run: Run, page: Path, pictures: Path, why: Path = WHY) -> None:
    """The page, and its pictures in a directory of their own."""
    page.parent.mkdir(parents=True, exist_ok=True)
    pictures.mkdir(parents=True, exist_ok=True)
    links = {}
    for name, model in run.models.items():
        picture = pictures / f"{name}.png"
        frontier(model, setting(run), picture)
        links[name] = Path(os.path.relpath(picture, page.parent)).as_posix()
    page.write_text(markdown(run, links, read_why(why)), encoding="utf-8")


def read_why(path: Path) -> dict[str, str]:
    """Hand-written reasons: under each heading `## model/variant` (with * for any) a paragraph."""
    if not path.exists():
        return {}
    parts = re.split(r"^## +(.+?) *$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {key: " ".join(text.split()) for key, text in zip(parts[1::2], parts[2::2], strict=True)}


def setting(run: Run) -> str:
    """Machine, versions, date and what was done, in a line."""
    machine, settings = run.machine, run.settings
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{machine['processor']}, {machine['threads']} thread, {versions}; {settings['rounds']} rounds in turn, "
        f"{machine['date'][:10]}"
    )


def markdown(run: Run, links: dict[str, str], why: dict[str, str]) -> str:
    """The whole page."""
    parts = [
        "# lowtide beside its peers",
        setting(run) + ".",
        f"Made by `python -m benchmarks run`; the machine's load was {run.machine['load']} at the start, the allocator "
        f"was told {_told(run.machine['allocator'])}. The same model and batch for every variant, all of them in turn "
        "in each round. A time is the processor's, over plain's; *min* compares the quickest rounds, *median* is the "
        "median of the ratios within each round. A peak is that of all live tensor bytes in a step, by one meter for "
        "all. Two times differ if their paired rounds do, by more than "
        f"{SURE:g} standard errors and {100 * FLOOR:g} %; otherwise, and with fewer than {LEAST_ROUNDS} rounds, it is "
        "undecided.",
        _failed_models(run),
        "## Overhead at equal peak",
        "The quickest of lowtide's plans whose measured peak is not above the peer's. Nothing is interpolated.",
        _equal_table(run, at_equal_peak),
        "## Peak at equal overhead",
        "The smallest of lowtide's plans that was measured no slower than the peer.",
        _equal_table(run, at_equal_overhead),
        "## Targets",
        "What lowtide sets itself. *Undecided*: the rounds differ too much to be sure, whatever the medians say.",
        _target_table(run),
        "## Where lowtide is behind",
        _behind(run, why),
        "## Budgets: asked, predicted, measured",
        _budget_table(run),
        "## All variants",
    ]
    for name, model in run.models.items():
        parts += [f"### {model.title}", f"![{model.title}]({links[name]})", _plain_line(model), _variant_table(model)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _told(allocator: dict[str, str]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in allocator.items()) or "nothing"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """In Markdown."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _failed_models(run: Run) -> str:
    broken = [f"{name}: {model.plain.error}" for name, model in run.models.items() if not model.plain.measured]
    return "Not measured: " + "; ".join(broken) + "." if broken else ""


def _sound(run: Run) -> dict[str, ModelResult]:
    return {name: model for name, model in run.models.items() if model.plain.measured}


def _equal_table(run: Run, stand: Callable[[ModelResult, str], Standing]) -> str:
    rows = []
    for name, model in _sound(run).items():
        for peer in peers(model):
            one = stand(model, peer)
            theirs = [_share(model, peer), _time(model, peer)]
            if one.ours is None or one.difference is None:
                rows.append([name, peer, *theirs, "none", "", "", "", one.verdict])
                continue
            more = f"{100 * (one.difference.ratio - 1):+.1f} %"
            rows.append(
                [name, peer, *theirs, one.ours, _share(model, one.ours), _time(model, one.ours), more, one.verdict]
            )
    header = ("model", "peer", "its peak", "its time", "lowtide", "peak", "time", "lowtide over peer", "lowtide is")
    return table(header, rows) if rows else "No peers in this run."


def _target_table(run: Run) -> str:
    rows = []
    for name, model in _sound(run).items():
        for target in TARGETS:
            found = outcome(model, target)
            if found is None:
                why = (
                    model.variants[target.ours].error if target.ours in model.variants else None
                ) or "not in this run"
                rows.append([name, target.words, "", "", first_sentence(why)])
                continue
            shares = [f"{100 * found.overhead:.1f} %", f"{100 * found.allowed:.1f} %"]
            rows.append([name, target.words, *shares, found.verdict])
    return table(("model", "target", "overhead", "allowed", ""), rows)


def _behind(run: Run, why: dict[str, str]) -> str:
    lines = []
    for name, model in _sound(run).items():
        for one in where_behind(name, model):
            key = f"{one.model}/{one.variant}"
            reasons = [text for pattern, text in why.items() if fnmatch.fnmatchcase(key, pattern)]
            lines.append(
                f"- **{one.model} / {one.variant}**: {one.sentence}" + "".join(f" *Why: {r}*" for r in reasons)
            )
    sure = "\n".join(lines) or "Nowhere for sure."
    return "\n\n".join([sure, *_undecided(run)])


def _undecided(run: Run) -> list[str]:
    """What the rounds leave open, and what of it speaks against lowtide."""
    found = [(name, at_equal_peak(model, peer)) for name, model in _sound(run).items() for peer in peers(model)]
    open_ones = [(name, one) for name, one in found if one.verdict == "undecided"]
    if not open_ones:
        return []
    against = [
        f"{name} / {one.peer} ({100 * (one.difference.ratio - 1):+.1f} %)"
        for name, one in open_ones
        if one.difference is not None and one.difference.ratio > 1
    ]
    return [
        f"Of {len(found)} comparisons at equal peak {len(open_ones)} are undecided: in this run the same code took "
        f"very different times from round to round. Slower by the mean of the rounds: {', '.join(against) or 'none'}."
    ]


def _budget_table(run: Run) -> str:
    rows = []
    for name, model in _sound(run).items():
        for variant, one in model.variants.items():
            if one.asked_bytes is None or one.error is not None:
                continue
            said = "" if one.predicted_bytes is None else _mib(one.predicted_bytes)
            own = "" if one.own_peak_bytes is None else _mib(one.own_peak_bytes)
            extra = _predicted_time(model, one)
            within = "**no**" if over_budget(model, variant) else "yes"
            rows.append([name, variant, _mib(one.asked_bytes), said, own, _mib(one.peak_bytes or 0), within, *extra])
    header = ("model", "variant", "asked, MiB", "predicted", "lowtide's own", "measured", "within", "time predicted",
              "time bound", "time")  # fmt: skip
    return table(header, rows) if rows else "No budgets in this run."


def _predicted_time(model: ModelResult, one: VariantResult) -> list[str]:
    """Seconds beyond a plain step that were predicted and are the least possible, over the plain step measured."""
    plain_s = min(model.plain.cpu_s)
    said = [one.predicted_extra_s, one.bound_extra_s]
    measured = f"× {min(one.cpu_s) / plain_s:.3f}" if one.cpu_s else ""
    return [*("" if extra is None else f"× {1 + extra / plain_s:.3f}" for extra in said), measured]


def _plain_line(model: ModelResult) -> str:
    if not model.plain.measured:
        return f"Plain fails: {model.plain.error}"
    return (
        f"Plain: {min(model.plain.cpu_s):.3f} s a step, peak {_mib(model.plain.peak_bytes or 0)} MiB, of which "
        f"{_mib(model.base_bytes)} are parameters, buffers and batch."
    )


def _variant_table(model: ModelResult) -> str:
    resident = any(one.resident_bytes is not None for one in model.variants.values())
    header = ["variant", "peak, MiB", "of plain's", "min", "median", "loss and gradients", "buffers", "prepared in"]
    rows = []
    for name, one in model.variants.items():
        if one.error is not None or not one.measured or not model.plain.measured:
            cells = [
                "",
                "",
                "",
                "",
                "",
                "",
                "",
                *(["", ""] if resident else []),
                first_sentence(one.error or "not timed"),
            ]
            rows.append([name, *cells])
            continue
        prepared = f"{one.preparation_s:.1f} s" if one.preparation_s and one.preparation_s > 0.05 else ""
        cells = [name, _mib(one.peak_bytes or 0), _share(model, name), _time(model, name),
                 f"× {model.median_ratio(name):.3f}", _same(one.exact), _same(one.buffers_equal), prepared]  # fmt: skip
        if resident:
            both = (one.resident_step_bytes, one.resident_bytes)
            cells += ["" if nbytes is None else _mib(nbytes) for nbytes in both]
        rows.append([*cells, one.note])
    return table(
        [*header, *(["step's rise of resident, MiB", "with what preparing left"] if resident else []), "note"], rows
    )


def _same(answer: bool | None) -> str:
    return {True: "equal", False: "**differ**", None: ""}[answer]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"


def _share(model: ModelResult, name: str) -> str:
    return f"{100 * model.peak_share(name):.1f} %"


def _time(model: ModelResult, name: str) -> str:
    return f"× {model.ratio_of_minima(name):.3f}"
