"""A plan: the decision for each op of one training step, and the predicted cost.

A plan is immutable. `solve` makes it and the engine follows it. It applies to steps with its fingerprint. It contains a
lower bound on the step time, which shows how much faster another plan could be.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from .._errors import ArgumentError
from .._units import format_bytes, format_time
from .codec_cost import CodecCost
from .link import Link
from .serialize import read_document
from .trace import Trace

_Record = TypeVar("_Record")

PLAN_VERSION = 8
WHEN_BACKWARD_BEGINS = -1
"""Trigger of a prefetch that starts when backward begins. Other triggers are the index of an op."""
_FORMAT = "lowtide plan"
_MAX_ROWS = 12
"""Rows of modules, and of pinned ops, in the printed plan."""


@dataclass(frozen=True)
class PinnedOp:
    """Ops of one name and module group that must not be replayed."""

    name: str
    module: str
    why: str
    count: int


@dataclass(frozen=True)
class ModuleSummary:
    """Totals of one module group. A group has the modules whose paths differ only in numbers ("h.*.mlp")."""

    name: str
    ops: int
    kept_bytes: int
    """Bytes held between forward and backward."""
    recomputed_bytes: int
    """Bytes that plain PyTorch holds and that are recomputed."""
    recompute_s: float
    offloaded_bytes: int = 0
    """Bytes in the store between forward and backward."""
    compressed_bytes: int = 0
    """Bytes, before compression, of values that are held compressed between forward and backward."""


@dataclass(frozen=True)
class Plan:
    """Decisions for every op of a step."""

    keep: tuple[bool, ...]
    """By op: whether its outputs are kept. Otherwise they are recomputed."""
    released: tuple[int, ...]
    """Recomputed ops whose values are released after each use and recomputed for the next one."""
    budget_bytes: int
    predicted_peak_bytes: int
    plain_peak_bytes: int
    """Predicted peak of plain PyTorch."""
    peak_at: str
    """Description of the event with the highest live bytes."""
    predicted_step_s: float
    plain_step_s: float
    """Step time of plain PyTorch."""
    bound_step_s: float
    """Lower bound on the step time of every exact plan within the budget."""
    solver: str
    """Name of the search that found the plan."""
    solve_s: float
    replayed_ops: int
    pinned: tuple[PinnedOp, ...]
    modules: tuple[ModuleSummary, ...]
    fingerprint: str
    """Fingerprint of the trace for which the plan was made."""
    op_names: tuple[str, ...]
    """By op. The engine compares them with the ops of a step."""
    offload: tuple[int, ...] = ()
    """Kept ops whose values are offloaded or compressed between forward and backward."""
    written_before: tuple[int, ...] = ()
    """By entry of `offload`: the op before which its values must be written or compressed."""
    prefetch_after: tuple[int, ...] = ()
    """By entry of `offload`: the op whose first fetch in backward starts the prefetch of its values, or
    `WHEN_BACKWARD_BEGINS`. The op itself: no prefetch. Empty: no prefetches at all."""
    compress: tuple[int, ...] = ()
    """Entries of `offload` whose values are compressed in memory instead of written to a store."""
    link: Link | None = None
    """Speed of the store, as assumed by the plan. None: no offloading."""
    codec_costs: tuple[CodecCost, ...] = ()
    """Costs of the codecs, as assumed by the plan."""
    copies: bool = False
    """Whether gradients that are views of a larger gradient are copied, so that the larger one can be freed."""
    store_wait_s: float = 0.0
    """Part of the predicted time: waiting for the store, compression and decompression."""
    held: tuple[int, ...] = ()
    """Recomputed ops whose values stay in memory from when a handle or recipe first needs them until their first
    drop."""
    drops: tuple[tuple[int, int, int, int], ...] = ()
    """By drop: saved tensor, zero-based index among its unpacks, op, position in its outputs. After this unpack the
    output of the op is released from memory. Its recipe stays."""
    tails: tuple[int, ...] = ()
    """Recomputed ops whose recipes stay after every replay, because a handle may outlive the last drop."""
    version: int = PLAN_VERSION

    @property
    def gap(self) -> float:
        """Return how far the step time is above its lower bound, as a fraction of the plain step time."""
        if self.plain_step_s <= 0:
            return 0.0
        return max(0.0, self.predicted_step_s - self.bound_step_s) / self.plain_step_s

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Return the recomputed ops."""
        return tuple(j for j, kept in enumerate(self.keep) if not kept)

    @property
    def offload_deadlines(self) -> dict[int, int]:
        """Return, by op of `offload`, the op before which its values must be written or compressed."""
        return dict(zip(self.offload, self.written_before, strict=True))

    @property
    def prefetches(self) -> dict[int, int]:
        """Return, by op with prefetched values, the op whose first fetch starts the prefetch (see `prefetch_after`)."""
        if not self.prefetch_after:
            return {}
        return {j: trigger for j, trigger in zip(self.offload, self.prefetch_after, strict=True) if trigger != j}

    @property
    def in_store(self) -> frozenset[int]:
        """Return the ops whose values are offloaded to the store."""
        return frozenset(self.offload) - frozenset(self.compress)

    def matches(self, trace: Trace) -> bool:
        """Return whether the plan was made for a step with the structure of `trace`."""
        return self.fingerprint == trace.fingerprint

    def __str__(self) -> str:
        share = 100 * self.predicted_peak_bytes / max(self.plain_peak_bytes, 1)
        slower = 100 * (self.predicted_step_s / self.plain_step_s - 1) if self.plain_step_s else 0.0
        bound = 100 * (self.bound_step_s / self.plain_step_s - 1) if self.plain_step_s else 0.0
        lines = [
            f"budget       {format_bytes(self.budget_bytes)}",
            f"peak         {format_bytes(self.predicted_peak_bytes)}, {share:.0f} % of "
            f"{format_bytes(self.plain_peak_bytes)} in plain PyTorch; {self.peak_at}",
            f"step         {format_time(self.predicted_step_s)}, {slower:.1f} % more than "
            f"{format_time(self.plain_step_s)} in plain PyTorch; lower bound {bound:.1f} % more",
            f"recompute    {len(self.recomputed):,} of {len(self.keep):,} ops, {self.replayed_ops:,} replays"
            + (f", {len(self.released):,} ops replayed more than once" if self.released else ""),
            *self._transfer_lines(),
            *(["copy         gradients that are views of a larger gradient"] if self.copies else []),
            f"solver       {self.solver}, {self.solve_s:.1f} s",
        ]
        for pin in self.pinned[:_MAX_ROWS]:
            where = f" in {pin.module}" if pin.module else ""
            lines.append(f"pinned       {pin.count} × {pin.name}{where}: {pin.why}")
        if len(self.pinned) > _MAX_ROWS:
            lines.append(f"pinned       and {len(self.pinned) - _MAX_ROWS} more groups of ops")
        return "\n".join([*lines, "", *_table(self.modules)])

    def _transfer_lines(self) -> list[str]:
        lines = []
        if self.compress:
            compressed_bytes = sum(group.compressed_bytes for group in self.modules)
            codecs = ", ".join(dict.fromkeys(codec_cost.codec for codec_cost in self.codec_costs))
            lines.append(f"compress     {len(self.compress):,} ops, {format_bytes(compressed_bytes)}, with {codecs}")
        if self.link is not None and self.in_store:
            offloaded_bytes = sum(group.offloaded_bytes for group in self.modules)
            lines.append(
                f"offload      {len(self.in_store):,} ops, {format_bytes(offloaded_bytes)}, to {self.link.tier}"
                + (f"; {len(self.prefetches):,} ops prefetched" if self.prefetches else "")
            )
        if lines:
            lines.append(f"waiting      {format_time(self.store_wait_s)} for {_waited_for(self)}")
        return lines

    def to_json(self) -> str:
        """Return compact JSON. `from_json` returns an equal plan."""
        document = {"format": _FORMAT, **asdict(self)}
        document["keep"] = "".join("1" if kept else "0" for kept in self.keep)
        names = sorted(set(self.op_names))
        number_of = {name: number for number, name in enumerate(names)}
        document["op_names"] = {"names": names, "by_op": [number_of[name] for name in self.op_names]}
        return json.dumps(document, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan in `text`. Raises `ArgumentError` for anything else."""
        document = read_document(text, _FORMAT, PLAN_VERSION)
        try:
            return _build(document)
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"not a valid plan: the file is damaged ({type(error).__name__}: {error})") from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a file that `save` wrote. Raises `ArgumentError` for anything else."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"cannot read a plan from {str(path)!r}: {error}") from error
        return Plan.from_json(text)


def _waited_for(plan: Plan) -> str:
    if not plan.compress:
        return "the store"
    return "codecs and the store" if plan.in_store else "codecs"


def _build(document: dict[str, Any]) -> Plan:
    """Return the plan of a JSON object. Raises `KeyError`, `TypeError` or `ValueError` if it is not valid."""
    fields = {name: value for name, value in document.items() if name != "format"}
    _check_scalars(fields)
    decisions = fields["keep"]
    if not isinstance(decisions, str) or set(decisions) - {"0", "1"}:
        raise ValueError("keep must be a string of 0 and 1")
    fields["keep"] = tuple(decision == "1" for decision in decisions)
    fields["op_names"] = _op_names(fields["op_names"], len(decisions))
    if not all(_is_index(j, decisions) and decisions[j] == "0" for j in fields["released"]):
        raise ValueError("released has an op that is not recomputed")
    fields["released"] = tuple(fields["released"])
    for name in ("held", "tails"):
        if not all(_is_index(j, decisions) and decisions[j] == "0" for j in fields[name]):
            raise ValueError(f"{name} has an op that is not recomputed")
        fields[name] = tuple(fields[name])
    fields["drops"] = tuple(_drop(row, decisions) for row in fields["drops"])
    fields["codec_costs"] = _records(fields["codec_costs"], CodecCost)
    if fields["link"] is not None:
        fields["link"] = Link(**_typed(fields["link"], Link))
    fields.update(_transfers(fields, decisions))
    fields["pinned"] = _records(fields["pinned"], PinnedOp)
    fields["modules"] = _records(fields["modules"], ModuleSummary)
    return Plan(**fields)


def _drop(row: list[Any], decisions: str) -> tuple[int, int, int, int]:
    """Return one drop. Raises `TypeError` or `ValueError` if it is not valid."""
    save, nth, op, output = row
    if not all(type(x) is int and x >= 0 for x in (save, nth, op, output)):
        raise TypeError(f"{row!r} is not a drop")
    if not _is_index(op, decisions) or decisions[op] == "1":
        raise ValueError("drops has an op that is not recomputed")
    return save, nth, op, output


def _check_scalars(fields: dict[str, Any]) -> None:
    number = (int, float)
    types: dict[str, Any] = {
        "budget_bytes": int,
        "predicted_peak_bytes": int,
        "plain_peak_bytes": int,
        "peak_at": str,
        "predicted_step_s": number,
        "plain_step_s": number,
        "bound_step_s": number,
        "solver": str,
        "solve_s": number,
        "replayed_ops": int,
        "store_wait_s": number,
        "fingerprint": str,
    }
    if not isinstance(fields["copies"], bool):
        raise TypeError(f"copies is {fields['copies']!r}")
    for name, expected in types.items():
        if not isinstance(fields[name], expected) or isinstance(fields[name], bool):
            raise TypeError(f"{name} is {fields[name]!r}")


def _op_names(table: dict[str, Any], count: int) -> tuple[str, ...]:
    names, numbers = table["names"], table["by_op"]
    if len(numbers) != count or not all(isinstance(name, str) for name in names):
        raise ValueError("op_names must have one name for each op")
    return tuple(names[number] for number in numbers)


def _transfers(fields: dict[str, Any], decisions: str) -> dict[str, tuple[int, ...]]:
    """Return the fields about offloaded and compressed values, checked against each other."""
    offload, written_before = tuple(fields["offload"]), tuple(fields["written_before"])
    compress, prefetch_after = tuple(fields["compress"]), tuple(fields["prefetch_after"])
    if not all(_is_index(j, decisions) and decisions[j] == "1" for j in offload):
        raise ValueError("offload has an op that is not kept")
    if len(written_before) != len(offload) or not all(
        type(i) is int and j < i <= len(decisions) for j, i in zip(offload, written_before, strict=True)
    ):
        raise ValueError("written_before must have an op after each op of offload")
    if not set(compress) <= set(offload) or (compress and not fields["codec_costs"]):
        raise ValueError("compress has an op that is not in offload, or there is no codec")
    triggers = {WHEN_BACKWARD_BEGINS, *offload} - {*compress}
    if prefetch_after and not all(
        type(i) is int and (i == j or (i in triggers and j not in compress))
        for j, i in zip(offload, prefetch_after, strict=True)
    ):
        raise ValueError("prefetch_after has an op that is never fetched, or an entry for a compressed op")
    if fields["link"] is None and len(offload) > len(compress):
        raise ValueError("offload has ops for the store, but there is no link")
    return {
        "offload": offload,
        "written_before": written_before,
        "compress": compress,
        "prefetch_after": prefetch_after,
    }


def _is_index(j: object, decisions: str) -> bool:
    return type(j) is int and 0 <= j < len(decisions)


def _records(rows: list[dict[str, Any]], cls: type[_Record]) -> tuple[_Record, ...]:
    return tuple(cls(**_typed(row, cls)) for row in rows)


def _typed(record: dict[str, Any], cls: type) -> dict[str, Any]:
    """Return the record. Raises `TypeError` unless its fields have the types that `cls` declares."""
    types: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
    for name, annotation in cls.__annotations__.items():
        if not isinstance(record[name], types[annotation]):
            raise TypeError(f"{name} is {record[name]!r}")
    return record


def _table(groups: tuple[ModuleSummary, ...]) -> list[str]:
    """Return the module groups in columns, the ones with most bytes first."""
    if not groups:
        return []
    ordered = sorted(groups, key=lambda group: -(group.kept_bytes + group.recomputed_bytes))
    shown, others = ordered[:_MAX_ROWS], ordered[_MAX_ROWS:]
    rows: list[tuple[str, ...]] = [
        ("modules", "ops", "kept", "offloaded", "compressed", "recomputed", "recompute time")
    ]
    rows += [_row(group) for group in shown]
    if others:
        total = ModuleSummary(
            f"{len(others)} other groups",
            sum(group.ops for group in others),
            sum(group.kept_bytes for group in others),
            sum(group.recomputed_bytes for group in others),
            sum(group.recompute_s for group in others),
            sum(group.offloaded_bytes for group in others),
            sum(group.compressed_bytes for group in others),
        )
        rows.append(_row(total))
    if not any(group.compressed_bytes for group in groups):
        rows = [(*row[:4], *row[5:]) for row in rows]
    if not any(group.offloaded_bytes for group in groups):
        rows = [(*row[:3], *row[4:]) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]


def _row(group: ModuleSummary) -> tuple[str, ...]:
    return (
        group.name or "(outside modules)",
        f"{group.ops:,}",
        format_bytes(group.kept_bytes),
        format_bytes(group.offloaded_bytes),
        format_bytes(group.compressed_bytes),
        format_bytes(group.recomputed_bytes),
        format_time(group.recompute_s),
    )
