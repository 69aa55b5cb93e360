"""A plan: what to keep and what to recompute in one step, and what that is predicted to cost.

Immutable; made by `solve`, read by the engine, printed for people. Holds for steps with the fingerprint it
names. It carries its own lower bound, so that everybody can see how much better another plan could be.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._errors import ArgumentError
from .._units import format_bytes, format_time
from .codec_cost import CodecCost
from .link import Link
from .serialize import read_document
from .trace import Trace

PLAN_VERSION = 7
WHEN_BACKWARD_BEGINS = -1
"""In place of the op after whose first fetch something is read."""
_FORMAT = "lowtide plan"
_LINES = 12


@dataclass(frozen=True)
class PinnedOp:
    """Ops that may not be replayed."""

    name: str
    module: str
    why: str
    count: int


@dataclass(frozen=True)
class ModuleSummary:
    """What the plan does with the ops of alike modules ("h.*.mlp")."""

    name: str
    ops: int
    kept_bytes: int
    """Held from forward into backward."""
    recomputed_bytes: int
    """Saved by autograd in plain PyTorch, and made again here."""
    recompute_s: float
    offloaded_bytes: int = 0
    """In the store between forward and backward."""
    compressed_bytes: int = 0
    """Of values that are held packed between forward and backward: what they are unpacked."""


@dataclass(frozen=True)
class Plan:
    """Decisions for every op of a step."""

    keep: tuple[bool, ...]
    """By op: True to keep what it makes, False to recompute it."""
    released: tuple[int, ...]
    """Recomputed ops whose values are released after use, and recomputed when they are needed next."""
    budget_bytes: int
    predicted_peak_bytes: int
    plain_peak_bytes: int
    peak_at: str
    predicted_step_s: float
    plain_step_s: float
    bound_step_s: float
    """No exact plan within the budget is faster than this."""
    solver: str
    solve_s: float
    replayed_ops: int
    pinned: tuple[PinnedOp, ...]
    modules: tuple[ModuleSummary, ...]
    fingerprint: str
    """Of the trace it was made for."""
    op_names: tuple[str, ...]
    """By op, to tell whether a step goes as planned."""
    offload: tuple[int, ...] = ()
    """Of the kept ops: those whose values wait elsewhere between forward and backward, in a store or packed."""
    written_before: tuple[int, ...] = ()
    """For each of those: the op before which its values are written or packed; forward waits for that if it must."""
    prefetch_after: tuple[int, ...] = ()
    """For each of those: the op after whose first fetch in backward its values are read ahead, -1 for when backward
    begins; itself where they are read when they are needed. Empty where all are."""
    compress: tuple[int, ...] = ()
    """Of those: the ops whose values are packed by a codec and stay in memory, as far as there is one for them."""
    link: Link | None = None
    """The store, and how fast it was taken to be; None where nothing may be offloaded."""
    codec_costs: tuple[CodecCost, ...] = ()
    """The codecs that values may be packed by, and how fast they were taken to be."""
    copies: bool = False
    """Whether gradients are copied that wait as a part of a larger one."""
    store_wait_s: float = 0.0
    """Of the predicted time: what the step waits for the store, and takes to pack and unpack."""
    version: int = PLAN_VERSION

    @property
    def gap(self) -> float:
        """How much of a plain step a better plan could save at most."""
        if self.plain_step_s <= 0:
            return 0.0
        return max(0.0, self.predicted_step_s - self.bound_step_s) / self.plain_step_s

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The ops to recompute."""
        return tuple(j for j, kept in enumerate(self.keep) if not kept)

    @property
    def offload_deadlines(self) -> dict[int, int]:
        """By op whose values wait elsewhere: the op before which they are written, or packed."""
        return dict(zip(self.offload, self.written_before, strict=True))

    @property
    def prefetches(self) -> dict[int, int]:
        """By op whose values are read ahead: the op after whose first fetch, or -1: when backward begins."""
        if not self.prefetch_after:
            return {}
        return {j: event for j, event in zip(self.offload, self.prefetch_after, strict=True) if event != j}

    @property
    def in_store(self) -> frozenset[int]:
        """The ops whose values wait in the store."""
        return frozenset(self.offload) - frozenset(self.compress)

    def matches(self, trace: Trace) -> bool:
        """Whether the plan was made for a step like this one."""
        return self.fingerprint == trace.fingerprint

    def __str__(self) -> str:
        share = 100 * self.predicted_peak_bytes / max(self.plain_peak_bytes, 1)
        slower = 100 * (self.predicted_step_s / self.plain_step_s - 1) if self.plain_step_s else 0.0
        bound = 100 * (self.bound_step_s / self.plain_step_s - 1) if self.plain_step_s else 0.0
        lines = [
            f"budget       {format_bytes(self.budget_bytes)}",
            f"peak         {format_bytes(self.predicted_peak_bytes)}, {share:.0f} % of "
            f"{format_bytes(self.plain_peak_bytes)} without a plan; {self.peak_at}",
            f"step         {format_time(self.predicted_step_s)}, {slower:.1f} % more than "
            f"{format_time(self.plain_step_s)}; no plan can do with less than {bound:.1f} % more",
            f"recompute    {len(self.recomputed):,} of {len(self.keep):,} ops, {self.replayed_ops:,} replays"
            + (f", {len(self.released):,} ops more than once" if self.released else ""),
            *self._about_elsewhere(),
            *(["copy         gradients that wait as a part of a larger one, so that it can go"] if self.copies else []),
            f"found by     {self.solver}, in {self.solve_s:.1f} s",
        ]
        for pin in self.pinned[:_LINES]:
            where = f" in {pin.module}" if pin.module else ""
            lines.append(f"pinned       {pin.count} × {pin.name}{where}: {pin.why}")
        if len(self.pinned) > _LINES:
            lines.append(f"pinned       and {len(self.pinned) - _LINES} more kinds")
        return "\n".join([*lines, "", *_table(self.modules)])

    def _about_elsewhere(self) -> list[str]:
        lines = []
        if self.compress:
            packed = sum(kind.compressed_bytes for kind in self.modules)
            codecs = ", ".join(dict.fromkeys(codec_cost.codec for codec_cost in self.codec_costs))
            lines.append(f"compress     {len(self.compress):,} ops, {format_bytes(packed)}, by {codecs}")
        if self.link is not None and self.in_store:
            moved = sum(kind.offloaded_bytes for kind in self.modules)
            lines.append(
                f"offload      {len(self.in_store):,} ops, {format_bytes(moved)} to the {self.link.tier} and back"
                + (f", {len(self.prefetches):,} of them read ahead" if self.prefetches else "")
            )
        if lines:
            lines[-1] += f"; {format_time(self.store_wait_s)} of waiting for {'both' if lines[1:] else 'it'}"
        return lines

    def to_json(self) -> str:
        """Compact JSON; `from_json` gives an equal plan."""
        document = {"format": _FORMAT, **asdict(self)}
        document["keep"] = "".join("1" if kept else "0" for kept in self.keep)
        names = sorted(set(self.op_names))
        places = {name: number for number, name in enumerate(names)}
        document["op_names"] = {"names": names, "by_op": [places[name] for name in self.op_names]}
        return json.dumps(document, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote; `ArgumentError` for anything else."""
        document = read_document(text, _FORMAT, PLAN_VERSION)
        try:
            return _build(document)
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"not a valid plan: the file is damaged ({type(error).__name__}: {error})") from error

    def save(self, path: str | Path) -> None:
        """Write the JSON form to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read what `save` wrote."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"no plan can be read from {str(path)!r}: {error}") from error
        return Plan.from_json(text)


def _build(document: dict[str, Any]) -> Plan:
    fields = {name: value for name, value in document.items() if name != "format"}
    types: dict[str, Any] = {
        "budget_bytes": int,
        "predicted_peak_bytes": int,
        "plain_peak_bytes": int,
        "peak_at": str,
        "predicted_step_s": (int, float),
        "plain_step_s": (int, float),
        "bound_step_s": (int, float),
        "solver": str,
        "solve_s": (int, float),
        "replayed_ops": int,
        "store_wait_s": (int, float),
        "fingerprint": str,
    }
    if not isinstance(fields["copies"], bool):
        raise TypeError(f"copies is {fields['copies']!r}")
    for name, kind in types.items():
        if not isinstance(fields[name], kind) or isinstance(fields[name], bool):
            raise TypeError(f"{name} is {fields[name]!r}")
    decisions = fields["keep"]
    if not isinstance(decisions, str) or set(decisions) - {"0", "1"}:
        raise ValueError("the decisions are not a row of 0 and 1")
    fields["keep"] = tuple(mark == "1" for mark in decisions)
    names, numbers = fields["op_names"]["names"], fields["op_names"]["by_op"]
    if len(numbers) != len(decisions) or not all(isinstance(name, str) for name in names):
        raise ValueError("the ops are not named one by one")
    fields["op_names"] = tuple(names[number] for number in numbers)
    released = fields["released"]
    if not all(type(j) is int and 0 <= j < len(decisions) and decisions[j] == "0" for j in released):
        raise ValueError("an op is to be made more than once that is not to be recomputed")
    fields["released"] = tuple(released)
    offload, written_before = fields["offload"], fields["written_before"]
    if not all(type(j) is int and 0 <= j < len(decisions) and decisions[j] == "1" for j in offload):
        raise ValueError("an op is to be offloaded that is not to be kept")
    if len(written_before) != len(offload) or not all(
        type(i) is int and j < i <= len(decisions) for j, i in zip(offload, written_before, strict=True)
    ):
        raise ValueError("values are to be written before they are made")
    fields["offload"], fields["written_before"] = tuple(offload), tuple(written_before)
    fields["codec_costs"] = tuple(CodecCost(**_typed(codec_cost, CodecCost)) for codec_cost in fields["codec_costs"])
    compress = fields["compress"] = tuple(fields["compress"])
    if not set(compress) <= set(offload) or (compress and not fields["codec_costs"]):
        raise ValueError("ops are to be packed that are not away, or without a codec")
    prefetch_after = fields["prefetch_after"] = tuple(fields["prefetch_after"])
    events = {-1, *offload} - {*compress}
    if prefetch_after and not all(
        type(i) is int and (i == j or (i in events and j not in compress))
        for j, i in zip(offload, prefetch_after, strict=True)
    ):
        raise ValueError("values are to be read ahead that are packed, or after what is never fetched")
    if fields["link"] is not None:
        fields["link"] = Link(**_typed(fields["link"], Link))
    elif len(offload) > len(compress):
        raise ValueError("ops are to be offloaded, but there is no store")
    fields["pinned"] = tuple(PinnedOp(**_typed(pin, PinnedOp)) for pin in fields["pinned"])
    fields["modules"] = tuple(ModuleSummary(**_typed(kind, ModuleSummary)) for kind in fields["modules"])
    return Plan(**fields)


def _typed(record: dict[str, Any], cls: type) -> dict[str, Any]:
    """The fields of a small record, if they have the types that its class says."""
    kinds: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
    for name, annotation in cls.__annotations__.items():
        if not isinstance(record[name], kinds[annotation]):
            raise TypeError(f"{name} is {record[name]!r}")
    return record


def _table(kinds: tuple[ModuleSummary, ...]) -> list[str]:
    """Module kinds with the most bytes first, in columns."""
    if not kinds:
        return []
    ordered = sorted(kinds, key=lambda kind: -(kind.kept_bytes + kind.recomputed_bytes))
    shown, rest = ordered[:_LINES], ordered[_LINES:]
    rows: list[tuple[str, ...]] = [
        ("modules", "ops", "kept", "offloaded", "compressed", "recomputed", "recompute time")
    ]
    rows += [_row(kind) for kind in shown]
    if rest:
        rows.append(
            _row(
                ModuleSummary(
                    f"{len(rest)} other kinds",
                    sum(kind.ops for kind in rest),
                    sum(kind.kept_bytes for kind in rest),
                    sum(kind.recomputed_bytes for kind in rest),
                    sum(kind.recompute_s for kind in rest),
                    sum(kind.offloaded_bytes for kind in rest),
                    sum(kind.compressed_bytes for kind in rest),
                )
            )
        )
    if not any(kind.compressed_bytes for kind in kinds):
        rows = [(*row[:4], *row[5:]) for row in rows]
    if not any(kind.offloaded_bytes for kind in kinds):
        rows = [(*row[:3], *row[4:]) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]


def _row(kind: ModuleSummary) -> tuple[str, ...]:
    return (
        kind.name or "(outside of modules)",
        f"{kind.ops:,}",
        format_bytes(kind.kept_bytes),
        format_bytes(kind.offloaded_bytes),
        format_bytes(kind.compressed_bytes),
        format_bytes(kind.recomputed_bytes),
        format_time(kind.recompute_s),
    )
