"""A run as a page: tables, what lowtide is behind in and why, a picture for each model. Markdown; no torch."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from statistics import median

from .machine import machine_line
from .noise import FLOOR, LEAST_ROUNDS, SURE_WITHIN, spread
from .plots import frontier
from .records import ModelResult, Run
from .standing import Standing, at_equal_overhead, at_equal_peak, first_sentence, over_budget, peers, where_behind
from .targets import TARGETS, WITH_DISK, Target, outcome

MIB = 2**20
WHY = Path(__file__).parents[1] / "why.md"
CONTROL = "plain-again"
OTHER_PAGES = {
    "scaling.md": "how costs grow with depth, batch and length, and what planning and recording take",
    "overhead.md": "what recording costs, by op",
    "schedules.md": "schedules for chains beside their peers",
    "../large/RESULTS.md": "the targets once more, with steps that take 1 to 3 s",
    "../held.md": "whether budgets hold, on twelve architectures",
}


def write_page(run: Run, page: Path, pictures: Path, why: Path = WHY, drawn: Collection[str] = ()) -> None:
    """The page, and its pictures in a directory of their own, without those that are `drawn`."""
    page.parent.mkdir(parents=True, exist_ok=True)
    pictures.mkdir(parents=True, exist_ok=True)
    links = {}
    for name, model in run.models.items():
        picture = pictures / f"{name}.png"
        if name not in drawn:
            frontier(model, setting(run), picture)
        links[name] = Path(os.path.relpath(picture, page.parent)).as_posix()
    others = {name: Path(os.path.relpath(pictures / name, page.parent)).as_posix() for name in OTHER_PAGES
              if (pictures / name).exists()}  # fmt: skip
    page.write_text(markdown(run, links, read_why(why), others), encoding="utf-8")


def read_why(path: Path) -> dict[str, str]:
    """Hand-written reasons: under each heading `## model/variant` (with * for any) a paragraph."""
    if not path.exists():
        return {}
    parts = re.split(r"^## +(.+?) *$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {key: " ".join(text.split()) for key, text in zip(parts[1::2], parts[2::2], strict=True)}


def setting(run: Run) -> str:
    """Machine, versions, date and what was done, in a line."""
    rounds = [len(one.cpu_s) for model in run.models.values() for name, one in model.measured().items()
              if name != "plain"]  # fmt: skip
    taken = " to ".join(dict.fromkeys(str(edge(rounds)) for edge in (min, max))) if rounds else "no"
    return f"{machine_line(run.machine)}; {taken} rounds in turn"


def markdown(run: Run, links: dict[str, str], why: dict[str, str], others: dict[str, str]) -> str:
    """The whole page."""
    parts = [
        "# lowtide beside its peers",
        setting(run) + ".",
        f"Made by {_command(run)}; the machine's load was {run.machine['load']} at the start, the allocator was told "
        f"{_told(run.machine['allocator'])}. The same model and batch for every variant, all of them in turn in each "
        "round, each step between two plain ones. A time is the processor's (all threads), over plain's: over the mean "
        "of the plain steps just before and just after, and of all rounds the median; *min* compares the quickest step "
        "with the quickest of as "
        "many plain ones. A peak is that of all live tensor bytes in a step, by one meter for all. Two times differ if "
        f"they do by more than {SURE_WITHIN:g} standard errors, estimated from the rounds, and {100 * FLOOR:g} %; "
        f"otherwise, and with fewer than {LEAST_ROUNDS} rounds, it is undecided.",
        _control(run),
        _failed_models(run),
        "\n".join(f"- [{OTHER_PAGES[name]}]({link})" for name, link in others.items()),
        "## Targets",
        "What lowtide sets itself: measured overhead, and in brackets what is allowed. *Undecided*: the rounds differ "
        "too much to be sure. *No plan can*: the planner's lower bound, from the op times of its profile, is above "
        "what is allowed.",
        _target_matrix(run),
        _target_table(run),
        "## Overhead at equal peak",
        "The quickest of lowtide's plans whose measured peak is not above the peer's. Nothing is interpolated.",
        _equal_table(run, at_equal_peak),
        "## Peak at equal overhead",
        "The smallest of lowtide's plans that was measured no slower than the peer.",
        _equal_table(run, at_equal_overhead),
        "## Where lowtide is behind",
        _behind(run, why),
        "## Budgets: asked, predicted, measured",
        _budget_table(run),
        _resident(run),
        "## All variants",
    ]
    for name, model in run.models.items():
        parts += [f"### {model.title}", f"![{model.title}]({links[name]})", _plain_line(model), _variant_table(model)]
    parts += _set_up(run)
    return "\n\n".join(part for part in parts if part) + "\n"


def _control(run: Run) -> str:
    """How far the same code differs from itself, by both clocks."""
    there = {name: model for name, model in _sound(run).items() if CONTROL in model.measured()}
    if not there:
        return ""
    found = ", ".join(f"{name} × {model.ratio(CONTROL):.3f}" for name, model in there.items())
    both = []
    for clock in ("cpu_s", "wall_s"):
        spreads = [spread([math.log(ratio) for ratio in model.ratios(CONTROL, clock)]) for model in there.values()]
        both.append(f"{100 * median(spreads):.1f} %" if math.isfinite(median(spreads)) else "unknown")
    return (
        f"Plain steps once more, treated like any variant (`{CONTROL}`), came out as {found}. Their single rounds "
        f"differ by {both[0]} (standard deviation, the model in the middle) by the processor's time and {both[1]} by "
        "the clock's; verdicts use the processor's."
    )


def _set_up(run: Run) -> list[str]:
    """How each variant is used, in the words of the code."""
    how: dict[str, str] = run.settings.get("set_up", {})
    return (
        ["## How each is set up", "\n".join(f"- **{name}**: {' '.join(text.split())}" for name, text in how.items())]
        if how
        else []
    )


def _command(run: Run) -> str:
    if run.settings.get("catalogue") == "large":
        return "`python -m benchmarks run --large`"
    return "`python -m benchmarks run`, which is part of `make bench`"


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


def _target_matrix(run: Run) -> str:
    """One line a model."""

    def cell(model: ModelResult, target: Target) -> str:
        found = outcome(model, target)
        if found is None:
            return ""
        return f"{found.verdict.partition(';')[0]}: {100 * found.overhead:.1f} % ({100 * found.allowed:.1f} %)"

    rows = [[name, *(cell(model, target) for target in TARGETS)] for name, model in _sound(run).items()]
    rows = [row for row in rows if any(row[1:])]
    return table(("model", *(target.short for target in TARGETS)), rows) if rows else ""


def _target_table(run: Run) -> str:
    rows = []
    for name, model in _sound(run).items():
        for target in (*TARGETS, *WITH_DISK):
            found = outcome(model, target)
            if found is not None:
                shares = (found.overhead, found.allowed, found.predicted, found.least)
                cells = ["" if share is None else f"{100 * share:.1f} %" for share in shares]
                rows.append([name, target.words, *cells, found.verdict])
            elif target.ours in model.variants and (error := model.variants[target.ours].error) is not None:
                rows.append([name, target.words, "", "", "", "", first_sentence(error)])
    header = ("model", "target", "overhead", "allowed", "predicted", "least possible", "")
    return table(header, rows) if rows else "Nothing of this was measured in this run."


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
        f"very different times from round to round. Slower by the median of the rounds: {', '.join(against) or 'none'}."
    ]


def _budget_table(run: Run) -> str:
    rows = []
    for name, model in _sound(run).items():
        for variant, one in model.variants.items():
            if one.asked_bytes is None or one.error is not None:
                continue
            said = "" if one.predicted_bytes is None else _mib(one.predicted_bytes)
            own = "" if one.own_peak_bytes is None else _mib(one.own_peak_bytes)
            extra = _predicted_time(model, variant)
            within = "**no**" if over_budget(model, variant) else "yes"
            rows.append([name, variant, _mib(one.asked_bytes), said, own, _mib(one.peak_bytes or 0), within, *extra])
    header = ("model", "variant", "asked, MiB", "predicted", "lowtide's own", "measured", "within", "time predicted",
              "time bound", "time")  # fmt: skip
    return table(header, rows) if rows else "No budgets in this run."


def _predicted_time(model: ModelResult, variant: str) -> list[str]:
    """Time that was predicted and that is the least possible, over the profiled plain step; and as measured."""
    said = [model.said(variant, what) for what in ("predicted", "bound")]
    measured = _time(model, variant) if model.variants[variant].measured else ""
    return [*("" if extra is None else f"× {1 + extra:.3f}" for extra in said), measured]


def _resident(run: Run) -> str:
    told = run.settings.get("resident_allocator")
    if not told:
        return ""
    rows = [
        [name, variant, _mib(one.peak_bytes or 0), _mib(one.resident_step_bytes or 0), _mib(one.resident_bytes)]
        for name, model in _sound(run).items()
        for variant, one in model.variants.items()
        if one.resident_bytes is not None
    ]
    words = (
        f"A process of its own for each, with the allocator told {_told(told)}, so that what is freed goes back to the "
        "system. The peak of live tensors includes parameters, buffers and batch, the rise of a step does not."
    )
    header = (
        "model",
        "variant",
        "peak of live tensors, MiB",
        "rise of resident memory in a step",
        "and since before preparing",
    )
    return "\n\n".join(["## Resident memory", words, table(header, rows)]) if rows else ""


def _plain_line(model: ModelResult) -> str:
    if not model.plain.measured:
        return f"Plain fails: {model.plain.error}"
    return (
        f"Plain: {min(model.plain.cpu_s):.3f} s a step, peak {_mib(model.plain.peak_bytes or 0)} MiB, of which "
        f"{_mib(model.base_bytes)} are parameters, buffers and batch."
    )


def _variant_table(model: ModelResult) -> str:
    header = ["variant", "peak, MiB", "of plain's", "time", "min", "rounds", "loss and gradients", "buffers",
              "prepared in", "note"]  # fmt: skip
    rows = []
    for name, one in model.variants.items():
        if not one.measured or not model.plain.measured:
            rows.append([name, *[""] * (len(header) - 2), first_sentence(one.error or "not timed")])
            continue
        prepared = f"{one.preparation_s:.1f} s" if one.preparation_s and one.preparation_s > 0.05 else ""
        rows.append([
            name, _mib(one.peak_bytes or 0), _share(model, name), _time(model, name),
            f"× {model.ratio_of_minima(name):.3f}", str(len(one.cpu_s)), _same(one.exact), _same(one.buffers_equal),
            prepared, one.note,
        ])  # fmt: skip
    return table(header, rows)


def _same(answer: bool | None) -> str:
    return {True: "equal", False: "**differ**", None: ""}[answer]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"


def _share(model: ModelResult, name: str) -> str:
    return f"{100 * model.peak_share(name):.1f} %"


def _time(model: ModelResult, name: str) -> str:
    return f"× {model.ratio(name):.3f}"
