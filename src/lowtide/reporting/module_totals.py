"""Totals of a plan for modules of one pattern ("h.*.mlp"): values, bytes, replays."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ..planning import Problem, Simulator
from ..planning.summary import module_pattern
from .timeline import Timeline


@dataclass(frozen=True)
class ModuleTotals:
    """Totals for the modules of one pattern. Values that backward does not need are not counted."""

    name: str
    """The pattern."""
    modules: int
    ops: int
    values_kept: int = 0
    kept_bytes: int = 0
    """Held from forward into backward."""
    values_recomputed: int = 0
    recomputed_bytes: int = 0
    """Saved by autograd in plain PyTorch, recomputed under the plan."""
    values_offloaded: int = 0
    offloaded_bytes: int = 0
    """In the store between forward and backward."""
    values_compressed: int = 0
    compressed_bytes: int = 0
    """Uncompressed size of the values that are compressed between forward and backward."""
    replays: int = 0
    recompute_s: float = 0.0

    @property
    def saved_bytes(self) -> int:
        """Bytes that backward needs: kept, recomputed, offloaded or compressed."""
        return self.kept_bytes + self.recomputed_bytes + self.offloaded_bytes + self.compressed_bytes

    def __add__(self, other: ModuleTotals) -> ModuleTotals:
        names = [field.name for field in fields(self) if field.name != "name"]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


def totals_by_module(timeline: Timeline) -> tuple[ModuleTotals, ...]:
    """Return the totals for each module pattern, those with the most saved bytes first."""
    trace, keep, simulation = timeline.trace, timeline.keep, timeline.simulation
    problem = Problem(trace, codec_costs=timeline.codec_costs)
    simulator = Simulator(problem)
    held = frozenset(simulator.held_into_backward(keep, simulation.written_before))
    stored = frozenset(simulator.offloaded_into_backward(keep, simulation.written_before))
    paths: dict[str, set[str]] = {}
    totals: dict[str, ModuleTotals] = {}
    for j, op in enumerate(trace.ops):
        pattern = module_pattern(op.module)
        paths.setdefault(pattern, set()).add(op.module)
        sizes = {v: problem.nbytes[v] for v in problem.outputs[j]}
        kept = [nbytes for v, nbytes in sizes.items() if v in held]
        recomputed = [nbytes for v, nbytes in sizes.items() if problem.saved[v] and not keep[j]]
        compressed = [nbytes for v, nbytes in sizes.items() if v in stored and problem.codec_cost[v] is not None]
        offloaded = [nbytes for v, nbytes in sizes.items() if v in stored and problem.codec_cost[v] is None]
        replays = simulation.replays[j]
        total = ModuleTotals(
            pattern, modules=0, ops=1, values_kept=len(kept), kept_bytes=sum(kept),
            values_recomputed=len(recomputed), recomputed_bytes=sum(recomputed),
            values_offloaded=len(offloaded), offloaded_bytes=sum(offloaded),
            values_compressed=len(compressed), compressed_bytes=sum(compressed),
            replays=replays, recompute_s=replays * problem.replay_s[j],
        )  # fmt: skip
        totals[pattern] = totals[pattern] + total if pattern in totals else total
    rows = [replace(total, modules=len(paths[pattern])) for pattern, total in totals.items()]
    return tuple(sorted(rows, key=lambda row: -row.saved_bytes))
