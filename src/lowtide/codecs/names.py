"""Codecs by name: `codecs="exact"`, `codecs="bf16"`, `codecs=("exact", "int8")`.

Lossy codecs are in the answer only where they are named. Exact ones change nothing that anybody could notice,
so they come with lossy ones, unless the exact codecs wanted are themselves named.
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
"""Every codec, by its name; the exact ones first."""

EXACT = "exact"


def resolve(codecs: str | Sequence[str] | None = EXACT) -> tuple[Codec, ...]:
    """The codecs that may be used: "exact", a name, or several names; None or an empty sequence for no codec.

    "exact" leaves out `bytes` where its package is not installed; asked for by name, it is then an error.

    >>> [codec.name for codec in resolve(("mask", "bf16"))]
    ['mask', 'bf16']
    """
    if codecs is None:
        return ()
    names = [codecs] if isinstance(codecs, str) else list(codecs)
    for name in names:
        if not isinstance(name, str) or (name != EXACT and name not in CODECS):
            raise ArgumentError(f"no codec is called {name!r}; codecs are {_listed()}")
    if Bytes.name in names and not Bytes.available():
        raise MissingPackageError("blosc2", "the codec 'bytes'", extra="codecs")
    all_exact = EXACT in names or (bool(names) and not any(CODECS[name].exact for name in names))
    return tuple(
        codec
        for name, codec in CODECS.items()
        if name in names or (all_exact and codec.exact and (name != Bytes.name or Bytes.available()))
    )


def decode(encoded: Encoded) -> Tensor:
    """A new tensor with the content that one of the codecs here has encoded."""
    if encoded.codec not in CODECS:
        raise ArgumentError(f"no codec is called {encoded.codec!r}; codecs are {_listed()}")
    return CODECS[encoded.codec].decode(encoded)


def _listed() -> str:
    exact = ", ".join(repr(name) for name, codec in CODECS.items() if codec.exact)
    lossy = ", ".join(repr(name) for name, codec in CODECS.items() if not codec.exact)
    return f"'exact' (all of {exact}) and, lossy, {lossy}"
