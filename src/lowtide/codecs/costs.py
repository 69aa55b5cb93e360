"""How small and how fast the codecs are whose size does not depend on the content: what plans may pack by."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from ..records import CodecCost, Trace
from . import Codec, measure
from ._base import CHUNK_ELEMENTS
from .names import CODECS, resolve

_SMALL, _LARGE = 2**14, 2**18  # elements
_ROUNDS = 3


def codec_costs_for(trace: Trace, codecs: str | Sequence[str] | Sequence[Codec] | None) -> tuple[CodecCost, ...]:
    """What the values of a step can be packed by, of the codecs that are allowed."""
    named = [codec.name if isinstance(codec, Codec) else codec for codec in codecs or ()]
    allowed = resolve(codecs if isinstance(codecs, str) else named)
    contents = sorted({(value.dtype, value.binary) for value in trace.values if value.dtype})
    found = [
        measure_codec_cost(codec.name, dtype, trace.device, binary=binary)
        for codec in allowed
        for dtype, binary in contents
    ]
    return tuple(dict.fromkeys(codec_cost for codec_cost in found if codec_cost is not None))


@lru_cache(maxsize=256)
def measure_codec_cost(
    codec_name: str, dtype_name: str, device: str = "cpu", *, binary: bool = False
) -> CodecCost | None:
    """How a codec packs values of this dtype; None where its size depends on the content, or it does not apply.

    `binary`: values with two different elements at most.

    >>> from lowtide.codecs.costs import measure_codec_cost
    >>> codec_cost = measure_codec_cost("mask", "bool")
    >>> codec_cost.packed_bytes(64)
    8
    """
    codec = CODECS[codec_name]
    dtype = getattr(torch, dtype_name)
    if binary and codec.fixed_size(dtype) is not None:
        return measure_codec_cost(codec_name, dtype_name, device)  # it makes no difference
    size = codec.fixed_size(dtype, binary=binary)
    if size is None:
        return None
    own = torch.Generator(device).manual_seed(0)  # the user's generators are not ours to draw from
    content = torch.randn(_LARGE, device=device, generator=own)
    row = (content > 0).to(dtype) if binary or dtype is torch.bool else content.to(dtype)
    small, large = (measure(codec, row[:count], _ROUNDS) for count in (_SMALL, _LARGE))
    if small is None or large is None:
        return None
    nbytes = _SMALL * dtype.itemsize, _LARGE * dtype.itemsize
    compress_s, compress_s_per_byte = _line(nbytes, small.encode_bytes_per_second, large.encode_bytes_per_second)
    decompress_s, decompress_s_per_byte = _line(nbytes, small.decode_bytes_per_second, large.decode_bytes_per_second)
    return CodecCost(
        codec=codec_name,
        dtype=dtype_name,
        exact=codec.exact,
        itemsize=dtype.itemsize,
        bits=size.bits,
        block_bytes=size.block_bytes,
        work_bytes_per_element=size.work_bytes_per_element,
        chunk_elements=CHUNK_ELEMENTS,
        compress_s=compress_s,
        compress_s_per_byte=compress_s_per_byte,
        decompress_s=decompress_s,
        decompress_s_per_byte=decompress_s_per_byte,
        binary=binary,
    )


def _line(nbytes: tuple[int, int], small_bytes_per_s: float, large_bytes_per_s: float) -> tuple[float, float]:
    """Seconds for any value, and for each of its bytes, through the two that were measured."""
    small_s, large_s = nbytes[0] / small_bytes_per_s, nbytes[1] / large_bytes_per_s
    per_byte = max(0.0, (large_s - small_s) / (nbytes[1] - nbytes[0]))
    return max(0.0, small_s - nbytes[0] * per_byte), per_byte
