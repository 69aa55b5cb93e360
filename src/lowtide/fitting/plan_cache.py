"""Plans kept in a directory from one run to the next.

A plan is found again by the model (names and shapes of its parameters), the kind of step and the budget. What the
file says is only ever a plan: a step that does not go as planned is still right (Rule 13). JSON, no pickle; files
are written whole or not at all, and a damaged one is passed over with a warning.
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


def key_of(model: nn.Module, kind: Any) -> str:
    """What steps of this kind of this model are filed under."""
    parameters = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    return hashlib.sha256(repr((type(model).__qualname__, parameters, kind)).encode()).hexdigest()[:24]


class PlanCache:
    """A directory of plans."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"plans cannot be kept in {str(directory)!r}: {error}") from error
        self.directory = directory

    def get(self, key: str) -> Plan | None:
        """The plan filed under this key, if there is one."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            return Plan.load(path)
        except ArgumentError as error:
            warnings.warn(f"{path} is passed over, and a new plan will be made: {error}", LowtideWarning, stacklevel=2)
            return None

    def put(self, key: str, plan: Plan) -> None:
        """File a plan; where that is not possible, training goes on without."""
        try:
            handle, name = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(plan.to_json())
            os.replace(name, self._path(key))
        except OSError as error:
            warnings.warn(f"the plan could not be kept in {self.directory}: {error}", LowtideWarning, stacklevel=2)

    def _path(self, key: str) -> Path:
        return self.directory / f"plan-{key}.json"
