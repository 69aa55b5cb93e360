"""Plan cache: a directory of plans, shared by several runs.

The key of a plan contains the model (names and shapes of its parameters), the step signature and the budget. A wrong
plan cannot give wrong gradients, because a step that differs from its plan leaves it (Rule 13). Files are JSON and are
replaced atomically. A damaged file is ignored with a warning.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from .._errors import ArgumentError, LowtideWarning
from ..planning import Plan


def key_of(model: nn.Module, settings: Any) -> str:
    """Return the key for a model and the settings of its plan. `settings` must have a stable `repr`."""
    parameters = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    return hashlib.sha256(repr((type(model).__qualname__, parameters, settings)).encode()).hexdigest()[:24]


class PlanCache:
    """A directory of plans."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"cannot use {str(directory)!r} as a plan cache: {error}") from error
        self.directory = directory

    def get(self, key: str) -> Plan | None:
        """Return the plan with this key, or None if there is none."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            return Plan.load(path)
        except ArgumentError as error:
            warnings.warn(f"ignored {path}; a new plan will be made: {error}", LowtideWarning, stacklevel=2)
            return None

    def put(self, key: str, plan: Plan) -> None:
        """Save a plan. Warn if this fails; training continues."""
        try:
            handle, name = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(plan.to_json())
            os.replace(name, self._path(key))
        except OSError as error:
            warnings.warn(f"could not save the plan in {self.directory}: {error}", LowtideWarning, stacklevel=2)

    def _path(self, key: str) -> Path:
        return self.directory / f"plan-{key}.json"
