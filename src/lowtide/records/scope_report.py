"""The report of one scope: what was kept, what was recomputed, what had to be pinned and why."""

from __future__ import annotations

from dataclasses import dataclass

from .._units import format_bytes
from .budget_report import BudgetReport


@dataclass(frozen=True)
class Pinned:
    """Values that the policy wanted recomputed and that are kept instead."""

    op: str
    module: str
    why: str
    count: int


@dataclass(frozen=True)
class ScopeReport:
    """The counts of the scope that was opened last. Values are counted when autograd saves them."""

    policy: str
    ops: int
    """Ops that made a value."""
    layers: int
    """Layers that were entered, for policies that look at layers."""
    values_kept: int
    bytes_kept: int
    values_recomputed: int
    bytes_recomputed: int
    values_from_outside: int
    """Times that autograd saved something from outside the scope: parameters, inputs."""
    replayed_ops: int
    bytes_copied: int
    """Copies made because a value was about to be overwritten that a recompute needs."""
    pinned: tuple[Pinned, ...]
    foreign: dict[str, int]
    """Tensor classes without a storage of their own, left as they are, and how often they were met."""
    values_offloaded: int = 0
    """By a plan; under a budget see `budget`."""
    bytes_offloaded: int = 0
    values_compressed: int = 0
    """By a plan, too."""
    bytes_compressed: int = 0
    budget: BudgetReport | None = None
    """For a scope with a budget."""

    def __str__(self) -> str:
        lines = [
            f"policy          {self.policy}",
            f"ops             {self.ops:,} recorded, {self.replayed_ops:,} replayed",
            f"kept            {self.values_kept:,} values, {format_bytes(self.bytes_kept)}",
            f"recomputed      {self.values_recomputed:,} values, {format_bytes(self.bytes_recomputed)}",
            f"from outside    {self.values_from_outside:,} saved references",
        ]
        if self.values_offloaded:
            lines.append(f"offloaded       {self.values_offloaded:,} values, {format_bytes(self.bytes_offloaded)}")
        if self.values_compressed:
            lines.append(f"compressed      {self.values_compressed:,} values, {format_bytes(self.bytes_compressed)}")
        if self.budget is not None:
            lines.append(str(self.budget))
        if self.layers:
            lines.append(f"layers          {self.layers}")
        if self.bytes_copied:
            lines.append(f"copied          {format_bytes(self.bytes_copied)} before being overwritten")
        for pin in self.pinned:
            where = f" in {pin.module}" if pin.module else ""
            lines.append(f"pinned          {pin.count} × {pin.op}{where}: {pin.why}")
        for name, count in self.foreign.items():
            lines.append(f"foreign         {count} × {name}: kept as it is")
        return "\n".join(lines)
