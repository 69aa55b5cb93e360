"""Results: one run, its models, their variants, every round of them. Plain records, to JSON and back; no torch."""

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
    """A file that holds no results."""


@dataclass
class VariantResult:
    """One variant of one model."""

    family: str
    peak_bytes: int | None = None
    exact: bool | None = None
    """Loss and gradients bit-equal to plain's in every step."""
    buffers_equal: bool | None = None
    cpu_s: list[float] = field(default_factory=list)
    """By round: the least of its timed steps."""
    wall_s: list[float] = field(default_factory=list)
    beside_cpu_s: list[list[float]] = field(default_factory=list)
    """By round: plain's steps just before and just after. Empty: one plain step in each round stands for all."""
    beside_wall_s: list[list[float]] = field(default_factory=list)
    preparation_s: float | None = None
    """Planning or compiling."""
    asked_bytes: int | None = None
    predicted_bytes: int | None = None
    predicted_extra_s: float | None = None
    predicted_plain_s: float | None = None
    bound_extra_s: float | None = None
    own_peak_bytes: int | None = None
    resident_bytes: int | None = None
    """The most that a process of its own had resident in a step, beyond what it had before it prepared anything."""
    resident_step_bytes: int | None = None
    """The same, beyond what it had just before this step."""
    note: str = ""
    error: str | None = None

    @property
    def measured(self) -> bool:
        """Whether there is a point to draw."""
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
        """What the others are compared with."""
        return self.variants["plain"]

    def measured(self) -> dict[str, VariantResult]:
        """The variants with a peak and times."""
        return {name: one for name, one in self.variants.items() if one.measured}

    def peak_share(self, name: str) -> float:
        """Of plain's peak."""
        return (self.variants[name].peak_bytes or 0) / (self.plain.peak_bytes or 1)

    def ratios(self, name: str, clock: str = "cpu_s") -> list[float]:
        """By round: the time over plain's around it, or in the same round; the processor's or "wall_s"."""
        one = self.variants[name]
        beside: list[list[float]] = getattr(one, f"beside_{clock}")
        plain = [math.sqrt(before * after) for before, after in beside] or getattr(self.plain, clock)
        return [a / b for a, b in zip(getattr(one, clock), plain, strict=False)]

    def ratio_of_minima(self, name: str) -> float:
        """The least CPU time of any round over that of as many plain steps."""
        one = self.variants[name]
        return min(one.cpu_s) / min([before for before, _ in one.beside_cpu_s] or self.plain.cpu_s)

    def said(self, name: str, what: str) -> float | None:
        """Overhead that was "predicted" or is the "bound" of any plan, as a share of a plain step."""
        one = self.variants[name]
        extra_s: float | None = getattr(one, f"{what}_extra_s")
        return None if extra_s is None else extra_s / (one.predicted_plain_s or min(self.plain.cpu_s))

    def ratio(self, name: str) -> float:
        """The median over the rounds."""
        return median(self.ratios(name))


@dataclass
class Run:
    """What one call of `python -m benchmarks run` found, so far."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    models: dict[str, ModelResult] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the JSON; a reader sees the old file or the new one, never half of one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"format": "lowtide benchmarks", "version": VERSION, **asdict(self)}
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)

    @staticmethod
    def load(path: Path) -> Run:
        """Read what `save` wrote; `ResultsError` for anything else."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document.get("format") != "lowtide benchmarks" or document.get("version") != VERSION:
                raise ResultsError(f"{path} holds no benchmark results of version {VERSION}")
            models = {
                name: ModelResult(
                    one["title"], one["base_bytes"], {n: VariantResult(**v) for n, v in one["variants"].items()}
                )
                for name, one in document["models"].items()
            }
            return Run(document["machine"], document["settings"], models)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ResultsError(
                f"no results can be read from {path}: {type(error).__name__}: {error}; "
                "a results.json of `python -m benchmarks run` is wanted"
            ) from error
