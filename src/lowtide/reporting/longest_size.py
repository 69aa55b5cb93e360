"""The longest size that fits into a budget, with the predictions for some smaller sizes. Does not import torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from .._units import format_bytes, format_time
from ..records import Trace
from ..records.plan import Plan
from .report import Report

_COLUMNS = ("size", "plain peak", "predicted peak", "step time", "overhead")


@dataclass(frozen=True)
class SizePrediction:
    """A size, and the predictions for the fastest plan that fits."""

    size: int
    plain_peak_bytes: int
    """Predicted peak of plain PyTorch."""
    peak_bytes: int | None = None
    """Predicted peak. None: no plan fits."""
    step_s: float | None = None
    """Predicted step time. None: no plan fits."""
    overhead: float | None = None
    """Predicted step time over that of plain PyTorch, minus 1. None: no plan fits."""

    @property
    def fits(self) -> bool:
        """Whether a plan fits into the budget."""
        return self.peak_bytes is not None


@dataclass(frozen=True)
class LongestSize:
    """The longest size that fits into a budget. `print` shows a table of sizes."""

    size: int
    """The longest size that fits."""
    budget_bytes: int
    plan: Plan = field(repr=False)
    """Plan for steps of this size."""
    predictions: tuple[SizePrediction, ...] = field(repr=False)
    """Sizes from the smallest to the longest, and the next one, which does not fit."""
    profiled: tuple[int, ...]
    """The sizes that were profiled."""
    uncertain_bytes: int
    """Upper limit on the bytes by which the peak may be smaller than predicted."""
    trace: Trace = field(repr=False)
    """A step of the longest size, from the profiles."""

    def details(self) -> Report:
        """Return the report of the plan: `found.details().save_html("step.html")`."""
        return Report.of(self.trace, self.plan)

    def to_json(self) -> str:
        """Return all numbers and the plan as JSON."""
        document = {
            "format": "lowtide longest size",
            "fits": True,
            "size": self.size,
            "budget_bytes": self.budget_bytes,
            "profiled": self.profiled,
            "uncertain_bytes": self.uncertain_bytes,
            "predictions": [asdict(prediction) for prediction in self.predictions],
            "plan": json.loads(self.plan.to_json()),
        }
        return json.dumps(document)

    def __str__(self) -> str:
        return self.table()

    def table(self, size_name: str = "size") -> str:
        """Return the table and the longest size. `size_name` is what a size means, such as "length"."""
        rows = [(size_name, *_COLUMNS[1:]), *map(_row, self.predictions)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        beyond = "" if not self.predictions[-1].fits else f"; a larger {size_name} was not tried"
        lines += ["", f"longest {size_name} that fits into {format_bytes(self.budget_bytes)}: {self.size:,}{beyond}"]
        lines.append(f"predicted from profiles of {size_name} {_listed(self.profiled)}")
        if self.uncertain_bytes:
            lines[-1] += f"; peaks may be up to {format_bytes(self.uncertain_bytes)} smaller"
        return "\n".join(lines)


def _row(prediction: SizePrediction) -> tuple[str, ...]:
    plain = format_bytes(prediction.plain_peak_bytes)
    if prediction.peak_bytes is None:
        return f"{prediction.size:,}", plain, "does not fit", "", ""
    step = format_time(prediction.step_s or 0.0)
    overhead = f"{100 * (prediction.overhead or 0.0):.1f} %"
    return f"{prediction.size:,}", plain, format_bytes(prediction.peak_bytes), step, overhead


def _listed(sizes: tuple[int, ...]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} and {last}" if others else last
