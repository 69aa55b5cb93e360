"""Counts of one scope: ops, kept and recomputed values, pinned ops. They hold no tensor and may outlive the step."""

from __future__ import annotations

from collections import Counter

from ...records.budget_report import BudgetReport
from ...records.scope_report import Pinned, ScopeReport
from .value import Origin, Value


class ScopeCounts:
    """The counts of one scope so far."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.ops = 0
        self.layers = 0
        self.kept_values = 0
        self.kept_bytes = 0
        self.recomputed_values = 0
        self.recomputed_bytes = 0
        self.offloaded_values = 0
        self.offloaded_bytes = 0
        self.compressed_values = 0
        self.compressed_bytes = 0
        self.outside_values = 0
        self.copied_bytes = 0
        self.replayed_ops = 0
        self._pinned: Counter[tuple[str, str, str]] = Counter()  # (op, module, reason)
        self._foreign: Counter[str] = Counter()

    def pin(self, origin: Origin, why: str) -> None:
        """Count an op whose values are kept although the policy wanted them recomputed."""
        self._pinned[origin.facts.name, origin.location.path, why] += 1

    def foreign(self, type_name: str) -> None:
        """Count a foreign tensor (Rule 14)."""
        self._foreign[type_name] += 1

    def copied(self, nbytes: int) -> None:
        """Count a copy that replay or an in-place op needed."""
        self.copied_bytes += nbytes

    def saved(self, value: Value) -> None:
        """Count a value that autograd saves for the first time."""
        value.counted = True
        if value.recipe is not None:
            self.recomputed_values += 1
            self.recomputed_bytes += value.nbytes
        elif value.origin is not None:
            self.kept_values += 1
            self.kept_bytes += value.nbytes
        else:
            self.outside_values += 1

    def saved_evictable(self, value: Value) -> None:
        """Count a value that is kept until memory is short."""
        value.counted = True
        self.kept_values += 1
        self.kept_bytes += value.nbytes

    def saved_from_outside(self) -> None:
        """Count a saved tensor that no recorded op has made."""
        self.outside_values += 1

    def offloaded(self, value: Value) -> None:
        """Count a value that a plan offloads."""
        value.counted = True
        self.offloaded_values += 1
        self.offloaded_bytes += value.nbytes

    def compressed(self, value: Value) -> None:
        """Count a value that a plan compresses."""
        value.counted = True
        self.compressed_values += 1
        self.compressed_bytes += value.nbytes

    def kept_after_all(self, value: Value) -> None:
        """Move a value from recomputed to kept: it turned out to be the input of a layer."""
        self.recomputed_values -= 1
        self.recomputed_bytes -= value.nbytes
        self.kept_values += 1
        self.kept_bytes += value.nbytes

    def report(self, budget: BudgetReport | None) -> ScopeReport:
        """Return the counts as a frozen record."""
        return ScopeReport(
            policy=self.policy,
            ops=self.ops,
            layers=self.layers,
            values_kept=self.kept_values,
            bytes_kept=self.kept_bytes,
            values_recomputed=self.recomputed_values,
            bytes_recomputed=self.recomputed_bytes,
            values_offloaded=self.offloaded_values,
            bytes_offloaded=self.offloaded_bytes,
            values_compressed=self.compressed_values,
            bytes_compressed=self.compressed_bytes,
            values_from_outside=self.outside_values,
            replayed_ops=self.replayed_ops,
            bytes_copied=self.copied_bytes,
            pinned=tuple(Pinned(*key, count) for key, count in self._pinned.items()),
            foreign=dict(self._foreign),
            budget=budget,
        )
