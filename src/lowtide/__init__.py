"""Train PyTorch models within a memory budget, with bit-equal gradients.

This file lists all public names. Each name is imported on first use, so that `lowtide.chain`, which
works on plain arrays, does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import chain as chain
    from ._errors import (
        ArgumentError as ArgumentError,
        BudgetError as BudgetError,
        DamagedValueError as DamagedValueError,
        DiskFullError as DiskFullError,
        LowtideError as LowtideError,
        LowtideWarning as LowtideWarning,
        MissingCheckpointError as MissingCheckpointError,
        MissingPackageError as MissingPackageError,
        ReplayMismatchError as ReplayMismatchError,
        ScheduleError as ScheduleError,
        StaleSourceError as StaleSourceError,
        StoreError as StoreError,
    )
    from .engine.ops.facts import allow_replay as allow_replay
    from .engine.scopes.budget import budget as budget
    from .engine.scopes.checkpoint import checkpoint as checkpoint, checkpoint_sequential as checkpoint_sequential
    from .engine.scopes.saving import saving as saving
    from .fitting.fit import fit as fit, report as report, unfit as unfit
    from .fitting.longest import longest as longest
    from .fitting.plan import frontier as frontier, plan as plan
    from .planning import Plan as Plan
    from .policies import (
        Decision as Decision,
        EveryN as EveryN,
        KeepAll as KeepAll,
        KeepNone as KeepNone,
        OpInfo as OpInfo,
        Policy as Policy,
        SaveOps as SaveOps,
        Segments as Segments,
        Selective as Selective,
    )
    from .reporting.longest_size import LongestSize as LongestSize
    from .reporting.report import Report as Report

__version__ = "0.1.0"

_MODULES = {
    "ArgumentError": "_errors",
    "BudgetError": "_errors",
    "DamagedValueError": "_errors",
    "DiskFullError": "_errors",
    "LowtideError": "_errors",
    "LowtideWarning": "_errors",
    "MissingCheckpointError": "_errors",
    "MissingPackageError": "_errors",
    "ReplayMismatchError": "_errors",
    "ScheduleError": "_errors",
    "StaleSourceError": "_errors",
    "StoreError": "_errors",
    "budget": "engine.scopes.budget",
    "allow_replay": "engine.ops.facts",
    "fit": "fitting.fit",
    "frontier": "fitting.plan",
    "longest": "fitting.longest",
    "LongestSize": "reporting.longest_size",
    "plan": "fitting.plan",
    "Plan": "planning",
    "Report": "reporting.report",
    "report": "fitting.fit",
    "unfit": "fitting.fit",
    "saving": "engine.scopes.saving",
    "checkpoint": "engine.scopes.checkpoint",
    "checkpoint_sequential": "engine.scopes.checkpoint",
    "Decision": "policies",
    "EveryN": "policies",
    "KeepAll": "policies",
    "KeepNone": "policies",
    "OpInfo": "policies",
    "Policy": "policies",
    "SaveOps": "policies",
    "Segments": "policies",
    "Selective": "policies",
}

__all__ = ["__version__", "chain", *_MODULES]


def __getattr__(name: str) -> Any:
    if name == "chain":
        return importlib.import_module(".chain", __name__)
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
