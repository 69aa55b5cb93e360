"""A trace as compact JSON and back: rows without keys, names written once.

Guarantees an equal trace after a round trip, and an `ArgumentError` for text that is no trace of this
version. Nothing in the text is executed or imported.
"""

from __future__ import annotations

import json
from typing import Any

from .._errors import ArgumentError
from .trace import TRACE_VERSION, Copied, Op, Trace, Unpack, Value, Write

_FORMAT = "lowtide trace"


def trace_to_json(trace: Trace) -> str:
    """Compact JSON of a trace."""
    words: dict[str, int] = {}

    def word(text: str) -> int:
        return words.setdefault(text, len(words))

    ops = [
        [
            word(op.name),
            word(op.module),
            op.time_s,
            op.inputs,
            op.outputs,
            None if op.pinned is None else word(op.pinned),
            op.other_bytes,
            [[w.old, w.new, int(w.exclusive)] for w in op.writes],
            op.replay_s,
        ]
        for op in trace.ops
    ]
    values = [
        [v.nbytes, v.op, v.storage, v.user_holds_until, v.freed_at_unpack, word(v.dtype), int(v.binary)]
        for v in trace.values
    ]
    document = {
        "format": _FORMAT,
        "version": trace.version,
        "device": trace.device,
        "note": trace.note,
        "step_s": trace.step_s,
        "replay_overhead_s": trace.replay_overhead_s,
        "peak_bytes": trace.peak_bytes,
        "words": list(words),
        "ops": ops,
        "values": values,
        "saved": trace.saved,
        "unpacks": [[a.value, a.node, a.other_bytes, a.time_s, a.rise_bytes] for a in trace.unpacks],
        "copies": [[c.unpack, c.more_bytes, c.more_rise_bytes] for c in trace.copies],
        "copying_s": trace.copying_s,
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def trace_from_json(text: str) -> Trace:
    """The checked trace in `text`."""
    document = read_document(text, _FORMAT, TRACE_VERSION)
    try:
        trace = _build(document)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ArgumentError(f"not a valid trace: the file is damaged ({type(error).__name__}: {error})") from error
    trace.check()
    return trace


def read_document(text: str, kind: str, version: int) -> dict[str, Any]:
    """The JSON object in `text`, if it is of this kind ("lowtide trace") and version."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"not a {kind}: not JSON, or cut off ({error})") from error
    if not isinstance(document, dict) or document.get("format") != kind:
        raise ArgumentError(f"not a {kind}: the JSON is of something else")
    if document.get("version") != version:
        raise ArgumentError(
            f"this {kind} has version {document.get('version')!r}, this lowtide reads version {version}: make it again"
        )
    return document


def _build(document: dict[str, Any]) -> Trace:
    words = [_text(word) for word in _list(document["words"])]
    ops = []
    for name, module, time_s, inputs, outputs, pinned, other_bytes, writes, replay_s in _list(document["ops"]):
        ops.append(
            Op(
                name=words[_index(name)],
                module=words[_index(module)],
                time_s=_seconds(time_s),
                inputs=_ints(inputs),
                outputs=_ints(outputs),
                pinned=None if pinned is None else words[_index(pinned)],
                other_bytes=_int(other_bytes),
                writes=tuple(
                    Write(old=_int_or_none(old), new=_int(new), exclusive=bool(_int(exclusive)))
                    for old, new, exclusive in writes
                ),
                replay_s=None if replay_s is None else _seconds(replay_s),
            )
        )
    values = [
        Value(
            nbytes=_int(nbytes),
            op=_int_or_none(op),
            storage=_int(storage),
            user_holds_until=_int(user_holds_until),
            freed_at_unpack=_int_or_none(freed),
            dtype=words[_index(dtype)],
            binary=bool(_int(binary)),
        )
        for nbytes, op, storage, user_holds_until, freed, dtype, binary in _list(document["values"])
    ]
    unpacks = [
        Unpack(_int(value), _int(node), _int(other), _seconds(time_s), _int(rise))
        for value, node, other, time_s, rise in _list(document["unpacks"])
    ]
    return Trace(
        version=_int(document["version"]),
        ops=tuple(ops),
        values=tuple(values),
        saved=_ints(document["saved"]),
        unpacks=tuple(unpacks),
        step_s=_seconds(document["step_s"]),
        peak_bytes=_int(document["peak_bytes"]),
        device=_text(document["device"]),
        note=_text(document["note"]),
        replay_overhead_s=_seconds(document["replay_overhead_s"]),
        copies=tuple(Copied(_int(unpack), _int(more), _int(rise)) for unpack, more, rise in _list(document["copies"])),
        copying_s=_seconds(document["copying_s"]),
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
