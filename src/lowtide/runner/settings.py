"""Settings of `lowtide run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Settings of one run, shared by all models of the script."""

    budget_bytes: int
    store: str = "device"
    codecs: tuple[str, ...] = ("exact",)
    cache: Path | None = None
    """Directory of the plan cache."""
