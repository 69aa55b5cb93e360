"""Write docs/reference/api.md, the list of all public names, from the code: `python docs/make_api.py`.

Signatures and descriptions come from the source; a test compares the page with the source. `GROUPS` gives the sections
of the page and the pages that explain them. A public name in no group is an error.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, get_args

PAGE = Path(__file__).parent / "reference" / "api.md"
WIDTH = 110

# (module, heading, pages that explain it, names); names of None: all of `__all__` that earlier groups do not have
GROUPS: list[tuple[str, str, str, list[str] | None]] = [
    (
        "lowtide",
        "Models",
        "../how-to/fit.md",
        ["fit", "unfit", "report", "Report", "plan", "Plan", "longest", "LongestSize", "frontier"],
    ),
    ("lowtide", "Scopes", "../how-to/budget.md ../how-to/policies.md", ["budget", "saving", "allow_replay"]),
    ("lowtide", "Functions", "../how-to/from-torch-checkpoint.md", ["checkpoint", "checkpoint_sequential"]),
    (
        "lowtide",
        "Policies",
        "../how-to/policies.md",
        ["KeepAll", "KeepNone", "EveryN", "Selective", "Segments", "SaveOps", "Policy", "OpInfo", "Decision"],
    ),
    (
        "lowtide",
        "Errors",
        "",
        [
            "LowtideError",
            "ArgumentError",
            "BudgetError",
            "StaleSourceError",
            "ReplayMismatchError",
            "ScheduleError",
            "DiskFullError",
            "StoreError",
            "DamagedValueError",
            "MissingCheckpointError",
            "MissingPackageError",
            "LowtideWarning",
        ],
    ),
    ("lowtide.reporting.fit_report", "Result of `report(model)`", "../how-to/fit.md", ["FitReport"]),
    (
        "lowtide.records.scope_report",
        "Result of `report()`",
        "../explanation/how-it-works.md",
        ["ScopeReport", "Pinned"],
    ),
    ("lowtide.records.budget_report", "`report().budget`", "../how-to/budget.md", ["BudgetReport"]),
    ("lowtide.reporting.longest_size", "`LongestSize.predictions`", "../how-to/fit.md", ["SizePrediction"]),
    ("lowtide.reporting.frontier", "Result of `frontier`", "../how-to/fit.md", ["Frontier", "Point"]),
    ("lowtide.stores", "Stores", "../how-to/budget.md ../how-to/choosing.md", None),
    ("lowtide.codecs", "Codecs", "../how-to/budget.md ../how-to/choosing.md", None),
    ("lowtide.chain", "Chains of step functions", "chains.md", None),
    ("lowtide.chain.schedules", "Schedules", "chains.md", None),
]


def page() -> str:
    """Return the text of docs/reference/api.md."""
    import lowtide

    shown = {name for module, _, _, names in GROUPS if module == "lowtide" for name in names or ()}
    missing = set(lowtide.__all__) - shown - {"__version__", "chain"}
    if missing:
        raise SystemExit(f"public names that are in no group of docs/make_api.py: {', '.join(sorted(missing))}")
    lines = [
        "# All public names",
        "",
        "Generated from the source by `python docs/make_api.py`; do not edit. `lowtide.__version__` is the version.",
        "",
    ]
    seen: set[int] = set()
    for module_name, heading, pages, names in GROUPS:
        lines += _group(importlib.import_module(module_name), heading, pages.split(), names, seen)
    return "\n".join(lines)


def _group(
    module: ModuleType, heading: str, pages: list[str], names: list[str] | None, seen: set[int]
) -> Iterator[str]:
    links = " and ".join(f"[{_title(name)}]({name})" for name in pages)
    yield from (f"## {heading}", "", f"In `{module.__name__}`" + (f"; explained in {links}." if links else "."), "")
    for name in names if names is not None else sorted(module.__all__):
        value = getattr(module, name)
        if isinstance(value, ModuleType) or id(value) in seen:
            continue
        seen.add(id(value))
        yield from (f"### `{module.__name__}.{name}`", "")
        if callable(value):
            yield from ("```", *_lines(name, value), "```", "")
        yield from (_sentence(value), "")
        if isinstance(value, type):
            yield from _members(value)


def _title(name: str) -> str:
    return (PAGE.parent / name).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def _sentence(value: Any) -> str:
    """Return the first paragraph of the docstring; for a union or a dict, its members."""
    if isinstance(value, UnionType):
        return f"One of {', '.join(f'`{one.__name__}`' for one in get_args(value))}."
    if isinstance(value, dict):
        return f"A dict with the keys {', '.join(f'`{key}`' for key in value)}."
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def _lines(name: str, value: Any) -> list[str]:
    """Return the signature on one line, or with one line per parameter."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return [f"{name}.{member}" for member in value.__members__]
    if isinstance(value, type) and issubclass(value, BaseException) and "__init__" not in vars(value):
        return [f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"]
    given, result = _signature(value)
    line = f"{name}({', '.join(given)}){result}"
    return [line] if len(line) <= WIDTH else [f"{name}(", *(f"    {one}," for one in given), f"){result}"]


def _signature(value: Any) -> tuple[list[str], str]:
    signature = inspect.signature(value)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    kinds = [p.kind for p in parameters]
    given = [_parameter(p) for p in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        given.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    return given, "" if isinstance(value, type) else f" -> {_annotation(signature.return_annotation)}"


def _parameter(parameter: inspect.Parameter) -> str:
    kind = parameter.kind
    stars = "*" if kind is parameter.VAR_POSITIONAL else "**" if kind is parameter.VAR_KEYWORD else ""
    text = stars + parameter.name
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        default = repr(parameter.default)
        text += " = ..." if default.startswith("<") else f" = {default}"  # an object without a literal
    return text


def _annotation(annotation: Any) -> str:
    text = getattr(annotation, "__forward_arg__", annotation)
    return str(text if isinstance(text, str) else getattr(text, "__name__", text))


def _members(cls: type) -> list[str]:
    """Return one line for each documented field, method and property, and one for the base classes."""
    lines = [f"- `{name}`: {text}" for name, text in _described_fields(cls)]
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else inspect.unwrap(getattr(value, "__func__", value))
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        given, result = _signature(function)
        shown = name if isinstance(value, property) else f"{name}({', '.join(given)}){result}"
        lines.append(f"- `{shown}`: {_sentence(function)}")
    ours = [base.__name__ for base in cls.__bases__ if base.__module__.startswith("lowtide") and base is not cls]
    if ours and not issubclass(cls, BaseException):
        lines.append(f"- and all members of `{'`, `'.join(ours)}`")
    return [*lines, ""] if lines else []


def _described_fields(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the fields with a docstring below them, read from the source because Python does not keep those."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            target: ast.expr = field.target
        elif isinstance(field, ast.Assign):
            target = field.targets[0]
        else:
            continue
        if isinstance(target, ast.Name) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield target.id, " ".join(str(below.value.value).split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
