"""Results of a run: models, variants and rounds, to JSON and back. No torch."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

VERSION = 1


class ResultsError(ValueError):
    """A file that is not a results file."""


@dataclass
class VariantResult:
    """One variant of one model."""

    family: str
    peak_bytes: int | None = None
    exact: bool | None = None
    """Loss and gradients bit-equal to plain's in every step."""
    buffers_equal: bool | None = None
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of the step, by round."""
    wall_s: list[float] = field(default_factory=list)
    beside_cpu_s: list[list[float]] = field(default_factory=list)
    """Plain steps just before and after, by round. If empty, the plain step of the round is the reference."""
    beside_wall_s: list[list[float]] = field(default_factory=list)
    preparation_s: float | None = None
    """Time of planning or compiling."""
    asked_bytes: int | None = None
    predicted_bytes: int | None = None
    predicted_extra_s: float | None = None
    predicted_plain_s: float | None = None
    bound_extra_s: float | None = None
    own_peak_bytes: int | None = None
    resident_bytes: int | None = None
    """Peak resident memory of a step in its own process, above that before planning."""
    resident_step_bytes: int | None = None
    """The same, above that just before the step."""
    note: str = ""
    error: str | None = None

    @property
    def measured(self) -> bool:
        """Whether peak and times are known."""
        return self.error is None and self.peak_bytes is not None and bool(self.cpu_s)


@dataclass
class ModelResult:
    """One model and its variants."""

    title: str
    base_bytes: int
    """Parameters, buffers and batch."""
    variants: dict[str, VariantResult] = field(default_factory=dict)

    @property
    def plain(self) -> VariantResult:
        """Result of plain steps."""
        return self.variants["plain"]

    def measured(self) -> dict[str, VariantResult]:
        """Return the variants with a peak and times."""
        return {name: one for name, one in self.variants.items() if one.measured}

    def peak_share(self, name: str) -> float:
        """Return the peak as a share of plain's."""
        return (self.variants[name].peak_bytes or 0) / (self.plain.peak_bytes or 1)

    def ratios(self, name: str, clock: str = "cpu_s") -> list[float]:
        """Return the time over that of the plain steps around it, by round; `clock` is "cpu_s" or "wall_s"."""
        one = self.variants[name]
        beside: list[list[float]] = getattr(one, f"beside_{clock}")
        plain = [math.sqrt(before * after) for before, after in beside] or getattr(self.plain, clock)
        return [a / b for a, b in zip(getattr(one, clock), plain, strict=False)]

    def ratio_of_minima(self, name: str) -> float:
        """Return the least processor time of all rounds over that of as many plain steps."""
        one = self.variants[name]
        return min(one.cpu_s) / min([before for before, _ in one.beside_cpu_s] or self.plain.cpu_s)

    def planned_overhead(self, name: str, key: str) -> float | None:
        """Return the "predicted" overhead or its lower "bound", as a share of a plain step; None if unknown."""
        one = self.variants[name]
        extra_s: float | None = getattr(one, f"{key}_extra_s")
        return None if extra_s is None else extra_s / (one.predicted_plain_s or min(self.plain.cpu_s))

    def ratio(self, name: str) -> float:
        """Return the median of the ratios over the rounds."""
        return median(self.ratios(name))


@dataclass
class Run:
    """Results of one call of `python -m benchmarks run`, so far."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    models: dict[str, ModelResult] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the JSON file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"format": "lowtide benchmarks", "version": VERSION, **asdict(self)}
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    @staticmethod
    def load(path: Path) -> Run:
        """Read a file of `save`; raise `ResultsError` for any other file."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document.get("format") != "lowtide benchmarks" or document.get("version") != VERSION:
                raise ResultsError(f"{path} has no benchmark results of version {VERSION}")
            models = {
                name: ModelResult(
                    one["title"], one["base_bytes"], {n: VariantResult(**v) for n, v in one["variants"].items()}
                )
                for name, one in document["models"].items()
            }
            return Run(document["machine"], document["settings"], models)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ResultsError(
                f"cannot read results from {path}: {type(error).__name__}: {error}; "
                "expected a results.json of `python -m benchmarks run`"
            ) from error
