"""HTML and SVG elements. Plain strings are escaped, so names of modules and ops cannot inject markup."""

from __future__ import annotations

import html
import json
from typing import Any


class Markup(str):
    """Text that is already escaped markup."""

    __slots__ = ()


def tag(name: str, attributes: dict[str, object] | None = None, *children: str) -> Markup:
    """Return one element. Attributes are escaped, and children unless they are `Markup`."""
    escaped = "".join(f' {key}="{html.escape(str(value))}"' for key, value in (attributes or {}).items())
    return Markup(f"<{name}{escaped}>{join(*children)}</{name}>")


def join(*parts: str) -> Markup:
    """Return the concatenated parts, escaped unless they are `Markup`."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


def data_script(data: Any) -> Markup:
    """Return a script element with JSON data. No text in the data can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json">{text}</script>')
