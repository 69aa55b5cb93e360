"""Codecs by name: `codecs="exact"`, `codecs="bf16"`, `codecs=("exact", "int8")`.

Lossy codecs are used only if named. All exact codecs are added unless some exact codecs are named.
"""

from __future__ import annotations

from collections.abc import Sequence

from .._errors import ArgumentError, MissingPackageError
from ._base import Codec, Encoded, Tensor
from .bf16 import BF16
from .constant import Constant
from .fp8 import FP8
from .fp16 import FP16
from .int8 import Int8
from .lossless_bytes import Bytes
from .mask import Mask
from .narrow import Narrow
from .sparse import Sparse

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Constant(), Mask(), Narrow(), Sparse(), Bytes(), BF16(), FP16(), FP8(), Int8())
}
"""Every codec by name, exact codecs first."""

EXACT = "exact"


def resolve(codecs: str | Sequence[str] | None = EXACT) -> tuple[Codec, ...]:
    """Return the codecs for "exact", one name or several names. None or an empty sequence means no codec.

    "exact" omits `bytes` if the package blosc2 is not installed; naming `bytes` then raises an error.

    >>> [codec.name for codec in resolve(("mask", "bf16"))]
    ['mask', 'bf16']
    """
    if codecs is None:
        return ()
    names = [codecs] if isinstance(codecs, str) else list(codecs)
    for name in names:
        if not isinstance(name, str) or (name != EXACT and name not in CODECS):
            raise _unknown_codec(name)
    if Bytes.name in names and not Bytes.available():
        raise MissingPackageError("blosc2", "the codec 'bytes'", extra="codecs")
    all_exact = EXACT in names or (bool(names) and not any(CODECS[name].exact for name in names))
    return tuple(
        codec
        for name, codec in CODECS.items()
        if name in names or (all_exact and codec.exact and (name != Bytes.name or Bytes.available()))
    )


def decode(encoded: Encoded) -> Tensor:
    """Decompress to a new tensor."""
    if encoded.codec not in CODECS:
        raise _unknown_codec(encoded.codec)
    return CODECS[encoded.codec].decode(encoded)


def _unknown_codec(name: object) -> ArgumentError:
    exact = ", ".join(repr(name) for name, codec in CODECS.items() if codec.exact)
    lossy = ", ".join(repr(name) for name, codec in CODECS.items() if not codec.exact)
    return ArgumentError(f"unknown codec {name!r}: use 'exact' (all of {exact}) or the lossy {lossy}")
