"""Frontier: step time against peak bytes, for plans, the lower bound and simple schemes. Does not import torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._errors import MissingPackageError
from .._units import format_bytes

FRONTIER_TITLE = "Step time against peak bytes"
FRONTIER_COLUMNS = ("peak", "of plain", "step time", "lower bound")


@dataclass(frozen=True)
class Point:
    """One plan or scheme."""

    budget_bytes: int
    peak_bytes: int
    step_s: float
    bound_step_s: float
    """Proven lower bound on the step time of plans with this peak."""
    name: str


@dataclass(frozen=True)
class Frontier:
    """Step time against peak bytes."""

    points: tuple[Point, ...]
    """Plans, from the smallest feasible budget to keeping everything."""
    baselines: tuple[Point, ...]
    """Simple schemes, such as a checkpoint on every block."""
    plain_peak_bytes: int
    plain_step_s: float

    def __str__(self) -> str:
        rows = [(*FRONTIER_COLUMNS, ""), *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join([*(row[i].rjust(widths[i]) for i in range(4)), row[4]]).rstrip() for row in rows)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Return peak, share of the plain peak, time, bound and name as text, for plans and then for baselines."""
        return [self._row(point) for point in (*self.points, *self.baselines)]

    def _row(self, point: Point) -> tuple[str, str, str, str, str]:
        return (
            format_bytes(point.peak_bytes),
            f"{100 * point.peak_bytes / max(1, self.plain_peak_bytes):.0f} %",
            f"× {point.step_s / self.plain_step_s:.3f}",
            f"× {point.bound_step_s / self.plain_step_s:.3f}",
            point.name,
        )

    def to_json(self) -> str:
        """Return all numbers as JSON."""
        return json.dumps(asdict(self))

    def plot(self, path: str | Path | None = None) -> Any:
        """Return a matplotlib figure, and save it to `path` if given. Needs `pip install "lowtide[plots]"`."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingPackageError("matplotlib", "a plot of a frontier", extra="plots") from error
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        self.draw(figure.add_subplot())
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def draw(self, axes: Any) -> None:
        """Draw the frontier on existing matplotlib axes."""
        x = [point.peak_bytes / 2**20 for point in self.points]
        axes.plot(x, [point.step_s / self.plain_step_s for point in self.points], "o-", ms=4, label="lowtide plans")
        axes.plot(
            x,
            [point.bound_step_s / self.plain_step_s for point in self.points],
            ":",
            color="gray",
            label="proven lower bound",
        )
        for point, marker in zip(self.baselines, "sD^vP*X", strict=False):
            axes.plot(point.peak_bytes / 2**20, point.step_s / self.plain_step_s, marker, ms=7, label=point.name)
        axes.set(xlabel="peak bytes (MiB)", ylabel="step time (plain = 1)")
        axes.set_title(FRONTIER_TITLE, loc="left")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
