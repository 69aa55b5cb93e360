"""Traces as compact JSON: rows without keys, each name written once.

A round trip gives an equal trace. Text that is not a trace of this version raises `ArgumentError`. Nothing in the text
is executed or imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .._errors import ArgumentError
from .trace import TRACE_VERSION, CopyEffect, Op, Trace, Unpack, Value, Write

_FORMAT = "lowtide trace"
_UNPACK_FIELDS = 7  # the row of an op has twelve


def trace_to_json(trace: Trace) -> str:
    """Return a trace as compact JSON."""
    words: dict[str, int] = {}

    def word(text: str) -> int:
        return words.setdefault(text, len(words))

    document = {
        "format": _FORMAT,
        "version": trace.version,
        "device": trace.device,
        "note": trace.note,
        "step_s": trace.step_s,
        "replay_overhead_s": trace.replay_overhead_s,
        "peak_bytes": trace.peak_bytes,
        "events": [_event_row(event, word) for event in trace.events],
        "values": [_value_row(value, word) for value in trace.values],
        "saved": trace.saved,
        "copies": [[c.unpack, c.more_bytes, c.more_rise_bytes] for c in trace.copies],
        "copying_s": trace.copying_s,
        "words": list(words),
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _value_row(value: Value, word: Callable[[str], int]) -> list[Any]:
    return [
        value.nbytes,
        value.made_at,
        value.storage,
        value.held_until,
        word(value.dtype),
        int(value.binary),
        value.handles,
        value.shape,
    ]


def _event_row(event: Op | Unpack, word: Callable[[str], int]) -> list[Any]:
    if isinstance(event, Unpack):
        return [
            event.value,
            event.node,
            event.other_bytes,
            event.time_s,
            event.rise_bytes,
            event.backward,
            event.save,
        ]
    return [
        word(event.name),
        word(event.module),
        event.time_s,
        event.inputs,
        event.outputs,
        None if event.pinned is None else word(event.pinned),
        event.other_bytes,
        [[w.old, w.new, int(w.exclusive)] for w in event.writes],
        event.replay_s,
        event.backward,
        event.workspace_bytes,
        event.reads_until,
    ]


def trace_from_json(text: str) -> Trace:
    """Return the trace in `text`, checked."""
    document = read_document(text, _FORMAT, TRACE_VERSION)
    try:
        trace = _build(document)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ArgumentError(f"not a valid trace: the file is damaged ({type(error).__name__}: {error})") from error
    trace.check()
    return trace


def read_document(text: str, format_name: str, version: int) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises `ArgumentError` unless it has this format and version."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"not a {format_name}: not JSON, or cut off ({error})") from error
    if not isinstance(document, dict) or document.get("format") != format_name:
        raise ArgumentError(f"not a {format_name}: the JSON has another format")
    if document.get("version") != version:
        raise ArgumentError(
            f"this {format_name} has version {document.get('version')!r}, and this lowtide reads version {version}: "
            "create it again"
        )
    return document


def _build(document: dict[str, Any]) -> Trace:
    words = [_text(word) for word in _list(document["words"])]
    values = [
        Value(
            nbytes=_int(nbytes),
            made_at=_int_or_none(made_at),
            storage=_int(storage),
            held_until=_int(held_until),
            dtype=words[_index(dtype)],
            binary=bool(_int(binary)),
            handles=tuple((_int(saved), _int(freed)) for saved, freed in _list(handles)),
            shape=None if shape is None else _ints(shape),
        )
        for nbytes, made_at, storage, held_until, dtype, binary, handles, shape in _list(document["values"])
    ]
    return Trace(
        version=_int(document["version"]),
        events=tuple(_event(_list(row), words) for row in _list(document["events"])),
        values=tuple(values),
        saved=_ints(document["saved"]),
        step_s=_seconds(document["step_s"]),
        peak_bytes=_int(document["peak_bytes"]),
        device=_text(document["device"]),
        note=_text(document["note"]),
        replay_overhead_s=_seconds(document["replay_overhead_s"]),
        copies=tuple(CopyEffect(*_ints(row)) for row in _list(document["copies"])),
        copying_s=_seconds(document["copying_s"]),
    )


def _event(row: list[Any], words: list[str]) -> Op | Unpack:
    if len(row) == _UNPACK_FIELDS:
        value, node, other_bytes, time_s, rise_bytes, backward, save = row
        return Unpack(
            value=_int(value),
            node=_int(node),
            other_bytes=_int(other_bytes),
            time_s=_seconds(time_s),
            rise_bytes=_int(rise_bytes),
            backward=_int(backward),
            save=_int(save),
        )
    name, module, time_s, inputs, outputs, pinned, other_bytes, writes, replay_s, backward, workspace, until = row
    return Op(
        name=words[_index(name)],
        module=words[_index(module)],
        time_s=_seconds(time_s),
        inputs=_ints(inputs),
        outputs=_ints(outputs),
        pinned=None if pinned is None else words[_index(pinned)],
        other_bytes=_int(other_bytes),
        writes=tuple(
            Write(old=_int_or_none(old), new=_int(new), exclusive=bool(_int(exclusive)))
            for old, new, exclusive in _list(writes)
        ),
        replay_s=None if replay_s is None else _seconds(replay_s),
        backward=_int_or_none(backward),
        workspace_bytes=_int(workspace),
        reads_until=_int_or_none(until),
    )


def _int(x: object) -> int:
    if type(x) is not int:
        raise TypeError(f"{x!r} is not a whole number")
    return x


def _index(x: object) -> int:
    if _int(x) < 0:
        raise IndexError(f"{x} is not a position")
    return _int(x)


def _int_or_none(x: object) -> int | None:
    return None if x is None else _int(x)


def _ints(xs: object) -> tuple[int, ...]:
    return tuple(_int(x) for x in _list(xs))


def _list(xs: object) -> list[Any]:
    if not isinstance(xs, list):
        raise TypeError(f"{xs!r} is not a list")
    return xs


def _seconds(x: object) -> float:
    if type(x) is not int and type(x) is not float:
        raise TypeError(f"{x!r} is not a time")
    return float(x)


def _text(x: object) -> str:
    if not isinstance(x, str):
        raise TypeError(f"{x!r} is not text")
    return x
