"""What a plan does with the values of each kind of module, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..planning import Problem, Simulator
from ..planning.summary import module_pattern
from .timeline import Timeline


@dataclass(frozen=True)
class ModuleAccount:
    """The modules of one kind ("h.*.mlp"). Values inside them that nobody needs in backward do not appear."""

    name: str
    modules: int
    ops: int
    values_kept: int = 0
    kept_bytes: int = 0
    """Held from forward into backward."""
    values_recomputed: int = 0
    recomputed_bytes: int = 0
    """Saved by autograd in plain PyTorch, and made again here."""
    values_offloaded: int = 0
    offloaded_bytes: int = 0
    """In the store between forward and backward."""
    values_compressed: int = 0
    compressed_bytes: int = 0
    """Held packed between forward and backward; what they are unpacked."""
    replays: int = 0
    recompute_s: float = 0.0

    @property
    def saved_bytes(self) -> int:
        """What backward needs of it, however it gets it."""
        return self.kept_bytes + self.recomputed_bytes + self.offloaded_bytes + self.compressed_bytes

    def __add__(self, other: ModuleAccount) -> ModuleAccount:
        return ModuleAccount(
            self.name,
            self.modules + other.modules,
            self.ops + other.ops,
            self.values_kept + other.values_kept,
            self.kept_bytes + other.kept_bytes,
            self.values_recomputed + other.values_recomputed,
            self.recomputed_bytes + other.recomputed_bytes,
            self.values_offloaded + other.values_offloaded,
            self.offloaded_bytes + other.offloaded_bytes,
            self.values_compressed + other.values_compressed,
            self.compressed_bytes + other.compressed_bytes,
            self.replays + other.replays,
            self.recompute_s + other.recompute_s,
        )


def account_modules(timeline: Timeline) -> tuple[ModuleAccount, ...]:
    """One account for each kind of module, those with the most bytes first."""
    trace, keep, simulation = timeline.trace, timeline.keep, timeline.simulation
    problem = Problem(trace, codec_costs=timeline.codec_costs)
    simulator = Simulator(problem)
    held = frozenset(simulator.held_into_backward(keep, simulation.written_before))
    away = frozenset(simulator.held_elsewhere(keep, simulation.written_before))
    paths: dict[str, set[str]] = {}
    accounts: dict[str, ModuleAccount] = {}
    for j, op in enumerate(trace.ops):
        kind = module_pattern(op.module)
        paths.setdefault(kind, set()).add(op.module)
        kept = [problem.nbytes[v] for v in problem.outputs[j] if v in held]
        remade = [] if keep[j] else [problem.nbytes[v] for v in problem.outputs[j] if problem.saved[v]]
        moved = [problem.nbytes[v] for v in problem.outputs[j] if v in away and problem.codec_cost[v] is None]
        packed = [problem.nbytes[v] for v in problem.outputs[j] if v in away and problem.codec_cost[v] is not None]
        replays = simulation.replays[j]
        one = ModuleAccount(
            kind, 0, 1, len(kept), sum(kept), len(remade), sum(remade), len(moved), sum(moved),
            len(packed), sum(packed), replays, replays * problem.replay_overhead_s[j],
        )  # fmt: skip
        accounts[kind] = accounts[kind] + one if kind in accounts else one
    rows = [replace(account, modules=len(paths[kind])) for kind, account in accounts.items()]
    return tuple(sorted(rows, key=lambda row: -row.saved_bytes))
