"""What `lowtide run` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Of one run; the same for every model that the program trains."""

    budget_bytes: int
    store: str = "device"
    codecs: tuple[str, ...] = ("exact",)
    cache: Path | None = None
