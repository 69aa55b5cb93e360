"""Markup that cannot be broken by what it shows: plain strings are escaped wherever they are put into it."""

from __future__ import annotations

import html
import json
from typing import Any


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, attributes: dict[str, object] | None = None, *children: str) -> Markup:
    """One element. Attributes are escaped, and children unless they are `Markup`."""
    written = "".join(f' {key}="{html.escape(str(value))}"' for key, value in (attributes or {}).items())
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*parts: str) -> Markup:
    """Parts one after the other, escaped unless they are `Markup`."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


def data_script(data: Any) -> Markup:
    """Data for a script of the page; no text in it can end the element or begin another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(f'<script type="application/json">{text}</script>')
