"""The events of a profile while the step runs, and the records that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ... import records


class OpEvent:
    """An op that has run. `other_bytes` are the highest live bytes that belong to no value of the trace."""

    __slots__ = ("other_bytes", "record")

    def __init__(self, record: records.Op) -> None:
        self.record = record
        self.other_bytes = 0

    def moment(self, other: int, uncopied: int) -> None:
        """Note other live bytes. The second number is for a step without gradient copies."""
        self.other_bytes = max(self.other_bytes, other)


class _OtherBytes:
    """Live bytes that belong to no value of the trace, from an unpack to the next event."""

    __slots__ = ("at_unpack", "highest")

    def __init__(self, at_unpack: int) -> None:
        self.at_unpack = self.highest = max(0, at_unpack)

    @property
    def rise_bytes(self) -> int:
        """Bytes allocated after the unpack."""
        return self.highest - self.at_unpack


class UnpackEvent:
    """A value that a backward node has unpacked."""

    __slots__ = ("backward", "budget_s", "ended_s", "next_s", "node", "other", "save", "uncopied", "value")

    def __init__(self, value: int, node: int, save: int, backward: int, other: int, uncopied: int) -> None:
        self.value = value
        self.node = node
        self.save = save
        self.backward = backward
        self.other = _OtherBytes(other)
        self.uncopied = _OtherBytes(uncopied)
        """The same, if no gradient were copied."""
        self.ended_s = 0.0
        """When the unpack returned."""
        self.next_s: float | None = None
        """When the next event began. None: not yet."""
        self.budget_s = 0.0
        """Time that the memory budget took until the next event."""

    def moment(self, other: int, uncopied: int) -> None:
        """Note other live bytes. The second number is for a step without gradient copies."""
        self.other.highest = max(self.other.highest, other)
        self.uncopied.highest = max(self.uncopied.highest, uncopied)

    @property
    def time_s(self) -> float:
        """Time of backward from this event to the next."""
        return 0.0 if self.next_s is None else max(0.0, self.next_s - self.ended_s - self.budget_s)


Event = OpEvent | UnpackEvent
ReadsUntil = Callable[[Iterable[int]], int | None]


def trace_events(
    events: Sequence[Event], values: Sequence[records.Value], reads_until: ReadsUntil
) -> tuple[records.Op | records.Unpack, ...]:
    """Return the events as records. Each has the median time of the events with the same signature.

    `reads_until` returns the event that overwrites one of the given values, if there is one.
    """
    ops = [event for event in events if isinstance(event, OpEvent)]
    unpacks = [event for event in events if isinstance(event, UnpackEvent)]
    op_records = iter(_op_records(ops, values, reads_until, len(events)))
    unpack_records = iter(_unpack_records(unpacks, events, values))
    return tuple(next(op_records) if isinstance(event, OpEvent) else next(unpack_records) for event in events)


def _op_records(
    ops: Sequence[OpEvent], values: Sequence[records.Value], reads_until: ReadsUntil, n_events: int
) -> list[records.Op]:
    found = [event.record for event in ops]
    signatures = [(op.name, _sizes(values, op.inputs), _sizes(values, op.outputs)) for op in found]
    times_s = _medians(signatures, [op.time_s for op in found])
    replays_s = _medians(signatures, [op.replay_s for op in found])
    made = []
    for event, time_s, replay_s in zip(ops, times_s, replays_s, strict=True):
        until = reads_until(event.record.inputs)
        made.append(
            replace(
                event.record,
                time_s=time_s or 0.0,
                replay_s=replay_s,
                other_bytes=event.other_bytes,
                reads_until=until if until is not None and until < n_events else None,
            )
        )
    return made


def _unpack_records(
    unpacks: Sequence[UnpackEvent], events: Sequence[Event], values: Sequence[records.Value]
) -> list[records.Unpack]:
    """Return the unpacks. A time depends on the signature of the unpack and of its successor."""
    signatures = []
    node = -1
    nodes = []
    previous: UnpackEvent | None = None
    for unpack in unpacks:
        same_node = previous is not None and (previous.node, previous.backward) == (unpack.node, unpack.backward)
        node += not same_node
        nodes.append(node)
        made_at = values[unpack.value].made_at
        maker = None if made_at is None else events[made_at]
        name = maker.record.name if isinstance(maker, OpEvent) else None
        signatures.append((name, values[unpack.value].nbytes, unpack.other.rise_bytes, same_node))
        previous = unpack
    pairs = list(zip(signatures, [*signatures[1:], None], strict=False))
    times_s = _medians(pairs, [unpack.time_s for unpack in unpacks])
    return [
        records.Unpack(
            unpack.value,
            number,
            unpack.other.highest,
            time_s or 0.0,
            unpack.other.rise_bytes,
            unpack.backward,
            unpack.save,
        )
        for unpack, number, time_s in zip(unpacks, nodes, times_s, strict=True)
    ]


def _sizes(values: Sequence[records.Value], numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(values[v].nbytes for v in numbers)


def _medians(signatures: Sequence[Any], times_s: Sequence[float | None]) -> list[float | None]:
    """Return for each item the median time of the items with its signature, or None if none has a time."""
    times: dict[Any, list[float]] = {}
    for signature, time_s in zip(signatures, times_s, strict=True):
        if time_s is not None:
            times.setdefault(signature, []).append(time_s)
    found = {signature: median(some) for signature, some in times.items()}
    return [found.get(signature) for signature in signatures]
