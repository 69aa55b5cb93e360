"""Gradients of long chains of step functions in little memory, for NumPy, torch and JAX arrays. Imports no torch."""

from __future__ import annotations

from . import schedules
from ._report import GradReport
from ._store_stats import StoredEntry, StoreStats
from ._taylor import TaylorResult, taylor_test
from .adjoint import grad
from .checkpointer import Checkpointer, CheckpointerStats
from .store import ActivationStore

__all__ = [
    "ActivationStore",
    "Checkpointer",
    "CheckpointerStats",
    "GradReport",
    "StoreStats",
    "StoredEntry",
    "TaylorResult",
    "grad",
    "schedules",
    "taylor_test",
]
