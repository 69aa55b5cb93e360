"""Report of a memory budget: its peak, and counts of evicted values."""

from __future__ import annotations

from dataclasses import dataclass

from .._units import format_bytes


@dataclass(frozen=True)
class BudgetReport:
    """Counts of one scope with a budget, in forward and backward. A value may be evicted several times."""

    budget_bytes: int
    peak_bytes: int
    """Peak of live bytes while ops of this scope ran."""
    values_dropped: int
    bytes_dropped: int
    values_compressed: int
    bytes_compressed: int
    bytes_compressed_to: int
    values_offloaded: int
    bytes_written: int
    """Bytes written to the store. A value that is already in the store is not written again."""
    values_fetched: int
    values_decompressed: int
    store: str | None

    def __str__(self) -> str:
        lines = [
            f"budget          {format_bytes(self.budget_bytes)}, peak {format_bytes(self.peak_bytes)}",
            f"dropped         {self.values_dropped:,} values, {format_bytes(self.bytes_dropped)}",
        ]
        if self.values_compressed:
            lines.append(
                f"compressed      {self.values_compressed:,} values, {format_bytes(self.bytes_compressed)} "
                f"to {format_bytes(self.bytes_compressed_to)}"
            )
        if self.store is not None:
            lines.append(
                f"offloaded       {self.values_offloaded:,} values to {self.store}, "
                f"{format_bytes(self.bytes_written)} written, {self.values_fetched:,} values fetched"
            )
        return "\n".join(lines)
