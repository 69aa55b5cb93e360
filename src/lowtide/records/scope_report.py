"""Report of one scope: counts of kept, recomputed, offloaded, compressed and pinned values."""

from __future__ import annotations

from dataclasses import dataclass

from .._units import format_bytes
from .budget_report import BudgetReport


@dataclass(frozen=True)
class Pinned:
    """Values of one op that are kept although the policy chose recompute."""

    op: str
    module: str
    why: str
    count: int


@dataclass(frozen=True)
class ScopeReport:
    """Counts of the most recently opened scope. Values are counted when autograd saves them."""

    policy: str
    ops: int
    """Ops that produced a value."""
    layers: int
    """Layer calls, for policies with `needs_layers`."""
    values_kept: int
    bytes_kept: int
    values_recomputed: int
    bytes_recomputed: int
    values_from_outside: int
    """Number of saves of tensors from outside the scope: parameters, inputs."""
    replayed_ops: int
    bytes_copied: int
    """Bytes of values copied before an in-place op because a recompute needs them."""
    pinned: tuple[Pinned, ...]
    foreign: dict[str, int]
    """Uses of tensors that lowtide keeps unchanged, by class or by kind: nested, sparse, meta."""
    values_offloaded: int = 0
    """Offloaded by a plan. For a scope with a budget see `budget`."""
    bytes_offloaded: int = 0
    values_compressed: int = 0
    """Compressed by a plan."""
    bytes_compressed: int = 0
    budget: BudgetReport | None = None
    """Counts of a scope with a budget, else None."""

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
            lines.append(f"copied          {format_bytes(self.bytes_copied)} before in-place ops")
        for pin in self.pinned:
            where = f" in {pin.module}" if pin.module else ""
            lines.append(f"pinned          {pin.count} × {pin.op}{where}: {pin.why}")
        for name, count in self.foreign.items():
            lines.append(f"foreign         {count} × {name}: kept unchanged")
        return "\n".join(lines)
